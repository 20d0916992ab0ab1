"""What errors call the keys of a checkpoint's files, among which are some that belong to no model."""

from __future__ import annotations

RESERVED_PREFIX = "@paddle_fsdp_ckpt/"
"""How the keys begin of what ``CheckpointManager`` keeps beside model and optimizers; see :mod:`.reserved_keys`."""


def say_key(key: str) -> str:
    """Return what an error calls a key: a user's by its name, and one of what a manager keeps by what it is."""
    if not key.startswith(RESERVED_PREFIX):
        return f"key '{key}'"
    kind, _, name = key.removeprefix(RESERVED_PREFIX).partition("/")
    said = {
        "common": "what the manager kept beside the model (extra_state, schedulers, scaler)",
        "metrics": "the metrics",
        "rank": f"what the manager kept of rank {name} alone (random numbers, rank_state)",
        "sharded": f"key '{name}' of the tensors given by sharded=",
    }
    return said.get(kind, f"key '{key}'")
