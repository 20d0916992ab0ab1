"""Trains adapters on several ranks, and hands what is new of the weights to another process, which must compute the same logits.

    python -m paddle.distributed.launch --nproc_per_node 2 examples/weights_to_engine.py --rounds 3

Rank 0 starts the other process, a stand-in for an inference engine: it has the whole model, and takes whole named tensors as they come out
of the sharded one, flat buffer by flat buffer. After the first round only the adapters go, as nothing else has changed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from safetensors.numpy import load, save

from paddle_fsdp_ckpt import fully_shard, iter_full_parameters, parameter_versions

TOKENS = np.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])


class Adapted(nn.Layer):
    """A frozen linear layer, and adapters that train."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        for parameter in self.base.parameters():
            parameter.stop_gradient = True
        self.down = nn.Linear(width, 2, bias_attr=False)
        self.up = nn.Linear(2, width, bias_attr=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Return both added, of x's shape."""
        return self.base(x) + self.up(self.down(x))


def build() -> nn.Layer:
    """Return the model: tokens in, logits out."""
    return nn.Sequential(nn.Embedding(11, 6), Adapted(6), Adapted(6), nn.Linear(6, 11))


class Engine:
    """The other process, as the trainer sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, __file__, "--engine"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout

    def send(self, name: str, value: np.ndarray) -> None:
        """Give the process a whole weight."""
        write(self._to, {name: value})

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Return what the process computes with the weights that it has."""
        write(self._to, {"tokens": tokens})
        return read(self._from)["logits"]

    def close(self) -> None:
        """End the process."""
        self._to.close()
        assert self._process.wait(60) == 0


def serve() -> None:
    """Be the other process: take weights, and answer with logits."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed is no answer
    model = build()
    weights = model.state_dict()
    while received := read(sys.stdin.buffer):
        if "tokens" in received:
            write(answers, {"logits": model(paddle.to_tensor(received["tokens"])).numpy()})
        else:
            for name, value in received.items():
                weights[name].set_value(value)


def write(stream: BinaryIO, tensors: dict[str, np.ndarray]) -> None:
    """Write tensors, their length in bytes first."""
    content = save(tensors)
    stream.write(len(content).to_bytes(8, "little") + content)
    stream.flush()


def read(stream: BinaryIO) -> dict[str, np.ndarray]:
    """Return the tensors that come next, none at the end."""
    length = int.from_bytes(stream.read(8), "little")
    return load(stream.read(length)) if length else {}


@dataclass
class Round:
    """What was sent, and what trainer and engine, on rank 0, compute then."""

    sent: list[str]
    logits: np.ndarray
    served: np.ndarray | None


def train(rounds: int) -> list[Round]:
    """Train; before each step all that changed since the last one goes to the engine."""
    paddle.seed(3)
    engine = Engine() if dist.get_rank() == 0 else None
    model = build()
    optimizer = paddle.optimizer.SGD(0.1, parameters=[*model[1].parameters(), *model[2].parameters()])
    fully_shard(model, optimizer=optimizer)
    sent: dict[str, int] = {}
    done = []
    for _ in range(rounds):
        versions = parameter_versions(model)
        new = {name for name, version in versions.items() if sent.get(name) != version}
        for name, tensor in iter_full_parameters(model, include=lambda name, new=new: name in new, to_rank=0, device="cpu"):
            assert engine is not None  # the other ranks get nothing, and take part all the same
            engine.send(name, tensor.numpy())
        sent = versions
        with paddle.no_grad():
            logits = model(paddle.to_tensor(TOKENS)).numpy()
        done.append(Round(sorted(new), logits, None if engine is None else engine.logits(TOKENS)))
        loss = model(paddle.to_tensor(TOKENS * 0 + dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    if engine is not None:
        engine.close()
    return done


def main() -> None:
    """Train, and say what was sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", action="store_true", help="be the other process")
    options = parser.parse_args()
    if options.engine:
        serve()
        return
    dist.init_parallel_env()
    for number, one in enumerate(train(options.rounds)):
        if one.served is not None:
            difference = np.abs(one.served - one.logits).max()
            print(f"round {number}: {len(one.sent)} tensors sent; the logits there differ by at most {difference:.1e}")


if __name__ == "__main__":
    main()
