"""The base that an adapter belongs to: parameters that don't train, told apart by checksums instead of being stored.

Each rank sums over the elements of its own pieces, and rank 0 adds these sums up, so that nothing is gathered, and the checksum of a
parameter is the same however the model is cut.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from .errors import CheckpointError, listing
from .fsdp import dtype_name
from .host_memory import chunks_of
from .lora_layers import merged_lora_layers
from .meeting import check_same, digest_of
from .storage.agreement import COORDINATOR
from .storage.base_parameter import BaseParameter
from .storage.checksums import checksum_text, seed_of, sum_of_elements
from .storage.json_values import JsonValue
from .subjects import Subjects


@dataclass(frozen=True, eq=False)
class ParameterPart:
    """One parameter of a model, and what this rank has of it.

    Attributes:
        names: all of them, sorted.
        dtype: Paddle's dtype name.
        shape: of the whole parameter.
        trains: whether optimizers step it.
        values: this rank's elements, one after another; None where it has none.
        first: position of the first of them in the flattened parameter.
        changes: how often they were written to; None where nobody counts.
    """

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    trains: bool
    values: paddle.Tensor | None
    first: int = 0
    changes: int | None = None

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def seed(self) -> int:
        """What its checksum begins with."""
        return seed_of(self.dtype, self.shape)

    def sum_of_elements(self) -> int:
        """Return this rank's part of the checksum, in bounded memory wherever the values are."""
        if self.values is None:
            return 0
        total, first, itemsize = 0, self.first, int(self.values.element_size())
        for chunk in chunks_of(self.values):
            total += sum_of_elements(chunk, itemsize, first, self.seed)
            first += len(chunk) // itemsize
        return total % (1 << 64)


def parameter_parts(subjects: Subjects) -> list[ParameterPart]:
    """Return the parameters of a model, in the same order on every rank; none where no model is given."""
    if subjects.model is None:
        return []
    if subjects.sharding.is_plain:
        return [
            ParameterPart(
                tuple(sorted(named.names)),
                dtype_name(named.parameter),
                tuple(named.parameter.shape),
                not named.parameter.stop_gradient,
                named.parameter.detach(),
            )
            for named in subjects.parameters
        ]
    parts = []
    rank = subjects.sharding.communicator.rank
    for shard in subjects.sharding.flat_shards():
        start = shard.layout.shard(rank).start
        for number, (slot, trains) in enumerate(zip(shard.layout.slots, shard.trainable, strict=True)):
            mine = shard.layout.local_range(slot, rank)
            at = slot.offset + mine.start - start
            values = shard.tensor._slice(at, at + mine.numel) if mine.numel else None
            changes = None if shard.changes is None else shard.changes[number]
            parts.append(ParameterPart(slot.names, shard.layout.dtype, slot.shape, trains, values, mine.start, changes))
    return parts


@dataclass(frozen=True, eq=False)
class LeftOut:
    """What a save leaves out of a model.

    Attributes:
        keys: of the parameters of which this rank leaves out what it has.
        message: what this rank tells rank 0 of them.
    """

    keys: frozenset[str]
    message: JsonValue
    _subjects: Subjects
    _parts: Sequence[ParameterPart]

    def describe(self, messages: Sequence[JsonValue]) -> dict[str, BaseParameter]:
        """Return what the manifest says of the base, on rank 0, from the messages of all ranks in order.

        Raises:
            RankFailedError: ranks differ in which parameters don't train.
        """
        check_same("save", "frozen parameters (stop_gradient)", [one["names"] for one in messages], "nothing was written", shown=False)
        trained = {name for one in messages for name in one["trained"]}
        of_saved = checksums(self._subjects, self._parts, [one["sums"] for one in messages])[COORDINATOR]
        return {
            part.name: BaseParameter(part.dtype, part.shape, checksum)
            for part, checksum in zip(self._parts, of_saved, strict=True)
            if part.name not in trained
        }

    def was_heard(self) -> None:
        """Remember that the meeting ended well."""
        note_told(self._subjects, self.message["sums"])


