"""``{id}.metadata`` of every version of Paddle gives the same data, and what contradicts itself is refused."""

from __future__ import annotations

import io
import pickle
import sys
import time
import types
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.distributed.flex_checkpoint.dcp.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata

from paddle_fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError
from paddle_fsdp_ckpt.storage.entries import Box
from paddle_fsdp_ckpt.storage.metadata import StockPiece, read_metadata


def read(pickled: bytes) -> list[StockPiece]:
    return list(read_metadata(io.BytesIO(pickled), len(pickled), "'0.metadata'"))


def dumped(metadata: object) -> bytes:
    return pickle.dumps(metadata, protocol=4)


WHOLE = LocalTensorMetadata((0,), (1,), "float32", (1,))
BOX = LocalTensorMetadata((0, 4), (6, 4), "bfloat16", (6, 8))
FLAT = LocalTensorMetadata((0, 0), (6, 4), "bfloat16", (6, 8), True, (3, 24))


def index_of(key: str, one: LocalTensorMetadata, replica: int | None = None) -> LocalTensorIndex:
    return LocalTensorIndex(key, one.global_offset, one.is_flattened, one.flattened_range, replica, one.local_shape)


def metadata() -> Metadata:
    storage = {
        index_of("w", FLAT): "0_0.distcp",
        index_of("w", BOX): "1_0.distcp",
        index_of("s", WHOLE, 0): "1_0.distcp",
        index_of("s", WHOLE, 1): "0_0.distcp",
    }
    return Metadata({"w": [FLAT, BOX], "s": [WHOLE]}, storage, {"w": ("w",), "s": ("s",)})


def test_every_part_has_its_file() -> None:
    assert read(dumped(metadata())) == [
        StockPiece("w", "bfloat16", Box((6, 8), (0, 0), (6, 4), 24), 3, 24, "0_0.distcp", False),
        StockPiece("w", "bfloat16", Box((6, 8), (0, 4), (6, 4), 24), 0, 24, "1_0.distcp", False),
        StockPiece("s", "float32", Box((1,), (0,), (1,), 1), 0, 1, "1_0.distcp", False),
        StockPiece("s", "float32", Box((1,), (0,), (1,), 1), 0, 1, "0_0.distcp", True),
    ]


def test_older_paddle_said_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in paddle/distributed/checkpoint/metadata.py of Paddle 2.6 to 3.1; the first had no dtype."""

    @dataclass
    class LocalTensorMetadata:
        global_offset: tuple[int, ...]
        local_shape: tuple[int, ...]

    @dataclass(frozen=True)
    class LocalTensorIndex:
        tensor_key: str
        global_offset: tuple[int, ...]

    @dataclass
    class Metadata:
        state_dict_metadata: Any = None
        storage_metadata: Any = None
        flat_mapping: Any = None

    old = types.ModuleType("paddle.distributed.checkpoint.metadata")
    for cls in (LocalTensorMetadata, LocalTensorIndex, Metadata):
        cls.__module__, cls.__qualname__ = old.__name__, cls.__name__
        setattr(old, cls.__name__, cls)
    package = types.ModuleType("paddle.distributed.checkpoint")
    package.metadata = old  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, old.__name__, old)
    parts = {"w": [LocalTensorMetadata((0, 0), (2, 3)), LocalTensorMetadata((2, 0), (1, 3))], "s": [LocalTensorMetadata((), ())]}
    places = [("w", (0, 0), "0_0.distcp"), ("w", (2, 0), "1_0.distcp"), ("s", (), "0_0.distcp")]
    storage = {LocalTensorIndex(key, offset): name for key, offset, name in places}
    assert read(dumped(Metadata(parts, storage, {}))) == [
        StockPiece("w", None, Box((3, 3), (0, 0), (2, 3), 6), 0, 6, "0_0.distcp", False),
        StockPiece("w", None, Box((3, 3), (2, 0), (1, 3), 3), 0, 3, "1_0.distcp", False),
        StockPiece("s", None, Box((), (), (), 1), 0, 1, "0_0.distcp", False),
    ]


def changed(**fields: Any) -> Metadata:
    """The first part described otherwise."""
    one = metadata()
    one.state_dict_metadata["w"][0] = replace(FLAT, **fields)
    return one


def without(key: str) -> Metadata:
    one = metadata()
    del one.state_dict_metadata[key]
    return one


def unplaced() -> Metadata:
    one = metadata()
    del one.storage_metadata[index_of("w", BOX)]
    return one


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"w": 1}, "where a Metadata should be"),
        (None, "where a Metadata should be"),
        (Metadata(), "lacks its tables"),
        (Metadata({"w": "x"}, {}, {}), "table of tensors is none"),
        (Metadata({"w": ["x"]}, {"w": "0_0.distcp"}, {}), "where a LocalTensorMetadata should be"),
        (Metadata({"w": [WHOLE]}, {"w": "0_0.distcp"}, {}), "where a LocalTensorIndex should be"),
        (Metadata({"w": [WHOLE]}, {index_of("w", WHOLE): 5}, {}), "name is not a text"),
        (changed(global_offset=(0, 1)), "0 descriptions of 'w'"),
        (changed(flattened_range=(3, 23)), "0 descriptions of 'w'"),
        (changed(local_shape=(6, 5)), "0 descriptions of 'w'"),
        (changed(global_shape=(6,)), "different numbers of dimensions"),
        (changed(global_shape=(6, 3)), "doesn't lie inside"),
        (changed(global_shape=(6, -3)), "not a tuple of whole numbers"),
        (changed(global_shape=(6.0, 8)), None),
        (changed(dtype=5), "a dtype is not a text"),
        (changed(is_flattened=1), "neither true nor false"),
        (changed(flattened_range=(3, 4, 5)), "not a pair"),
        (changed(flattened_range=None), "not a tuple of whole numbers"),
        (without("w"), "0 descriptions of 'w'"),
        (unplaced(), "no file is said to hold 'w'"),
    ],
)
def test_what_contradicts_itself_is_refused(wrong: Any, text: str | None) -> None:
    with pytest.raises(CorruptCheckpointError if text else UnsafeCheckpointError, match=text):
        read(dumped(wrong))


def test_one_list_under_many_keys_makes_no_endless_work() -> None:
    """A file of a few MB could ask for a million times a million parts."""
    shared = [replace(WHOLE, local_shape=(i,)) for i in range(20_000)]
    bomb = Metadata({f"{i}": shared for i in range(20_000)}, {index_of("w", WHOLE): "0_0.distcp"}, {})
    pickled = dumped(bomb)
    started = time.monotonic()
    with pytest.raises(CorruptCheckpointError, match="describes more parts"):
        read(pickled)
    assert time.monotonic() - started < 10


def test_arrays_have_no_place_in_it() -> None:
    import numpy as np

    with pytest.raises(UnsafeCheckpointError, match="_reconstruct"):
        read(dumped(changed(global_offset=np.zeros(2))))


SEED = dumped(metadata())


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SEED) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_mutated_files_end_in_data_or_an_error(changes: list[tuple[int, int]]) -> None:
    mutated = bytearray(SEED)
    for position, byte in changes:
        mutated[position] = byte
    with suppress(CheckpointError):
        read(bytes(mutated))
