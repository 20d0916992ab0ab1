"""Loss scaling over a sharded model: the same steps, skips and scales as in one process, whichever rank finds the infinity."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from harness import RankPool, hybrid_groups, this_rank
from paddle import nn
from paddle.amp import grad_scaler

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import errors
from paddle_fsdp_ckpt.fsdp import runtime_of
from paddle_fsdp_ckpt.optim import bind_grad_scaler, describe_grad_scaler, restore_grad_scaler

Ranks = Callable[[int], RankPool]
ROWS = 12
INFINITE = {2: np.inf, 5: np.nan, 6: -np.inf}
"""The steps in which one element of one gradient is not finite."""


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let a GradScaler be enabled on CPU, and see float16, as it would be on a GPU; the kernels are there.

    And let it print its scale, a tensor of shape [1]: with numpy 2.4, Paddle 3.3.1 fails there at the first infinity.
    """
    names = ("_dygraph_tracer", "amp_global_state")
    kept = {name: getattr(grad_scaler, name) for name in names}
    vars(grad_scaler)["float"] = lambda value: value.item() if isinstance(value, paddle.Tensor) else float(value)
    place = SimpleNamespace(is_gpu_place=lambda: True)
    grad_scaler._dygraph_tracer = lambda: SimpleNamespace(_expected_place=place)
    grad_scaler.amp_global_state = lambda: SimpleNamespace(amp_dtype="float16")
    try:
        yield
    finally:
        for name in names:
            setattr(grad_scaler, name, kept[name])
        del vars(grad_scaler)["float"]


