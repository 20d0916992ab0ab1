"""A trainer on some ranks that hands changed weights to another process, and that process."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
from gather_cases import Adapted, Net, values_of
from harness import this_rank
from paddle import nn

import paddle_fsdp_ckpt as ckpt

TOKENS = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]


class Scorer(nn.Layer):
    """Tokens in, logits out, nothing that differs between training and serving."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = Adapted(6)
        self.second = Adapted(6)
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.second(self.first(self.embed(tokens))))


class Server:
    """Another process that takes weights one tensor at a time, while the trainer runs."""

    def __init__(self) -> None:
        paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent), str(Path(ckpt.__file__).parent.parent)]
        code = f"import sys; sys.path[:0] = {paths!r}; import sync_cases; sync_cases.serve()"
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def send(self, item: object) -> None:
        assert self._process.stdin is not None
        pickle.dump(item, self._process.stdin)
        self._process.stdin.flush()

    def logits(self) -> np.ndarray:
        """What the server computes with all that it was sent so far."""
        self.send("compute")
        assert self._process.stdout is not None
        return pickle.load(self._process.stdout)

    def stop(self) -> None:
        self.send("stop")
        assert self._process.wait(60) == 0


def serve() -> None:
    """Be the other process."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed is no answer
    model = Scorer()
    weights = model.state_dict()
    while (item := pickle.load(sys.stdin.buffer)) != "stop":
        if item == "compute":
            pickle.dump(model(paddle.to_tensor(TOKENS)).numpy(), answers)
            answers.flush()
        else:
            name, value = item
            weights[name].set_value(value)


def train_and_hand_on() -> list[tuple[list[str], np.ndarray, np.ndarray | None]]:
    """Train three rounds; before each, rank 0 sends what is new. Returns for each the names sent, and the trainer's and server's logits."""
    paddle.seed(3)
    server = Server() if this_rank().rank == 0 else None
    model = Scorer()
    optimizer = paddle.optimizer.SGD(0.1, parameters=[*model.first.parameters(), *model.second.parameters()])
    ckpt.fully_shard(model, optimizer=optimizer)
    sent: dict[str, int] = {}
    rounds = []
    for _ in range(3):
        versions = ckpt.parameter_versions(model)
        new = {name for name, version in versions.items() if sent.get(name) != version}
        for name, tensor in ckpt.iter_full_parameters(model, include=lambda name, new=new: name in new, to_rank=0, device="cpu"):
            assert server is not None
            server.send((name, tensor.numpy()))
        sent = versions
        with paddle.no_grad():
            mine = model(paddle.to_tensor(TOKENS)).numpy()
        rounds.append((sorted(new), mine, None if server is None else server.logits()))
        loss = model(paddle.to_tensor(TOKENS) * 0 + this_rank().rank).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    if server is not None:
        server.stop()
    return rounds


def versions_count() -> None:
    model = Net()
    values_of(model)
    ckpt.fully_shard(model, optimizer=paddle.optimizer.SGD(0.1, parameters=model.parameters()))
    first = ckpt.parameter_versions(model)
    assert first == ckpt.parameter_versions(model)
    assert "out.weight" in first
    assert len(first) == len({name for name, _ in ckpt.iter_full_parameters(model)})
    model.head.bias.set_value(np.zeros(6, "float32"))
    second = ckpt.parameter_versions(model)
    assert {name for name in second if second[name] != first[name]} == {"head.bias"}
    with ckpt.local_parameters(model):
        pass
    third = ckpt.parameter_versions(model)
    assert all(third[name] > second[name] for name in third)
