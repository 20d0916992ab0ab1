"""A trainer on some ranks that hands changed weights to another process, and that process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
from gather_cases import Adapted, Net, values_of
from harness import this_rank
from paddle import nn
from safetensors.paddle import load_file, save_file

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


def train_and_hand_on(directory: str) -> list[tuple[list[str], np.ndarray]]:
    """Train three rounds; after each, rank 0 writes what is new. Returns for each the names sent, and the trainer's logits."""
    paddle.seed(3)
    model = Scorer()
    optimizer = paddle.optimizer.SGD(0.1, parameters=[*model.first.parameters(), *model.second.parameters()])
    ckpt.fully_shard(model, optimizer=optimizer)
    sent: dict[str, int] = {}
    rounds = []
    for number in range(3):
        versions = ckpt.parameter_versions(model)
        new = {name for name, version in versions.items() if sent.get(name) != version}
        tensors = dict(ckpt.iter_full_parameters(model, include=lambda name, new=new: name in new, to_rank=0, device="cpu"))
        sent = versions
        if this_rank().rank == 0:
            save_file(tensors, str(Path(directory) / f"{number}.safetensors"))
        with paddle.no_grad():
            rounds.append((sorted(new), model(paddle.to_tensor(TOKENS)).numpy()))
        loss = model(paddle.to_tensor(TOKENS) * 0 + this_rank().rank).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
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


def serve(directory: str) -> None:
    """Be the other process: take up each file, and save the logits."""
    model = Scorer()
    for number in range(3):
        missing, unexpected = model.set_state_dict({**model.state_dict(), **load_file(str(Path(directory) / f"{number}.safetensors"))})
        assert not missing
        assert not unexpected
        np.save(Path(directory) / f"{number}.npy", model(paddle.to_tensor(TOKENS)).numpy())


def run_server(directory: Path) -> None:
    """Run :func:`serve` in a process of its own."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent), str(Path(ckpt.__file__).parent.parent)]
    code = f"import sys; sys.path[:0] = {paths!r}; import sync_cases; sync_cases.serve({str(directory)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