class Net(nn.Layer):
    """Adds to its loss what gives the first element of one weight, or the last of its bias, a gradient of choice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 75)
        self.last = nn.Linear(75, 2)

    def forward(self, x: paddle.Tensor, which: str, extra: float) -> paddle.Tensor:
        loss = self.last(nn.functional.gelu(self.first(x))).square().mean()
        parameter = getattr(self.last, which)
        chosen = np.zeros(parameter.shape, "float32")
        chosen.reshape(-1)[0 if which == "weight" else -1] = extra
        return loss + (paddle.to_tensor(chosen) * parameter).sum()


def _groups(model: nn.Layer) -> Any:
    groups = [{"params": model.last.parameters(), "weight_decay": 0.3}, {"params": model.first.parameters()}]
    return paddle.optimizer.AdamW(0.05, epsilon=1e-4, parameters=groups, grad_clip=nn.ClipGradByGlobalNorm(0.1))


OPTIMIZERS: dict[str, Callable[[nn.Layer], Any]] = {
    "sgd": lambda m: paddle.optimizer.SGD(0.1, parameters=m.parameters()),
    "momentum clipped": lambda m: paddle.optimizer.Momentum(0.1, parameters=m.parameters(), grad_clip=nn.ClipGradByGlobalNorm(0.1)),
    "adamw groups": _groups,
    "asgd": lambda m: paddle.optimizer.ASGD(0.1, 2, parameters=m.parameters()),
}


def step(scaler: Any, optimizer: Any, loss: paddle.Tensor, how: str) -> None:
    scaled = scaler.scale(loss)
    scaled.backward()
    if how == "minimize":
        scaler.minimize(optimizer, scaled)
    else:
        if how == "unscale_":
            scaler.unscale_(optimizer)
            with pytest.raises(RuntimeError, match="already been called"):
                scaler.unscale_(optimizer)
        scaler.step(optimizer)
        if scaler.is_use_dynamic_loss_scaling():
            with pytest.raises(RuntimeError, match="already been called"):
                scaler.step(optimizer)
        scaler.update()
    optimizer.clear_grad()


def make_scaler(**options: Any) -> Any:
    return paddle.amp.GradScaler(init_loss_scaling=1024.0, incr_every_n_steps=2, **options)


def run(
    optimizer: str, how: str, which: str, sharded: bool, dynamic: bool = True, **groups: Any
) -> list[tuple[dict[str, np.ndarray], Any]]:
    """Eight steps; after each, this rank's weights (whole ones, where not sharded) and the scaler's state.

    Where sharded, what is not finite comes from the last rank's rows alone.
    """
    paddle.seed(3)
    model = Net()
    stepper = OPTIMIZERS[optimizer](model)
    scaler = make_scaler(use_dynamic_loss_scaling=dynamic)
    place = this_rank()
    rows = slice(0, ROWS)
    if sharded:
        ckpt.fully_shard(model, optimizer=stepper, **groups)
        bind_grad_scaler(scaler)
        bind_grad_scaler(scaler)
        rows = slice(ROWS // place.world_size * place.rank, ROWS // place.world_size * (place.rank + 1))
    seen = []
    for number in range(8):
        batch = np.random.RandomState(number).standard_normal([ROWS, 3]).astype("float32")[rows]
        extra = 0.0 if sharded and place.rank < place.world_size - 1 else INFINITE.get(number, 0.0)
        step(scaler, stepper, model(paddle.to_tensor(batch), which, extra), how)
        seen.append((weights(model), json.loads(json.dumps(describe_grad_scaler(scaler), allow_nan=False))))
    return seen


def weights(model: nn.Layer) -> dict[str, np.ndarray]:
    runtime = runtime_of(model)
    if runtime is None:
        return {name: parameter.numpy().reshape(-1).copy() for name, parameter in model.named_parameters()}
    return {f"{one.slot.name} {one.range.start} {one.range.stop}": one.local.numpy().copy() for one in runtime.shards}


def compare(optimizer: str, how: str, which: str, dynamic: bool = True, shards: int = 0) -> bool:
    """Run it sharded and in this process alone, and compare; return whether this rank holds the infinite element."""
    with as_on_gpu():
        right = run(optimizer, how, which, False, dynamic)
        tried = run(optimizer, how, which, True, dynamic, **(hybrid_groups(shards) if shards else {}))
    before: dict[str, np.ndarray] = {}
    for number, ((whole, right_state), (pieces, state)) in enumerate(zip(right, tried, strict=True)):
        assert state == right_state
        for name, piece in pieces.items():
            name, start, stop = name.split()
            np.testing.assert_allclose(piece, whole[name][int(start) : int(stop)], rtol=1e-5, atol=1e-6)
        if before and any(piece.size for piece in pieces.values()):
            skipped = all(np.array_equal(piece, before[name]) for name, piece in pieces.items())
            assert skipped == (number in INFINITE)
        before = pieces
    scales = [state["scale"] for _, state in tried]
    assert scales == ([1024, 2048, 1024, 1024, 2048, 1024, 512, 512] if dynamic else [1024] * 8)
    element = "last.weight 0 " if which == "weight" else "last.bias "
    return any(name.startswith(element) and piece.size and (which == "weight" or name.endswith(" 2")) for name, piece in before.items())


@pytest.mark.parametrize(
    ("optimizer", "how"),
    # Paddle's minimize takes no param groups.
    [(name, how) for name in OPTIMIZERS for how in ("step", "minimize", "unscale_") if (name, how) != ("adamw groups", "minimize")],
)
def test_scaled_steps_are_those_of_one_process(optimizer: str, how: str, ranks: Ranks) -> None:
    assert ranks(2).run(compare, optimizer, how, "weight") == [True, False]
    assert ranks(2).run(compare, optimizer, how, "bias") == [False, True]


@pytest.mark.parametrize("world_size", [1, 3])
def test_at_other_world_sizes(world_size: int, ranks: Ranks) -> None:
    assert sum(ranks(world_size).run(compare, "adamw groups", "step", "bias")) == 1


@pytest.mark.parametrize("optimizer", ["sgd", "adamw groups"])
def test_over_replicas(optimizer: str, ranks: Ranks) -> None:
    assert ranks(4).run(compare, optimizer, "unscale_", "weight", True, 2) == [True, False] * 2


def test_a_fixed_scale(ranks: Ranks) -> None:
    ranks(2).run(compare, "sgd", "step", "bias", False)


def two_optimizers(sharded: bool) -> list[tuple[dict[str, np.ndarray], Any]]:
    """One scaler for two halves of a model; the infinity is in the second's."""
    paddle.seed(3)
    model = Net()
    second = paddle.optimizer.AdamW(0.05, epsilon=1e-4, parameters=model.last.parameters())
    steppers = [OPTIMIZERS["sgd"](model.first), second]
    scaler = make_scaler()
    if sharded:
        ckpt.fully_shard(model, optimizer=steppers)
        bind_grad_scaler(scaler)
    seen = []
    for number in range(5):
        scaler.scale(model(paddle.linspace(-1, 1, 12).reshape([4, 3]), "bias", INFINITE.get(number, 0.0))).backward()
        for stepper in steppers:
            scaler.step(stepper)
        scaler.update()
        for stepper in steppers:
            stepper.clear_grad()
        seen.append((weights(model), describe_grad_scaler(scaler)))
    return seen


