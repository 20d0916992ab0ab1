"""Every optimizer of paddle.optimizer has a row in the catalog, or a reason why it is refused."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from harness import RankPool
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import errors
from paddle_fsdp_ckpt.optim import CATALOG, StateKind, entry_of, init_optimizer_state
from paddle_fsdp_ckpt.optim.catalog import REFUSALS

Ranks = Callable[[int], RankPool]


def _classes() -> dict[str, Any]:
    modules = [importlib.import_module(f"paddle.optimizer.{module.name}") for module in pkgutil.iter_modules(paddle.optimizer.__path__)]
    found = [value for module in (paddle.optimizer, *modules) for value in vars(module).values() if isinstance(value, type)]
    return {cls.__name__: cls for cls in found if issubclass(cls, paddle.optimizer.Optimizer)}


def test_every_class_has_a_row_or_a_refusal() -> None:
    classes = set(_classes())
    assert {"AdamW", "LBFGS", "ASGD"} <= classes
    assert classes == CATALOG.keys() | REFUSALS.keys()
    assert not CATALOG.keys() & REFUSALS.keys()


def _net() -> nn.Layer:
    return nn.Sequential(nn.Linear(3, 101), nn.GELU(), nn.Linear(101, 2))


def _make(name: str, model: nn.Layer) -> Any:
    options = {"batch_num": 3} if name == "ASGD" else {}
    return _classes()[name](learning_rate=0.01, parameters=model.parameters(), **options)


REASONS = {
    "Lamb": "its trust ratio needs the norms of whole parameters",
    "LBFGS": "its line search and its history need whole parameters",
    "Optimizer": "no update rule",
}


def _refusal(name: str) -> tuple[str, bool]:
    model = _net()
    optimizer = _make(name, model)
    with pytest.raises(errors.UnsupportedOptimizerError) as caught:
        ckpt.fully_shard(model, optimizer=optimizer)
    return str(caught.value), all(parameter._is_initialized() for parameter in model.parameters())


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_the_class_and_its_reason(name: str, single: RankPool) -> None:
    message, untouched = single.run(_refusal, name)[0]
    assert f"{name} can't step a sharded model: " in message
    assert REASONS[name] in message
    assert "supported are Adam" in message
    assert untouched


class AdamW(paddle.optimizer.Optimizer):  # type: ignore[misc]
    """Has the name of a row, and may do anything."""


def _refuses_others() -> list[str]:
    messages = []
    for cls in (AdamW, paddle.incubate.optimizer.LBFGS):
        model = _net()
        with pytest.raises(errors.UnsupportedOptimizerError) as caught:
            ckpt.fully_shard(model, optimizer=cls(0.1, parameters=model.parameters()))
        messages.append(str(caught.value))
    return messages


def test_classes_from_elsewhere_are_refused(single: RankPool) -> None:
    for message in single.run(_refuses_others)[0]:
        assert "can't step a sharded model; supported are" in message


def _mixed_rprop() -> str:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).to(dtype="float64"))
    with pytest.raises(errors.UnsupportedOptimizerError) as caught:
        ckpt.fully_shard(model, optimizer=paddle.optimizer.Rprop(0.01, parameters=model.parameters()))
    ckpt.fully_shard(model, optimizer=[paddle.optimizer.Rprop(0.01, parameters=layer.parameters()) for layer in model])
    return str(caught.value)


def test_rprop_over_several_dtypes_is_refused(single: RankPool) -> None:
    message = single.run(_mixed_rprop)[0]
    assert "paddle.float32, paddle.float64" in message
    assert "one Rprop for each dtype" in message


def _states(name: str, low_precision: bool) -> None:
    """The table names just the states that the optimizer has, with their kinds, dtypes and live tensors."""
    model = _net()
    if low_precision:
        model.to(dtype="bfloat16")
    optimizer = _make(name, model)
    optimizer._multi_precision = low_precision
    ckpt.fully_shard(model, optimizer=optimizer)
    init_optimizer_state(optimizer)
    weights = ckpt.optimizer_sharded_state_dict(optimizer)
    kinds = entry_of(optimizer).states
    suffixes = {key.rpartition(".")[2].removesuffix("_0") for key in weights}
    assert suffixes == (set(kinds) - {"moment2_max"}) | ({"w"} if low_precision else set())
    for tensors in optimizer._accumulators.values():
        for tensor in tensors.values():
            tensor.fill_(7)
    for key, weight in weights.items():
        state = key.rpartition(".")[2].removesuffix("_0")
        if state != "w":
            assert (weight.local_tensor.astype("float32").numpy() == 7).all(), f"{key} is a copy"
        if kinds.get(state) is StateKind.STACKED:
            assert not weight.is_flattened
            assert len(weight.global_shape) == 2
            assert weight.global_shape[0] == weight.local_shape[0] == 3
            assert tuple(weight.local_tensor.shape) == tuple(weight.local_shape)
        in_its_dtype = low_precision and name in ("ASGD", "Rprop") and state not in ("m", "w")
        if in_its_dtype:
            assert weight.local_tensor.dtype == paddle.bfloat16, key
        elif low_precision and state != "m":
            assert weight.local_tensor.dtype == paddle.float32, key


@pytest.mark.parametrize("low_precision", [False, True])
@pytest.mark.parametrize("name", CATALOG)
def test_the_table_names_the_states(name: str, low_precision: bool, ranks: Ranks) -> None:
    ranks(2).run(_states, name, low_precision)


def _fill(model: nn.Layer, optimizer: Any, path: str) -> None:
    """Let every number be its own place in the whole tensor, and save."""
    for key, weight in {**ckpt.sharded_state_dict(model), **ckpt.optimizer_sharded_state_dict(optimizer)}.items():
        whole = np.arange(int(np.prod(weight.global_shape))) % 251 + len(key)
        if weight.is_flattened:
            values = whole[weight.flattened_range]
        else:
            box = [slice(start, start + size) for start, size in zip(weight.global_offset, weight.local_shape, strict=True)]
            values = whole.reshape(weight.global_shape)[tuple(box)]
        with paddle.no_grad():
            paddle.assign(
                paddle.to_tensor(values).astype(weight.local_tensor.dtype).reshape(weight.local_tensor.shape), weight.local_tensor
            )
    ckpt.save(path, model=model, optimizer=optimizer)


def _low_precision(name: str, path: str, target: str) -> None:
    """Fill and save, or load, check, and save to the target."""
    model = _net()
    model.to(dtype="bfloat16")
    optimizer = _make(name, model)
    optimizer._multi_precision = True
    ckpt.fully_shard(model, optimizer=optimizer)
    if target:
        ckpt.load(path, model=model, optimizer=optimizer)
        ckpt.save(target, model=model, optimizer=optimizer)
        found = _numbers(optimizer)
        _fill(model, optimizer, target + " again")
        right = _numbers(optimizer)
        assert found.keys() == right.keys()
        for key, values in right.items():
            np.testing.assert_array_equal(found[key], values, err_msg=key)
    else:
        _fill(model, optimizer, path)


def _numbers(optimizer: Any) -> dict[str, np.ndarray]:
    weights = ckpt.optimizer_sharded_state_dict(optimizer)
    return {key: weight.local_tensor.astype("float32").numpy() for key, weight in weights.items()}


@pytest.mark.parametrize("name", CATALOG)
def test_low_precision_states_go_to_other_world_sizes(name: str, tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "2")
    ranks(2).run(_low_precision, name, path, "")
    for number, world_size in enumerate((3, 2, 1, 2)):
        target = str(tmp_path / f"{number} of {world_size}")
        ranks(world_size).run(_low_precision, name, path, target)
        path = target


def _train(model: nn.Layer, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        x = paddle.to_tensor(np.random.RandomState(step).standard_normal([6, 3]).astype("float32"))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()


def _plain(name: str, path: str, save: bool) -> dict[str, np.ndarray]:
    model = _net()
    optimizer = _make(name, model)
    if save:
        _train(model, optimizer, 0, 4)
        ckpt.save(path, model=model, optimizer=optimizer)
    else:
        ckpt.load(path, model=model, optimizer=optimizer)
    _train(model, optimizer, 4, 6)
    values = {f"{i}": parameter.numpy() for i, parameter in enumerate(model.parameters())}
    names = {parameter.name: f"{i}" for i, parameter in enumerate(model.parameters())}
    return values | {f"{names[o]}.{acc}": t.numpy() for acc, owned in optimizer._accumulators.items() for o, t in owned.items()}


def _through_sharded(name: str, path: str, target: str) -> None:
    model = _net()
    optimizer = _make(name, model)
    ckpt.fully_shard(model, optimizer=optimizer)
    ckpt.load(path, model=model, optimizer=optimizer)
    ckpt.save(target, model=model, optimizer=optimizer)


@pytest.mark.parametrize("name", CATALOG)
def test_a_plain_models_states_go_through_a_sharded_one(name: str, tmp_path: Path, single: RankPool, ranks: Ranks) -> None:
    plain, sharded = str(tmp_path / "plain"), str(tmp_path / "sharded")
    right = single.run(_plain, name, plain, True)[0]
    ranks(2).run(_through_sharded, name, plain, sharded)
    found = single.run(_plain, name, sharded, False)[0]
    assert found.keys() == right.keys()
    for key, values in right.items():
        assert np.isfinite(values).all(), key
        np.testing.assert_array_equal(found[key], values, err_msg=key)


def _other_batch_num(path: str, save: bool) -> str:
    model = _net()
    optimizer = paddle.optimizer.ASGD(0.1, 3 if save else 4, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    if save:
        init_optimizer_state(optimizer)
        ckpt.save(path, model=model, optimizer=optimizer)
        return ""
    with pytest.raises(errors.CheckpointError) as caught:
        ckpt.load(path, model=model, optimizer=optimizer)
    return str(caught.value)


def test_another_batch_num_of_asgd_is_an_error(tmp_path: Path, ranks: Ranks) -> None:
    path = str(tmp_path / "checkpoint")
    ranks(2).run(_other_batch_num, path, True)
    for message in ranks(2).run(_other_batch_num, path, False):
        assert "of another shape" in message
        assert ".y_0" in message
