"""What all ranks must give alike to a save: each describes its own, and rank 0 compares."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from .differing_values import describe_values, raise_difference
from .errors import RankFailedError, listing
from .host_memory import bytes_of
from .meeting import check_same, digest_of
from .storage.agreement import COORDINATOR
from .storage.digests import digest
from .storage.json_values import JsonValue
from .subjects import Subjects
from .warn import warn_caller

_ARGUMENTS = ("path", "step", "overwrite", "trainable_only")
_WRITTEN = "what set_value was given since the last step (use load_full_state_dict for what one rank has)"
_PLAIN = "weights of a model that is not sharded (was fully_shard forgotten?)"


def describe_own(
    subjects: Subjects,
    sharded: Mapping[str, ShardedWeight],
    *,
    path: Path,
    step: int | None,
    overwrite: bool,
    extra_state: JsonValue,
    trainable_only: bool,
) -> JsonValue:
    """Return what :func:`check_same_saving` compares. It reads all that every rank has whole.

    Args:
        subjects: what is saved.
        sharded: this rank's parts of tensors of the user's own; see :func:`is_whole`.
        path: the target; it and the rest are arguments of the save.
        step: the number.
        overwrite: or not.
        extra_state: JSON values.
        trainable_only: or all.
    """
    return {
        "alike": {
            "path": str(path),
            "model and optimizers": subjects.digest(),
            "step": step,
            "overwrite": overwrite,
            "trainable_only": trainable_only,
            _PLAIN: _weights_digest(subjects),
            _WRITTEN: subjects.sharding.written,
        },
        "whole": {key: digest(bytes_of(weight.local_tensor)) for key, weight in sorted(sharded.items()) if is_whole(weight)},
        "extra_state": digest_of(_encode(extra_state).hex()),
        "buffers": {name: zlib.crc32(bytes_of(buffer)) for name, buffer in subjects.buffers},
        "replica": _replica(subjects),
    }


def is_whole(weight: ShardedWeight) -> bool:
    """Tell whether a rank has all of a tensor, so that all ranks must have the same."""
    return tuple(weight.local_shape) == tuple(weight.global_shape) and not weight.is_flattened


def check_same_saving(ranks: Sequence[JsonValue]) -> None:
    """Raise where ranks gave what must be the same and is not, but for ``extra_state``; warn where buffers differ.

    Args:
        ranks: what :func:`describe_own` returned on each.

    Raises:
        RankFailedError: naming what differs.
    """
    for what in ranks[COORDINATOR]["alike"]:
        check_same("save", what, [one["alike"][what] for one in ranks], "nothing was written", shown=what in _ARGUMENTS)
    _check_same_replicas([one["replica"] for one in ranks])
    _check_same_whole([one["whole"] for one in ranks])
    buffers = [one["buffers"] for one in ranks]
    differing = [name for name, checksum in buffers[COORDINATOR].items() if any(other[name] != checksum for other in buffers)]
    if differing:
        warn_caller(
            f"buffers differ between ranks, and rank {COORDINATOR}'s are saved: {listing(differing)}; a resumed run has these everywhere"
        )


def has_same_extra_state(ranks: Sequence[JsonValue]) -> bool:
    """Tell whether all ranks gave the same ``extra_state``, of what :func:`describe_own` returned on each."""
    return len({one["extra_state"] for one in ranks}) == 1


def describe_extra_state(extra_state: JsonValue) -> JsonValue:
    """Return what :func:`raise_other_extra_state` compares."""
    return describe_values({"extra_state": extra_state}, _encode)


def raise_other_extra_state(ranks: Sequence[JsonValue]) -> None:
    """Raise, and say what differs in what ranks gave as ``extra_state``.

    Raises:
        RankFailedError: naming the first value that does.
    """
    raise_difference(
        "save", ranks, {"extra_state": "Give all ranks the same; a CheckpointManager keeps what is a rank's own, by rank_state="}
    )


def _encode(extra_state: JsonValue) -> bytes:
    return json.dumps(extra_state, sort_keys=True).encode()


def _replica(subjects: Subjects) -> JsonValue:
    """Return which shard this rank keeps, and digests of its parameters and states, where other replicas keep it too."""
    sharding = subjects.sharding
    if sharding.communicator.replica_count == 1:
        return None
    parameters = [shard.tensor for shard in sharding.flat_shards()]
    states = [state.tensor for one in subjects.steppers for state in sharding.states(one.optimizer, one.parameters)]
    of_values = [digest_of(" ".join(digest(bytes_of(tensor)) for tensor in tensors)) for tensors in (parameters, states)]
    return [sharding.communicator.rank, *of_values]


def _check_same_replicas(ranks: list[JsonValue]) -> None:
    """Raise where replicas have parted, as each writes a part of the checkpoint."""
    first: dict[int, tuple[int, list[str]]] = {}
    for rank, replica in enumerate(ranks):
        if replica is not None:
            shard, *values = replica
            other, right = first.setdefault(shard, (rank, values))
            if values != right:
                what = "parameters" if values[0] != right[0] else "optimizer states"
                raise RankFailedError(
                    f"save: ranks {other} and {rank} are replicas, and their {what} differ; nothing was written. Was something "
                    "written to them, by set_value or inside local_parameters, that wasn't the same on all replicas?"
                )


def _check_same_whole(ranks: Sequence[dict[str, str]]) -> None:
    """Raise where ranks gave different tensors under one key, of which each says that it has all."""
    first = ranks[COORDINATOR]
    differing = {key for one in ranks for key in {*first, *one} if one.get(key) != first.get(key)}
    if differing:
        raise RankFailedError(
            f"sharded: ranks gave different values, or some none, under keys of which each has all: {listing(sorted(differing))}; nothing "
            "was written. Give different tensors different keys, or say which part of a larger one they are"
        )


def _weights_digest(subjects: Subjects) -> str:
    """Return a digest of the values of plain models' parameters."""
    plain = [named.parameter for named in subjects.parameters if named.names[0] in subjects.whole_keys]
    return digest_of(" ".join(digest(bytes_of(parameter)) for parameter in plain))
