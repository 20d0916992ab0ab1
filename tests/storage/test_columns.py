"""The columns in a header say what its JSON says; else they are refused, and a header without them, or changed, is read as JSON."""

from __future__ import annotations

import base64
import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import cut, edit_manifest, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from paddle_fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError
from paddle_fsdp_ckpt.layout import Range
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage import header as header_module
from paddle_fsdp_ckpt.storage.columns import FileColumns, columns_of
from paddle_fsdp_ckpt.storage.digests import Digester
from paddle_fsdp_ckpt.storage.entries import Box, Entry
from paddle_fsdp_ckpt.storage.format import DTYPE_NBYTES, LENGTH_NBYTES
from paddle_fsdp_ckpt.storage.header import decode_header, decode_header_columns, encode_header, encode_part, in_file_order
from paddle_fsdp_ckpt.storage.index import read_index
from paddle_fsdp_ckpt.storage.table import table_of
from paddle_fsdp_ckpt.storage.verify import verify

BEFORE = b'{"__metadata__":{"paddle_fsdp_ckpt.format_version":"1","paddle_fsdp_ckpt.columns":"'
WHOLE = np.arange(24, dtype=np.float32).reshape(4, 6)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4).filter(lambda key: key != "__metadata__")


@st.composite
def pieces(draw: st.DrawFn, key: str) -> Piece:
    """Draw a piece with elements, of a small tensor."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    offset, local = shape, shape
    if draw(st.booleans()):
        offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
        local = tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, offset, strict=True))
    else:
        offset = (0,) * len(shape)
    numel = int(np.prod(local))
    start = draw(st.integers(0, numel - 1))
    flat = Range(start, draw(st.integers(start + 1, numel))) if draw(st.booleans()) else None
    return Piece(key, draw(st.sampled_from(sorted(DTYPE_NBYTES))), shape, offset, local, flat)


@st.composite
def files(draw: st.DrawFn) -> list[Piece]:
    """Draw the pieces of a file, in its order."""
    keys = draw(st.lists(KEYS, unique=True, max_size=7))
    several = [draw(pieces(key)) for key in keys]
    return [several[i] for i in in_file_order(several)]


def data_nbytes(stored: list[Piece]) -> int:
    return sum(piece.numel * DTYPE_NBYTES[piece.dtype] for piece in stored)


def decode(header: bytes, nbytes: int) -> tuple[list[Entry] | None, list[Entry]]:
    """Return what a header's columns and its JSON say of a file with so many bytes of data."""
    encoded, size = header[LENGTH_NBYTES:], len(header) + nbytes
    columns = decode_header_columns(encoded, size, "'f'")
    return None if columns is None else list(columns.entries()), list(decode_header(encoded, size, "'f'"))


@given(files(), st.integers(1, 3), st.integers(0, 7))
def test_columns_say_what_the_json_says(stored: list[Piece], block: int, first: int) -> None:
    """However many blocks there are, and however many of the pieces were known before, which changes no byte of the header."""
    kept = header_module._BLOCK_LENGTH
    header_module._BLOCK_LENGTH = block
    try:
        header = encode_header(stored)
        assert header == encode_header(stored[first:], encode_part(stored[:first]))
    finally:
        header_module._BLOCK_LENGTH = kept
    by_columns, by_json = decode(header, data_nbytes(stored))
    assert by_columns == by_json
    assert header[LENGTH_NBYTES:].split(b'"')[9].count(b".") == -(-len(stored) // block) + (not stored)
    assert list(columns_of(by_json).entries()) == by_json


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(b'"shape":[4,6]', b'"shape":[6,4]'),
        lambda text: text.replace(b'\\"w\\":[[4,6]', b'\\"w\\":[[6,4]'),
        lambda text: text + b" ",
        lambda text: json.dumps(json.loads(text)).encode(),
        lambda text: text.replace(b"paddle_fsdp_ckpt.columns", b"paddle_fsdp_ckpt.kolumns"),
        lambda text: text.replace(b'ckpt.columns":"', b'ckpt.columns":"0'),
    ],
)
def test_columns_of_another_header_do_not_count(change: Callable[[bytes], bytes]) -> None:
    header = encode_header([cut("w", WHOLE)[0]])[LENGTH_NBYTES:]
    changed = change(header)
    assert changed != header
    assert decode_header_columns(changed, LENGTH_NBYTES + len(changed) + WHOLE.nbytes, "'f'") is None


