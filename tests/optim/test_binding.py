"""An optimizer that is not bound never trains a sharded model wrongly in silence; one that is bound refuses what it can't do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from harness import RankPool
from paddle import nn
from paddle.nn import functional as F

from paddle_fsdp_ckpt import errors, full_state_dict
from paddle_fsdp_ckpt.fsdp import local_parameters, runtime_of
from paddle_fsdp_ckpt.optim import bind_optimizer, binding_of, optimizer_shards, parameter_groups
from paddle_fsdp_ckpt.training import fully_shard

Ranks = Callable[[int], RankPool]


def net() -> nn.Layer:
    return nn.Sequential(nn.Linear(3, 7), nn.GELU(), nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 2))


def loss_of(model: nn.Layer) -> paddle.Tensor:
    return model(paddle.linspace(-1, 1, 12).reshape([4, 3])).square().mean()


def weights(model: nn.Layer) -> list[np.ndarray]:
    runtime = runtime_of(model)
    assert runtime is not None
    return [shard.local.numpy().copy() for shard in runtime.shards]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def adamw(model: nn.Layer, **options: Any) -> Any:
    return paddle.optimizer.AdamW(0.1, parameters=model.parameters(), **options)


# Not bound.


def backward_unbound() -> list[str]:
    model = net()
    fully_shard(model)
    with paddle.no_grad():
        loss_of(model)
    loss = loss_of(model)  # a forward alone may come before the binding
    before = weights(model)
    with pytest.raises(Exception, match="no optimizer is bound") as caught:
        loss.backward()
    messages = [str(caught.value)]
    with pytest.raises(errors.UnboundOptimizerError) as caught:
        loss_of(model)
    messages.append(str(caught.value))
    assert same(before, weights(model))
    optimizer = adamw(model)
    bind_optimizer(optimizer)
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
        optimizer.clear_grad()
    assert not same(before, weights(model))
    return messages


def backward_unbound_and_bound_at_once() -> None:
    model = net()
    fully_shard(model)
    loss = loss_of(model)
    with pytest.raises(Exception, match="no optimizer is bound"):
        loss.backward()
    optimizer = adamw(model)
    bind_optimizer(optimizer)
    loss_of(model).backward()
    optimizer.step()


def step_unbound() -> str:
    model = net()
    optimizer = adamw(model)
    fully_shard(model)
    before = weights(model)
    with pytest.raises(errors.UnboundOptimizerError) as caught:
        optimizer.step()
    assert same(before, weights(model))
    return str(caught.value)


def step_unbound_beside_a_bound_one(kind: str) -> None:
    model = net()
    bound = adamw(model)
    fully_shard(model, optimizer=bound)
    makers = {
        "sgd": lambda: paddle.optimizer.SGD(0.1, parameters=model.parameters()),
        "adamw": lambda: adamw(model),
        "clip": lambda: adamw(model, grad_clip=nn.ClipGradByGlobalNorm(1.0)),
        "by hand": lambda: paddle.optimizer.SGD(0.1, parameters=model.parameters()),
        "groups": lambda: paddle.optimizer.Adam(0.1, parameters=[{"params": model.parameters()}]),
    }
    other = makers[kind]()
    if kind == "by hand":
        runtime_of(model).steps_by_hand = True  # type: ignore[union-attr]
    loss_of(model).backward()
    before = weights(model)
    with pytest.raises(errors.UnboundOptimizerError):
        other.step()
    assert same(before, weights(model))
    bound.step()
    assert not same(before, weights(model))


def minimize_unbound_beside_a_bound_one(kind: str, accumulate: int) -> None:
    model = net()
    bound = adamw(model)
    fully_shard(model, optimizer=bound)
    makers = {
        "sgd": lambda: paddle.optimizer.SGD(0.1, parameters=model.parameters()),
        "adamw": lambda: adamw(model),
        "clip": lambda: adamw(model, grad_clip=nn.ClipGradByGlobalNorm(1.0)),
        "decay": lambda: paddle.optimizer.Momentum(0.1, parameters=model.parameters(), weight_decay=0.1),
    }
    other = makers[kind]()
    for _ in range(accumulate):
        loss = loss_of(model)
        loss.backward()
    before = weights(model)
    with pytest.raises(errors.UnboundOptimizerError, match="bind_optimizer"):
        other.minimize(loss)
    with pytest.raises(errors.UnboundOptimizerError, match="bind_optimizer"):
        other.apply_gradients(other.backward(loss))
    assert same(before, weights(model))
    bound.minimize(loss)
    assert not same(before, weights(model))


def minimize_unbound_inside_local_parameters() -> None:
    model = net()
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    fully_shard(model, optimizer=None)
    before = weights(model)
    loss = loss_of(model)
    loss.backward()
    with local_parameters(model), pytest.raises(errors.UnboundOptimizerError, match="local_parameters"):
        optimizer.minimize(loss)
    assert same(before, weights(model))


def step_unbound_inside_local_parameters() -> None:
    model = net()
    optimizer = adamw(model)
    fully_shard(model, optimizer=None)
    before = weights(model)
    loss_of(model).backward()
    with pytest.raises(errors.UnboundOptimizerError):
        optimizer.step()
    with local_parameters(model):
        optimizer.step()
    optimizer.clear_grad()
    assert not same(before, weights(model))
    loss_of(model).backward()


def frozen_model_needs_no_optimizer() -> None:
    model = net()
    for parameter in model.parameters():
        parameter.stop_gradient = True
    fully_shard(model)
    x = paddle.ones([2, 3])
    x.stop_gradient = False
    model(x).sum().backward()
    assert x.grad is not None
    assert np.abs(x.grad.numpy()).max() > 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_backward_without_a_bound_optimizer_is_an_error(ranks: Ranks, world_size: int) -> None:
    for messages in ranks(world_size).run(backward_unbound):
        for message in messages:
            assert "bind_optimizer(opt)" in message
    ranks(world_size).run(backward_unbound_and_bound_at_once)


@pytest.mark.parametrize("world_size", [1, 2])
def test_step_of_an_unbound_optimizer_is_an_error(ranks: Ranks, world_size: int) -> None:
    for message in ranks(world_size).run(step_unbound):
        assert "no optimizer is bound" in message


@pytest.mark.parametrize("kind", ["sgd", "adamw", "clip", "groups", "by hand"])
def test_step_of_an_unbound_optimizer_beside_a_bound_one_is_an_error(ranks: Ranks, kind: str) -> None:
    ranks(2).run(step_unbound_beside_a_bound_one, kind)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["sgd", "adamw", "clip", "decay"])
def test_minimize_of_an_unbound_optimizer_beside_a_bound_one_is_an_error(ranks: Ranks, kind: str, accumulate: int) -> None:
    ranks(2).run(minimize_unbound_beside_a_bound_one, kind, accumulate)


def test_minimize_of_an_unbound_optimizer_inside_local_parameters_is_an_error(ranks: Ranks) -> None:
    ranks(2).run(minimize_unbound_inside_local_parameters)


def test_step_of_an_unbound_optimizer_inside_local_parameters(ranks: Ranks) -> None:
    ranks(2).run(step_unbound_inside_local_parameters)


def test_a_frozen_model_needs_no_optimizer(ranks: Ranks) -> None:
    ranks(2).run(frozen_model_needs_no_optimizer)


# Bound.


def bound_refuses() -> None:
    model = net()
    optimizer = adamw(model)
    fully_shard(model, optimizer=optimizer)
    binding = binding_of(optimizer)
    bind_optimizer(optimizer)
    assert binding_of(optimizer) is binding
    for call in (optimizer.state_dict, lambda: optimizer.set_state_dict({})):
        with pytest.raises(errors.ShardingError, match="optimizer_sharded_state_dict"):
            call()
    assert len(optimizer_shards(optimizer)) == 6
    assert [len(group["params"]) for group in parameter_groups(optimizer)] == [6]

    class Clip(nn.ClipGradByGlobalNorm):  # type: ignore[misc]
        pass

    loss_of(model).backward()
    before = weights(model)
    optimizer._grad_clip = Clip(1.0)
    with pytest.raises(errors.UnsupportedOptimizerError, match="Clip can't clip"):
        optimizer.step()
    assert same(before, weights(model))
    optimizer._grad_clip = None
    optimizer.step()
    assert not same(before, weights(model))


def given_gradients_refused() -> list[str]:
    """Whole gradients, which are not reduced, and parameters of others; also where one rank alone is given them. Nothing is stepped."""
    from harness import this_rank

    model, other = net(), net()
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    fully_shard(model, optimizer=optimizer)
    loss = loss_of(model)
    whole = paddle.grad(loss, model.parameters(), retain_graph=True)
    loss.backward()
    pieces = optimizer.backward(loss)
    before = weights(model)
    messages = []
    for wrong in (list(zip(model.parameters(), whole, strict=True)), [(other[0].weight, paddle.ones([3, 7]))]):
        for given in (wrong, wrong if this_rank().rank == 1 else pieces):
            with pytest.raises(errors.CheckpointError) as caught:
                optimizer.apply_gradients(given)
            messages.append(str(caught.value))
            assert same(before, weights(model))
    optimizer.apply_gradients(pieces)
    assert not same(before, weights(model))
    return messages


def second_model_given_later() -> None:
    """A bound optimizer is given the parameters of another sharded model, which the error of an unbound one says to bind."""
    seen = []
    for sharded in (False, True):
        paddle.seed(3)
        model, other = net(), nn.Linear(3, 2)
        optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(0.1))
        if sharded:
            fully_shard(model, optimizer=optimizer)
            fully_shard(other)
        optimizer._parameter_list.extend(other.parameters())
        if sharded:
            bind_optimizer(optimizer)
        for _ in range(2):
            (loss_of(model) + loss_of(other)).backward()
            optimizer.step()
            optimizer.clear_grad()
        seen.append(full_state_dict(other, to_rank=None) if sharded else other.state_dict())
    for name, right in seen[0].items():
        np.testing.assert_allclose(seen[1][name].numpy(), right.numpy(), rtol=0, atol=1e-6)


def later_parameters_refused() -> list[str]:
    """What an optimizer is given later is looked at as what it is bound with; also where one rank alone gives it something."""
    from harness import this_rank

    model, plain = net(), nn.Linear(2, 2)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model[0].parameters())
    fully_shard(model, optimizer=optimizer)
    loss_of(model).backward()
    optimizer.step()
    before = weights(model)
    messages = []
    for added in (plain.parameters(), model[2].parameters() if this_rank().rank == 1 else []):
        loss_of(model).backward()
        optimizer._parameter_list.extend(added)
        with pytest.raises(errors.ShardingError) as caught:
            optimizer.step()
        messages.append(str(caught.value))
        assert same(before, weights(model))
        del optimizer._parameter_list[2:]
    optimizer.step()
    assert not same(before, weights(model))
    return messages


def error_inside_a_step() -> None:
    """An error in the middle of a step leaves parameters that can be trained on."""
    model = net()
    optimizer = adamw(model, apply_decay_param_fun=_fail_once)
    fully_shard(model, optimizer=optimizer)
    loss_of(model).backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    _FAILED.clear()
    optimizer.step()
    optimizer.clear_grad()
    loss_of(model).backward()
    optimizer.step()
    assert all(not parameter._is_initialized() for parameter in model.parameters())


_FAILED: list[int] = [1]


def _fail_once(name: str) -> bool:
    if _FAILED and name.startswith("linear_1"):
        raise ZeroDivisionError
    return True


def sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    fully_shard(model, optimizer=optimizer)
    model(paddle.arange(5)).sum().backward()
    with pytest.raises(errors.ShardingError, match=r"'0.weight'.*sparse=False"):
        optimizer.step()


class Branches(nn.Layer):
    """Uses only one of two layers, each a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(3, 3)
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)

    def forward(self, x: paddle.Tensor, rank: int) -> paddle.Tensor:
        x = self.same(x)
        return self.one(x) if rank == 0 else self.two(x)


