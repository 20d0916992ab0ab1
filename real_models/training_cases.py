"""Train the tiny models as PaddleFormers' Trainer sets it up, plain in one process or sharded, and say what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from harness import StatePiece, this_rank
from harness.training import held
from paddle import nn
from paddleformers.trainer import Trainer, TrainingArguments
from tiny_models import build

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.demo.text import Batches, read_corpus

STEPS, SAVED_AT = 6, 3
WEIGHT_DECAY = 0.3
BATCH_SIZE, LENGTH = 6, 32


@dataclass(frozen=True)
class Outcome:
    """What a training came to: the losses over the global batch, and what this rank holds at the end."""

    losses: list[float]
    held: dict[str, StatePiece]


@dataclass
class Training:
    """A model, and the optimizer and schedule that PaddleFormers' Trainer made for it."""

    model: nn.Layer
    optimizer: Any
    schedule: Any

    def run(self, first: int, last: int) -> list[float]:
        """Train steps ``first`` to ``last`` on this rank's part of the text, and return the losses over all of it."""
        place = this_rank()
        batches = Batches(read_corpus(), BATCH_SIZE, LENGTH, seed=3)
        losses = []
        for step in range(first, last + 1):
            inputs, labels = (paddle.to_tensor(part) for part in batches.part(step, place.rank, place.world_size))
            loss = self.model(input_ids=inputs, labels=labels, return_dict=True).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
            self.schedule.step()
            value = loss.detach().clone()
            if place.world_size > 1:
                dist.all_reduce(value)
            losses.append(value.item() / place.world_size)
        return losses

    def held(self) -> dict[str, StatePiece]:
        """Copy what this rank holds of the sharded model and of its optimizer."""
        return held(self.model, self.optimizer)

    def plain(self) -> dict[str, np.ndarray]:
        """Copy the weights and moments of a model that is not sharded, as Paddle's own objects hold them."""
        values = {}
        for name, parameter in self.model.named_parameters():
            values[name] = parameter.numpy().copy()
            for moment in ("moment1", "moment2"):
                values[f"{name}.{moment}_0"] = self.optimizer._accumulators[moment][parameter.name].numpy().copy()
        return values


def prepare(model: nn.Layer, *, sharded: bool, weight_decay: float = WEIGHT_DECAY) -> Training:
    """Have PaddleFormers' Trainer make AdamW, its clip, its callback for the decay and its schedule, and shard the model."""
    arguments = TrainingArguments(
        output_dir=str(this_rank().scratch),
        max_steps=STEPS,
        learning_rate=1e-2,
        weight_decay=weight_decay,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        max_grad_norm=0.5,
        disable_tqdm=True,
        report_to=[],
        recompute=model.config.recompute,
    )
    trainer = Trainer(model=model, args=arguments)
    trainer.create_optimizer_and_scheduler(STEPS)
    if sharded:
        ckpt.fully_shard(model, optimizer=trainer.optimizer)
    return Training(model, trainer.optimizer, trainer.lr_scheduler)


def train_plain(family: str, changes: dict[str, Any], weight_decay: float) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train all steps in one process on the global batch."""
    training = prepare(build(family, **changes), sharded=False, weight_decay=weight_decay)
    return training.run(1, STEPS), training.plain()


def train_recomputing(family: str, changes: dict[str, Any]) -> tuple[list[float], int]:
    """Train sharded, and also count how often a forward of the first attention ran."""
    training = prepare(build(family, **changes), sharded=True)
    (attention, *_) = [layer for name, layer in training.model.named_sublayers() if name.endswith("self_attn")]
    forwards: list[None] = []
    attention.register_forward_pre_hook(lambda *_: forwards.append(None))
    return training.run(1, STEPS), len(forwards)


def train_sharded(family: str, changes: dict[str, Any], path: str) -> Outcome:
    """Train all steps, and save in the middle."""
    training = prepare(build(family, **changes), sharded=True)
    losses = training.run(1, SAVED_AT)
    ckpt.save(path, model=training.model, optimizer=training.optimizer, step=SAVED_AT)
    losses += training.run(SAVED_AT + 1, STEPS)
    return Outcome(losses, training.held())


def resume(family: str, changes: dict[str, Any], path: str) -> Outcome:
    """Go on from what was saved, in a model that began otherwise."""
    training = prepare(build(family, seed=12, **changes), sharded=True)
    report = ckpt.load(path, model=training.model, optimizer=training.optimizer)
    assert report.is_exact, str(report)
    assert report.step == SAVED_AT
    return Outcome(training.run(SAVED_AT + 1, STEPS), training.held())
