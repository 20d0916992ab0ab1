from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError, NewerFormatError, UnsafeCheckpointError
from paddle_fsdp_ckpt.layout import Range
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.format import DTYPE_NBYTES, LENGTH_NBYTES, MAX_HEADER_NBYTES
from paddle_fsdp_ckpt.storage.header import decode_header, encode_header, encode_part, header_nbytes, in_file_order

PIECES = [
    Piece("whole", "float32", (4, 6), (0, 0), (4, 6)),
    Piece("flat", "float32", (4, 6), (0, 0), (4, 6), Range(5, 17)),
    Piece("box", "float32", (4, 6), (1, 2), (2, 3)),
    Piece("flat of a box", "bfloat16", (4, 6), (1, 2), (2, 3), Range(1, 4)),
    Piece("scalar", "float32", (), (), ()),
    Piece('a "quoted"\n\\ key', "int64", (1,), (0,), (1,)),
]
"""In any order; :data:`STORED` is what a file makes of them."""

STORED = [PIECES[i] for i in in_file_order(PIECES)]
NBYTES = sum(piece.numel * DTYPE_NBYTES[piece.dtype] for piece in PIECES)


def decode(encoded: bytes, data_nbytes: int = NBYTES) -> list[Any]:
    return list(decode_header(encoded, LENGTH_NBYTES + len(encoded) + data_nbytes, "'f'"))


