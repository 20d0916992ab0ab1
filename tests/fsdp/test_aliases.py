"""Different Parameter objects that are one memory: made one parameter by ``fully_shard``, and refused where that would not be right."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from harness import RankPool, this_rank
from paddle import nn
from paddle.base.framework import EagerParamBase
from paddle.regularizer import L2Decay
from training_models import WIDTH, Net, TransposedHead
from training_runs import VOCABULARY, Run, compare, language_loss

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.export.inspection import Inspection, inspect
from paddle_fsdp_ckpt.fsdp import runtime_of

Ranks = Callable[[int], RankPool]


def _from_tensor(head: nn.Layer, weight: Any) -> None:
    head.weight = EagerParamBase.from_tensor(weight.detach())


WAYS: dict[str, Callable[[nn.Layer, Any], None]] = {
    "_share_buffer_to": lambda head, weight: weight._share_buffer_to(head.weight),
    "_share_data_with": lambda head, weight: head.weight.get_tensor()._share_data_with(weight.get_tensor()),
    "data": lambda head, weight: setattr(head.weight, "data", weight),
    "dlpack": lambda head, weight: setattr(head.weight, "data", paddle.from_dlpack(weight.detach())),
    "from_tensor": _from_tensor,
}
"""How Parameters come to be one memory in Paddle 3.3.1."""


def shared(way: str = "_share_buffer_to") -> Net:
    """A model whose head has a Parameter object of its own, over the embedding's memory."""
    model = Net(2, "same")
    model.head = TransposedHead(paddle.create_parameter([VOCABULARY, WIDTH], paddle.get_default_dtype()))
    WAYS[way](model.head, model.embed.weight)
    assert model.head.weight is not model.embed.weight and model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    return model


def adamw(model: nn.Layer) -> Any:
    groups = [{"params": [p for p in model.parameters() if (len(p.shape) > 1) == matrices]} for matrices in (True, False)]
    groups[0]["weight_decay"] = 0.1
    return paddle.optimizer.AdamW(0.01, epsilon=1e-6, parameters=groups, weight_decay=0.0, grad_clip=nn.ClipGradByGlobalNorm(0.5))


def sgd(model: nn.Layer) -> Any:
    return paddle.optimizer.SGD(0.3, parameters=model.parameters())


def as_tied_by_one_object(run: Run) -> None:
    for way in list(WAYS)[this_rank().world_size - 1 :: 3]:
        paddle.seed(7)  # after which an object that is dropped draws too
        model = shared(way) if run.sharded else Net(2, "same")
        run.train(model, run.start(model, adamw), steps=2)


def as_two_objects_under_sgd(run: Run) -> None:
    model = shared()
    optimizer = run.start(model, sgd)
    for step in range(3):
        loss = language_loss(run, model, step)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        run.log(loss)
    run.note_weights(model)


def trains_like_plain_models() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(as_tied_by_one_object, "float64")
        compare(as_two_objects_under_sgd, "float64")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_they_train_as_one(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(trains_like_plain_models, timeout=30)


def whole(model: nn.Layer) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in ckpt.iter_full_parameters(model)}


def step(model: nn.Layer, optimizer: Any) -> None:
    language_loss(Run(False), model, 0).backward()
    optimizer.step()
    optimizer.clear_grad()


