"""An average of a model's weights (EMA): a second model, which is moved towards the first one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import paddle
from paddle import nn

from .errors import CheckpointError, MismatchError, ShardingError, listing
from .fsdp import Communicator, LiveBuffer, ParameterShard, Runtime, dtype_name, runtime_of
from .layout import LOW_PRECISION
from .optim import SteppedParameter, check_is_optimizer, optimizer_list, parameter_groups, whole_parameters
from .shardings import sharding_of
from .subjects import ModelTensors, check_tensors
from .warn import warn_caller


def update_average(average: nn.Layer, model: nn.Layer, weight: float, *, optimizer: Any = None) -> None:
    """Move each parameter of a second model towards that of the trained one: ``average += weight * (value - average)``.

    All ranks must call it, once a step, behind ``step()`` and ``clear_grad()``. It computes in the dtype of the average's parameter, for
    which float32 is right: one of 16 bits is moved in float32 and rounded, so that small steps are lost, of which it warns. A ``weight``
    of 1 copies. Where a parameter is cut at the same places in both models each rank works on its piece; of others the model's flat
    buffers are gathered, one at a time.

    Persistable buffers are copied: running statistics are averages already, and counters can't be averaged.

    Args:
        average: of the same structure, with parameters of any floating dtype; sharded by our ``fully_shard(average, optimizer=None)``, over
            the same ranks as the model where both are, or plain.
        model: sharded by our ``fully_shard``, or plain. It isn't changed.
        weight: of the new values, from 0 to 1; 0.001 for what is also called a decay of 0.999.
        optimizer: one that steps the model, or a list of them: where it has the master weight of a parameter, that is taken as its value.
            By default, and before the first step has made master weights, the parameter is.

    Raises:
        CheckpointError: ``weight`` is no number from 0 to 1, or one of the models is none.
        MismatchError: the models differ in names or shapes. Nothing was changed.
        ShardingError: Paddle's own ``fully_shard`` cut one of them, or they are cut over different ranks; a forward of one is running,
            or the model has gradients that no step has used; the optimizer steps nothing of the model; or ``weight`` or so differs between
            ranks. Nothing was changed.
        UnsupportedOptimizerError: ``optimizer`` is none of Paddle's.
        RankFailedError: another rank raised one of these.
    """
    runtimes = [runtime_of(one) for one in (model, average) if isinstance(one, nn.Layer)]
    communicator = next((one.communicator for one in runtimes if one is not None), Communicator(None))
    update, error = None, None
    try:
        update = _prepare(average, model, weight, optimizer)
    except CheckpointError as one:
        error = one
    communicator.raise_together(error)
    assert update is not None
    communicator.check_same("what is given to update_average", update.summary())
    with paddle.no_grad():
        update.apply()


@dataclass(frozen=True, eq=False)
class _Pair:
    """A parameter of the average, and that of the model."""

    target: SteppedParameter
    source: SteppedParameter

    @cached_property
    def needs_gather(self) -> bool:
        """Whether ranks lack values of the model's parameter that they need; the same on all ranks."""
        target, source = self.target, self.source
        if not isinstance(source, ParameterShard):
            return False
        if not isinstance(target, ParameterShard) or target.buffer.communicator.replicas != source.buffer.communicator.replicas:
            return True
        return target.buffer.layout.cuts(target.slot) != source.buffer.layout.cuts(source.slot)

    def move(self, values: paddle.Tensor, weight: float) -> None:
        """Move this rank's piece of the average.

        Args:
            values: what this rank has of the model's: as much as it keeps of the average's, in any shape.
            weight: of them.
        """
        live = self.target.local if isinstance(self.target, ParameterShard) else self.target.parameter
        _move(live, values.reshape(live.shape), weight)