def different_layers_on_each_rank() -> str:
    from harness import this_rank

    model = Branches()
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    fully_shard(model, optimizer=optimizer)
    before = weights(model)
    model(paddle.ones([2, 3]), this_rank().rank).sum().backward()
    with pytest.raises(errors.ShardingError) as caught:
        optimizer.step()
    assert same(before, weights(model))
    return str(caught.value)


def a_bound_optimizer_of_an_ordinary_model_is_not_made() -> None:
    ordinary, model = net(), net()
    theirs, ours = adamw(ordinary), adamw(model)
    fully_shard(model, optimizer=ours)
    with pytest.raises(errors.ShardingError, match="6 of its 6 parameters"):
        bind_optimizer(theirs)
    F.relu(ordinary(paddle.ones([2, 3]))).sum().backward()
    theirs.step()
    assert theirs.state_dict()


def test_a_bound_optimizer_refuses_what_it_can_not_do(ranks: Ranks) -> None:
    ranks(2).run(bound_refuses)


def test_given_gradients_that_are_no_pieces_are_refused(ranks: Ranks) -> None:
    first, second = ranks(2).run(given_gradients_refused)
    for messages in (first, second):
        assert "SGD.apply_gradients: sharded parameter '0.weight'" in messages[0]
        assert "What paddle.grad returns is whole" in messages[0]
        assert "is not among the parameters of this optimizer" in messages[2]
    assert "rank 1 refused" in first[1]
    assert "rank 1 refused" in first[3]
    assert second[1::2] == second[::2]