def leave_out_base(subjects: Subjects) -> LeftOut:
    """Return what is left out where only what trains is saved, and what tells it apart.

    Raises:
        CheckpointError: nothing trains, or LoRA layers are merged, so that the base is not what it was.
    """
    assert subjects.model is not None
    merged = merged_lora_layers(subjects.model)
    if merged:
        raise CheckpointError(
            f"trainable_only: the weights of LoRA layers hold their adapters at the moment: {listing(merged)}; unmerge them first, or the "
            "checkpoint would belong to a base that there is nowhere else"
        )
    parts = parameter_parts(subjects)
    if not any(part.trains for part in parts):
        raise CheckpointError("trainable_only: no parameter trains (all have stop_gradient), so there is nothing to save")
    frozen = [part for part in parts if not part.trains]
    trained = _trained_names(subjects, frozen)
    message = {
        "names": digest_of(" ".join(part.name for part in frozen)),
        "trained": sorted(trained),
        "sums": own_sums(subjects, frozen),
    }
    keys = frozenset(name for part in frozen if part.name not in trained for name in part.names)
    return LeftOut(keys, message, subjects, frozen)


def _trained_names(subjects: Subjects, parts: Sequence[ParameterPart]) -> set[str]:
    """Return those of the parameters of which this rank has optimizer states: they trained before."""
    states = (state for one in subjects.steppers for state in subjects.sharding.states(one.optimizer, one.parameters))
    return {part.name for part in parts}.intersection(state.shard.slot.name for state in states)


def own_sums(subjects: Subjects, parts: Sequence[ParameterPart]) -> JsonValue:
    """Return what this rank tells rank 0 of the checksums of some parameters; little, where it has told it before."""
    known = subjects.sharding.known_sums
    sums = []
    for part in parts:
        found = None if known is None or part.changes is None or not known.are_trusted else known.mine.get(part.name)
        if found is None or found[0] != part.changes:
            found = (part.changes or 0, part.sum_of_elements())
            if known is not None and part.changes is not None:
                known.mine[part.name] = found
        sums.append(found[1])
    encoded = base64.b64encode(np.array(sums, "<u8").tobytes()).decode()
    digest = digest_of(" ".join([encoded, *(part.name for part in parts)]))
    if known is not None and known.told == digest:
        return [digest, None]
    if known is not None:
        known.told = None  # until the meeting has ended well, nobody knows what rank 0 heard last
    return [digest, encoded]


def note_told(subjects: Subjects, message: JsonValue) -> None:
    """Remember, once the meeting has ended well, that rank 0 heard what :func:`own_sums` returned."""
    if subjects.sharding.known_sums is not None:
        subjects.sharding.known_sums.told = message[0]


def checksums(subjects: Subjects, parts: Sequence[ParameterPart], messages: Sequence[JsonValue]) -> list[list[str]]:
    """Return the checksums of parameters on rank 0; several lists where each rank, or replica, has all of a model by itself.

    Args:
        subjects: on rank 0.
        parts: for which each rank called :func:`own_sums`.
        messages: what that returned, in the order of the ranks.
    """
    known = subjects.sharding.known_sums
    sums = []
    for rank, (digest, encoded) in enumerate(messages):
        if encoded is None:
            assert known is not None
            assert known.heard[rank][0] == digest
            sums.append(known.heard[rank][1])
            continue
        sums.append(np.frombuffer(base64.b64decode(encoded), "<u8").tolist())
        if known is not None:
            known.heard[rank] = digest, sums[-1]
    sharding = subjects.sharding
    groups = [[one] for one in sums] if sharding.is_plain else [[sums[rank] for rank in row] for row in sharding.communicator.replicas]
    return [[checksum_text(part.seed, of_ranks) for part, *of_ranks in zip(parts, *group, strict=True)] for group in groups]


def other_base(
    subjects: Subjects, parts: Sequence[ParameterPart], messages: Sequence[JsonValue], base: Mapping[str, BaseParameter]
) -> list[str]:
    """Return the names of the parameters that are not what the base was when an adapter was saved, on rank 0.

    Args:
        subjects: that are loaded into.
        parts: their parameters that have names in ``base``.
        messages: see :func:`checksums`.
        base: what the checkpoint says, by every name.
    """
    differing: set[str] = set()
    for of_rank in checksums(subjects, parts, messages):
        for part, checksum in zip(parts, of_rank, strict=True):
            mine = BaseParameter(part.dtype, part.shape, checksum)
            differing.update(name for name in part.names if name in base and base[name] != mine)
    return sorted(differing)


def say_other_base(differing: Sequence[str], parameters: int) -> str:
    """Say that an adapter belongs to another base."""
    return (
        f"it was saved without its base, and this is another one: {len(differing)} of the base's {parameters} parameters have other "
        f"values, shapes or dtypes here: {listing(differing)}; load that base first (allow_other_base=True takes this one)"
    )