@dataclass(frozen=True, eq=False)
class _Update:
    """What :func:`update_average` is about to do.

    Attributes:
        runtime: the average's, or None where it is plain.
        pairs: the parameters.
        buffers: of the average and of the model.
        weight: of the model's values.
        masters: master weights, by the id of the model's parameter.
        with_masters: whether an optimizer was given.
    """

    runtime: Runtime | None
    pairs: Sequence[_Pair]
    buffers: Sequence[tuple[paddle.Tensor, paddle.Tensor]]
    weight: float
    masters: Mapping[int, paddle.Tensor]
    with_masters: bool

    def summary(self) -> str:
        """Return what must be the same on every rank."""
        gathered = [pair.source.slot.name for pair in self.pairs if pair.needs_gather]
        return repr((self.weight, self.with_masters, gathered))

    def apply(self) -> None:
        """Do it. A collective operation."""
        if self.runtime is None:
            self._move_all()
        else:
            with self.runtime.showing_local(self.runtime.shards):
                self._move_all()
            self.runtime.parameters_written(self.runtime.shards)
        for target, source in self.buffers:
            paddle.assign(source.astype(target.dtype), target)

    def _move_all(self) -> None:
        gathered: dict[LiveBuffer, list[_Pair]] = {}
        for pair in self.pairs:
            if pair.needs_gather:
                assert isinstance(pair.source, ParameterShard)
                gathered.setdefault(pair.source.buffer, []).append(pair)
            elif pair.target.range.numel:
                pair.move(self._own_values(pair), self.weight)
        for buffer, pairs in gathered.items():
            whole = self._gather(buffer)
            for pair in pairs:
                wanted = pair.target.range.shift(pair.source.slot.offset)
                if wanted.numel:
                    pair.move(whole._slice(wanted.start, wanted.stop), self.weight)
            del whole  # before the next one is gathered

    def _own_values(self, pair: _Pair) -> paddle.Tensor:
        """Return the values of the model's parameter that this rank needs, and has."""
        source, wanted = pair.source, pair.target.range
        master = self.masters.get(id(source.parameter))
        if isinstance(source, ParameterShard):
            return source.local if master is None else master
        whole = source.parameter.detach() if master is None else master
        return whole if wanted == source.range else whole.reshape([-1])[wanted.start : wanted.stop]

    def _gather(self, buffer: LiveBuffer) -> paddle.Tensor:
        """Return the whole of one of the model's flat buffers, with master weights where there are. A collective operation."""
        values = buffer.shard
        if self.with_masters and buffer.layout.dtype in LOW_PRECISION:
            values = values.astype("float32")
            for shard in buffer.shards:
                master = self.masters.get(id(shard.parameter)) if shard.range.numel else None
                if master is not None:
                    paddle.assign(master, values._slice(shard.buffer_range.start, shard.buffer_range.stop))
        return values if buffer.communicator.alone else buffer.communicator.all_gather(values)


def _prepare(average: nn.Layer, model: nn.Layer, weight: float, optimizer: Any) -> _Update:
    """Check what was given, and return what to do. No collective operation."""
    if isinstance(weight, (bool, np.bool_)) or not (isinstance(weight, (int, float, np.number)) and 0 <= weight <= 1):
        raise CheckpointError(f"update_average: weight is {weight!r:.100}, and a number from 0 to 1 is needed, such as 0.001")
    tensors = [check_tensors(one) for one in (average, model)]
    runtimes = [_runtime(one, name) for one, name in ((average, "average"), (model, "model"))]
    own, source = runtimes
    if own is not None and source is not None and own.communicator.ranks != source.communicator.ranks:
        raise ShardingError(
            f"update_average: the average is cut over ranks {list(own.communicator.ranks)}, and the model over "
            f"{list(source.communicator.ranks)}; give both to fully_shard with the same ranks"
        )
    if source is not None and any(shard.is_unused for shard in source.shards):
        raise ShardingError(
            "update_average: the model has gradients that no step has used; call it once a step, behind opt.step() and opt.clear_grad()"
        )
    targets, sources = (
        list(whole_parameters(one).values()) if runtime is None else runtime.shards
        for one, runtime in zip((average, model), runtimes, strict=True)
    )
    pairs = _pairs(targets, sources)
    buffers = _buffer_pairs(*tensors)
    optimizers = optimizer_list(optimizer)
    masters = _masters(optimizers, sources)
    low = [pair.target.slot.name for pair in pairs if dtype_name(pair.target.parameter) in LOW_PRECISION]
    if low and weight < 1:
        warn_caller(
            f"update_average: {len(low)} parameters of the average have 16 bits, in which small steps are lost; "
            f"make it of float32, by average.float() before fully_shard: {listing(low)}"
        )
    return _Update(own, pairs, buffers, float(weight), masters, bool(optimizers))


