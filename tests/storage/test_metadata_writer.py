"""``0.metadata``, written as bytes, is loaded as the objects that Paddle would have saved; what another Paddle saves is left to it."""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.distributed.flex_checkpoint.dcp import metadata as paddle_module
from paddle.distributed.flex_checkpoint.dcp.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata

from paddle_fsdp_ckpt.storage import flex
from paddle_fsdp_ckpt.storage.columns import columns_of
from paddle_fsdp_ckpt.storage.entries import Box, Entry
from paddle_fsdp_ckpt.storage.index import CheckpointIndex
from paddle_fsdp_ckpt.storage.manifest import FileRecord
from paddle_fsdp_ckpt.storage.metadata import read_metadata
from paddle_fsdp_ckpt.storage.metadata_writer import metadata_blocks
from paddle_fsdp_ckpt.storage.table import PieceTable, table_of

DTYPES = ["float32", "bfloat16", "int64"]
KEYS = st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), st.text("aé層😀", min_size=60, max_size=300))


def box_of(shape: tuple[int, ...], offset: tuple[int, ...] | None = None, local: tuple[int, ...] | None = None) -> Box:
    local = shape if local is None else local
    return Box(shape, offset or (0,) * len(shape), local, math.prod(local))


@st.composite
def files(draw: st.DrawFn) -> list[list[Entry]]:
    """Draw what some files hold of some tensors, often the same; some of it is of so many elements that it needs long integers."""
    keys = draw(st.lists(KEYS, unique=True, max_size=4))
    dims = st.lists(st.sampled_from([1, 2, 3, 255, 256]), max_size=5)
    shapes = [(*draw(st.sampled_from([(), (0xFFFF,), (1 << 16,), ((1 << 31) - 1,), (1 << 31,)])), *draw(dims)[:3]) for _ in keys]
    dtypes = [draw(st.sampled_from(DTYPES)) for _ in keys]
    drawn = []
    for _ in range(draw(st.integers(0, 3))):
        entries = []
        for key, shape, dtype in zip(keys, shapes, dtypes, strict=True):
            box = box_of(shape)
            if shape and draw(st.booleans()):
                box = box_of(shape, (shape[0] - 1, *[0] * (len(shape) - 1)), (1, *shape[1:]))
            start = draw(st.sampled_from([0, box.numel // 2]))
            if draw(st.integers(0, 3)):
                entries.append((key, dtype, box, start, draw(st.sampled_from([box.numel, start + 1])), 0))
        drawn.append(entries)
    return drawn


def names_of(several: list[list[Entry]]) -> list[str]:
    return [f"{number}_0.safetensors" for number in range(len(several))]


def table_for(several: list[list[Entry]]) -> PieceTable:
    table = table_of([columns_of(entries) for entries in several])
    assert table is not None
    return table


def by_paddle(several: list[list[Entry]], index_class: Callable[..., Any] = LocalTensorIndex) -> Metadata:
    """What they hold, as Paddle has it; of equal parts only the first counts."""
    metadata = Metadata({}, {}, {})
    held: dict[str, list[tuple[str, Entry]]] = {}
    for name, entries in zip(names_of(several), several, strict=True):
        for entry in entries:
            held.setdefault(entry[0], []).append((name, entry))
    for key, those in held.items():
        descriptions = []
        for name, (_, dtype, box, start, stop, _) in those:
            flat = (start, stop) if stop - start < box.numel else None
            one = LocalTensorMetadata(box.global_offset, box.local_shape, dtype, box.global_shape, flat is not None, flat)
            if one not in descriptions:
                descriptions.append(one)
                index = index_class(key, one.global_offset, one.is_flattened, one.flattened_range, None, one.local_shape)
                metadata.storage_metadata[index] = name
        metadata.state_dict_metadata[key] = descriptions
        metadata.flat_mapping[key] = (key,)
    return metadata


def in_order(metadata: Metadata) -> str:
    """All of it, types and orders included."""
    return repr({name: list(table.items()) for name, table in vars(metadata).items()})


@settings(max_examples=100)
@given(files())
def test_paddle_loads_what_it_would_have_saved(several: list[list[Entry]]) -> None:
    encoded = b"".join(metadata_blocks(table_for(several), names_of(several)))
    expected = by_paddle(several)
    loaded = paddle.load(io.BytesIO(encoded))
    assert loaded == expected
    assert in_order(loaded) == in_order(expected) == in_order(pickle._loads(encoded))  # that one checks frames too
    assert all(list(vars(one)) == list(vars(other)) for one, other in zip(loaded.storage_metadata, expected.storage_metadata, strict=True))
    pickletools.dis(encoded, io.StringIO())  # raises where stack or memo are misused
    read = list(read_metadata(io.BytesIO(encoded), len(encoded), "it"))
    assert [(one.key, one.file_name) for one in read] == [(where.tensor_key, name) for where, name in expected.storage_metadata.items()]


def test_many_keys_take_little_memory_beside_them() -> None:
    """More than two bytes can count, in blocks that stay small."""
    shapes = [box_of((size, 3)) for size in (1, 2, 300)]
    several: list[list[Entry]] = [[], [], []]
    for number in range(70_000):
        box = shapes[number % 3]
        several[number % 2].append((f"layers.{number}.weight.moment1_0", DTYPES[number % 2], box, 0, box.numel - number % 2, 0))
    several[2] = [("", "float32", shapes[0], 0, 3, 0), ("é" * 200, "float32", shapes[0], 0, number % 3 + 1, 0)]
    several[1].append(("", "float32", shapes[0], 0, 3, 0))
    table = table_for(several)
    tracemalloc.start()
    sizes = list(map(len, metadata_blocks(table, names_of(several))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(sizes) < 1 << 19
    assert peak < 70_000 * 100, "columns of numbers, and a block; an object for each key would take several times as much"
    encoded = b"".join(metadata_blocks(table, names_of(several)))
    assert in_order(paddle.load(io.BytesIO(encoded))) == in_order(by_paddle(several))


@dataclass(frozen=True)
class Changed:
    """A LocalTensorIndex of which a pickle of today lacks a field."""

    tensor_key: str
    global_offset: tuple[int, ...]
    is_flattened: bool = False
    flattened_range: tuple[int, ...] | None = None
    replica_id: int | None = None
    local_shape: tuple[int, ...] | None = None
    axes: tuple[int, ...] = field(default_factory=lambda: (7,))


@dataclass(frozen=True)
class Refusing(LocalTensorIndex):
    """A LocalTensorIndex that doesn't take attributes by their names."""

    def __getstate__(self) -> list[object]:
        return list(vars(self).values())

    def __setstate__(self, state: list[object]) -> None:
        vars(self).update(zip(vars(LocalTensorIndex("", ())), state, strict=True))


@pytest.mark.parametrize("cls", [Changed, Refusing, None])
def test_other_classes_are_left_to_paddle(cls: type | None, monkeypatch: pytest.MonkeyPatch) -> None:
    box = box_of((4, 6))
    several: list[list[Entry]] = [[("w", "float32", box, 0, 12, 0)], [("w", "float32", box, 12, 24, 0), ("é", "int64", box, 0, 24, 0)]]
    if cls is not None:
        cls.__module__, cls.__qualname__ = paddle_module.__name__, "LocalTensorIndex"
        monkeypatch.setattr(paddle_module, "LocalTensorIndex", cls)
        monkeypatch.setattr(flex, "LocalTensorIndex", cls)
    records = tuple(FileRecord(name, 0, 0, "") for name in names_of(several))
    index = CheckpointIndex(Path(), records, {}, {}).with_table(table_for(several))
    blocks = list(flex.paddle_metadata(index))
    assert (len(blocks) == 1) == (cls is not None)
    loaded = paddle.load(io.BytesIO(b"".join(blocks)))
    expected = by_paddle(several, cls or LocalTensorIndex)
    assert loaded == expected
    assert in_order(loaded) == in_order(expected)
    assert list(loaded.flat_mapping) == ["w", "é"]
