"""One rank of a job: ``python -m paddle_fsdp_ckpt.demo.worker JOB.json``, started by :mod:`.launch`.

The training loop is an ordinary one for Paddle; what this package adds to it is ``fully_shard``, ``save`` and ``load``.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn

from paddle_fsdp_ckpt import fully_shard, load, optimizer_sharded_state_dict, save, sharded_state_dict

from .job import Event, Job
from .model import CausalLM, DecoderConfig
from .state import Part, write_parts
from .text import VOCABULARY, Batches, open_batches

_PEAK_LR, _FIRST_LR, _LAST_LR = 3e-3, 3e-4, 3e-4

_DENSE = DecoderConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=True,
)
_MOE = DecoderConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
)


@dataclass(frozen=True)
class Training:
    """What changes while training, and so must be saved."""

    model: nn.Layer
    optimizer: paddle.optimizer.Optimizer
    schedule: paddle.optimizer.lr.LRScheduler


def build(job: Job) -> Training:
    """Create the model, its optimizer and its schedule, and shard the model over the ranks."""
    paddle.seed(job.seed)
    model = CausalLM(_MOE if job.moe else _DENSE)
    schedule = _schedule(job.steps)
    decayed = {parameter.name for parameter in model.parameters() if parameter.ndim > 1}
    optimizer = paddle.optimizer.AdamW(
        learning_rate=schedule,
        parameters=model.parameters(),
        weight_decay=0.1,
        apply_decay_param_fun=lambda name: name in decayed,
        grad_clip=nn.ClipGradByGlobalNorm(1.0),
    )
    fully_shard(model, optimizer=optimizer)
    return Training(model, optimizer, schedule)


def _schedule(steps: int) -> paddle.optimizer.lr.LRScheduler:
    warmup = max(1, steps // 6)
    cosine = paddle.optimizer.lr.CosineAnnealingDecay(_PEAK_LR, T_max=max(1, steps - warmup), eta_min=_LAST_LR)
    return paddle.optimizer.lr.LinearWarmup(cosine, warmup_steps=warmup, start_lr=_FIRST_LR, end_lr=_PEAK_LR)


def train_step(training: Training, batches: Batches, step: int) -> float:
    """Train one step on this rank's share of its batch, and return the loss before it, averaged over the ranks."""
    inputs, labels = batches.part(step, dist.get_rank(), dist.get_world_size())
    scores = training.model(paddle.to_tensor(inputs))
    loss = F.cross_entropy(scores.reshape([-1, VOCABULARY]), paddle.to_tensor(labels).reshape([-1]))
    loss.backward()
    training.optimizer.step()
    training.optimizer.clear_grad()
    training.schedule.step()
    return _mean_over_ranks(loss)


def _mean_over_ranks(value: paddle.Tensor) -> float:
    total = value.detach().clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return float(total.numpy().item()) / dist.get_world_size()


def save_checkpoint(training: Training, path: str, step: int) -> None:
    """Save everything that the steps after ``step`` depend on; the schedule is saved with the optimizer."""
    save(path, model=training.model, optimizer=training.optimizer, step=step)


def load_checkpoint(training: Training, path: str) -> int:
    """Put a checkpoint into a fresh model, optimizer and schedule, and return the step after which it was saved."""
    step = load(path, model=training.model, optimizer=training.optimizer).step
    assert step is not None, "save_checkpoint notes the step"
    return step


class EventWriter:
    """Adds events to the job's file, on rank 0; other ranks stay silent."""

    def __init__(self, job: Job) -> None:
        self._file = job.events().open("a", encoding="utf-8") if dist.get_rank() == 0 else None

    def write(self, kind: str, **values: Any) -> None:
        """Add one event, visible at once."""
        event: Event = {"kind": kind, **values}
        if self._file is not None:
            self._file.write(json.dumps(event) + "\n")
            self._file.flush()


def run(job: Job) -> None:
    """Do what the job says on this rank."""
    events = EventWriter(job)
    batches = open_batches(Path(job.text) if job.text is not None else None)
    training = build(job)
    events.write("started", parameters=sum(math.prod(parameter.shape) for parameter in training.model.parameters()))
    done = 0
    if job.load_from is not None:
        began = time.perf_counter()
        done = load_checkpoint(training, job.load_from)
        events.write("loaded", step=done, seconds=time.perf_counter() - began)
    for step in range(done + 1, job.steps + 1):
        events.write("step", step=step, loss=train_step(training, batches, step))
        if job.save_to is not None and step == job.save_at:
            began = time.perf_counter()
            save_checkpoint(training, job.save_to, step)
            events.write("saved", step=step, seconds=time.perf_counter() - began)
    write_parts(job.state("parameters", dist.get_rank()), _parts(sharded_state_dict(training.model)))
    write_parts(job.state("optimizer", dist.get_rank()), _parts(optimizer_sharded_state_dict(training.optimizer)))


def _parts(state: dict[str, Any]) -> dict[str, Part]:
    return {
        key: Part(
            values=weight.local_tensor.numpy(),
            start=weight.flattened_range.start if weight.is_flattened else 0,
            shape=tuple(weight.global_shape),
        )
        for key, weight in state.items()
    }


def _connect() -> None:
    """Join the other ranks; a single rank trains without ``paddle.distributed``."""
    paddle.device.set_device("cpu")
    if "PADDLE_TRAINERS_NUM" not in os.environ:
        return
    if os.environ["PADDLE_TRAINER_ID"] != "0":
        _wait_for_listener(os.environ["PADDLE_MASTER"])
    dist.init_parallel_env()


def _wait_for_listener(endpoint: str) -> None:
    """Wait until rank 0 listens: Paddle's own first try again comes only after three seconds."""
    host, port = endpoint.split(":")
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)


def end_with_parent() -> None:
    """End this process when its standard input ends, that is, when the process that started it is gone."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Run the job whose file is the first argument."""
    end_with_parent()
    _connect()
    run(Job.read(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