def encode_text(keys: Any, dtypes: Any, outlines: Any, rows: list[tuple[int, ...]]) -> bytes:
    """Return a text of columns, made anew as the format says."""
    body = b"".join(struct.pack(f"<{len(rows)}{code}", *column) for code, column in zip("BIQQ", zip(*rows, strict=True), strict=True))
    return base64.b64encode(zlib.compress(json.dumps([keys, dtypes, outlines]).encode() + b"\n" + body))


def bind(*texts: bytes) -> bytes:
    """Return the header, without its length, that has these columns and, as if for them, the JSON of ``w``."""
    _, rest = encode_header([cut("w", WHOLE)[0]])[LENGTH_NBYTES + len(BEFORE) :].split(b'"', 1)
    return BEFORE + b".".join([xxh3_64_hexdigest(b'"' + rest).encode(), *texts]) + b'"' + rest


def read(*texts: bytes, nbytes: int = WHOLE.nbytes) -> FileColumns | None:
    encoded = bind(*texts)
    return decode_header_columns(encoded, LENGTH_NBYTES + len(encoded) + nbytes, "'f'")


GOOD: tuple[Any, Any, Any, list[tuple[int, ...]]] = (["w"], ["float32"], [[[4, 6]]], [(0, 0, 0, 24)])


def test_columns_are_read_as_the_format_says() -> None:
    columns = read(encode_text(*GOOD))
    assert columns is not None
    assert list(columns.entries()) == [
        ("w", "float32", Box((4, 6), (0, 0), (4, 6), 24), 0, 24, LENGTH_NBYTES + len(bind(encode_text(*GOOD))))
    ]
    two = read(
        encode_text(["w"], ["int8", "float32"], [[[4, 6]]], [(1, 0, 3, 24)]),
        encode_text(["v", "x"], ["bool"], [[[7]], [[4, 6], [1, 2], [2, 3]]], [(0, 1, 1, 5), (0, 0, 0, 7)]),
        nbytes=21 * 4 + 4 + 7,
    )
    assert two is not None
    assert [(key, dtype, box.local_shape, start, stop) for key, dtype, box, start, stop, _ in two.entries()] == [
        ("w", "float32", (4, 6), 3, 24),
        ("v", "bool", (2, 3), 1, 5),
        ("x", "bool", (7,), 0, 7),
    ]
    assert np.diff(two.offsets).tolist() == [21 * 4, 4]


@pytest.mark.parametrize(
    ("texts", "nbytes"),
    [
        ([encode_text(*GOOD)], 95),
        ([encode_text(*GOOD)], 97),
        ([encode_text(*GOOD)], 1 << 40),
        ([encode_text(*GOOD)] * 2, 192),  # a key twice
        ([b"!!!!"], 96),
        ([b"abc"], 96),
        ([base64.b64encode(b"no zlib")], 96),
        ([encode_text(*GOOD)[:-8]], 96),
        ([base64.b64encode(base64.b64decode(encode_text(*GOOD)) + b"more")], 96),
        ([base64.b64encode(zlib.compress(b"no json\n"))], 96),
        ([base64.b64encode(zlib.compress(b"[[]]"))], 96),
        ([base64.b64encode(zlib.compress(b"[[1],[2],[3]]\n" + b"\0" * 21))], 96),
        ([base64.b64encode(zlib.compress(b"[" * 100_000))], 96),
        ([encode_text(["\ud800"], *GOOD[1:])], 96),
        ([encode_text(["__metadata__"], *GOOD[1:])], 96),
        ([encode_text([["w"]], *GOOD[1:])], 96),
        ([encode_text({"w": 1}, *GOOD[1:])], 96),
        ([encode_text(["w", "v"], *GOOD[1:])], 96),
        ([encode_text([], *GOOD[1:])], 96),
        ([encode_text(["w"], ["float33"], *GOOD[2:])], 96),
        ([encode_text(["w"], [["float32"]], *GOOD[2:])], 96),
        ([encode_text(["w"], "float32", *GOOD[2:])], 96),
        ([encode_text(["w"], ["float32"], [*GOOD[2], [[1]]], GOOD[3])], 96),
        *(
            ([encode_text(["w"], ["float32"], outlines, GOOD[3])], 96)
            for outlines in (
                [],
                [[]],
                [[4, 6]],
                [[[4, "6"]]],
                [[[4.0, 6]]],
                [[[True, 24]]],
                [[[-4, -6]]],
                [[[4, 6], [0, 0]]],
                [[[4, 6], [1, 0], [4, 6]]],
                [[[1] * 65 + [24]]],
                [[[1 << 63]]],
                [[[1 << 40, 1 << 40]]],
                [[[[4], 6]]],
                "ab",
                [5],
            )
        ),
        *(
            ([encode_text(*GOOD[:3], [row])], 96)
            for row in ((1, 0, 0, 24), (0, 1, 0, 24), (0, 1 << 31, 0, 24), (0, 0, 0, 25), (0, 0, 1, 24), (0, 0, 24, 24), (0, 0, 24, 0))
        ),
        ([encode_text(["w"], ["float32"], [[[1 << 62]]], [(0, 0, 0, 1 << 62)])], 96),
        ([encode_text(["w"], ["float32"], [[[1 << 62]]], [(0, 0, 0, (1 << 64) - 1)])], 96),
        # Whole numbers of 64 bits would add up to 96 bytes.
        ([encode_text(["w", "v"], ["float32"], [[[1 << 62]]], [(0, 0, 0, 1 << 62), (0, 0, 0, 24)])], 96),
    ],
)
def test_malformed_columns_are_refused(texts: list[bytes], nbytes: int) -> None:
    with pytest.raises(CorruptCheckpointError, match="columns in the header of 'f' are malformed: .*; restore the file"):
        read(*texts, nbytes=nbytes)


