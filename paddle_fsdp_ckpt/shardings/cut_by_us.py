"""A model that our runtime cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from ..division import written_range
from ..errors import ShardingError, listing
from ..fsdp import (
    Communicator,
    KnownSums,
    ParameterShard,
    Runtime,
    elementwise,
    named_buffers,
    replicated,
    row_by_row,
)
from ..layout import Range
from ..optim import OptimizerState, StateKind, SteppedParameter, bound_optimizers, check_bound, entry_of, optimizer_shards, state_columns
from .live_places import LivePlaces
from .places import places_of_cut
from .sharding import FlatShard, LiveTables, Sharding, stacked


@dataclass(frozen=True)
class CutByUs(Sharding):
    """A model that :func:`paddle_fsdp_ckpt.fully_shard` cut."""

    runtime: Runtime

    tells_places = True

    @property
    def gradients_pending(self) -> bool:
        """What the runtime says."""
        return self.runtime.awaits_step

    def dropped_gradients(self) -> list[str]:
        """Return those that the user set to None."""
        return [shard.slot.name for shard in self.runtime.shards if shard.is_dropped and not self.has_gradient(shard)]

    def lost_weights(self) -> ShardingError | None:
        """Return what the runtime knows."""
        return self.runtime.lost.error()

    @property
    def written(self) -> int:
        """The runtime's own."""
        return self.runtime.given_values.checksum

    @property
    def communicator(self) -> Communicator:
        """The runtime's own."""
        return self.runtime.communicator

    def bound_optimizers(self) -> list[Any]:
        """Return those that are bound to the runtime."""
        return bound_optimizers(self.runtime)

    @property
    def known_sums(self) -> KnownSums:
        """The runtime's own."""
        return self.runtime.known_sums

    def flat_shards(self) -> list[FlatShard]:
        """Return the runtime's shards."""
        self.runtime.check_unwritten()
        return [
            FlatShard(
                one.layout,
                one.shard,
                tuple(not own.parameter.stop_gradient for own in one.shards),
                tuple(one.shards),
            )
            for one in self.runtime.buffers
        ]

    @property
    def kept(self) -> dict[type, Any]:
        """What the runtime keeps."""
        return self.runtime.kept

    def live_tables(self, optimizers: Sequence[Any], buffers: Sequence[tuple[str, paddle.Tensor]]) -> LiveTables:
        """Return the shards, whose pieces are where they are for good, buffers, and the optimizers' own tables."""
        self.runtime.check_unwritten()
        names: list[object] = [name for name, _ in buffers]
        tensors = [one.shard for one in self.runtime.buffers]
        tensors += [buffer for _, buffer in buffers]
        for one in optimizers:
            names.append((type(one), one._name))
            tables = [*one._accumulators.items(), ("master weights", one._master_weights)]
            names += [(name, list(table)) for name, table in tables]
            tensors += row_by_row([table.values() for _, table in tables])
        return LiveTables(names, tensors)

    def live_places(
        self, buffers: Sequence[tuple[str, paddle.Tensor]], steppers: Sequence[tuple[Any, Sequence[SteppedParameter]]]
    ) -> LivePlaces | None:
        """Return where the shards' pieces, whole buffers and states are; None where some are on a device, or don't lie as they should."""
        self.runtime.check_unwritten()
        columns = [column for optimizer, parameters in steppers for column in state_columns(optimizer, parameters)]
        return places_of_cut(self.runtime.buffers, buffers, columns, self.communicator.rank)

    def warn_of_cuts(self) -> None:
        """We cut where it loads right."""

    def model_weights(self, model: nn.Layer) -> dict[str, ShardedWeight]:
        """Return views of the shards, and whole buffers."""
        weights: dict[str, ShardedWeight] = {}
        self.runtime.check_unwritten()
        for shard in self.runtime.shards:
            if shard.range.numel:
                weights.update({name: shard.weight(name, shard.local) for name in shard.slot.names})
        weights.update({name: replicated(name, buffer) for name, buffer in named_buffers(model)})
        return weights

    def held_by(self, optimizers: Sequence[Any], model: nn.Layer | None) -> list[Sequence[SteppedParameter]]:
        """Return the shards of bound optimizers."""
        for one in optimizers:
            entry_of(one)
        for one in optimizers:
            check_bound(one)
        held = [optimizer_shards(one) for one in optimizers]
        foreign_units = {unit for unit in {shard.unit for shards in held for shard in shards} if unit.runtime is not self.runtime}
        foreign = [shard.slot.name for shards in held for shard in shards if shard.unit in foreign_units] if foreign_units else []
        if foreign:
            whose = "of several sharded models, whose names may be the same" if model is None else "of another model than the one given"
            raise ShardingError(
                f"{len(foreign)} parameters of the optimizers are {whose}: {listing(foreign)}; to save and "
                'load, give all models that they step, as model={"actor": actor, "critic": critic}; for the rest, give each model its own '
                "optimizer"
            )
        return list(held)

    def weight_of(self, state: OptimizerState) -> ShardedWeight:
        """Describe this rank's piece, or a scalar."""
        if state.kind is StateKind.SCALAR:
            return replicated(state.key, state.tensor)
        if state.kind is StateKind.STACKED:
            return stacked(state)
        assert isinstance(state.shard, ParameterShard)
        return state.shard.weight(state.key, state.tensor)

    def written_model_weights(self, model: nn.Layer) -> dict[str, ShardedWeight]:
        """Return this replica's part of this rank's pieces, and whole buffers."""
        weights = self.model_weights(model)
        for shard in self.runtime.shards if self.communicator.replica_count > 1 else ():
            wanted = self._written_range(shard)
            for name in shard.slot.names if shard.range.numel else ():
                if wanted.numel:
                    weights[name] = self._part(name, shard, shard.local, wanted)
                else:
                    del weights[name]
        return weights

    def written_state(self, state: OptimizerState) -> ShardedWeight | None:
        """Return this replica's part: of layers where there are several, as a piece's columns do not lie together."""
        assert isinstance(state.shard, ParameterShard)
        replica, count = self.communicator.replica, self.communicator.replica_count
        if count == 1:
            return super().written_state(state)
        if state.kind is StateKind.STACKED:
            layers = state.tensor.shape[0]
            wanted = Range(layers * replica // count, layers * (replica + 1) // count)
            return stacked(state, wanted) if wanted.numel else None
        wanted = self._written_range(state.shard)
        if not wanted.numel or (state.kind is StateKind.SCALAR and wanted.start):
            return None
        return self.weight_of(state) if state.kind is StateKind.SCALAR else self._part(state.key, state.shard, state.tensor, wanted)

    def _written_range(self, shard: ParameterShard) -> Range:
        own = self.communicator
        return written_range(shard.buffer.layout, shard.slot, own.rank, own.replica, own.replica_count)

    def _part(self, key: str, shard: ParameterShard, piece: paddle.Tensor, wanted: Range) -> ShardedWeight:
        """Describe a part of what this rank keeps of something elementwise."""
        values = piece._slice(wanted.start - shard.range.start, wanted.stop - shard.range.start)
        return elementwise(key, values, shard.slot, wanted, self.communicator.overall_world_size)

    def has_gradient(self, parameter: SteppedParameter) -> bool:
        """Tell whether some rank has one."""
        assert isinstance(parameter, ParameterShard)
        return parameter.has_gradient or parameter.got_gradient

    def reset_gradient(self, parameter: SteppedParameter, present: bool) -> None:
        """Set it on every rank."""
        assert isinstance(parameter, ParameterShard)
        parameter.reset_gradient(present)

    def values_written(
        self, model: nn.Layer | None, optimizers: Sequence[Any], stepped: Sequence[SteppedParameter], kept: Collection[str] = ()
    ) -> None:
        """Release whole units, and tell the optimizers that were not loaded."""
        if model is None:
            return
        loaded, kept_names = {id(one) for one in stepped}, set(kept)
        changed: list[ParameterShard] = []
        for unit in self.runtime.units:
            own = [shard for shard in unit.shards if kept_names.isdisjoint(shard.slot.names)]
            unit.changed(own)
            changed += own
        self.runtime.given_values.forget(changed)
        self.runtime.lost.forget(changed)
        self.runtime.parameters_written([shard for shard in changed if id(shard) not in loaded])