def test_parameters_that_an_optimizer_is_given_later_must_be_sharded_and_the_same_on_every_rank(ranks: Ranks) -> None:
    for foreign, differing in ranks(2).run(later_parameters_refused):
        assert "2 of its 4 parameters are not in a sharded model" in foreign
        assert "differ in the optimizer's learning rate, parameters or" in differing


def test_an_optimizer_is_given_another_sharded_model_later(ranks: Ranks) -> None:
    ranks(2).run(second_model_given_later)


def test_an_error_inside_a_step_leaves_a_model_that_trains(ranks: Ranks) -> None:
    ranks(2).run(error_inside_a_step)


def test_sparse_gradients_are_refused(ranks: Ranks) -> None:
    ranks(2).run(sparse_gradients)


def test_different_layers_on_each_rank_are_found(ranks: Ranks) -> None:
    for message in ranks(2).run(different_layers_on_each_rank):
        assert "did not gather and reduce the same units in the same order" in message


def test_optimizers_of_ordinary_models_stay_as_they_are(ranks: Ranks) -> None:
    ranks(2).run(a_bound_optimizer_of_an_ordinary_model_is_not_made)


def local_parameters_needs_a_sharded_model() -> None:
    with pytest.raises(errors.ShardingError, match="not sharded"), local_parameters(net()):
        pass


def test_local_parameters_needs_a_sharded_model(single: RankPool) -> None:
    single.run(local_parameters_needs_a_sharded_model)