@pytest.mark.parametrize("count", [1, 200])
def test_columns_never_take_much_more_memory_than_their_header(count: int) -> None:
    bomb = base64.b64encode(zlib.compress(b" " * (300 << 20)))
    with pytest.raises(CorruptCheckpointError, match="longer than it may be"):
        read(*[bomb] * count)


@settings(max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 21))
def test_odd_columns_are_refused_or_fit_the_file(odd: bytes, position: int) -> None:
    line, _, body = zlib.decompress(base64.b64decode(encode_text(*GOOD))).partition(b"\n")
    data = line + b"\n" + body[:position] + odd + body[position + len(odd) :]
    try:
        columns = read(base64.b64encode(zlib.compress(data)))
    except CheckpointError:
        return
    assert columns is not None
    assert [(stop - start) * DTYPE_NBYTES[dtype] for _, dtype, _, start, stop, _ in columns.entries()] == [96]


def rewrite_header(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the header of a checkpoint's first file, and the manifest so that it fits."""
    file = path / "0_0.safetensors"
    data = file.read_bytes()
    start = LENGTH_NBYTES + int.from_bytes(data[:LENGTH_NBYTES], "little")
    changed = change(data[LENGTH_NBYTES:start])
    file.write_bytes(len(changed).to_bytes(LENGTH_NBYTES, "little") + changed + data[start:])
    digester = Digester(LENGTH_NBYTES + len(changed))
    digester.update(memoryview(file.read_bytes()))
    record = {"size": file.stat().st_size, "header_nbytes": LENGTH_NBYTES + len(changed), "digests": digester.finish()}
    edit_manifest(path, lambda fields: fields["files"][0].update(record))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A weight that two files share, out of order, a box, and one of another dtype."""
    return write_checkpoint(
        tmp_path / "step",
        [
            [cut("w", WHOLE, flat=(13, 24)), cut("b", WHOLE, offset=(1, 2), local=(2, 3)), cut("@paddle_fsdp_ckpt/common", WHOLE)],
            [cut("n", np.arange(3)), cut("w", WHOLE, flat=(0, 13)), cut("b", WHOLE)],
        ],
    )


def test_a_checkpoint_from_before_there_were_columns_is_read_the_same(checkpoint: Path) -> None:
    before = read_index(checkpoint)

    def without_columns(header: bytes) -> bytes:
        fields = json.loads(header)
        del fields["__metadata__"]["paddle_fsdp_ckpt.columns"]
        return json.dumps(fields).encode()

    rewrite_header(checkpoint, without_columns)
    after = read_index(checkpoint)
    assert list(after.keys()) == list(before.keys()) and after.dtypes == before.dtypes
    shorter = [one.header_nbytes - other.header_nbytes for one, other in zip(before.files, after.files, strict=True)]
    assert shorter[0] > 0 == shorter[1]
    for key, pieces in before.stored.items():
        assert after.stored[key] == [(file, *place, offset - shorter[file]) for file, *place, offset in pieces]
    assert not verify(checkpoint).findings


def test_an_index_is_made_of_columns_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("paddle_fsdp_ckpt.storage.index.decode_header")
    assert read_index(checkpoint).keys() == {"w", "b", "n", "@paddle_fsdp_ckpt/common"}


def test_verify_finds_columns_that_say_something_else(checkpoint: Path) -> None:
    """Nothing but a defect of ours makes such, or somebody who means to deceive."""
    assert not verify(checkpoint).findings
    header = (checkpoint / "0_0.safetensors").read_bytes()
    columns = decode_header_columns(header[8 : 8 + int.from_bytes(header[:8], "little")], len(header), "'f'")
    assert columns is not None
    rows = list(
        zip(columns.dtype_numbers.tolist(), columns.box_numbers.tolist(), columns.starts.tolist(), columns.stops.tolist(), strict=True)
    )
    rows[0] = (*rows[0][:2], 12, 23)  # 11 elements of "w", but others
    outlines = [[list(box.global_shape), list(box.global_offset), list(box.local_shape)] for box in columns.boxes]
    text = encode_text(list(columns.keys), list(columns.dtypes), outlines, rows)

    def with_other_columns(encoded: bytes) -> bytes:
        _, rest = encoded[len(BEFORE) :].split(b'"', 1)
        return BEFORE + xxh3_64_hexdigest(b'"' + rest).encode() + b"." + text + b'"' + rest

    rewrite_header(checkpoint, with_other_columns)
    (finding,) = verify(checkpoint).findings
    assert finding.where == "0_0.safetensors" and "one thing in its JSON and another in its columns" in finding.text


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(["a", "ba", "bb", "c"]), st.integers(0, 5), st.integers(1, 6)), unique_by=lambda one: one[0]),
        max_size=4,
    )
)
def test_a_table_has_what_the_files_have(drawn: list[list[tuple[str, int, int]]]) -> None:
    box = Box((2, 3), (0, 0), (2, 3), 6)
    expected: dict[str, list[Any]] = {}
    stored: list[list[Entry]] = []
    for file, rows in enumerate(drawn):
        stored.append([(key, "int8", box, min(start, stop - 1), stop, 10 * file + start) for key, start, stop in rows])
        for key, _, *place in stored[-1]:
            expected.setdefault(key, []).append((file, *place))
    table = table_of([columns_of(rows) for rows in stored])
    assert table is not None
    for prefix, has in ((prefix, has) for prefix in ("d", "a", "b") for has in (False, True)):
        kept = {key: pieces for key, pieces in expected.items() if key.startswith(prefix) == has}
        part = table.only(prefix) if has else table.without(prefix)
        assert list(part.numbers.items()) == [(key, number) for number, key in enumerate(kept)]
        by_place = {
            key: [
                (int(part.files[i]), part.boxes[part.box_numbers[i]], int(part.starts[i]), int(part.stops[i]), int(part.offsets[i]))
                for i in range(part.first[number], part.first[number + 1])
            ]
            for key, number in part.numbers.items()
        }
        assert by_place == {key: sorted(pieces, key=lambda one: (one[2], one[0])) for key, pieces in kept.items()}
        assert part.dtype_of_each() == dict.fromkeys(kept, "int8")
        assert dict(part.walk()) == kept
        times = {key: [sum(start <= i < stop for _, _, start, stop, _ in pieces) for i in range(6)] for key, pieces in kept.items()}
        assert part.uncovered_keys() == [key for key, of_each in times.items() if of_each != [1] * 6]


def test_a_box_does_not_cover_a_tensor() -> None:
    """Though it has as many elements as are asked for."""
    half, whole = Box((2, 3), (0, 0), (1, 3), 3), Box((2, 3), (0, 0), (2, 3), 6)
    table = table_of(
        [columns_of([("a", "int8", half, 0, 3, 0), ("b", "int8", whole, 0, 3, 3)]), columns_of([("a", "int8", whole, 3, 6, 0)])]
    )
    assert table is not None and table.uncovered_keys() == ["a", "b"]


def test_a_table_is_only_of_files_that_agree() -> None:
    one: Entry = ("a", "int8", Box((6,), (0,), (6,), 6), 0, 6, 0)
    for other in (("a", "bool", *one[2:]), ("a", "int8", Box((2, 3), (0, 0), (2, 3), 6), 0, 6, 0)):
        assert table_of([columns_of([one]), columns_of([other])]) is None
    assert table_of([]) is not None


def test_files_are_let_go_of_one_by_one() -> None:
    """Many that have the same keys, of 200 bytes each, take little more than their columns."""
    files, keys = 64, 1000
    box = Box((64, 6), (0, 0), (64, 6), 384)

    def read() -> Iterator[FileColumns]:
        for file in range(files):
            yield columns_of((f"{key:0150}", "int8", box, 6 * file, 6 * file + 6, 6 * key) for key in range(keys))

    tracemalloc.start()
    table = table_of(read())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table is not None and len(table.starts) == files * keys and table.uncovered_keys() == []
    assert peak < 600 * keys + 120 * files * keys
