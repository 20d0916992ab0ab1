"""Read a pickle without unpickling it: a closed set of opcodes, a closed list of classes, and nothing is ever called.

Stock Paddle's ``.distcp`` and ``.metadata`` files are pickles of protocol 4 (``python/paddle/framework/io.py`` of Paddle 3.3:
``_legacy_save`` and ``_pickle_save``, default ``protocol=4``). Unpickling runs whatever a file asks for, and reads all values.
Here the instructions are walked through by hand. Those that such files have, and no others, build plain data; a NumPy array
becomes its description and the place of its bytes in the file, which are skipped. What an array looks like in a pickle is
from NumPy's ``ndarray.__reduce__`` and ``dtype.__reduce__``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import BinaryIO

from ..errors import CorruptCheckpointError, UnsafeCheckpointError
from .pickled import NUMPY_GLOBALS, AllowedClass, GlobalName, NumpyGlobal, Payload, PickledArray, PickledDtype, PickledObject, as_shape

_PROTOCOL = 4
_MAX_TEXT_NBYTES = 1 << 16
_MAX_INTEGER_NBYTES = 8
_MAX_OPCODES = 100_000_000
_MAX_SHOWN = 100
_WAY_OUT = "restore the file from a copy, or load another checkpoint"


def read_arrays(file: BinaryIO, size: int, where: str) -> object:
    """Return what a pickle of containers, texts, numbers and NumPy arrays holds.

    Args:
        file: at its start.
        size: of the whole file, in bytes.
        where: names the file for the messages.

    Returns:
        None, bool, int, str, tuple, list, dict, :class:`PickledArray` or :class:`Payload`, in each other. The same list or dict
        may be in several places.

    Raises:
        UnsafeCheckpointError: it asks for anything else, or for more than a checkpoint needs. Nothing of it was run.
        CorruptCheckpointError: it is cut short or contradicts itself.
    """
    return _Machine(file, size, where, dict(NUMPY_GLOBALS)).run()


def read_objects(file: BinaryIO, size: int, where: str, classes: Collection[GlobalName]) -> object:
    """Return what a pickle of containers, texts, numbers and objects of the given classes holds; else like :func:`read_arrays`."""
    return _Machine(file, size, where, {one: AllowedClass(one[1]) for one in classes}).run()


class _Machine:
    """The stack machine of Python's ``pickletools``, cut down to what builds plain data."""

    def __init__(
        self, file: BinaryIO, size: int, where: str, known: dict[GlobalName, NumpyGlobal] | dict[GlobalName, AllowedClass]
    ) -> None:
        self._file = file
        self._size = size
        self._where = where
        self._known = known
        self._stack: list[object] = []
        self._below_marks: list[list[object]] = []
        self._memo: list[object] = []

    def run(self) -> object:
        read, instructions = self._file.read, _INSTRUCTIONS
        try:
            for _ in range(_MAX_OPCODES):
                code = read(1)
                if code == b".":
                    return self._stop()
                instruction = instructions.get(code)
                if instruction is None:
                    if not code:
                        raise ValueError("it has no end")
                    raise self._unsafe(f"uses the instruction {code!r}")
                instruction(self)
        except (IndexError, ValueError) as error:
            text = "its instructions don't fit together" if isinstance(error, IndexError) else str(error)
            raise CorruptCheckpointError(f"{self._where} is malformed: {text}; {_WAY_OUT}") from error
        raise self._unsafe(f"has more than {_MAX_OPCODES} instructions")

    def _unsafe(self, what: str) -> UnsafeCheckpointError:
        return UnsafeCheckpointError(
            f"{self._where} {what}, which no checkpoint of stock Paddle needs; nothing of it was run. Don't use this file with other "
            "programs either, unless you know who wrote it"
        )

    def _stop(self) -> object:
        (value,) = self._stack if len(self._stack) == 1 else (None,)
        if len(self._stack) != 1 or self._below_marks:
            raise ValueError("it ends within a value")
        if self._file.read(1):
            raise ValueError("it goes on after its end")
        return value

    def _bytes(self, count: int) -> bytes:
        found = self._file.read(count)
        if len(found) != count:
            raise ValueError("it is cut short")
        return found

    def _byte(self) -> int:
        return self._file.read(1)[0]

    def _unsigned(self, count: int) -> int:
        return int.from_bytes(self._bytes(count), "little")

    def _pop_to_mark(self) -> list[object]:
        items, self._stack = self._stack, self._below_marks.pop()
        return items

    # The instructions, by the names that pickletools gives them.

    def op_proto(self) -> None:
        if self._byte() != _PROTOCOL:
            raise self._unsafe(f"is a pickle of another protocol than {_PROTOCOL}")

    def op_frame(self) -> None:
        self._bytes(8)

    def op_mark(self) -> None:
        self._below_marks.append(self._stack)
        self._stack = []

    def op_memoize(self) -> None:
        self._memo.append(self._stack[-1])

    def op_binget(self) -> None:
        self._stack.append(self._memo[self._byte()])

    def op_long_binget(self) -> None:
        self._stack.append(self._memo[self._unsigned(4)])

    def op_none(self) -> None:
        self._stack.append(None)

    def op_newtrue(self) -> None:
        self._stack.append(True)

    def op_newfalse(self) -> None:
        self._stack.append(False)

    def op_binint(self) -> None:
        self._stack.append(int.from_bytes(self._bytes(4), "little", signed=True))

    def op_binint1(self) -> None:
        self._stack.append(self._byte())

    def op_binint2(self) -> None:
        self._stack.append(self._unsigned(2))

    def op_long1(self) -> None:
        count = self._byte()
        if count > _MAX_INTEGER_NBYTES:
            raise self._unsafe(f"has an integer of {count} bytes")
        self._stack.append(int.from_bytes(self._bytes(count), "little", signed=True))

    def op_short_binunicode(self) -> None:
        self._stack.append(self._bytes(self._byte()).decode())

    def op_binunicode(self) -> None:
        count = self._unsigned(4)
        if count > _MAX_TEXT_NBYTES:
            raise self._unsafe(f"has a text of {count} bytes")
        self._stack.append(self._bytes(count).decode())

    def op_short_binbytes(self) -> None:
        self._skip_payload(self._byte())

    def op_binbytes(self) -> None:
        self._skip_payload(self._unsigned(4))

    def op_binbytes8(self) -> None:
        self._skip_payload(self._unsigned(8))

    def _skip_payload(self, nbytes: int) -> None:
        offset = self._file.tell()
        if nbytes > self._size - offset:
            raise ValueError("it is cut short")
        self._file.seek(offset + nbytes)
        self._stack.append(Payload(offset, nbytes))

    def op_empty_tuple(self) -> None:
        self._stack.append(())

    def op_tuple1(self) -> None:
        self._stack[-1:] = [(self._stack[-1],)]

    def op_tuple2(self) -> None:
        self._make_tuple(2)

    def op_tuple3(self) -> None:
        self._make_tuple(3)

    def _make_tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def op_tuple(self) -> None:
        items = self._pop_to_mark()
        self._stack.append(tuple(items))

    def op_empty_list(self) -> None:
        self._stack.append([])

    def op_append(self) -> None:
        item = self._stack.pop()
        self._list().append(item)

    def op_appends(self) -> None:
        items = self._pop_to_mark()
        self._list().extend(items)

    def _list(self) -> list[object]:
        if type(self._stack[-1]) is not list:
            raise ValueError("it appends to something else than a list")
        return self._stack[-1]

    def op_empty_dict(self) -> None:
        self._stack.append({})

    def op_setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def op_setitems(self) -> None:
        self._set_items(self._pop_to_mark())

    def _set_items(self, items: list[object]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("it sets items of something else than a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing a tuple goes as deep as the file nests tuples, which may be too deep.
            if type(key) is not str and type(key) is not PickledObject:
                raise ValueError("a key of a dict is neither a text nor an object")
            target[key] = value

    def op_stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("the name of a class is not a text")
        known = self._known.get((module, name))
        if known is None:
            raise self._unsafe(f"asks for {f'{module}.{name}'[:_MAX_SHOWN]!r}")
        self._stack.append(known)

    def op_newobj(self) -> None:
        arguments, cls = self._stack.pop(), self._stack.pop()
        if type(cls) is not AllowedClass or type(arguments) is not tuple or arguments:
            raise self._unsafe("makes an object in a way")
        self._stack.append(PickledObject(cls.name))

    def op_reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(arguments) is not tuple:
            raise ValueError("the arguments of a call are no tuple")
        if function is NumpyGlobal.RECONSTRUCT and len(arguments) == 3 and arguments[0] is NumpyGlobal.NDARRAY:
            self._stack.append(PickledArray())
        elif function is NumpyGlobal.DTYPE and len(arguments) == 3 and type(arguments[0]) is str:
            self._stack.append(PickledDtype(arguments[0]))
        else:
            raise self._unsafe("calls something in a way")

    def op_build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) is PickledArray:
            self._build_array(target, state)
        elif type(target) is PickledDtype:
            self._build_dtype(target, state)
        elif type(target) is PickledObject and type(state) is dict:
            target.fields.update(state)
        else:
            raise self._unsafe("sets the state of something")

    def _build_dtype(self, dtype: PickledDtype, state: object) -> None:
        # version, byte order, no subarray, no names, no fields, and what only text and records have
        if type(state) is not tuple or len(state) != 8 or type(state[1]) is not str or state[2:5] != (None, None, None):
            raise self._unsafe("has elements of a kind")
        if state[1] not in ("<", "|"):
            raise ValueError("its arrays are not little-endian")
        dtype.is_complete = True

    def _build_array(self, array: PickledArray, state: object) -> None:
        if type(state) is not tuple or len(state) != 5 or array.payload is not None:
            raise self._unsafe("has an array in a form")
        _, shape, dtype, is_fortran, payload = state
        if type(dtype) is not PickledDtype or not dtype.is_complete or type(payload) is not Payload or type(is_fortran) is not bool:
            raise self._unsafe("has an array in a form")
        array.code, array.shape, array.is_fortran, array.payload = dtype.code, as_shape(shape), is_fortran, payload


_INSTRUCTIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": _Machine.op_proto,
    b"\x95": _Machine.op_frame,
    b"(": _Machine.op_mark,
    b"\x94": _Machine.op_memoize,
    b"h": _Machine.op_binget,
    b"j": _Machine.op_long_binget,
    b"N": _Machine.op_none,
    b"\x88": _Machine.op_newtrue,
    b"\x89": _Machine.op_newfalse,
    b"J": _Machine.op_binint,
    b"K": _Machine.op_binint1,
    b"M": _Machine.op_binint2,
    b"\x8a": _Machine.op_long1,
    b"\x8c": _Machine.op_short_binunicode,
    b"X": _Machine.op_binunicode,
    b"C": _Machine.op_short_binbytes,
    b"B": _Machine.op_binbytes,
    b"\x8e": _Machine.op_binbytes8,
    b")": _Machine.op_empty_tuple,
    b"\x85": _Machine.op_tuple1,
    b"\x86": _Machine.op_tuple2,
    b"\x87": _Machine.op_tuple3,
    b"t": _Machine.op_tuple,
    b"]": _Machine.op_empty_list,
    b"a": _Machine.op_append,
    b"e": _Machine.op_appends,
    b"}": _Machine.op_empty_dict,
    b"s": _Machine.op_setitem,
    b"u": _Machine.op_setitems,
    b"\x93": _Machine.op_stack_global,
    b"\x81": _Machine.op_newobj,
    b"R": _Machine.op_reduce,
    b"b": _Machine.op_build,
}
"""Opcode -> what it does; ``.``, which ends a pickle, is in :meth:`_Machine.run`."""
