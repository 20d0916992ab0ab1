"""Whole tensors out of and into a model that Paddle's own fully_shard cut, against the pieces that the ranks hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from adapter_cases import cut
from fused_cases import Blocks, Held, assert_goes_on_alike, cut_by_paddle, held, partly_frozen, train, whole
from harness import RankPool, this_rank

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp.paddle_runtime import paddle_runtime_of

Ranks = Callable[[int], RankPool]


def train_and_gather(optimizer: str) -> tuple[dict[str, np.ndarray], Held]:
    with cut_by_paddle(optimizer) as (model, stepper):
        train(model, stepper, 0, 3)
        found = {**ckpt.full_state_dict(model, to_rank=None), **ckpt.full_optimizer_state_dict(stepper, to_rank=None)}
        return {key: tensor.numpy() for key, tensor in found.items()}, held(model, stepper)


@pytest.mark.parametrize("optimizer", ["adamw", "nadam", "sgd", "adamw decay"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gather(ranks: Ranks, world_size: int, optimizer: str) -> None:
    results = ranks(world_size).run(train_and_gather, optimizer)
    right = whole([pieces for _, pieces in results])
    for found, _ in results:
        assert found.keys() == right.keys()
        for key, value in right.items():
            np.testing.assert_array_equal(found[key].reshape(-1), value, err_msg=key)


def scatter() -> None:
    with cut_by_paddle("sgd") as (model, stepper):
        train(model, stepper, 0, 1)
        shapes = {name: tensor.shape for name, tensor in ckpt.full_state_dict(model, to_rank=None).items()}
        new = {name: np.random.RandomState(len(name)).rand(*shape).astype("float32") for name, shape in shapes.items()}
        ckpt.load_full_state_dict(model, new if this_rank().rank == 1 else None, from_rank=1)
        found = ckpt.full_state_dict(model, to_rank=None)
        for name, value in new.items():
            np.testing.assert_array_equal(found[name].numpy(), value, err_msg=name)
        losses = train(model, stepper, 1, 2)
        ckpt.load_full_state_dict(model, {name: paddle.to_tensor(value) for name, value in new.items()})
        # What was gathered for the step is gone: the same loss again.
        assert train(model, stepper, 1, 2) == losses


def test_scatter(ranks: Ranks) -> None:
    ranks(2).run(scatter)


def train_two_objects(one_memory: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Cut a model in which two Parameter objects have the same values, perhaps in one memory; return the whole weights, and after steps."""
    paddle.seed(1)
    model = Blocks()
    first, second = (block.up.weight for block in model.blocks[:2])
    second.set_value(first)
    if one_memory:
        first._share_buffer_to(second)
    with cut(model):
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        before = {name: tensor.numpy() for name, tensor in ckpt.iter_full_parameters(model)}
        train(model, optimizer, 0, 2)
        return before, {name: tensor.numpy() for name, tensor in ckpt.iter_full_parameters(model)}


def test_paddle_takes_objects_over_one_memory_apart_and_each_comes_out_as_it_trains(ranks: Ranks) -> None:
    apart, shared = (ranks(2).run(train_two_objects, one_memory)[0] for one_memory in (False, True))
    np.testing.assert_equal(shared, apart)
    names = "blocks.0.up.weight", "blocks.1.up.weight"
    before, after = (np.array_equal(*(found[name] for name in names)) for found in shared)
    assert before and not after


def gather_by_options() -> None:
    """What is asked for comes, on the rank that asks for it; each fused buffer is gathered once; a rank that leaves is an error."""
    last = this_rank().world_size - 1
    with partly_frozen(1) as (model, optimizer):
        train(model, optimizer, 0, 1)
        runtime = paddle_runtime_of(model)
        assert runtime is not None
        real, sizes = dist.stream.all_gather, []
        dist.stream.all_gather = lambda out, tensor, **options: (sizes.append(int(tensor.size)), real(out, tensor, **options))[1]
        try:
            every = dict(ckpt.iter_full_parameters(model, device="cpu"))
            assert sizes == [buffer.layout.shard_numel for buffer in runtime.buffers]
            trains = dict(ckpt.iter_full_parameters(model, trainable_only=True))
            assert len(sizes) == 2 * len(runtime.buffers) - 1
            some = dict(
                ckpt.iter_full_parameters(model, include=["head.*", "*.weight"], exclude=["embed.*"], dtype="float64", to_rank=last)
            )
        finally:
            dist.stream.all_gather = real
        assert trains.keys() == every.keys() - {"embed.weight"}
        wanted = {name for name in every if name != "embed.weight" and name.endswith(("weight", "head.bias"))}
        assert some.keys() == (wanted if this_rank().rank == last else set())
        for name, tensor in some.items():
            assert tensor.dtype == paddle.float64
            np.testing.assert_array_equal(tensor.numpy(), every[name].numpy().astype("float64"))
        before = {name: tensor.numpy().copy() for name, tensor in every.items()}
        train(model, optimizer, 1, 2)
        for name, tensor in every.items():
            np.testing.assert_array_equal(tensor.numpy(), before[name])
        assert bool(ckpt.full_optimizer_state_dict(optimizer, to_rank=last)) == (this_rank().rank == last)
        pairs = ckpt.iter_full_parameters(model)
        if this_rank().rank == last:
            next(pairs)
            del pairs
        else:
            with pytest.raises(ckpt.RankFailedError, match="another rank left iter_full_parameters"):
                list(pairs)


def test_options_of_a_gather(ranks: Ranks) -> None:
    ranks(2).run(gather_by_options)


def gather_between_steps(gathers: bool) -> Held:
    with cut_by_paddle("adamw decay") as (model, stepper):
        losses = []
        for step in range(3):
            losses += train(model, stepper, step, step + 1)
            if gathers:
                ckpt.full_state_dict(model)
                ckpt.full_optimizer_state_dict(stepper)
        return held(model, stepper, losses)


def test_a_step_after_a_gather_is_bit_for_bit_the_step_without(ranks: Ranks) -> None:
    assert_goes_on_alike(ranks(2).run(gather_between_steps, True), ranks(2).run(gather_between_steps, False))
