"""What a rank holds and for how long; that no weight is ever stale; that nothing outlives its use."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from harness import RankPool, this_rank
from paddle import nn
from paddle.base import core
from paddle.nn import functional as F
from training_models import AttentionBlock, LoRALinear, Net, Recomputed, Unused
from training_runs import Run, language_loss

from paddle_fsdp_ckpt.fsdp import Runtime, ShardedParameter, Unit, local_parameters, runtime_of
from paddle_fsdp_ckpt.training import fully_shard

Ranks = Callable[[int], RankPool]


def sharded(model: nn.Layer, **options: Any) -> tuple[Any, Runtime]:
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(1.0))
    fully_shard(model, optimizer=optimizer, **options)
    runtime = runtime_of(model)
    assert runtime is not None
    return optimizer, runtime


def held_bytes() -> int:
    """Bytes that Paddle's allocator has handed out on the CPU."""
    return int(core.host_memory_stat_current_value("Allocated", 0))


# One unit at a time.


def gathered_at_once(kind: str) -> tuple[int, int, int, int]:
    """Return how many units were whole at once, how many gradients, and the bytes of whole buffers against those of the largest unit."""
    builders: dict[str, Callable[[], nn.Layer]] = {
        "net": lambda: Net(6),
        "recomputed": lambda: Recomputed(False),
        "inner recompute": lambda: Recomputed(True),
        "recomputed, not reentrant": lambda: Recomputed(False, use_reentrant=False),
        "inner recompute, not reentrant": lambda: Recomputed(True, use_reentrant=False),
        "lora": lambda: Net(6, None, LoRALinear),
    }
    model = builders[kind]()
    optimizer, runtime = sharded(model)
    units, gradients, whole_bytes = [0], [0], [0]
    gather = Unit.gather

    def tracing(unit: Unit) -> None:
        gather(unit)
        units.append(sum(one.is_gathered for one in runtime.units))
        gradients.append(sum(buffer.has_pending_gradient for buffer in runtime.buffers if buffer.unit is not unit))
        whole_bytes.append(runtime.memory_bytes()[1])

    Unit.gather = tracing  # type: ignore[method-assign]
    try:
        run = Run(True)
        for step in range(2):
            loss = language_loss(run, model, step)
            assert sum(one.is_gathered for one in runtime.units) <= 1
            loss.backward()
            optimizer.step()
            optimizer.clear_grad(set_to_zero=False)
            assert runtime.memory_bytes()[1] == 0
    finally:
        Unit.gather = gather  # type: ignore[method-assign]
    largest = max(sum(buffer.layout.nbytes for buffer in unit.buffers) for unit in runtime.units)
    local = sum(buffer.layout.nbytes // this_rank().world_size for buffer in runtime.buffers)
    assert runtime.memory_bytes()[0] == local
    return max(units), max(gradients), max(whole_bytes), largest


@pytest.mark.parametrize(
    "kind", ["net", "recomputed", "inner recompute", "recomputed, not reentrant", "inner recompute, not reentrant", "lora"]
)
def test_one_unit_is_whole_at_a_time(ranks: Ranks, kind: str) -> None:
    for units, gradients, whole_bytes, largest in ranks(2).run(gathered_at_once, kind):
        assert units == 1
        assert gradients == 0
        assert 0 < whole_bytes <= 2 * largest


def real_peak() -> tuple[int, int, int, int]:
    """Return the bytes held between steps, at the peak of a step, of the whole model, and of one block."""
    width, blocks = 128, 8
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(blocks)))
    before = held_bytes()
    optimizer, runtime = sharded(model, unit_layers=[nn.Sequential])
    gc.collect()
    freed = before - held_bytes()
    model_bytes = sum(buffer.layout.nbytes for buffer in runtime.buffers)
    assert freed >= model_bytes * (1 - 1 / this_rank().world_size) - 100_000, "the whole parameters are still held"
    x = paddle.ones([2, width])
    baseline = held_bytes()
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    model(x).square().mean().backward()
    peak = int(core.host_memory_stat_peak_value("Allocated", 0)) - baseline
    runtime.begin_step()
    optimizer.clear_grad(set_to_zero=False)
    gc.collect()
    return held_bytes() - baseline, peak, model_bytes, model_bytes // blocks


