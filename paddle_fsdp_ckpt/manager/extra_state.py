"""What a trainer wants to keep beside models and optimizers, as bytes: JSON values, numpy arrays and Paddle tensors. No pickle.

The bytes are the length of a JSON text as 8 little-endian bytes, the text, and the values of all arrays, one behind the other. In
the text an array is ``{"@array": [kind, dtype, shape, first byte]}``, and a dict that has this very key itself ``{"@dict": {...}}``.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import paddle

from ..errors import CheckpointError, CorruptCheckpointError
from ..fsdp import dtype_name, why_without_values
from ..host_memory import bytes_of
from ..storage.format import DTYPE_NBYTES
from ..storage.json_values import JsonValue, parse_json
from ..storage.reserved_keys import LENGTH_NBYTES, text_and_arrays

_NUMPY_KINDS = "biufc"
_NUMPY_DTYPE = re.compile(f"[<>|][{_NUMPY_KINDS}][0-9]{{1,2}}", re.ASCII)
_ARRAY, _DICT = "@array", "@dict"


def encode_extra_state(value: Any, where: str) -> bytes:
    """Return a value as bytes that :func:`decode_extra_state` turns back into an equal one.

    Args:
        value: None, bool, int, float, str, numpy arrays (in either byte order) and numbers of boolean, integer, floating or complex type,
            Paddle tensors, and lists and dicts (with str keys) of these.
        where: names it for the messages; empty for a dict whose values are named by their keys.

    Raises:
        CheckpointError: it holds something else, such as a tuple, which would come back as a list.
    """
    encoder = _Encoder()
    try:
        text = json.dumps(encoder.encode(value, where)).encode()
    except RecursionError:
        raise CheckpointError(f"{where or 'a value'} is nested beyond reason, or holds itself; nothing was saved") from None
    return b"".join([len(text).to_bytes(LENGTH_NBYTES, "little"), text, *encoder.buffers])


def decode_extra_state(encoded: bytes | bytearray, where: str) -> Any:
    """Return the value that :func:`encode_extra_state` was given. Arrays are copies, tensors on the current device.

    Raises:
        CorruptCheckpointError: the bytes are not what that returns; ``where`` names them for the message.
    """
    try:
        text, arrays = text_and_arrays(encoded)
        return _decode(parse_json(text, allow_nan=True), arrays)
    except (ValueError, TypeError, AttributeError, OverflowError, OSError, RuntimeError) as error:  # the last two of Paddle, of a shape
        raise CorruptCheckpointError(f"{where} is not what a save writes ({error}); load another checkpoint") from error


class _Encoder:
    def __init__(self) -> None:
        self.buffers: list[bytes] = []
        self._nbytes = 0

    def encode(self, value: Any, where: str) -> JsonValue:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            return [self.encode(item, f"{where}[{number}]") for number, item in enumerate(value)]
        if type(value) is dict:
            strange = [key for key in value if type(key) is not str]
            if strange:
                raise CheckpointError(f"{where} has the key {strange[0]!r:.100}, which is no str; nothing was saved. Use str keys")
            fields = {key: self.encode(item, f"{where}[{key!r}]" if where else key) for key, item in value.items()}
            return {_DICT: fields} if _ARRAY in fields or _DICT in fields else fields
        # A subclass would lose what makes it one, as a masked array its mask.
        if (type(value) is np.ndarray or isinstance(value, np.generic)) and _can_be_named(value.dtype):
            kind = "numpy" if isinstance(value, np.ndarray) else "number"
            stored = value.dtype if value.dtype.byteorder == ">" else value.dtype.newbyteorder("<")
            return self._add(kind, stored.str, list(value.shape), np.ascontiguousarray(value).astype(stored).tobytes())
        if isinstance(value, paddle.Tensor) and not value.is_dist() and dtype_name(value) in DTYPE_NBYTES:
            if (why := why_without_values(value)) is not None:
                raise CheckpointError(f"{where} can't be saved: {why}; nothing was saved")
            return self._add("paddle", dtype_name(value), list(value.shape), bytes(bytes_of(value)))
        raise CheckpointError(
            f"{where} is of type {type(value).__name__}, which can't be saved; nothing was saved. Use None, bool, int, float, str, numpy "
            "arrays of numbers (of no subclass; numpy.asarray makes one, without a mask), Paddle tensors that are not distributed, and "
            "lists and dicts of these"
        )

    def _add(self, kind: str, dtype: str, shape: list[int], data: bytes) -> JsonValue:
        start = self._nbytes
        self.buffers.append(data)
        self._nbytes += len(data)
        return {_ARRAY: [kind, dtype, shape, start]}


def _can_be_named(dtype: np.dtype[Any]) -> bool:
    """Tell whether a dtype is one of numbers that numpy knows by its name, which those of other packages are not."""
    try:
        return dtype.kind in _NUMPY_KINDS and np.dtype(dtype.str) == dtype
    except TypeError:
        return False


def _decode(value: JsonValue, data: memoryview) -> Any:
    if isinstance(value, list):
        return [_decode(item, data) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_ARRAY}:
        kind, dtype, shape, start = value[_ARRAY]
        return _decode_array(kind, dtype, shape, start, data)
    if value.keys() == {_DICT}:
        value = value[_DICT]
    return {key: _decode(item, data) for key, item in value.items()}


def _decode_array(kind: str, dtype: str, shape: list[int], start: int, data: memoryview) -> Any:
    if not all(type(number) is int and number >= 0 for number in [*shape, start]):
        raise ValueError("an array of it has a shape or a place of something else than whole numbers")
    if kind == "paddle":
        stop = start + math.prod(shape) * DTYPE_NBYTES.get(dtype, 0)
        if dtype not in DTYPE_NBYTES or stop > len(data):
            raise ValueError("a tensor of it has no such values")
        tensor = paddle.empty(shape, dtype=dtype).cpu()
        bytes_of(tensor)[:] = data[start:stop]
        # The current device, where that is no CPU.
        return tensor if paddle.device.get_device() == "cpu" else paddle.to_tensor(tensor)
    if not _NUMPY_DTYPE.fullmatch(dtype) or kind not in ("numpy", "number"):
        raise ValueError(f"it names an array of kind {kind!r:.20} and type {dtype!r:.20}")
    described = np.dtype(dtype)
    owned = described if described.byteorder == ">" else described.newbyteorder("=")
    array = np.frombuffer(data, described, math.prod(shape), start).reshape(shape).astype(owned)
    return array if kind == "numpy" else array[()]
