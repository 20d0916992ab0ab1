"""Hyper-parameters are described as they take effect on each parameter, and compared by the parameters' names."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from harness import RankPool
from paddle import nn
from paddle.regularizer import L1Decay, L2Decay

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.layout import Slot
from paddle_fsdp_ckpt.optim import CATALOG, WholeParameter, describe_hyperparameters, differences, optimizer_shards

Ranks = Callable[[int], RankPool]


def net(attribute: Any = None) -> nn.Layer:
    return nn.Sequential(nn.Linear(3, 4, weight_attr=attribute), nn.GELU(), nn.Linear(4, 2))


def held(model: nn.Layer) -> list[WholeParameter]:
    return [WholeParameter(Slot((name,), tuple(p.shape), 0), p) for name, p in model.named_parameters()]


def described(optimizer: Any, model: nn.Layer) -> Any:
    return json.loads(json.dumps(describe_hyperparameters(optimizer, held(model)), allow_nan=False))


def make(cls: str, model: nn.Layer | None = None, **options: Any) -> Any:
    """The description of an optimizer over a model."""
    model = model or net()
    required = {"learning_rate": 0.01, **({"batch_num": 1} if cls == "ASGD" else {})}
    return described(getattr(paddle.optimizer, cls)(**{**required, "parameters": model.parameters(), **options}), model)


CHANGED: dict[str, Any] = {
    "beta1": 0.5,
    "beta2": 0.7,
    "epsilon": 1e-3,
    "rho": 0.5,
    "momentum": 0.3,
    "momentum_decay": 0.1,
    "initial_accumulator_value": 0.5,
    "centered": True,
    "amsgrad": True,
    "use_lowprecision_moment": True,
    "lazy_mode": True,
    "use_nesterov": True,
    "multi_precision": True,
    "rescale_grad": 0.5,
    "batch_num": 3,
    "weight_decay": 0.25,
    "learning_rate_range": (1e-3, 0.5),
    "etas": (0.25, 1.5),
    "grad_clip": nn.ClipGradByGlobalNorm(0.5),
}
"""For each argument of an optimizer of Paddle's, another value than the default."""

NOT_COMPARED = {"self", "learning_rate", "parameters", "name", "use_multi_tensor"}
"""Described elsewhere, no settings, or refused."""
FUNCTIONS = {"apply_decay_param_fun", "lr_ratio"}

ARGUMENTS = [
    (cls, argument)
    for cls in CATALOG
    for argument in inspect.signature(getattr(paddle.optimizer, cls).__init__).parameters
    if argument not in NOT_COMPARED | FUNCTIONS
]


@pytest.mark.parametrize(("cls", "argument"), ARGUMENTS)
def test_every_argument_of_every_optimizer_is_compared(cls: str, argument: str) -> None:
    before, after = make(cls), make(cls, **{argument: CHANGED[argument]})
    assert differences(before, make(cls)) == []
    (text,) = differences(before, after)
    assert text.startswith(f"{cls}, 4 parameters (first '0.weight'): {argument} was saved as ")
    shown = {"grad_clip": "ClipGradByGlobalNorm(clip_norm=0.5", "learning_rate_range": "[0.001, 0.5]", "etas": "[0.25, 1.5]"}
    if argument == "weight_decay" and cls != "AdamW":
        shown[argument] = "L2Decay(coefficient=0.25)"
    assert f" and is {shown.get(argument, CHANGED[argument])}" in text
    (back,) = differences(after, before)
    assert back != text


@pytest.mark.parametrize(("cls", "argument"), [(cls, argument) for cls, argument in ARGUMENTS if argument in ("beta1", "rho", "momentum")])
def test_a_group_sets_its_own(cls: str, argument: str) -> None:
    model = net()
    groups = [{"params": model[0].parameters(), argument: 0.125}, {"params": model[2].parameters()}]
    first, second = make(cls, model, parameters=groups)
    assert first["parameters"] == ["0.weight", "0.bias"]
    assert first["settings"][argument] == 0.125
    assert second["settings"] == make(cls)[0]["settings"]


