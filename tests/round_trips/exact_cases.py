"""Loads of just what was saved, planned at once and key by key; and what tells how a load was planned."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import paddle
from checkpoint_cases import build, train
from harness.training import held

import paddle_fsdp_ckpt as ckpt

load_module = importlib.import_module("paddle_fsdp_ckpt.loading.load")  # the package shows the function of this name
plan_module = importlib.import_module("paddle_fsdp_ckpt.loading.plan")


@contextmanager
def _planned_as() -> Iterator[list[str]]:
    """Note how each load in the block is planned."""
    kept = load_module.plan_load
    kinds: list[str] = []

    def noting(*args: Any) -> Any:
        plan = kept(*args)
        kinds.append(type(plan.reading).__name__)
        return plan

    load_module.plan_load = noting
    try:
        yield kinds
    finally:
        load_module.plan_load = kept


def load_both_ways(model: str, optimizer: str, path: str) -> tuple[list[str], bool, bool]:
    """Load as ever, and again key by key: how each was planned, and whether reports and all values are alike."""
    with _planned_as() as kinds:
        one, stepper = build(model, optimizer, seed=7)
        train(one, stepper, 20, 21)
        report = ckpt.load(path, model=one, optimizer=stepper)
        other, other_stepper = build(model, optimizer, seed=8)
        with mock.patch.object(plan_module, "plan_exact_load", return_value=None):
            other_report = ckpt.load(path, model=other, optimizer=other_stepper)
    mine, right = held(one, stepper), held(other, other_stepper)
    are_equal = mine.keys() == right.keys() and all(np.array_equal(mine[key].values, right[key].values) for key in mine)
    return kinds, report == other_report and str(report) == str(other_report), are_equal


def saves_to_judge(root: str) -> None:
    """Checkpoints of a model with two optimizers' parameters, one of which is not always given; of another shape; and a usual one."""
    for name, width in (("usual", 6), ("wider", 7)):
        model, optimizer = _net(width)
        ckpt.save(f"{root}/{name}", model=model, optimizer=optimizer)


def _net(width: int = 6, **settings: Any) -> tuple[Any, Any]:
    paddle.seed(3)
    model = paddle.nn.Sequential(paddle.nn.Linear(4, width), paddle.nn.Linear(width, 2))
    optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters(), **settings)
    ckpt.fully_shard(model, optimizer=optimizer)
    ckpt.init_optimizer_state(optimizer)
    return model, optimizer


def plans_of_others(root: str) -> dict[str, tuple[list[str], str]]:
    """For loads that are not of just what was saved, or might not be: how they were planned, and how they ended."""

    def moments_in_16_bits(model: Any, optimizer: Any) -> None:
        table = optimizer._accumulators["moment1"]
        for name in table:
            table[name] = table[name].astype("float16")

    cases: dict[str, tuple[str, Callable[[Any, Any], None] | None, dict[str, Any]]] = {
        "usual": ("usual", None, {}),
        "cast, and nothing to cast": ("usual", None, {"cast": True}),
        "without digests": ("usual", None, {"check_digests": False}),
        "verified first": ("usual", None, {"verify_first": True}),
        "patterns": ("usual", None, {"allow_missing": ["head.*"]}),
        "another shape": ("wider", None, {}),
        "another dtype": ("usual", moments_in_16_bits, {}),
    }
    ended = {}
    for name, (path, change, options) in cases.items():
        model, optimizer = _net()
        if change is not None:
            change(model, optimizer)
        with _planned_as() as kinds:
            try:
                end = str(ckpt.load(f"{root}/{path}", model=model, optimizer=optimizer, **options).step)
            except ckpt.MismatchError as error:
                end = str(error)
        ended[name] = kinds, end
    return ended
