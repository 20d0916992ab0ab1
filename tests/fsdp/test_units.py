"""How a model is cut into units."""

from __future__ import annotations

import paddle
import pytest
from paddle import nn
from training_models import Block, Collections, ExpertNet, Images, Nested, Net, Odd, Recurrent, SideOutputs, Transformer

from paddle_fsdp_ckpt.errors import ShardingError
from paddle_fsdp_ckpt.fsdp.units import ROOT, named_buffers, named_parameters, plan_units

MODELS = [Net, Collections, Images, Nested, Recurrent, SideOutputs, Transformer, lambda: ExpertNet(None), Odd]


def units(model: nn.Layer, unit_layers: list[type[nn.Layer] | str] | None = None) -> dict[str, list[str]]:
    return {unit.name: [named.names[0] for named in unit.parameters] for unit in plan_units(model, unit_layers).units}


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("unit_layers", [None, [nn.Linear], [nn.Layer], []])
def test_each_parameter_is_in_one_unit_and_hooked_by_a_layer_that_has_it(build: type[nn.Layer], unit_layers: list[type[nn.Layer]]) -> None:
    model = build()
    if unit_layers == [nn.Linear] and not any(isinstance(layer, nn.Linear) for layer in model.sublayers()):
        with pytest.raises(ShardingError, match="no layer of class Linear"):
            plan_units(model, unit_layers)
        return
    plan = plan_units(model, unit_layers)
    placed = [id(named.parameter) for unit in plan.units for named in unit.parameters]
    assert sorted(placed) == sorted(id(named.parameter) for named in named_parameters(model))
    assert len(set(placed)) == len(placed)
    assert len({unit.name for unit in plan.units}) == len(plan.units)
    for hooked in plan.hooked:
        below = {id(parameter) for parameter in hooked.layer.parameters()}
        for unit in hooked.units:
            assert any(id(named.parameter) in below for named in unit.parameters)


def test_repeated_blocks_are_units_and_so_is_each_other_layer() -> None:
    found = units(Net(2))
    assert list(found) == ["embed", "blocks.0", "blocks.1", "norm", "head"]
    assert found["blocks.1"] == [
        "blocks.1." + name for name in ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
    ]


def test_siblings_of_a_class_are_blocks() -> None:
    class Pair(nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.middle = Block(), Block(), nn.Linear(2, 2)

    assert list(units(Pair())) == ["left", "right", "middle"]


def test_containers_with_a_forward_of_their_own_are_blocks() -> None:
    assert list(units(Recurrent())) == ["embed", "lstm", "gru", "loop.cell", "head"]
    assert list(units(nn.LSTM(3, 4))) == [ROOT]


def test_experts_are_in_the_unit_of_their_block() -> None:
    assert list(units(ExpertNet(None))) == ["embed", "blocks.0", "blocks.1", "head"]


def test_unit_layers_are_told_by_class_or_name() -> None:
    assert list(units(Net(2), [Block])) == list(units(Net(2), ["Block"])) == list(units(Net(2)))
    assert list(units(Net(2), ["Net"])) == [ROOT]
    assert "blocks.0.up" in units(Net(2), [nn.Linear])
    assert list(units(Net(1), [])) == ["embed", "blocks.0.norm", "blocks.0.up", "blocks.0.down", "norm", "head"]
    with pytest.raises(ShardingError, match="no layer of class Conv2D; it has Block, Embedding"):
        plan_units(Net(1), [Block, nn.Conv2D])


def test_tied_parameters_have_all_their_names_and_both_layers_need_their_unit() -> None:
    plan = plan_units(Net(1, "same"), None)
    (embed,) = [unit for unit in plan.units if unit.name == "embed"]
    assert [named.names for named in embed.parameters] == [["embed.weight", "head.weight"]]
    assert [[unit.name for unit in hooked.units] for hooked in plan.hooked if type(hooked.layer).__name__ == "TransposedHead"] == [
        ["embed", "head"]
    ]


def test_a_layer_in_two_places_has_the_names_of_both() -> None:
    by_first = {named.names[0]: named.names for named in named_parameters(Collections())}
    assert by_first["shared.up.bias"] == ["shared.up.bias", "also_shared.0.up.bias"]


def test_running_statistics_are_buffers() -> None:
    model = Images(norm=True)
    model.register_buffer("steps", paddle.zeros([1]))
    model.register_buffer("cache", paddle.zeros([1]), persistable=False)
    assert [name for name, _ in named_buffers(model)] == ["steps", "norm._mean", "norm._variance"]
    assert not any("_mean" in name for named in named_parameters(model) for name in named.names)