def _runtime(model: nn.Layer, name: str) -> Runtime | None:
    """Return the runtime of a model that can be averaged; None of a plain one."""
    runtime = runtime_of(model)
    if runtime is None:
        if not sharding_of(model).is_plain:
            raise ShardingError(
                f"update_average: the {name} was cut by paddle.distributed.fsdp.fully_shard; use paddle_fsdp_ckpt.fully_shard, or a plain "
                "model"
            )
        return None
    runtime.check_unwritten()
    if runtime.is_in_forward:
        raise ShardingError(
            f"update_average: a forward of the {name} is running; call it between steps (one that an error ended is over at the next "
            "forward or step)"
        )
    return runtime


def _pairs(targets: Sequence[SteppedParameter], sources: Sequence[SteppedParameter]) -> list[_Pair]:
    """Pair the parameters of the average with those of the model."""
    if {id(one.parameter) for one in targets} & {id(one.parameter) for one in sources}:
        raise ShardingError("update_average: the average has parameters of the model itself; make it by copy.deepcopy(model)")
    found = {name: one for one in sources for name in one.slot.names}
    problems = _differing_names({name for one in targets for name in one.slot.names}, set(found))
    pairs = []
    for target in targets:
        its_sources = {id(found[name]): found[name] for name in target.slot.names if name in found}
        if len(its_sources) > 1:  # the reverse does no harm
            problems.append(f"{' = '.join(target.slot.names)} are tied in the average alone")
        for source in its_sources.values():
            pairs.append(_Pair(target, source))
            if source.slot.shape != target.slot.shape:
                problems.append(_other_shape(target.slot.name, target.slot.shape, source.slot.shape))
    _raise_mismatch(problems)
    return pairs


def _buffer_pairs(average: ModelTensors, model: ModelTensors) -> list[tuple[paddle.Tensor, paddle.Tensor]]:
    """Pair the persistable buffers."""
    targets, sources = dict(average.buffers), dict(model.buffers)
    problems = _differing_names(set(targets), set(sources))
    common = sorted(targets.keys() & sources.keys())
    shapes = [(name, tuple(targets[name].shape), tuple(sources[name].shape)) for name in common]
    _raise_mismatch(problems + [_other_shape(*one) for one in shapes if one[1] != one[2]])
    return [(targets[name], sources[name]) for name in common]


def _differing_names(average: set[str], model: set[str]) -> list[str]:
    return [
        *(f"'{name}' is in the average alone" for name in sorted(average - model)),
        *(f"'{name}' is in the model alone" for name in sorted(model - average)),
    ]


def _other_shape(name: str, average: tuple[int, ...], model: tuple[int, ...]) -> str:
    return f"'{name}' has shape {list(average)} in the average and {list(model)} in the model"


def _raise_mismatch(problems: Sequence[str]) -> None:
    if problems:
        raise MismatchError(f"update_average: average and model are of different structure; nothing was changed: {listing(problems)}")


def _masters(optimizers: Sequence[Any], sources: Sequence[SteppedParameter]) -> dict[int, paddle.Tensor]:
    """Return the master weights that there are, by the id of the model's parameter."""
    own = {id(one.parameter) for one in sources}
    masters: dict[int, paddle.Tensor] = {}
    for optimizer in optimizers:
        check_is_optimizer(optimizer)
        held = [parameter for group in parameter_groups(optimizer) for parameter in group["params"] if id(parameter) in own]
        if not held:
            raise ShardingError(
                f"update_average: {type(optimizer).__name__} steps no parameter of the model; give the optimizer that trains it"
            )
        found = {id(parameter): optimizer._master_weights.get(parameter.name) for parameter in held}
        masters |= {one: master for one, master in found.items() if master is not None}
    return masters


def _move(live: paddle.Tensor, values: paddle.Tensor, weight: float) -> None:
    """Move a tensor of the average, in place."""
    if weight == 1:
        paddle.assign(values.astype(live.dtype), live)
    elif dtype_name(live) in LOW_PRECISION:  # for which Paddle has no such kernels on CPU
        moved = live.astype("float32")
        _move(moved, values, weight)
        paddle.assign(moved.astype(live.dtype), live)
    else:
        step = values.astype(live.dtype) - live
        step.scale_(weight)
        live.add_(step)
