"""Saves that may use the plan of the save before, after something has changed, against saves that plan anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import paddle
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import save_plan, saving
from paddle_fsdp_ckpt.fsdp import runtime_of


class Net(nn.Layer):
    """Two layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 3)
        self.register_buffer("scale", paddle.full([2], 0.5))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.second(self.first(x)) * self.scale.sum()


def step(model: nn.Layer, optimizer: Any) -> None:
    model(paddle.ones([4, 6])).square().mean().backward()
    optimizer.step()
    optimizer.clear_grad()


def _first_state(optimizer: Any) -> tuple[dict[str, paddle.Tensor], str]:
    table = optimizer._accumulators["moment1"]
    return table, next(iter(table))


def replace_a_state(model: nn.Layer, optimizer: Any) -> None:
    table, name = _first_state(optimizer)
    table[name] = table[name] + 1.0


def move_a_state(model: nn.Layer, optimizer: Any) -> None:
    """The tensor stays, and its memory is elsewhere."""
    table, name = _first_state(optimizer)
    other = table[name] + 2.0
    table[name].get_tensor()._share_data_with(other.get_tensor())


def move_a_state_and_free_the_old(model: nn.Layer, optimizer: Any) -> None:
    """As after a load into an optimizer that had states."""
    table, name = _first_state(optimizer)
    values = table[name] + 3.0
    del table[name]
    table[name] = values


def reorder_states(model: nn.Layer, optimizer: Any) -> None:
    """Two states of one shape change places in the table: the same tensors at the same addresses under other names."""
    first, second = optimizer._accumulators["moment1"], optimizer._accumulators["moment2"]
    optimizer._accumulators["moment1"], optimizer._accumulators["moment2"] = second, first


def drop_states(model: nn.Layer, optimizer: Any) -> None:
    for table in optimizer._accumulators.values():
        table.clear()


def add_a_buffer(model: nn.Layer, optimizer: Any) -> None:
    model.register_buffer("count", paddle.full([3], 7.0))


def replace_a_buffer(model: nn.Layer, optimizer: Any) -> None:
    model.scale = paddle.full([4], 0.25)


def change_the_dtype_of_a_buffer(model: nn.Layer, optimizer: Any) -> None:
    model.scale = model.scale.astype("float64")


def set_a_weight(model: nn.Layer, optimizer: Any) -> None:
    model.first.weight.set_value(paddle.full([6, 9], 3.0))


def nothing(model: nn.Layer, optimizer: Any) -> None:
    """What only trains."""


CHANGES: dict[str, Callable[[nn.Layer, Any], None]] = {
    change.__name__: change
    for change in (
        nothing,
        replace_a_state,
        move_a_state,
        move_a_state_and_free_the_old,
        reorder_states,
        drop_states,
        add_a_buffer,
        replace_a_buffer,
        change_the_dtype_of_a_buffer,
        set_a_weight,
    )
}


def save_after_changes(root: str) -> dict[str, tuple[bool, bool]]:
    """For each change: whether the save after it planned anew, and whether it is byte for byte one that has nothing to go by."""
    outcomes = {}
    for name, change in CHANGES.items():
        model = Net()
        optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
        ckpt.fully_shard(model, optimizer=optimizer)
        step(model, optimizer)
        path = Path(root) / name
        ckpt.save(path / "first", model=model, optimizer=optimizer)
        if name != "drop_states":
            step(model, optimizer)
        change(model, optimizer)
        planned = _counted(lambda path=path, model=model, optimizer=optimizer: ckpt.save(path / "kept", model=model, optimizer=optimizer))
        runtime = runtime_of(model)
        assert runtime is not None
        runtime.kept.clear()
        ckpt.save(path / "anew", model=model, optimizer=optimizer)
        runtime.kept.clear()
        # With a tensor for each piece, as where nobody can tell where values are.
        with mock.patch.object(save_plan, "_plan_places", return_value=None):
            ckpt.save(path / "singly", model=model, optimizer=optimizer)
        outcomes[name] = planned, _files(path / "kept") == _files(path / "anew") == _files(path / "singly")
    return outcomes


def _counted(save: Callable[[], None]) -> bool:
    """Tell whether a save planned what it stores, or rank 0 read a header."""
    calls: list[str] = []

    def count(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            calls.append(what)
            return function(*args)

        return counted

    kept = save_plan._plan_places, save_plan.weights_to_store, saving.read_headers
    save_plan._plan_places = count("places", kept[0])
    save_plan.weights_to_store, saving.read_headers = count("weights", kept[1]), count("headers", kept[2])
    try:
        save()
    finally:
        save_plan._plan_places, save_plan.weights_to_store, saving.read_headers = kept
    return bool(calls)


def _files(path: Path) -> dict[str, bytes]:
    """Return the files of all ranks, but for the manifest, which has the time."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "manifest.json"}


def other_choices(root: str) -> list[bool]:
    """After a save with one optimizer: without any, and with it again; each byte for byte as anew."""
    model = Net()
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    step(model, optimizer)
    right = []
    for number, given in enumerate((optimizer, None, optimizer)):
        ckpt.save(Path(root) / f"{number}-kept", model=model, optimizer=given)
    for number, given in enumerate((optimizer, None, optimizer)):
        runtime = runtime_of(model)
        assert runtime is not None
        runtime.kept.clear()
        ckpt.save(Path(root) / f"{number}-anew", model=model, optimizer=given)
        right.append(_files(Path(root) / f"{number}-kept") == _files(Path(root) / f"{number}-anew"))
    return right


def keeps_no_state_alive() -> bool:
    """Tell whether a state that the optimizer forgot is gone, although a save has seen it."""
    import tempfile
    import weakref

    model = Net()
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    step(model, optimizer)
    with tempfile.TemporaryDirectory() as directory:
        ckpt.save(Path(directory) / "saved", model=model, optimizer=optimizer)
    table, name = _first_state(optimizer)
    state = weakref.ref(table[name])
    del table[name]
    return state() is None
