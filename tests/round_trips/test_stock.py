"""Stock ``dist.save_state_dict`` writes our state dicts, and stock ``dist.load_state_dict`` reads them and our checkpoints, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from checkpoint_cases import Outcome as Held
from checkpoint_cases import build, held, train, whole
from harness import RankPool, StatePiece, assert_equal_states
from paddle.distributed.flex_checkpoint.dcp.load_state_dict import merge_sharded_state_dict
from safetensors.numpy import load_file

import paddle_fsdp_ckpt as ckpt

Ranks = Callable[[int], RankPool]


def save_by_stock(model: str, path: str, safetensors: bool, shards: int = 0) -> Held:
    """Train, and let stock Paddle save."""
    made, optimizer = build(model, "adamw named", shards=shards)
    train(made, optimizer, 0, 2)
    state = held(made, optimizer)
    dist.save_state_dict(_weights(made, optimizer), path, safetensors=safetensors)
    return Held([], state)


def save_by_us(model: str, path: str, optimizer_name: str = "adamw named", shards: int = 0) -> Held:
    """Train, and save."""
    made, optimizer = build(model, optimizer_name, shards=shards)
    train(made, optimizer, 0, 2)
    ckpt.save(path, model=made, optimizer=optimizer)
    return Held([], held(made, optimizer))


def load_by_stock(model: str, path: str, safetensors: bool, forward_first: bool, shards: int = 0) -> tuple[Held, list[float]]:
    """Let stock Paddle load into fresh objects; then look, and train a step."""
    made, optimizer = build(model, "adamw named", seed=99, shards=shards)
    if forward_first:  # What was gathered for it must not be used after the load.
        made(paddle.zeros([2, 5], "int64"))
    ckpt.init_optimizer_state(optimizer)
    with _cuda_is_a_copy():
        dist.load_state_dict(_weights(made, optimizer), path, safetensors=safetensors)
    state = held(made, optimizer)
    return Held([], state), train(made, optimizer, 2, 3)


@contextmanager
def _cuda_is_a_copy() -> Iterator[None]:
    """On the CPU wheel, resharding calls Tensor.cuda() on everything."""
    original = paddle.Tensor.cuda
    paddle.Tensor.cuda = lambda tensor, *_: tensor.clone()
    try:
        yield
    finally:
        paddle.Tensor.cuda = original


def load_merged_by_stock(path: str) -> dict[str, np.ndarray]:
    """Whole tensors, as stock Paddle puts them together."""
    with _cuda_is_a_copy():
        return {key: tensor.numpy() for key, tensor in dist.load_merged_state_dict(path, safetensors=True).items()}


def merge_by_stock(path: str, target: str, skipped: list[str]) -> None:
    """Let stock Paddle write whole tensors, each rank a part of them."""
    with _cuda_is_a_copy():
        merge_sharded_state_dict(path, target, skip_postfix_list=skipped, safetensors=True)


def load_by_us(model: str, path: str) -> tuple[Held, list[float]]:
    made, optimizer = build(model, "adamw named", seed=99)
    ckpt.load(path, model=made, optimizer=optimizer)
    return Held([], held(made, optimizer)), train(made, optimizer, 2, 3)


def _weights(model: paddle.nn.Layer, optimizer: Any) -> dict[str, Any]:
    return {**ckpt.sharded_state_dict(model), **ckpt.optimizer_sharded_state_dict(optimizer)}


@pytest.mark.parametrize(("source", "target"), [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("model", ["tied", "tiny", "convolutions"])
def test_stock_saves_and_loads_our_state_dicts(model: str, source: int, target: int, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "stock")
    saved = ranks(source).run(save_by_stock, model, path, True)
    loaded = ranks(target).run(load_by_stock, model, path, True, False)
    assert_equal_states(whole([state for state, _ in loaded]), whole(saved))


@pytest.mark.parametrize("model", ["tied", "convolutions"])
def test_stock_loads_its_own_format_at_the_same_layout(model: str, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "distcp")
    saved = ranks(2).run(save_by_stock, model, path, False)
    loaded = ranks(2).run(load_by_stock, model, path, False, False)
    assert_equal_states(whole([state for state, _ in loaded]), whole(saved))


@pytest.mark.parametrize(("source", "target"), [(2, 1), (1, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("model", ["tied", "tiny", "convolutions"])
def test_we_load_what_stock_saves(model: str, source: int, target: int, tmp_path: Path, ranks: Ranks) -> None:
    """As .distcp, which stock itself can't load at another number of ranks on CPU, and as .safetensors."""
    for safetensors in (False, True):
        path = str(tmp_path / f"safetensors {safetensors}")
        saved = ranks(source).run(save_by_stock, model, path, safetensors)
        loaded = ranks(target).run(load_by_us, model, path)
        assert_equal_states(whole([state for state, _ in loaded]), whole(saved))


