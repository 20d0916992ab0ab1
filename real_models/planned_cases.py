"""The units of PaddleFormers' models, as ``fully_shard`` finds them."""

from __future__ import annotations

from tiny_models import build

from paddle_fsdp_ckpt.fsdp.units import plan_units

Units = list[tuple[str, list[tuple[tuple[str, ...], tuple[int, ...], str]]]]


def units(family: str) -> Units:
    """Return each unit's name, and the names, shapes and dtypes of its parameters."""
    return [
        (
            unit.name,
            [(tuple(one.names), tuple(one.parameter.shape), str(one.parameter.dtype).rpartition(".")[2]) for one in unit.parameters],
        )
        for unit in plan_units(build(family), None).units
    ]
