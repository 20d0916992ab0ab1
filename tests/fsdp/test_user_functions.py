"""Functions that users give an optimizer are asked with whole parameters; what would see pieces, or mix states up, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from harness import RankPool
from paddle import nn
from training_models import Net
from training_runs import Run, compare

from paddle_fsdp_ckpt.errors import ShardingError, UnsupportedOptimizerError
from paddle_fsdp_ckpt.state_dict import sharded_state_dict
from paddle_fsdp_ckpt.training import fully_shard

Ranks = Callable[[int], RankPool]


def decay_by_shape(run: Run) -> None:
    model = Net(2)

    def make(model: nn.Layer) -> Any:
        named = {parameter.name: parameter for parameter in model.parameters()}
        return paddle.optimizer.AdamW(
            0.01, parameters=model.parameters(), weight_decay=0.5, apply_decay_param_fun=lambda name: len(named[name].shape) > 1
        )

    run.train(model, run.start(model, make))


def train_with_decay_by_shape() -> None:
    compare(decay_by_shape, "float64")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_decay_function_sees_whole_shapes(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(train_with_decay_by_shape)


class NormDecay(paddle.regularizer.WeightDecayRegularizer):
    def __call__(self, parameter: Any, gradient: Any, block: Any) -> Any:
        return parameter * parameter.norm()


def refuse_own_regularizer() -> str:
    model = nn.Linear(3, 4, weight_attr=paddle.ParamAttr(regularizer=NormDecay()))
    with pytest.raises(UnsupportedOptimizerError) as caught:
        fully_shard(model, optimizer=paddle.optimizer.SGD(0.1, parameters=model.parameters()))
    model(paddle.ones([2, 3])).sum().backward()
    return str(caught.value)


def refuse_shared_name() -> str:
    model = nn.Sequential(*[nn.Linear(3, 3, weight_attr=paddle.ParamAttr(name=name)) for name in ("same", "other")])
    model[1].weight.name = "same"
    with pytest.raises(UnsupportedOptimizerError) as caught:
        fully_shard(model, optimizer=paddle.optimizer.Momentum(0.1, parameters=model.parameters()))
    return str(caught.value)


def refuse_colliding_names() -> str:
    model = nn.Layer()
    model.add_sublayer("a.b", nn.Linear(2, 2))
    model.add_sublayer("a", nn.Layer())
    model.a.add_sublayer("b", nn.Linear(2, 2))
    with pytest.raises(ShardingError) as caught:
        fully_shard(model, optimizer=None)
    return str(caught.value)


REFUSALS = {
    refuse_own_regularizer: "neither L1Decay nor L2Decay",
    refuse_shared_name: "one Paddle name",
    refuse_colliding_names: "a.b.weight",
}


@pytest.mark.parametrize("function", REFUSALS)
def test_refusals(ranks: Ranks, function: Callable[[], str]) -> None:
    assert all(REFUSALS[function] in message for message in ranks(2).run(function))


def write_while_sharded() -> str:
    model = nn.Linear(3, 4)
    fully_shard(model, optimizer=None)
    nn.initializer.Constant(0.25)(model.weight)
    with pytest.raises(ShardingError) as caught:
        sharded_state_dict(model)
    return str(caught.value)


def test_a_state_dict_finds_what_was_written_past_the_shard(ranks: Ranks) -> None:
    assert all("written to while it was sharded" in message for message in ranks(2).run(write_while_sharded))


def change_the_model_afterwards() -> list[str]:
    model = Net(2)
    fully_shard(model, optimizer=None)
    said = []
    for change in (
        lambda: setattr(model, "head", nn.Linear(2, 2)),
        lambda: setattr(model, "extra", nn.Linear(2, 2)),
        lambda: model.blocks.append(nn.Linear(2, 2)),
        lambda: model.add_sublayer("other", nn.Sequential(nn.Linear(2, 2))),
        lambda: setattr(model, "again", model.blocks[0]),
        lambda: setattr(model, "head", nn.Identity()),
        lambda: setattr(model, "head", None),
        lambda: delattr(model, "head"),
        lambda: model.blocks.__delitem__(0),
        lambda: model.blocks._sub_layers.pop("0"),
        lambda: model.blocks._sub_layers.clear(),
        lambda: setattr(model.head, "bias", None),
        lambda: delattr(model.head, "bias"),
        lambda: nn.utils.weight_norm(model.head),
    ):
        with pytest.raises(ShardingError) as caught:
            change()
        said.append(str(caught.value))
    model.activation = nn.ReLU()
    model.activation = nn.Tanh()
    del model.activation
    model.head = model.head
    assert model(paddle.zeros([2, 5], "int64")).shape[0] == 2
    return said


def test_layers_with_parameters_can_not_come_or_go_later(ranks: Ranks) -> None:
    for said in ranks(2).run(change_the_model_afterwards):
        assert all("can't be added, replaced or removed after fully_shard" in text for text in said)
