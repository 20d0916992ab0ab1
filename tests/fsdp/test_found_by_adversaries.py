"""Programs that once trained to other weights than the plain model, without an error; now they are right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from harness import RankPool, this_rank
from paddle import nn

import paddle_fsdp_ckpt as ckpt

Ranks = Callable[[int], RankPool]


def net() -> nn.Layer:
    paddle.seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def loss_of(model: nn.Layer, step: int = 0) -> paddle.Tensor:
    return model(paddle.arange(15, dtype="float32").reshape([3, 5]) * 0.1 + step).square().mean()


def sgd(model: nn.Layer, **settings: Any) -> Any:
    return paddle.optimizer.SGD(0.1, parameters=model.parameters(), **settings)


def weights_after(sharded: bool, clears: list[bool], **settings: Any) -> dict[str, np.ndarray]:
    model = net()
    optimizer = sgd(model, **settings)
    if sharded:
        ckpt.fully_shard(model, optimizer=optimizer)
    for step, clear in enumerate(clears):
        loss_of(model, step).backward()
        optimizer.step()
        if clear:
            optimizer.clear_grad()
    if sharded:
        return {name: tensor.numpy() for name, tensor in ckpt.full_state_dict(model, to_rank=None).items()}
    return {name: parameter.numpy() for name, parameter in model.named_parameters()}


def clipped_gradients_stay_clipped() -> None:
    settings = {"grad_clip": nn.ClipGradByGlobalNorm(0.05)}
    right = weights_after(False, [False, True, False, False], **settings)
    found = weights_after(True, [False, True, False, False], **settings)
    for name, value in right.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6, err_msg=name)


def zeros_from_before_are_gradients() -> None:
    weights = []
    for sharded in (False, True):
        model = net()
        optimizer = paddle.optimizer.Momentum(0.1, parameters=model[2].parameters(), weight_decay=0.1)
        loss_of(model).backward()
        model.clear_gradients()
        if sharded:
            ckpt.fully_shard(model, optimizer=optimizer)
        optimizer.step()  # by weight decay alone
        tensors = ckpt.full_state_dict(model, to_rank=None) if sharded else dict(model.named_parameters())
        weights.append({name: tensor.numpy() for name, tensor in tensors.items() if name.startswith("2.")})
    for name, value in weights[0].items():
        np.testing.assert_allclose(weights[1][name], value, rtol=0, atol=1e-7, err_msg=name)


class Strange(paddle.regularizer.L2Decay):
    def __call__(self, param: Any, grad: Any, block: Any) -> Any:
        return param / param.norm()


def _refused(kind: str) -> None:
    model = net()
    if kind == "write, then step":
        optimizer = sgd(model)
        ckpt.fully_shard(model, optimizer=optimizer)
        loss_of(model)
        nn.initializer.XavierUniform()(model[0].weight)
        optimizer.step()
    elif kind == "write, then local":
        ckpt.fully_shard(model, optimizer=None)
        paddle.assign(paddle.ones([5, 7]), model[0].weight)
        with ckpt.local_parameters(model):
            pass
    elif kind == "own weight decay":
        ckpt.fully_shard(model, optimizer=sgd(model, weight_decay=Strange(0.1)))
    elif kind == "own weight decay of a group":
        groups = [{"params": model.parameters(), "weight_decay": Strange(0.1)}]
        ckpt.fully_shard(model, optimizer=paddle.optimizer.SGD(0.1, parameters=groups))
    elif kind == "own regularizer later":
        optimizer = sgd(model)
        ckpt.fully_shard(model, optimizer=optimizer)
        optimizer.regularization = Strange(0.1)
        loss_of(model).backward()
        optimizer.step()
    elif kind == "parameter's regularizer later":
        ckpt.fully_shard(model, optimizer=sgd(model))
        model[0].weight.regularizer = Strange(0.1)
    elif kind in ("clip by hand", "lamb by hand"):
        clip = nn.ClipGradByGlobalNorm(0.1)
        lamb = paddle.optimizer.Lamb(0.1, parameters=model.parameters())
        optimizer = sgd(model, grad_clip=clip) if kind == "clip by hand" else lamb
        ckpt.fully_shard(model, optimizer=None)
        loss_of(model).backward()
        with ckpt.local_parameters(model):
            optimizer.step()
    elif kind == "a view as a buffer":
        model.register_buffer("transposed", model[0].weight.detach().T)
        ckpt.fully_shard(model, optimizer=None)
    elif kind == "a view as an attribute":
        with paddle.no_grad():
            model[0].same = model[0].weight.reshape([-1])
        ckpt.fully_shard(model, optimizer=None)
    elif kind.endswith("gradients from before"):
        if kind.startswith("sparse"):
            model = nn.Sequential(nn.Embedding(5, 4, sparse=True))
            model(paddle.to_tensor([1])).sum().backward()
        else:
            if kind.startswith("bfloat16"):
                model.to(dtype="bfloat16")
            paddle.add_n([parameter.astype("float32").sum() for parameter in model.parameters()]).backward()
        ckpt.fully_shard(model, optimizer=sgd(model))
    elif kind == "static":
        ckpt.fully_shard(model, optimizer=sgd(model))
        loss_of(paddle.jit.to_static(model, full_graph=False))


def zeros_from_before_in_16_bits() -> None:
    for dtype in ("bfloat16", "float16"):
        model = net()
        model.to(dtype=dtype)
        paddle.add_n([parameter.astype("float32").sum() for parameter in model.parameters()]).backward()
        for parameter in model.parameters():
            parameter.clear_gradient()
            assert parameter.grad.dtype == parameter.dtype
        ckpt.fully_shard(model, optimizer=None)
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def clips_beside_running_statistics() -> None:
    """All ranks have the same rows, so that a rank's statistics are the whole batch's. Paddle keeps them among the parameters."""
    norms = []
    for clip in (nn.utils.clip_grad_norm_, ckpt.clip_grad_norm_):
        paddle.seed(3)
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1D(7), nn.Tanh(), nn.Linear(7, 2))
        assert len(model.parameters()) == 8
        if clip is ckpt.clip_grad_norm_:
            ckpt.fully_shard(model, optimizer=None)
        loss_of(model).backward()
        given = [model.parameters()] if clip is nn.utils.clip_grad_norm_ else [model, model.parameters()]
        norms += [clip(one, 1e9).item() for one in given]
    np.testing.assert_allclose(norms[1:], norms[0], rtol=1e-5)


REFUSED = {
    "write, then step": "written to while it was sharded",
    "write, then local": "written to while it was sharded",
    "own weight decay": "neither a number nor L1Decay",
    "own weight decay of a group": "neither L1Decay nor L2Decay",
    "own regularizer later": "neither a number nor L1Decay",
    "parameter's regularizer later": "neither L1Decay nor L2Decay",
    "clip by hand": "needs norms of whole gradients",
    "lamb by hand": "needs norms of whole gradients",
    "a view as a buffer": "share memory",
    "a view as an attribute": "share memory",
    "gradients from before": "parameters have gradients",
    "bfloat16 gradients from before": "parameters have gradients",
    "sparse gradients from before": "parameters have gradients, which would be lost: 0.weight",
    "static": "to_static",
}


def refused(kind: str) -> str:
    with pytest.raises(ckpt.CheckpointError) as caught:
        _refused(kind)
    return str(caught.value)


def step_with_other_settings(kind: str) -> str:
    rank = this_rank().rank
    model = net()
    settings: dict[str, Any] = {
        "weight_decay": {"weight_decay": 0.1 * rank + 0.1},
        "clip": {"grad_clip": nn.ClipGradByGlobalNorm(1.0 + rank)},
        "group": {},
        "cleared": {},
        "clip later": {},
    }.get(kind, {"grad_clip": nn.ClipGradByGlobalNorm(1.0)})
    held = [{"params": model.parameters(), "learning_rate": 1 + rank}] if kind == "group" else model.parameters()
    optimizer = paddle.optimizer.SGD(0.1, parameters=held, **settings)
    ckpt.fully_shard(model, optimizer=optimizer)
    if kind == "cleared" or kind.endswith("later"):
        loss_of(model).backward()
        optimizer.step()
    if kind == "cleared" and rank == 0:
        optimizer.clear_grad(set_to_zero=False)
    if kind == "clip later":
        optimizer._grad_clip = nn.ClipGradByGlobalNorm(1.0 + rank)
    if kind == "rate of one later":
        model[2].bias.optimize_attr["learning_rate"] = 1.0 + rank
    elif kind == "regularizer of one later":
        model[2].bias.regularizer = paddle.regularizer.L2Decay(1e-7 * (1 + rank))
    elif kind == "need_clip of one later":
        model[2].bias.need_clip = rank == 0
    loss_of(model).backward()
    with pytest.raises(ckpt.ShardingError) as caught:
        optimizer.step()
    return str(caught.value)


_OTHER_SETTINGS = ["weight_decay", "clip", "group", "cleared", "clip later"] + [
    f"{what} of one later" for what in ("rate", "regularizer", "need_clip")
]


def set_on_one_rank(path: str, kind: str) -> list[str]:
    rank = this_rank().rank
    model = net()
    optimizer = sgd(model)
    ckpt.fully_shard(model, optimizer=optimizer)
    ckpt.save(f"{path}/before", model=model, optimizer=optimizer)
    if kind == "other values" or rank == 0:
        model[2].weight.set_value(np.full([7, 2], rank, "float32"))
    said = []
    loss_of(model).backward()
    for refused in (optimizer.step, lambda: ckpt.save(f"{path}/after", model=model)):
        with pytest.raises(ckpt.CheckpointError) as caught:
            refused()
        said.append(str(caught.value))
    if kind == "one rank":  # either puts it right
        ckpt.load(f"{path}/before", model=model, optimizer=optimizer)
    else:
        optimizer.clear_grad()
    for name in ("2.weight", "0.bias") if rank else ("0.bias", "2.weight"):  # in whatever order
        parameter = dict(model.named_parameters())[name]
        parameter.set_value(paddle.full(parameter.shape, 0.5))
    loss_of(model).backward()
    optimizer.step()
    plain = net()
    for name in ("2.weight", "0.bias"):
        dict(plain.named_parameters())[name].set_value(paddle.full(dict(plain.named_parameters())[name].shape, 0.5))
    loss_of(plain).backward()
    sgd(plain).step()
    for name, tensor in ckpt.full_state_dict(model, to_rank=None).items():
        np.testing.assert_allclose(tensor.numpy(), dict(plain.named_parameters())[name].numpy(), rtol=0, atol=1e-6, err_msg=name)
    return said


@pytest.mark.parametrize("kind", ["one rank", "other values"])
def test_values_that_not_all_ranks_were_given_are_refused(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    for step, save in ranks(2).run(set_on_one_rank, str(tmp_path), kind):
        assert "gave set_value other values" in step
        assert "what set_value was given" in save
    assert not (tmp_path / "after").exists()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_clipping_leaves_the_clipped_gradient(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(clipped_gradients_stay_clipped)


@pytest.mark.parametrize("world_size", [1, 2])
def test_zero_gradients_from_before_sharding_count(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(zeros_from_before_are_gradients)


@pytest.mark.parametrize("world_size", [1, 2])
def test_zero_gradients_of_16_bits_are_none_that_would_be_lost(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(zeros_from_before_in_16_bits)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_with_running_statistics_is_clipped_as_a_whole(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(clips_beside_running_statistics)


@pytest.mark.parametrize("kind", list(REFUSED))
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_refused(ranks: Ranks, world_size: int, kind: str) -> None:
    for message in ranks(world_size).run(refused, kind):
        assert REFUSED[kind] in message


@pytest.mark.parametrize("kind", _OTHER_SETTINGS)
def test_ranks_with_other_settings_are_refused(ranks: Ranks, kind: str) -> None:
    for message in ranks(2).run(step_with_other_settings, kind):
        assert "between ranks" in message or "the ranks differ" in message
