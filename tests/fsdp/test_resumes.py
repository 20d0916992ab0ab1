"""Models of many kinds, saved in the middle of a training and loaded into other ones: they go on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from expert_scenarios import LayerExperts, MoE, StackedExperts, Trouble
from harness import RankPool, hybrid_groups
from harness.training import held
from paddle import nn
from paddle.nn import functional as F
from training_models import WIDTH, Images, Net, Recomputed, WithSideOutputs
from training_runs import VOCABULARY, Run

import paddle_fsdp_ckpt as ckpt

Loss = Callable[[Run, nn.Layer, int], paddle.Tensor]


def of_tokens(run: Run, model: nn.Layer, step: int) -> paddle.Tensor:
    tokens = run.batch(step)
    found = model(tokens)
    logits, side = found if isinstance(found, tuple) else (found, paddle.zeros([]))
    return F.cross_entropy(logits.reshape([-1, VOCABULARY]), tokens.flatten()) + 0.1 * side


def of_trouble(run: Run, model: nn.Layer, step: int) -> paddle.Tensor:
    return model(run.images(step, WIDTH), again=False)["out"].square().mean()


def of_images(run: Run, model: nn.Layer, step: int) -> paddle.Tensor:
    return model(run.images(step, 3, 5, 5)).square().mean()


KINDS: dict[str, tuple[Callable[[], nn.Layer], Loss, dict[str, Any]]] = {
    "one layer an expert": (lambda: MoE(LayerExperts, 3), of_tokens, {}),
    "stacked experts": (lambda: MoE(StackedExperts, 3), of_tokens, {}),
    "spectral and weight norm": (Trouble, of_trouble, {}),
    "batch norm": (lambda: Images(norm=True), of_images, {}),
    "recompute": (lambda: Recomputed(True), of_tokens, {}),
    "recompute, not reentrant": (lambda: WithSideOutputs(3), of_tokens, {}),
    "prefetch": (lambda: Net(3), of_tokens, {"prefetch": 1}),
}


def goes_on(kind: str, path: str, shards: int) -> None:
    """Three steps, a save, and two more; then the same two by another model that is loaded into, after a step of its own."""
    build, loss_of, options = KINDS[kind]
    groups = hybrid_groups(shards) if shards else {}
    run = Run(True, groups)

    def start(seed: int) -> tuple[nn.Layer, Any]:
        paddle.seed(seed)
        model = build()
        optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(0.5))
        ckpt.fully_shard(model, optimizer=optimizer, **options, **groups)
        return model, optimizer

    def train(model: nn.Layer, optimizer: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = loss_of(run, model, step)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = start(1)
    train(model, optimizer, range(3))
    ckpt.save(path, model=model, optimizer=optimizer, step=3)
    wanted = train(model, optimizer, range(3, 5))
    other, other_optimizer = start(2)
    train(other, other_optimizer, range(9, 10))
    assert ckpt.load(path, model=other, optimizer=other_optimizer).is_exact
    assert train(other, other_optimizer, range(3, 5)) == wanted
    right, found = held(model, optimizer), held(other, other_optimizer)
    assert found.keys() == right.keys()
    for key, piece in right.items():
        np.testing.assert_array_equal(found[key].values, piece.values, err_msg=key)


@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_bit_for_bit(ranks: Callable[[int], RankPool], tmp_path: Path, kind: str) -> None:
    ranks(2).run(goes_on, kind, str(tmp_path / "checkpoint"), 0)


def test_replicas_of_experts_go_on_bit_for_bit(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    ranks(4).run(goes_on, "one layer an expert", str(tmp_path / "checkpoint"), 2)