def compare_two_optimizers() -> None:
    with as_on_gpu():
        for (whole, right_state), (pieces, state) in zip(two_optimizers(False), two_optimizers(True), strict=True):
            assert state == right_state
            for name, piece in pieces.items():
                name, start, stop = name.split()
                np.testing.assert_allclose(piece, whole[name][int(start) : int(stop)], rtol=1e-5, atol=1e-6)


def test_one_scaler_for_two_optimizers(ranks: Ranks) -> None:
    ranks(2).run(compare_two_optimizers)


def unscale_and_step(scaler: Any, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    optimizer.step()


def refuses_an_unbound_scaler(optimizer: str) -> None:
    with as_on_gpu():
        model = Net()
        stepper = OPTIMIZERS[optimizer](model)
        ckpt.fully_shard(model, optimizer=stepper)
        scaler = make_scaler()
        scaler.scale(model(paddle.ones([2, 3]), "bias", 0.0)).backward()
        before = weights(model)
        with pytest.raises(errors.ShardingError, match=r"bind_grad_scaler\(scaler\)"):
            scaler.step(stepper)
        assert all(np.array_equal(piece, before[name]) for name, piece in weights(model).items())
        with pytest.raises(errors.ShardingError, match=r"bind_grad_scaler\(scaler\)"):
            unscale_and_step(make_scaler(), stepper)
        assert all(np.array_equal(piece, before[name]) for name, piece in weights(model).items())
        # The gradients are still there, for another one.
        scaler = make_scaler()
        bind_grad_scaler(scaler)
        scaler.step(stepper)
        assert not all(np.array_equal(piece, before[name]) for name, piece in weights(model).items())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw groups"])
def test_a_scaler_that_is_not_bound_is_refused(optimizer: str, ranks: Ranks) -> None:
    ranks(2).run(refuses_an_unbound_scaler, optimizer)


def unscaled_gradients() -> None:
    with as_on_gpu():
        model = Net()
        optimizer = OPTIMIZERS["sgd"](model)
        ckpt.fully_shard(model, optimizer=optimizer)
        scaler = make_scaler()
        bind_grad_scaler(scaler)
        gradients = []
        for scaled in (False, True):
            loss = model(paddle.linspace(-1, 1, 12).reshape([4, 3]), "bias", 0.0)
            (scaler.scale(loss) if scaled else loss).backward()
            if scaled:
                scaler.unscale_(optimizer)
            gradients.append([None if p.grad is None else p.grad.numpy().copy() for p in model.parameters()])
            if not scaled:
                optimizer.clear_grad()
        for one, other in zip(*gradients, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                np.testing.assert_array_equal(one, other)
        assert any(one is not None and np.abs(one).max() > 0 for one in gradients[0])
        scaler.step(optimizer)


def test_unscaled_gradients_can_be_looked_at(ranks: Ranks) -> None:
    ranks(2).run(unscaled_gradients)


def plain_beside_sharded() -> None:
    with as_on_gpu():
        models = [nn.Linear(3, 2), nn.Linear(3, 2)]
        models[1].set_state_dict(models[0].state_dict())
        for model, bound in zip(models, (False, True), strict=True):
            optimizer, scaler = OPTIMIZERS["sgd"](model), make_scaler()
            if bound:
                bind_grad_scaler(scaler)
            step(scaler, optimizer, model(paddle.ones([1, 3])).sum(), "unscale_")
        np.testing.assert_array_equal(models[0].weight.numpy(), models[1].weight.numpy())


class Half(nn.Layer):
    """A bfloat16 parameter whose gradient is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([9, 5], default_initializer=nn.initializer.Constant(1.0))
        self.to(dtype="bfloat16")

    def forward(self, gradient: np.ndarray) -> paddle.Tensor:
        return (self.weight.astype("float32") * paddle.to_tensor(gradient)).sum()


def beside_bfloat16() -> None:
    """Scaled bfloat16 gradients are unscaled in float32, and an infinity on one rank lets all skip."""
    place = this_rank()
    model = Half()
    optimizer = OPTIMIZERS["sgd"](model)
    ckpt.fully_shard(model, optimizer=optimizer)
    with as_on_gpu():
        scaler = make_scaler()
        bind_grad_scaler(scaler)
        # 8 bits each, and their sums more.
        gradients = [
            np.round(np.random.RandomState(rank).standard_normal([9, 5]) * 40).astype("float32") for rank in range(place.world_size)
        ]
        for infinite in (False, True):
            mine = gradients[place.rank].copy()
            mine[-1, -1] = np.inf if infinite and place.rank == 0 else mine[-1, -1]
            before = weights(model)
            scaler.scale(model(mine)).backward()
            scaler.unscale_(optimizer)
            piece = model.weight.grad
            (shard,) = runtime_of(model).shards  # type: ignore[union-attr]
            if shard.range.numel and not infinite:
                assert piece.dtype == paddle.float32
                right = np.sum(gradients, axis=0).reshape(-1)[shard.range.start : shard.range.stop] / np.float32(place.world_size)
                np.testing.assert_array_equal(piece.numpy(), right)
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
            moved = any(not np.array_equal(value, before[name]) for name, value in weights(model).items())
            assert moved == (not infinite and shard.range.numel > 0)


def test_beside_bfloat16(ranks: Ranks) -> None:
    ranks(2).run(beside_bfloat16)


def test_a_bound_scaler_works_with_plain_models_as_before(single: RankPool) -> None:
    single.run(plain_beside_sharded)


def without_effect() -> None:
    """On CPU Paddle disables it, and it does nothing."""
    model = Net()
    optimizer, scaler = OPTIMIZERS["sgd"](model), make_scaler()
    ckpt.fully_shard(model, optimizer=optimizer)
    bind_grad_scaler(scaler)
    before = weights(model)
    scaler.scale(model(paddle.ones([2, 3]), "bias", 0.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not all(np.array_equal(piece, before[name]) for name, piece in weights(model).items() if piece.size)
    assert describe_grad_scaler(scaler) == {"enabled": False}
    assert restore_grad_scaler(scaler, {"enabled": False}) is None


def test_a_disabled_scaler_does_nothing(ranks: Ranks) -> None:
    ranks(2).run(without_effect)


# Its state.


def used_scaler(steps: int = 3, **options: Any) -> Any:
    with as_on_gpu():
        scaler = make_scaler(**options)
    go_on(scaler, steps)
    return scaler


def go_on(scaler: Any, steps: int) -> list[Any]:
    seen = []
    with as_on_gpu():
        for number in range(steps):
            scaler._cache_found_inf = number % 4 == 2
            scaler.update()
            seen.append(describe_grad_scaler(scaler))
    return seen


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_a_restored_scaler_goes_on(steps: int) -> None:
    uninterrupted, resumed, stale = used_scaler(steps), used_scaler(0), used_scaler(4)
    saved = json.loads(json.dumps(describe_grad_scaler(uninterrupted)))
    assert restore_grad_scaler(resumed, saved) is None
    assert restore_grad_scaler(stale, saved) is None
    right = go_on(uninterrupted, 6)
    assert go_on(resumed, 6) == right
    assert go_on(stale, 6) == right


def test_other_settings_of_a_scaler_stay_and_are_reported() -> None:
    saved = describe_grad_scaler(used_scaler(3))
    scaler = used_scaler(0, incr_ratio=4.0)
    assert restore_grad_scaler(scaler, saved) == "GradScaler: incr_ratio was saved as 2.0 and is 4.0 now"
    assert scaler.get_incr_ratio() == 4.0
    fixed = used_scaler(0, use_dynamic_loss_scaling=False)
    saved["scale"] = 4096.0
    assert restore_grad_scaler(fixed, saved) == (
        "GradScaler: scale was saved as 4096.0 and is 1024.0 now; use_dynamic_loss_scaling was saved as True and is False now"
    )
    assert restore_grad_scaler(paddle.amp.GradScaler(), saved) == "GradScaler was saved enabled and is disabled now"
    assert restore_grad_scaler(scaler, {"enabled": False}) == "GradScaler was saved disabled and is enabled now"


def test_what_is_no_scaler_is_refused() -> None:
    wrapped = SimpleNamespace(_inner_scaler=paddle.amp.GradScaler())
    for call in (bind_grad_scaler, describe_grad_scaler, lambda one: restore_grad_scaler(one, {"enabled": False})):
        with pytest.raises(errors.ShardingError, match="SimpleNamespace is not a paddle.amp.GradScaler; give the scaler that it wraps"):
            call(wrapped)


def save_around_update(path: str) -> list[list[str]]:
    """What a save warns of before the first step, between step and update, and after that."""
    said = []
    with as_on_gpu(), ckpt.CheckpointManager(path) as checkpoints:
        model = Net()
        optimizer, scaler = OPTIMIZERS["sgd"](model), make_scaler()
        ckpt.fully_shard(model, optimizer=optimizer)
        bind_grad_scaler(scaler)

        def save(step: int) -> None:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                checkpoints.save(step, model=model, optimizer=optimizer, grad_scaler=scaler)
            said.append([str(one.message) for one in found])

        save(0)
        scaler.scale(model(paddle.ones([2, 3]), "bias", 0.0)).backward()
        scaler.step(optimizer)
        optimizer.clear_grad()
        save(1)
        scaler.update()
        save(2)
    return said


def save_disabled(path: str) -> tuple[list[str], bool]:
    """A save and a restore with a scaler that is off, as for bfloat16: what differs, and whether all came back."""
    model = Net()
    optimizer = OPTIMIZERS["sgd"](model)
    ckpt.fully_shard(model, optimizer=optimizer)
    scaler = paddle.amp.GradScaler(enable=False)
    bind_grad_scaler(scaler)
    with ckpt.CheckpointManager(path) as checkpoints:
        scaler.scale(model(paddle.ones([2, 3]), "bias", 0.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        checkpoints.save(1, model=model, optimizer=optimizer, grad_scaler=scaler)
        checkpoints.restore(model=model, optimizer=optimizer, grad_scaler=scaler)
        report = checkpoints.restored
        assert report is not None
        return report.differences, report.is_exact


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_disabled_scaler_is_saved_and_restored(world_size: int, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(world_size).run(save_disabled, str(tmp_path / "root")) == [([], True)] * world_size


def test_a_save_before_the_update_of_the_scale_is_warned_of(ranks: Ranks, tmp_path: Path) -> None:
    ((before, (between,), after),) = ranks(1).run(save_around_update, str(tmp_path / "root"))
    assert (before, after) == ([], [])
    assert "save between step() and update() of a GradScaler" in between


def later_parameters_are_unscaled(how: str) -> None:
    """The optimizer is bound with one layer's parameters, and gets the other's after two steps."""
    seen = []
    for sharded in (False, True):
        paddle.seed(3)
        model = Net()
        first, last = model.first.parameters(), model.last.parameters()
        held = [{"params": last, "weight_decay": 0.1}] if how == "group" else list(last)
        optimizer, scaler = paddle.optimizer.SGD(0.1, parameters=held), make_scaler()
        if sharded:
            ckpt.fully_shard(model, optimizer=optimizer)
            bind_grad_scaler(scaler)
        with as_on_gpu():
            for number in range(4):
                if number == 2 and how == "group":
                    optimizer._add_param_group({"params": first, "weight_decay": 0.1})
                elif number == 2:
                    optimizer._parameter_list.extend(first)
                batch = np.random.RandomState(number).standard_normal([ROWS, 3]).astype("float32")
                step(scaler, optimizer, model(paddle.to_tensor(batch), "weight", 0.0), "step")
        seen.append(weights(model))
    for name, piece in seen[1].items():
        name, start, stop = name.split()
        np.testing.assert_allclose(piece, seen[0][name][int(start) : int(stop)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["group", "list"])
def test_parameters_that_the_optimizer_was_given_later_are_unscaled(ranks: Ranks, how: str) -> None:
    ranks(2).run(later_parameters_are_unscaled, how)