def train_and_save(path: str) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return the warnings of sharding, and what was saved."""
    paddle.seed(3)
    model = shared()
    third = model.third = nn.Embedding(VOCABULARY, WIDTH)
    model.embed.weight._share_buffer_to(third.weight)
    aliases, optimizer = (model.head.weight, third.weight), adamw(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ckpt.fully_shard(model, optimizer=optimizer)
    assert model.head.weight is model.embed.weight is third.weight
    assert [len(group["params"]) for group in optimizer._param_groups] == [5, len(model.parameters()) - 5]
    for alias in aliases:  # nobody computes with old values
        assert alias.shape == [VOCABULARY, WIDTH]
        with pytest.raises(RuntimeError):
            alias.sum()
    step(model, optimizer)
    tensors = dict(ckpt.iter_full_parameters(model))
    assert tensors["embed.weight"] is tensors["head.weight"] is tensors["third.weight"]
    ckpt.save(path, model=model, optimizer=optimizer)
    kept = whole(model)
    parameter = weakref.ref(model.embed.weight)
    ckpt.unshard(model)
    assert model.head.weight is model.embed.weight
    step(model, optimizer)
    assert (model.embed.weight.numpy() != kept["embed.weight"]).any()
    del model, optimizer, third, tensors
    gc.collect()
    assert parameter() is None  # the aliases don't keep it
    return [str(one.message) for one in caught], kept


def load_into(path: str, kind: str, copy_tied: bool = False) -> dict[str, np.ndarray]:
    """Load into a model whose names are one memory, one object, or each its own."""
    paddle.seed(4 + this_rank().rank)
    model = shared() if kind == "one memory" else Net(2, "same")
    model.third = nn.Embedding(VOCABULARY, WIDTH)
    if kind == "one memory":
        model.embed.weight._share_buffer_to(model.third.weight)
    elif kind == "one object":
        model.third.weight = model.embed.weight
    optimizer = adamw(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ckpt.fully_shard(model, optimizer=optimizer)
    ckpt.load(path, model=model, optimizer=optimizer, copy_tied=copy_tied)
    return whole(model)


def refuses_to_load(path: str) -> str:
    with pytest.raises(ckpt.MismatchError) as caught:
        load_into(path, "third apart")
    return str(caught.value)


def test_checkpoints_know_them_as_tied(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    messages, saved = ranks(2).run(train_and_save, path)[0]
    assert len(messages) == 1
    assert "were made one parameter: 'embed.weight' = 'head.weight' = 'third.weight'" in messages[0]
    np.testing.assert_array_equal(saved["embed.weight"], saved["head.weight"])
    found = inspect(Path(path))
    assert isinstance(found, Inspection) and found.tied == (("embed.weight", "head.weight", "third.weight"),)
    for world_size, kind in ((1, "one memory"), (3, "one object"), (3, "one memory")):
        for loaded in ranks(world_size).run(load_into, path, kind):
            np.testing.assert_equal(loaded, saved)
    assert "embed.weight = head.weight = third.weight is one tied parameter in the checkpoint" in ranks(2).run(refuses_to_load, path)[0]
    for loaded in ranks(2).run(load_into, path, "third apart", True):
        np.testing.assert_equal(loaded, saved)


def _set(name: str, value: Any) -> Callable[[Net], Any]:
    return lambda model: setattr(model.head.weight, name, value)


def _other_memory(value: Callable[[paddle.Tensor], paddle.Tensor]) -> Callable[[Net], Any]:
    return lambda model: setattr(model.head.weight, "data", value(model.embed.weight.detach()))


def _buffer(model: Net) -> None:
    model.blocks[0].register_buffer("same", model.blocks[0].up.weight.detach())


def _frozen_buffer(model: Net) -> None:
    frozen = model.blocks[0].up.weight
    frozen.stop_gradient = True
    model.blocks[1]._buffers["same"] = frozen


def _attribute(model: Net) -> None:
    model.blocks[0].__dict__["kept"] = model.head.weight


def _adamw(**settings: Any) -> Callable[[Net], Any]:
    return lambda model: paddle.optimizer.AdamW(0.1, parameters=model.parameters(), **settings)


def _decay_by_name(model: Net) -> Any:
    kept = model.embed.weight.name
    return _adamw(apply_decay_param_fun=lambda name: name == kept)(model)


def _other_betas(model: Net) -> Any:
    rest = [p for p in model.parameters() if p is not model.head.weight]
    return paddle.optimizer.AdamW(0.1, parameters=[{"params": rest}, {"params": [model.head.weight], "beta1": 0.5}])


def _without_the_head(model: Net) -> Any:
    return paddle.optimizer.SGD(0.1, parameters=[p for p in model.parameters() if p is not model.head.weight])


SETTINGS = (
    "'embed.weight' and 'head.weight' are different Parameter objects over one memory, of which fully_shard makes one parameter, and "
)
PLACES = "'embed.weight' and 'head.weight' are different objects that share memory, and would stop following each other: "

REFUSED: dict[str, tuple[Callable[[Net], Any], str]] = {
    "frozen": (_set("stop_gradient", True), SETTINGS + "their stop_gradient differs: False and True"),
    "need_clip": (_set("need_clip", False), SETTINGS + "their need_clip differs: True and False"),
    "is_distributed": (_set("is_distributed", True), SETTINGS + "their is_distributed differs: False and True"),
    "regularizer": (_set("regularizer", L2Decay(0.25)), SETTINGS + "their regularizer differs: None and L2Decay(0.25)"),
    "rate": (_set("optimize_attr", {"learning_rate": 2.0}), SETTINGS + "their optimize_attr differs: {'learning_rate': 1.0} and"),
    "own mark": (_set("no_weight_decay", True), SETTINGS + "their no_weight_decay differs: None and True"),
    "other strides": (_other_memory(lambda t: t.as_strided(t.shape, [1, VOCABULARY])), PLACES + "only parameters"),
    "other shape": (_other_memory(lambda t: t.reshape([-1])), "and these differ in shape, strides; to tie parameters"),
    "other place": (_other_memory(lambda t: t[1:]), "and these differ in place in the memory, shape; to tie parameters"),
    "other dtype": (_other_memory(lambda t: t.view("float16")), "and these differ in shape, strides, dtype; to tie parameters"),
    "a buffer": (_buffer, "'blocks.0.same' and 'blocks.0.up.weight' are different objects that share memory"),
    "itself as a buffer": (_frozen_buffer, "share memory, and would stop following each other: one of them is no parameter, but a buffer"),
    "an attribute": (_attribute, "one of them is no parameter, but a buffer or an attribute; to tie parameters"),
    "decay by name": (_decay_by_name, "AdamW: " + SETTINGS + "it steps them by different settings: weight_decay (0.01 and 0.0)"),
    "other group": (_other_betas, "it steps them by different settings: beta1 (0.9 and 0.5)"),
    "held in part": (_without_the_head, "SGD: " + SETTINGS + "it holds 'embed.weight' only; make it of both, or, after fully_shard"),
}


def refused(kind: str) -> str:
    """Return the error; the model is as before, two objects over one memory wherever they were, and shards once it is mended."""
    model = shared()
    made = REFUSED[kind][0](model)
    options = {"optimizer": made} if isinstance(made, paddle.optimizer.Optimizer) else {}
    before = [(name, id(one), one.data_ptr()) for layer in model.sublayers(True) for name, one in layer._parameters.items()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ckpt.ShardingError) as caught:
            ckpt.fully_shard(model, **options)
    assert before == [(name, id(one), one.data_ptr()) for layer in model.sublayers(True) for name, one in layer._parameters.items()]
    assert made is None or sum(len(group["params"]) for group in made._param_groups if isinstance(group, dict)) in (0, len(before))
    return str(caught.value)


def refuse_all() -> dict[str, str]:
    return {kind: refused(kind) for kind in REFUSED}


def bound_later() -> dict[str, str]:
    """Optimizers made before, and bound after: of all, which is mended; of the object that went only; with other settings."""
    said: dict[str, str] = {}
    optimizers: dict[str, Callable[[Net], Any]] = {
        "all": sgd,
        "part": lambda model: paddle.optimizer.SGD(parameters=[model.head.weight]),
        "decay": _decay_by_name,
    }
    for kind, make in optimizers.items():
        model = shared()
        optimizer = make(model)
        with pytest.warns(UserWarning, match="made one parameter"):
            ckpt.fully_shard(model)
        try:
            ckpt.bind_optimizer(optimizer)
        except ckpt.ShardingError as error:
            said[kind] = str(error)
        else:
            step(model, optimizer)
    return said


def differing_ranks() -> str:
    model = shared() if this_rank().rank else Net(2, "same")
    if not this_rank().rank:
        model.head = TransposedHead(paddle.create_parameter([VOCABULARY, WIDTH], "float32"))
    with pytest.raises(ckpt.ShardingError) as caught:
        ckpt.fully_shard(model, optimizer=None)
    return str(caught.value)


def test_what_would_not_be_right_is_refused(ranks: Ranks) -> None:
    for messages in ranks(2).run(refuse_all):
        assert not {kind: message for kind, message in messages.items() if REFUSED[kind][1] not in message}
    for said in ranks(2).run(bound_later):
        assert said.keys() == {"part", "decay"}
        assert SETTINGS + "it holds 'head.weight' only" in said["part"]
        assert SETTINGS + "it steps them by different settings: weight_decay" in said["decay"]
    for message in ranks(2).run(differing_ranks):
        assert "the model differs between ranks" in message


def shard_without_values() -> int:
    with paddle.LazyGuard():
        model = Net(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpt.fully_shard(model, optimizer=None)
    runtime = runtime_of(model)
    assert runtime is not None
    return len(runtime.shards)


def test_parameters_without_values_are_nobodys_aliases(ranks: Ranks) -> None:
    assert ranks(2).run(shard_without_values) == [17, 17]