@pytest.mark.parametrize(("source", "target"), [(2, 2), (1, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("model", ["tied", "tiny", "convolutions"])
def test_stock_loads_our_checkpoints(model: str, source: int, target: int, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "ours")
    saved = ranks(source).run(save_by_us, model, path)
    by_stock = ranks(target).run(load_by_stock, model, path, True, True)
    assert_equal_states(whole([state for state, _ in by_stock]), whole(saved))
    by_us = ranks(target).run(load_by_us, model, path)
    assert [losses for _, losses in by_stock] == [losses for _, losses in by_us]


def shaped(outcomes: list[Held]) -> dict[str, np.ndarray]:
    """Put the ranks' pieces together, in their shapes."""
    shapes = {key: piece.global_shape for outcome in outcomes for key, piece in outcome.state.items()}
    return {key: values.reshape(shapes[key]) for key, values in whole(outcomes).items()}


def assert_equal_tensors(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert_equal_states(one, other)
    assert {key: array.shape for key, array in one.items()} == {key: array.shape for key, array in other.items()}


@pytest.mark.parametrize("source", [1, 2, 3])
@pytest.mark.parametrize(("model", "optimizer"), [("tied", "adamw named"), ("tiny", "adamw named"), ("convolutions", "asgd named")])
def test_stock_merges_our_checkpoints(model: str, optimizer: str, source: int, tmp_path: Path, single: RankPool, ranks: Ranks) -> None:
    path = str(tmp_path / "ours")
    saved = shaped(ranks(source).run(save_by_us, model, path, optimizer))
    (merged,) = single.run(load_merged_by_stock, path)
    assert_equal_tensors(merged, saved)
    for merged in ranks(2).run(load_merged_by_stock, path):
        assert_equal_tensors(merged, saved)


@pytest.mark.parametrize(("source", "target"), [(2, 1), (3, 2)])
@pytest.mark.parametrize(("model", "optimizer"), [("tied", "adamw named"), ("convolutions", "asgd named")])
def test_stock_writes_our_checkpoints_merged(model: str, optimizer: str, source: int, target: int, tmp_path: Path, ranks: Ranks) -> None:
    path, merged = str(tmp_path / "ours"), tmp_path / "merged"
    saved = shaped(ranks(source).run(save_by_us, model, path, optimizer))
    # Paddle's index of what it wrote has no row for integers.
    skipped = [key for key, values in saved.items() if values.dtype.kind == "i"]
    ranks(target).run(merge_by_stock, path, str(merged), skipped)
    found: dict[str, np.ndarray] = {}
    for name in merged.glob("*.safetensors"):
        found.update(load_file(name))
    assert_equal_tensors(found, {key: values for key, values in saved.items() if key not in skipped})


def test_the_views_are_the_live_tensors(single: RankPool, ranks: Ranks) -> None:
    for pieces in (single.run(_write_through_views), ranks(2).run(_write_through_views)):
        assert all(pieces)


def _write_through_views() -> bool:
    made, optimizer = build("tied", "adamw")
    weights = _weights(made, optimizer)
    with paddle.no_grad():
        for weight in weights.values():
            weight.local_tensor.fill_(3.0)
    after: dict[str, StatePiece] = held(made, optimizer)
    return bool(after) and all((piece.values == 3.0).all() for piece in after.values())


def test_replicas_and_stock_read_each_other(tmp_path: Path, ranks: Ranks) -> None:
    """All replicas hand the same pieces to stock Paddle, which stores them once; of ours, each writes a part."""
    path, other = str(tmp_path / "stock"), str(tmp_path / "ours")
    saved = whole(ranks(4).run(save_by_stock, "convolutions", path, True, 2)[:2])
    assert_equal_states(whole([state for state, _ in ranks(2).run(load_by_us, "convolutions", path)]), saved)
    by_stock = ranks(4).run(load_by_stock, "convolutions", path, True, False, 2)
    assert_equal_states(whole([state for state, _ in by_stock[:2]]), saved)
    assert_equal_states(whole([state for state, _ in by_stock[2:]]), saved)
    saved = whole(ranks(4).run(save_by_us, "convolutions", other, "adamw named", 2)[:2])
    assert_equal_states(whole([state for state, _ in ranks(3).run(load_by_stock, "convolutions", other, True, False)]), saved)
