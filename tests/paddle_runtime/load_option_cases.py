"""Loads into a model cut by Paddle's own fully_shard with something allowed to differ; run on the ranks."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from fused_cases import EVERY, Held, cut_by_paddle, held, plain_held, plain_model, train
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.host_memory import bytes_of


def _contents(model: nn.Layer, stepper: Any) -> dict[str, bytes]:
    weights = ckpt.sharded_state_dict(model)
    found = {key: bytes(bytes_of(weight.local_tensor)) for key, weight in weights.items()}
    for accumulator, tensors in stepper._accumulators.items():
        found.update({f"{accumulator} of {owner}": bytes(bytes_of(tensor)) for owner, tensor in tensors.items()})
    found.update({f"master of {owner}": bytes(bytes_of(tensor)) for owner, tensor in stepper._master_weights.items()})
    return found


def _save_filled(path: str, model: nn.Layer) -> Held:
    """Save a plain model with states of AdamW, filled; scalars are the same for all parameters, as Paddle's runtime has them."""
    stepper = EVERY["adamw"](model)
    stepper._create_accumulators(paddle.static.default_main_program().global_block(), model.parameters())
    for tensors in stepper._accumulators.values():
        for tensor in tensors.values():
            paddle.assign(paddle.full(tensor.shape, 0.3, tensor.dtype) if tensor.size == 1 else paddle.rand(tensor.shape), tensor)
    ckpt.save(path, model=model, optimizer=stepper)
    return plain_held(model, stepper, [])


def save_double(path: str) -> Held:
    """A plain model and its states in float64, filled."""
    paddle.set_default_dtype("float64")
    return _save_filled(path, plain_model())


def load_double(path: str) -> tuple[Held, bool]:
    """Convert what save_double wrote; one more step works."""
    with cut_by_paddle("adamw", seed=9) as (model, stepper):
        report = ckpt.load(path, model=model, optimizer=stepper, cast=True)
        found = held(model, stepper)
        train(model, stepper, 0, 1)
        return found, all(one.may_have_rounded for one in report.casts)


def model_part(path: str) -> tuple[bool, bool]:
    """Only the model is loaded, with the optimizer given: whether the weights changed, and whether nothing else did."""
    with cut_by_paddle("adamw", seed=99) as (model, stepper):
        train(model, stepper, 50, 52)
        before = _contents(model, stepper)
        report = ckpt.load(path, model=model, optimizer=stepper, parts={"model"})
        after = _contents(model, stepper)
        weights = ckpt.sharded_state_dict(model)
        assert report.parts == ["model"] and report.not_asked_for
        return any(after[key] != before[key] for key in weights), all(after[key] == before[key] for key in before if key not in weights)


def all_start_afresh(path: str) -> tuple[int, int, int]:
    """No state of an other setting is taken: how many parameters started afresh, the states that there are, and the parameters."""
    with cut_by_paddle("adamw", seed=99) as (model, stepper):
        train(model, stepper, 50, 52)
        report = ckpt.load(path, model=model, optimizer=stepper, allow_missing=["*_0"])
        states = sum(len(tensors) for tensors in stepper._accumulators.values())
        train(model, stepper, 0, 1)
        return len(report.started_afresh), states, len(model.parameters())


def save_without_one_state(path: str, everywhere: bool) -> None:
    """A run in one process that has lost a state, of one parameter or of all."""
    model = plain_model()
    stepper = EVERY["adamw"](model)
    train(model, stepper, 0, 3)
    if everywhere:
        stepper._accumulators["moment2"].clear()
    else:
        stepper._accumulators["moment2"].pop(dict(model.named_parameters())["blocks.0.up.bias"].name)
    ckpt.save(path, model=model, optimizer=stepper)


def save_other_shapes(path: str, wider: list[str], more: int = 3) -> Held:
    """A plain model and its states, filled, of which some matrices have more rows."""
    model = plain_model()
    for name in wider:
        layer = dict(model.named_sublayers())[name]
        rows, columns = layer.weight.shape
        layer.weight = paddle.create_parameter([rows + more, columns], "float32")
    return _save_filled(path, model)


def load_other_shapes(path: str, names: list[str], options: dict[str, Any]) -> tuple[Held, Held, Any]:
    """What there was, what there is after the load, and its report; one more step works."""
    with cut_by_paddle("adamw", seed=9) as (model, stepper):
        train(model, stepper, 50, 51)
        before = held(model, stepper)
        report = ckpt.load(path, model=model, optimizer=stepper, allow_other_shape=names, **options)
        found = held(model, stepper)
        train(model, stepper, 0, 1)
        return before, found, report


def save_low_precision(path: str) -> None:
    """A bfloat16 model, without an optimizer."""
    with cut_by_paddle("adamw", dtype="bfloat16") as (model, _):
        ckpt.save(path, model=model)


def refused(path: str, dtype: str, options: dict[str, Any]) -> tuple[str, str]:
    """What is raised; nothing has changed."""
    with cut_by_paddle("adamw", seed=99, dtype=dtype) as (model, stepper):
        if dtype == "float32":
            train(model, stepper, 50, 51)
        before = _contents(model, stepper)
        try:
            ckpt.load(path, model=model, optimizer=stepper, **options)
        except ckpt.CheckpointError as error:
            assert _contents(model, stepper) == before
            return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def tensors_without_values(path: str) -> list[str]:
    """What saves say of a fused state whose memory was let go of, of one that is strided, and of a sparse buffer."""
    said = []
    with cut_by_paddle("adamw", seed=9) as (model, stepper):
        train(model, stepper, 0, 1)
        states = stepper._accumulators["moment2"]
        owner = next(iter(states))
        right, numel = states[owner], states[owner].shape[0]
        cleared = paddle.zeros([numel])
        cleared._clear_data()
        buffer = paddle.sparse.sparse_coo_tensor([[0]], [1.0], [3])
        for state, added in ((cleared, None), (paddle.as_strided(paddle.zeros([2 * numel]), [numel], [2]), None), (right, buffer)):
            states[owner] = state
            if added is not None:
                model.register_buffer("added", added)
            with pytest.raises(ckpt.CheckpointError) as caught:
                ckpt.save(path, model=model, optimizer=stepper)
            said.append(str(caught.value))
    return said