@pytest.mark.parametrize("cls", CATALOG)
def test_training_changes_nothing(cls: str) -> None:
    model = net()
    groups = [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": model[2].parameters()}]
    for parameters in (model.parameters(), groups):
        optimizer = getattr(paddle.optimizer, cls)(0.01, **({"batch_num": 2} if cls == "ASGD" else {}), parameters=parameters)
        before = described(optimizer, model)
        model(paddle.ones([2, 3])).sum().backward()
        optimizer.step()
        assert described(optimizer, model) == before


def in_groups(model: nn.Layer, *indices: list[int], **options: Any) -> Any:
    parameters = model.parameters()
    groups = [{"params": [parameters[i] for i in chosen], **options} for chosen in indices]
    return described(paddle.optimizer.AdamW(0.01, parameters=groups), model)


def test_groups_are_matched_by_names() -> None:
    one = in_groups(net(), [0, 1, 2, 3], weight_decay=0.1)
    assert differences(one, in_groups(net(), [3, 1], [], [2, 0], weight_decay=0.1)) == []
    assert differences(in_groups(net(), [3], [2], [1], [0], weight_decay=0.1), one) == []
    assert differences(one, make("AdamW", weight_decay=0.1)) == []
    model = net()
    parameters = model.parameters()
    other = paddle.optimizer.AdamW(
        0.01, parameters=[{"params": parameters[1::2], "weight_decay": 0.0}, {"params": parameters[::2], "weight_decay": 0.1}]
    )
    assert differences(one, described(other, model)) == [
        "AdamW, 2 parameters (first '0.bias'): weight_decay was saved as 0.1 and is 0.0 now"
    ]


def test_only_parameters_of_both_are_compared() -> None:
    saved = in_groups(net(), [0, 1], [2, 3], weight_decay=0.1)
    saved[0]["parameters"] = ["another", "2.bias"]
    assert differences(saved, make("AdamW", weight_decay=0.2)) == [
        "AdamW, 1 parameter ('2.bias'): weight_decay was saved as 0.1 and is 0.2 now"
    ]
    assert differences([], saved) == differences(saved, []) == []


def test_another_class_is_one_difference() -> None:
    (text,) = differences(make("Adam", amsgrad=True), make("AdamW"))
    assert text == "AdamW, 4 parameters (first '0.weight'): the optimizer was saved as 'Adam' and is 'AdamW' now"


def test_what_a_function_says_is_described() -> None:
    model = net()
    decayed = {p.name for p in model.parameters() if len(p.shape) > 1}
    with_function = make("AdamW", model, apply_decay_param_fun=lambda name: name in decayed, weight_decay=0.1)
    groups = in_groups(net(), [0, 1, 2, 3], weight_decay=0.1)
    assert differences(groups, with_function) == ["AdamW, 2 parameters (first '0.bias'): weight_decay was saved as 0.1 and is 0.0 now"]
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    optimizer._lr_ratio = lambda parameter: 0.5 if parameter is model[2].bias else 1.0  # the constructor takes it on GPU only
    assert differences(make("AdamW"), described(optimizer, model)) == [
        "AdamW, 3 parameters (first '0.weight'): lr_ratio was saved as None and is 1.0 now",
        "AdamW, 1 parameter ('2.bias'): lr_ratio was saved as None and is 0.5 now",
    ]


@pytest.mark.parametrize("cls", CATALOG)
def test_a_parameters_own_attributes(cls: str) -> None:
    attribute = paddle.ParamAttr(learning_rate=0.5, regularizer=L1Decay(0.25), need_clip=False)
    clip = nn.ClipGradByNorm(1.0)
    found = differences(make(cls, grad_clip=clip), make(cls, net(attribute), grad_clip=clip))
    what = "regularizer" if cls == "AdamW" else "weight_decay"
    assert found == [
        f"{cls}, 1 parameter ('0.weight'): learning_rate_factor was saved as 1.0 and is 0.5 now",
        f"{cls}, 1 parameter ('0.weight'): need_clip was saved as True and is False now",
        f"{cls}, 1 parameter ('0.weight'): {what} was saved as None and is L1Decay(coefficient=0.25) now",
    ]
    # Without a clip it says nothing.
    assert not any("need_clip" in text for text in differences(make(cls), make(cls, net(attribute))))


DECAYS = {"number": 0.25, "whole number": 1, "l2": L2Decay(0.25), "l1": L1Decay(0.25), "none": None, "zero": 0.0}


@pytest.mark.parametrize("cls", [cls for cls in CATALOG if cls not in ("AdamW", "Rprop")])
def test_kinds_of_weight_decay(cls: str) -> None:
    found = {name: make(cls, weight_decay=decay)[0]["settings"]["weight_decay"] for name, decay in DECAYS.items()}
    l2 = {"kind": "L2Decay", "coefficient": 0.25}
    whole = {"kind": "L2Decay", "coefficient": 1.0}
    l1 = {"kind": "L1Decay", "coefficient": 0.25}
    assert found == {"number": l2, "whole number": whole, "l2": l2, "l1": l1, "none": None, "zero": None}
    model = net()
    group = make(cls, model, parameters=[{"params": model.parameters(), "weight_decay": 0.25}])
    assert group[0]["settings"]["weight_decay"] == l2


@pytest.mark.parametrize(
    ("clip", "shown"),
    [
        (nn.ClipGradByGlobalNorm(0.5, auto_skip_clip=True), "ClipGradByGlobalNorm(clip_norm=0.5, auto_skip_clip=True)"),
        (nn.ClipGradByNorm(0.5), "ClipGradByNorm(clip_norm=0.5)"),
        (nn.ClipGradByValue(0.5), "ClipGradByValue(min=-0.5, max=0.5)"),
    ],
)
def test_kinds_of_clipping(clip: Any, shown: str) -> None:
    (text,) = differences(make("SGD"), make("SGD", grad_clip=clip))
    assert text == f"SGD, 4 parameters (first '0.weight'): grad_clip was saved as None and is {shown} now"


def in_words(saved_by: Any) -> tuple[Any, list[str], bool]:
    """On a bound optimizer, before and after a step: the description, its differences from the one given, and whether it stays."""
    model = net(paddle.ParamAttr(need_clip=False))
    biases = [p for p in model.parameters() if len(p.shape) == 1]
    weights = {p.name for p in model.parameters() if len(p.shape) > 1}
    optimizer = paddle.optimizer.AdamW(
        0.01,
        parameters=[{"params": biases, "beta1": 0.5}, {"params": [p for p in model.parameters() if p.name in weights]}],
        weight_decay=0.1,
        apply_decay_param_fun=lambda name: name in weights,
        grad_clip=nn.ClipGradByGlobalNorm(0.1),
    )
    ckpt.fully_shard(model, optimizer=optimizer)
    before = describe_hyperparameters(optimizer, optimizer_shards(optimizer))
    for _ in range(2):
        model(paddle.ones([2, 3])).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
    after = describe_hyperparameters(optimizer, optimizer_shards(optimizer))
    return before, differences(saved_by, before), after == before


def test_a_bound_optimizer_is_described_as_a_plain_one(ranks: Ranks) -> None:
    plain = make("AdamW", weight_decay=0.1, grad_clip=nn.ClipGradByGlobalNorm(0.1))
    (first, _, _), *others = results = ranks(2).run(in_words, plain)
    assert all(other == first for other, _, _ in others)
    for _, found, stays in results:
        assert stays
        assert sorted(found) == [
            "AdamW, 1 parameter ('0.weight'): need_clip was saved as True and is False now",
            "AdamW, 2 parameters (first '0.bias'): beta1 was saved as 0.9 and is 0.5 now",
            "AdamW, 2 parameters (first '0.bias'): weight_decay was saved as 0.1 and is 0.0 now",
        ]