def edit(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return the header of PIECES with its JSON, descriptions unpacked, changed."""
    header = json.loads(encode_header(STORED)[LENGTH_NBYTES:])
    metadata = header["__metadata__"]
    metadata["paddle_fsdp_ckpt.pieces"] = json.loads(metadata["paddle_fsdp_ckpt.pieces"])
    change(header)
    if isinstance(metadata.get("paddle_fsdp_ckpt.pieces"), dict):
        metadata["paddle_fsdp_ckpt.pieces"] = json.dumps(metadata["paddle_fsdp_ckpt.pieces"])
    return json.dumps(header).encode()


def descriptions(header: dict[str, Any]) -> dict[str, Any]:
    return header["__metadata__"]["paddle_fsdp_ckpt.pieces"]  # type: ignore[no-any-return]


def test_a_header_says_what_was_encoded() -> None:
    encoded = encode_header(STORED)
    assert header_nbytes(encoded[:LENGTH_NBYTES], len(encoded) + NBYTES, "f") == len(encoded) - LENGTH_NBYTES
    position = len(encoded)
    entries = decode(encoded[LENGTH_NBYTES:])
    assert len(entries) == len(STORED)
    for piece, (key, dtype, box, start, stop, byte_offset) in zip(STORED, entries, strict=True):
        assert (key, dtype) == (piece.key, piece.dtype)
        assert box == (piece.global_shape, piece.global_offset, piece.local_shape, math.prod(piece.local_shape))
        assert Range(start, stop) == piece.box_range
        assert byte_offset == position
        position += piece.numel * DTYPE_NBYTES[dtype]


def test_the_json_may_be_in_any_order() -> None:
    def reverse(header: dict[str, Any]) -> None:
        for key in list(header)[::-1]:
            header[key] = header.pop(key)

    assert [entry[0] for entry in decode(edit(reverse))] == [piece.key for piece in STORED]


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.pop("__metadata__"),
        lambda header: header["__metadata__"].pop("paddle_fsdp_ckpt.pieces"),
        lambda header: header["__metadata__"].pop("paddle_fsdp_ckpt.format_version"),
        lambda header: header["__metadata__"].update({"paddle_fsdp_ckpt.format_version": "one"}),
        lambda header: header["__metadata__"].update({"paddle_fsdp_ckpt.format_version": "0"}),
        lambda header: header["__metadata__"].update({"paddle_fsdp_ckpt.pieces": "[]"}),
        lambda header: header["__metadata__"].update({"paddle_fsdp_ckpt.pieces": '{"a": [[1]], "a": [[1]]}'}),
        lambda header: header["__metadata__"].update({"paddle_fsdp_ckpt.pieces": 7}),
        lambda header: header.update({"__metadata__": []}),
        lambda header: descriptions(header).pop("flat"),
        lambda header: descriptions(header).update({"more": [[4]]}),
        lambda header: header.update({"more": header["flat"]}),
        lambda header: header["flat"].update({"data_offsets": "0"}),
        lambda header: header["flat"].pop("data_offsets"),
        lambda header: header.update({"flat": []}),
    ],
)
def test_a_header_that_does_not_belong_to_its_descriptions_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(CorruptCheckpointError, match="'f'.*restore the file"):
        decode(edit(change))


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["flat"].update({"dtype": "F8"}),
        lambda header: header["flat"].update({"dtype": ["F32"]}),
        lambda header: header["flat"].update({"dtype": "F64"}),
        lambda header: header["flat"].update({"shape": [13]}),
        lambda header: header["flat"].update({"shape": "12"}),
        lambda header: header["flat"].update({"stride": [1]}),
        lambda header: header["flat"]["data_offsets"].append(3),
        lambda header: header["flat"]["data_offsets"].__setitem__(1, 0),
        lambda header: header["flat"]["data_offsets"].__setitem__(1, header["flat"]["data_offsets"][1] + 4),
        lambda header: header["flat"].update({"data_offsets": [n + 4 for n in header["flat"]["data_offsets"]]}),
        lambda header: descriptions(header).update({"flat": []}),
        lambda header: descriptions(header).update({"flat": 5}),
        lambda header: descriptions(header).update({"flat": "ab"}),
        lambda header: descriptions(header).update({"flat": [[4, 6], [5, 18]]}),
        lambda header: descriptions(header).update({"flat": [[4, 6], [17, 5]]}),
        lambda header: descriptions(header).update({"flat": [[4, 6], [-5, 7]]}),
        lambda header: descriptions(header).update({"flat": [[4, 6], [5.0, 17]]}),
        lambda header: descriptions(header).update({"flat": [[4, 6], [13, 25]]}),
        lambda header: descriptions(header).update({"flat": [[4, 6], [5, 17, 18]]}),
        lambda header: descriptions(header).update({"flat": [[4, "6"], [5, 17]]}),
        lambda header: descriptions(header).update({"flat": [[4.5, 6], [5, 17]]}),
        lambda header: descriptions(header).update({"flat": [[4, -6], [5, 17]]}),
        lambda header: descriptions(header).update({"flat": [[4, [6]], [5, 17]]}),
        lambda header: descriptions(header).update({"flat": [[4, 6], [0], [4, 6], [5, 17]]}),
        lambda header: descriptions(header).update({"flat": [[4, 6], [1, 0], [4, 6], [5, 17]]}),
        lambda header: descriptions(header).update({"flat": [[4, 6], [0, 0], [4, 6], [5, 17], 1]}),
    ],
)
def test_an_odd_entry_is_refused_by_name(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(CorruptCheckpointError, match="'f'.*'(flat|box|scalar)'.*restore the file"):
        decode(edit(change))


def test_numbers_that_only_equal_whole_ones_never_get_out() -> None:
    entries = decode(edit(lambda header: descriptions(header).update({"flat": [[4.0, 6], [5, 17]]})))
    assert all(type(size) is int for _, _, box, *_ in entries for size in box.global_shape)


def test_a_piece_without_elements_is_refused() -> None:
    def change(header: dict[str, Any]) -> None:
        header["none"] = {"dtype": "F32", "shape": [0], "data_offsets": [NBYTES, NBYTES]}
        descriptions(header)["none"] = [[0]]

    with pytest.raises(CorruptCheckpointError, match="'none'.*is no range"):
        decode(edit(change))


def test_overlapping_tensors_are_refused() -> None:
    def change(header: dict[str, Any]) -> None:
        header["flat"]["data_offsets"] = [start - 8 for start in header["flat"]["data_offsets"]]

    with pytest.raises(CorruptCheckpointError, match="no hole"):
        decode(edit(change))


@pytest.mark.parametrize("difference", [-8, -1, 1, 4096])
def test_data_that_the_header_does_not_describe_is_refused(difference: int) -> None:
    with pytest.raises(CorruptCheckpointError, match="bytes"):
        decode(encode_header(STORED)[LENGTH_NBYTES:], NBYTES + difference)


@pytest.mark.parametrize(
    "encoded", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"{" * 200_000, b'{"a":' * 200_000, b'{"a": NaN}', b"1" * 5000]
)
def test_what_is_no_header_is_refused(encoded: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="'f'"):
        decode(encoded)


def test_a_key_of_pieces_that_were_known_before_is_not_stored_again() -> None:
    known, behind = encode_part(STORED[:2]), STORED[2:]
    with pytest.raises(ValueError, match=f"'{STORED[1].key}' can't be stored twice in one file"):
        encode_header([*behind, STORED[1]], known)
    # Keys that only have a hash in common are others.
    same_hash = replace(known, key_hashes=np.array([hash(behind[0].key)]))
    assert encode_header(behind, same_hash) == encode_header(STORED)


def test_a_key_that_stands_twice_is_refused() -> None:
    encoded = encode_header(STORED)[LENGTH_NBYTES:].rstrip()
    twice = encoded[:-1] + b',"flat":{"dtype":"F32","shape":[12],"data_offsets":[0,48]}}'
    with pytest.raises(CorruptCheckpointError, match="'flat' stands twice"):
        decode(twice)


@pytest.mark.parametrize("length", [1 << 60, 2**64 - 1, MAX_HEADER_NBYTES + 1])
def test_a_giant_header_is_refused_before_it_is_read(length: int) -> None:
    with pytest.raises(UnsafeCheckpointError, match=f"{length} bytes"):
        header_nbytes(length.to_bytes(8, "little"), 2**62, "'f'")


def test_a_header_longer_than_its_file_is_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match="too short"):
        header_nbytes((93).to_bytes(8, "little"), 100, "'f'")
    with pytest.raises(CorruptCheckpointError, match="too short"):
        header_nbytes(b"\1\0", 2, "'f'")


def test_a_newer_format_version_is_named() -> None:
    with pytest.raises(NewerFormatError, match="format version 2"):
        decode(edit(lambda header: header["__metadata__"].update({"paddle_fsdp_ckpt.format_version": "2"})))


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_a_flipped_bit_gives_a_clear_error_or_a_header_that_is_consistent_in_itself(data: st.DataObject) -> None:
    encoded = bytearray(encode_header(STORED)[LENGTH_NBYTES:])
    position, bit = data.draw(st.integers(0, len(encoded) - 1)), data.draw(st.integers(0, 7))
    encoded[position] ^= 1 << bit
    try:
        entries = decode(bytes(encoded))
    except CheckpointError:
        return
    # A bit of a key's name, or of numbers that still agree with each other: only a digest can tell.
    end = LENGTH_NBYTES + len(encoded)
    for _, dtype, box, start, stop, byte_offset in entries:
        assert byte_offset == end
        assert 0 <= start < stop <= box.numel
        end += (stop - start) * DTYPE_NBYTES[dtype]
    assert end == LENGTH_NBYTES + len(encoded) + NBYTES