def test_real_memory_of_a_step(ranks: Ranks) -> None:
    for left, peak, model_bytes, block_bytes in ranks(4).run(real_peak):
        # This rank's gradients; a block's weights, its gradient as Paddle made it, flattened, and gloo's copy of it; activations.
        assert peak < model_bytes / 4 + 5 * block_bytes + 200_000
        assert left < 100_000


# Never stale.


def trace_weights(kind: str) -> int:
    """Train, and compare all weights that are computed with to those that all ranks hold at that time."""
    builders: dict[str, Callable[[], nn.Layer]] = {
        "tied": lambda: Net(3, "matmul", AttentionBlock),
        "untied": lambda: Net(3),
        "recomputed": lambda: Recomputed(True),
        "unused": Unused,
    }
    model = builders[kind]()
    optimizer, runtime = sharded(model)
    right: dict[str, np.ndarray] = {}
    seen = 0

    def renew() -> None:
        for buffer in runtime.buffers:
            parts: list[paddle.Tensor] = []
            dist.all_gather(parts, buffer.shard)
            whole = paddle.concat(parts).numpy()
            for shard in buffer.shards:
                right[shard.slot.name] = whole[shard.slot.range.start : shard.slot.range.stop].reshape(shard.slot.shape)

    def check(layer: nn.Layer, _: Any) -> None:
        nonlocal seen
        for parameter in layer._parameters.values():
            if parameter is not None:
                seen += 1
                np.testing.assert_array_equal(parameter.numpy(), right[parameter._shard.slot.name])

    def check_backward(buffer: Any, generation: int) -> paddle.Tensor:
        nonlocal seen
        whole = Runtime.whole_for_backward(runtime, buffer, generation)
        values = whole.numpy()
        for shard in buffer.shards:
            seen += 1
            part = values[shard.slot.range.start : shard.slot.range.stop].reshape(shard.slot.shape)
            np.testing.assert_array_equal(part, right[shard.slot.name])
        return whole

    runtime.whole_for_backward = check_backward  # type: ignore[method-assign]
    for layer in model.sublayers(include_self=True):
        layer.register_forward_pre_hook(check)
    run = Run(True)
    renew()
    for step in range(4):
        tokens = run.batch(step)
        arguments = (step % 2 == 0,) if kind == "unused" else ()
        with paddle.no_grad():
            model(tokens, *arguments)
        F.cross_entropy(model(tokens, *arguments).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.clear_grad()
        renew()
        if step == 1:
            for name, parameter in model.named_parameters():
                parameter.set_value(paddle.full(parameter.shape, 0.01 * len(name)))
            renew()
            assert right["embed.weight"].max() == np.float32(0.01 * len("embed.weight"))
        if step == 2:
            with local_parameters(model), paddle.no_grad():
                for parameter in model.parameters():
                    parameter.scale_(0.5)
            renew()
    return seen


@pytest.mark.parametrize("kind", ["tied", "untied", "recomputed", "unused"])
def test_weights_are_never_stale(ranks: Ranks, kind: str) -> None:
    assert min(ranks(2).run(trace_weights, kind)) > 100


# Nothing outlives its use.


class _Marker:
    """Lives as long as the graph that it was put into."""


class _Holding(paddle.autograd.PyLayer):
    marker: weakref.ref[_Marker] | None = None

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        ctx.marker = _Marker()
        _Holding.marker = weakref.ref(ctx.marker)
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return gradient


class HoldingBlock(nn.Layer):
    """A block that puts a marker into the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return F.gelu(self.linear(_Holding.apply(F.gelu(x)))) + x


def activations(keep: str) -> bool:
    """Tell whether the graph is gone after its use."""
    model = Net(2, "matmul", HoldingBlock)
    optimizer, _ = sharded(model)
    loss = language_loss(Run(True), model, 0)
    marker = _Holding.marker
    assert marker is not None
    assert marker() is not None
    if keep == "backward":
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    del loss
    if keep == "raised":
        hook = model.norm.register_forward_pre_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            language_loss(Run(True), model, 0)
        hook.remove()
        marker = _Holding.marker
        assert marker is not None
    gc.collect()
    return marker() is None


def _raise(*_: Any) -> None:
    raise ZeroDivisionError


def memory_over_steps(kind: str) -> list[int]:
    models: dict[str, Callable[[], nn.Layer]] = {"tied": lambda: Net(3, "matmul", AttentionBlock), "recomputed": lambda: Recomputed(True)}
    model = models[kind]()
    optimizer, _ = sharded(model)
    held, run = [], Run(True)
    for step in range(8):
        language_loss(run, model, 3)  # a graph that is never used
        with paddle.no_grad():
            language_loss(run, model, 2)
        language_loss(run, model, step).backward()
        optimizer.step()
        optimizer.clear_grad()
        gc.collect()
        held.append(held_bytes())
    return held


def everything_dropped() -> list[str]:
    """Return what is still there after the last reference to it is gone."""
    gc.collect()
    before = held_bytes()
    model = Net(3, "matmul")
    optimizer, runtime = sharded(model)
    run = Run(True)
    for step in range(2):
        language_loss(run, model, step).backward()
        optimizer.step()
        optimizer.clear_grad()
    loss = language_loss(run, model, 3)
    kept = {
        "model": model,
        "optimizer": optimizer,
        "runtime": runtime,
        "parameter": model.embed.weight,
        "unit": runtime.units[0],
        "loss": loss,
    }
    references = {name: weakref.ref(thing) for name, thing in kept.items()}
    del kept, model, optimizer, runtime, loss
    gc.collect()
    gc.collect()  # Paddle's tensors take no part in garbage collection: what they hold can be collected once they are gone
    left = [name for name, reference in references.items() if reference() is not None]
    if held_bytes() > before + 2000:
        left.append(f"{held_bytes() - before} bytes")
    return left


def optimizer_dropped() -> str:
    model = Net(2)
    optimizer, runtime = sharded(model)
    language_loss(Run(True), model, 0).backward()
    optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert not runtime.observers
    return "gone"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("keep", ["forward", "backward", "raised"])
def test_activations_go_with_their_graph(ranks: Ranks, world_size: int, keep: str) -> None:
    assert all(ranks(world_size).run(activations, keep))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["tied", "recomputed"])
def test_steps_do_not_grow_memory(ranks: Ranks, world_size: int, kind: str) -> None:
    for held in ranks(world_size).run(memory_over_steps, kind):
        assert held[-1] <= held[2], held


@pytest.mark.parametrize("world_size", [1, 2])
def test_everything_goes_with_the_model(ranks: Ranks, world_size: int) -> None:
    assert ranks(world_size).run(everything_dropped) == [[]] * world_size


def test_a_dropped_optimizer_is_not_bound_any_more(ranks: Ranks) -> None:
    ranks(2).run(optimizer_dropped)


def test_parameters_have_no_memory_between_uses(ranks: Ranks) -> None:
    ranks(2).run(between_uses)


def between_uses() -> None:
    model = Net(2)
    optimizer, runtime = sharded(model)
    language_loss(Run(True), model, 0).backward()
    optimizer.step()
    for parameter in model.parameters():
        assert isinstance(parameter, ShardedParameter)
        assert not parameter._is_initialized()
        assert tuple(parameter.shape) == parameter._shard.slot.shape
    assert not any(unit.is_gathered for unit in runtime.units)


_EXIT = """
import paddle
from paddle import nn
from paddle_fsdp_ckpt.training import fully_shard

class Model(nn.Layer):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
    def forward(self, x):
        raise RuntimeError(f"in the middle {self.first(x).shape}")

model = Model()
optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
fully_shard(model, optimizer=optimizer)
model(paddle.ones([2, 3]))
"""


def test_interpreter_exits_after_an_exception_in_a_forward() -> None:
    done = subprocess.run([sys.executable, "-c", _EXIT], capture_output=True, text=True, timeout=60, check=False, env=_environment())
    assert done.returncode == 1
    assert "RuntimeError: in the middle [2, 3]" in done.stderr or "in the middle paddle.Size([2, 3])" in done.stderr


def _environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}


def memory_after_clear_grad() -> tuple[int, int]:
    """Bytes that a rank holds after a step and clear_grad, and those of its shards of the data, where most ranks keep padding only."""
    model = nn.Linear(1, 1, bias_attr=False)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    fully_shard(model, optimizer=optimizer)
    model(paddle.ones([1, 1])).sum().backward()
    optimizer.step()
    optimizer.clear_grad()
    runtime = runtime_of(model)
    assert runtime is not None
    return runtime.memory_bytes()[0], sum(buffer.shard.shape[0] * 4 for buffer in runtime.buffers)


def test_clear_grad_frees_gradients_also_where_a_rank_keeps_only_padding(ranks: Ranks) -> None:
    for held, data in ranks(3).run(memory_after_clear_grad):
        assert held == data
