"""What a pickle that is only read is made of: places of bytes, arrays without their values, and objects of a few classes by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias, cast

_MAX_DIMENSIONS = 64


class Payload(NamedTuple):
    """Bytes in the file: where the first one is, and how many there are. They were not read."""

    offset: int
    nbytes: int


@dataclass(eq=False)
class PickledDtype:
    """A NumPy dtype; ``code`` is its kind and bytes an element, e.g. ``"f4"``. It is complete once its byte order was read."""

    code: str
    is_complete: bool = False


@dataclass(eq=False)
class PickledArray:
    """A NumPy array; ``payload`` has its elements, and is None for an array that the file doesn't complete.

    Attributes:
        code: kind and bytes an element, e.g. ``"f4"``; little-endian.
        shape: of the array.
        is_fortran: whether the first index varies fastest, instead of the last.
        payload: where the elements are; as many bytes as the shape and the code say.
    """

    code: str = ""
    shape: tuple[int, ...] = ()
    is_fortran: bool = False
    payload: Payload | None = None


@dataclass(eq=False)
class PickledObject:
    """An object of one of the allowed classes: the class's name without its module, and the attributes. Two are never equal."""

    cls: str
    fields: dict[object, object] = field(default_factory=dict)


class NumpyGlobal(Enum):
    """What a pickled array names."""

    RECONSTRUCT = "_reconstruct"
    NDARRAY = "ndarray"
    DTYPE = "dtype"


class AllowedClass(NamedTuple):
    """An allowed class, without its module."""

    name: str


GlobalName: TypeAlias = "tuple[str, str]"
"""Module and name, as a pickle has them."""

NUMPY_GLOBALS: dict[GlobalName, NumpyGlobal] = {
    ("numpy._core.multiarray", "_reconstruct"): NumpyGlobal.RECONSTRUCT,  # NumPy 2
    ("numpy.core.multiarray", "_reconstruct"): NumpyGlobal.RECONSTRUCT,  # NumPy 1
    ("numpy", "ndarray"): NumpyGlobal.NDARRAY,
    ("numpy", "dtype"): NumpyGlobal.DTYPE,
}


def as_shape(value: object) -> tuple[int, ...]:
    """Return a value of a pickle that must be a shape, or an offset, as such.

    Raises:
        ValueError: it is something else.
    """
    if type(value) is not tuple or len(value) > _MAX_DIMENSIONS or any(type(one) is not int or one < 0 for one in value):
        raise ValueError("a shape or an offset is not a tuple of whole numbers")
    return cast("tuple[int, ...]", value)
