"""Pickles are walked through by a closed list: what stock Paddle writes comes out right, and a crafted file runs nothing."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import subprocess
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paddle_fsdp_ckpt.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError
from paddle_fsdp_ckpt.storage.pickled import PickledArray, PickledObject
from paddle_fsdp_ckpt.storage.pickles import _INSTRUCTIONS, read_arrays, read_objects

DTYPES = [np.dtype(code) for code in ("f8", "f4", "f2", "u2", "i8", "i4", "i2", "i1", "u1", "?")]
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)))
START, END = b"\x80\x04", b"."


def walked(pickled: bytes) -> Any:
    return read_arrays(io.BytesIO(pickled), len(pickled), "'file'")


def values(pickled: bytes, array: PickledArray) -> np.ndarray:
    assert array.payload is not None
    payload = pickled[array.payload.offset : array.payload.offset + array.payload.nbytes]
    return np.frombuffer(payload, array.code).reshape(array.shape, order="F" if array.is_fortran else "C")


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=5), ARRAYS | ARRAYS.map(np.asfortranarray), max_size=5))
def test_arrays_are_found_where_they_lie(arrays: dict[str, np.ndarray]) -> None:
    # A name longer than any of theirs.
    pickled = pickle.dumps({**arrays, "all names": {key: f"eager_tmp_{key}" for key in arrays}}, protocol=4)
    found = walked(pickled)
    assert found.pop("all names") == {key: f"eager_tmp_{key}" for key in arrays}
    assert found.keys() == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(values(pickled, found[key]), array)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=300),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(PLAIN)
def test_plain_data_comes_back(value: Any) -> None:
    assert walked(pickle.dumps(value, protocol=4)) == value


def test_many_keys_come_back() -> None:
    many = {f"key{i}": [i, (i, i), "x" * 300] for i in range(3000)}
    assert walked(pickle.dumps(many, protocol=4)) == many


def test_numpy_1_is_read_too() -> None:
    array = np.arange(6, dtype="f4").reshape(2, 3)
    two = pickle.dumps({"w": array}, protocol=4)
    one = two.replace(b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray")
    assert len(one) == len(two) - 1
    np.testing.assert_array_equal(values(one, walked(one)["w"]), array)


class Reduced:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def crafted(mark: str) -> dict[str, Any]:
    write = f"open({mark!r}, 'w').close()"
    return {
        "os.system": Reduced(os.system, f"touch {mark}"),
        "eval": Reduced(eval, write),
        "exec": Reduced(exec, write),
        "popen": Reduced(subprocess.Popen, ["touch", mark]),
        "getattr": Reduced(getattr, os, "system"),
        "import": Reduced(__import__, "antigravity"),
        "in a list": [1, [Reduced(os.system, f"touch {mark}")]],
        "as a value": {"w": np.zeros(3), "x": Reduced(eval, write)},
        "nested": Reduced(eval, Reduced(str, write)),
        "in an array": np.array([Reduced(eval, write)], dtype=object),
        "in an array of records": np.zeros(2, dtype=[("a", "f4"), ("b", "O")]),
        "a class": Path,
        "an object": Path("x"),
        "another container": OrderedDict(w=1),
        "a dtype's name": np.dtype,
        "unpickling": Reduced(pickle.loads, pickle.dumps(Reduced(eval, write))),
    }


@pytest.mark.parametrize("kind", crafted("x"))
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_crafted_file_runs_nothing(kind: str, protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "it ran"
    try:
        pickled = pickle.dumps(crafted(str(mark))[kind], protocol=protocol)
    except TypeError:  # os itself has no pickle; its function has
        pickled = pickle.dumps(os.system, protocol=protocol)
    for read in (walked, lambda one: read_objects(io.BytesIO(one), len(one), "'file'", [("paddle", "Metadata")])):
        if kind == "a dtype's name" and read is walked and protocol == 4:
            continue  # names what an array names, and does nothing with it
        with pytest.raises(UnsafeCheckpointError, match="nothing of it was run"):
            read(pickled)
    assert not mark.exists()


def test_no_other_instruction_is_followed() -> None:
    codes = {opcode.code.encode("latin-1") for opcode in pickletools.opcodes}
    assert codes > _INSTRUCTIONS.keys()
    for code in codes - _INSTRUCTIONS.keys() - {END}:
        with pytest.raises(UnsafeCheckpointError, match="uses the instruction"):
            walked(START + b"N" + code + b"os\nsystem\n" + END)


@pytest.mark.parametrize(
    ("instructions", "kind"),
    [
        (b"\x8c\x05numpy\x8c\x07ndarray\x93)\x81", "makes an object"),
        (b"\x8c\x05numpy\x8c\x07ndarray\x93)R", "calls something"),
        (b"\x8c\x05numpy\x8c\x05dtype\x93)R", "calls something"),
        (b"\x8c\x05numpy\x8c\x05dtype\x93\x8c\x02f4\x89\x88\x87R}b", "elements of a kind"),
        (b"}}b", "sets the state"),
        (b"\x8c\x05numpy\x8c\x07ndarray\x93}b", "sets the state"),
        (b"\x8a\xff" + b"\x7f" * 255, "integer of 255 bytes"),
        (b"X\xff\xff\xff\x7f", "text of"),
        (b"\x80\x02", "another protocol"),
        (b"\x8c\x0bpaddle.base\x8c\x04core\x93", "asks for 'paddle.base.core'"),
        (b"\x8c\x05numpy\x8c\x04load\x93", "asks for 'numpy.load'"),
    ],
)
def test_what_builds_no_data_is_refused(instructions: bytes, kind: str) -> None:
    with pytest.raises(UnsafeCheckpointError, match=kind):
        walked(START + instructions + END)


@pytest.mark.parametrize(
    "instructions",
    [
        b"",
        b"NN",
        b"(N",
        b"t",
        b"a",
        b"]a",
        b"Ns",
        b"h\x05",
        b"j\xff\xff\xff\xff",
        b"\x94",
        b"\x85",
        b"N\x86",
        b"}(Nu",
        b"}(NNu",
        b"}(KKNu",
        b"N(Nu",
        b"N(Ne",
        b"N\x93",
        b"NN\x93",
        b"C\x05abc",
        b"B\xff\xff\xff\xff",
        b"\x8e" + b"\xff" * 8,
        b"\x8c\x02\xff\xff",
        b"NNR",
        b"N.N",
    ],
)
def test_malformed_file_is_corrupt(instructions: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="'file' is malformed"):
        walked(START + instructions + END)


@pytest.mark.parametrize("end", range(0, 80, 3))
def test_file_cut_short_is_corrupt(end: int) -> None:
    pickled = pickle.dumps({"w": np.arange(6, dtype="f4"), "x": [1, 2, ("y",)]}, protocol=4)
    with pytest.raises(CorruptCheckpointError):
        walked(pickled[:end])


def test_deep_nesting_is_walked_without_recursion() -> None:
    depth = 1_000_000
    deep = walked(START + b")" + b"\x85" * depth + END)
    for _ in range(1000):
        (deep,) = deep
    with pytest.raises(CorruptCheckpointError, match="key of a dict"):
        walked(START + b"}" + b")" + b"\x85" * depth + b"Ns" + END)
    walked(START + b"]\x94" + b"h\x00a" * 10 + END)  # a list that holds itself


def test_huge_array_is_not_read(tmp_path: Path) -> None:
    size = 64 << 30
    head, tail = pickle.dumps({"w": np.zeros(8, "u1")}, protocol=4).split(b"C\x08" + bytes(8))
    path = tmp_path / "huge"
    with open(path, "wb") as file:
        file.write(head + b"\x8e" + size.to_bytes(8, "little"))
        file.seek(size, os.SEEK_CUR)  # a hole
        file.write(tail)
    started = time.monotonic()
    with open(path, "rb") as file:
        found: Any = read_arrays(file, path.stat().st_size, "'huge'")
    assert time.monotonic() - started < 5
    assert found["w"].payload == (len(head) + 9, size)


def test_objects_of_allowed_classes_are_data() -> None:
    pickled = START + b"\x8c\x01m\x8c\x01C\x93)\x81}\x8c\x01aK\x01sb" + END
    found = read_objects(io.BytesIO(pickled), len(pickled), "'file'", [("m", "C")])
    assert isinstance(found, PickledObject)
    assert (found.cls, found.fields) == ("C", {"a": 1})
    with pytest.raises(UnsafeCheckpointError, match=r"asks for 'm\.C'"):
        walked(pickled)


SEED = pickle.dumps({"w": np.arange(6, dtype="f4"), "x": {"y": (1, 2)}, "v": np.zeros((2, 3), "i8")}, protocol=4)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SEED) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_mutated_files_run_nothing_and_end(changes: list[tuple[int, int]]) -> None:
    mutated = bytearray(SEED)
    for position, byte in changes:
        mutated[position] = byte
    with suppress(CheckpointError):
        walked(bytes(mutated))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*_INSTRUCTIONS, b"\x00", b"\x01", b"\x8c\x05numpy\x8c\x05dtype\x93"]), max_size=30))
def test_random_instructions_run_nothing_and_end(instructions: list[bytes]) -> None:
    with suppress(CheckpointError):
        walked(START + b"".join(instructions) + END)
