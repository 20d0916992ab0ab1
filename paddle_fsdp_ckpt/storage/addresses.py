"""Memory by its address: where there are many thousand small places, to make a view of each would take longer than to copy their bytes.

Whoever gives an address keeps the memory alive, and in its place.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .buffers import SMALL_NBYTES, TOGETHER_NBYTES
from .columns import Integers

_copy = ctypes.PyDLL(None).memmove
"""``_copy(to_address, from_address, nbytes)``. Other threads wait, since to let them go on would take longer."""
_copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy.restype = None

_TINY_NBYTES = 64  # of up to so many bytes NumPy copies many places at once, in a tenth of the time of as many calls
_MANY = 32


def address_of(buffer: memoryview | bytearray) -> int:
    """Return the address of writable, contiguous memory of at least one byte."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer))


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Return the bytes at an address, writable, 1-D."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def copy_places(to: Integers, source: Integers, nbytes: Integers) -> None:
    """Copy bytes from many places to as many others.

    Args:
        to: addresses, 1-D; no two of these places have bytes in common, with each other or with those that are read.
        source: addresses to copy from, one for each.
        nbytes: how many, at least 1, for each.
    """
    is_left = np.ones(len(nbytes), np.bool_)
    sizes, counts = np.unique(nbytes[nbytes <= _TINY_NBYTES], return_counts=True)
    for size in sizes[counts >= _MANY].tolist():
        alike = nbytes == size
        targets, target_offsets = _elements(to[alike], size)
        sources, source_offsets = _elements(source[alike], size)
        targets[target_offsets] = sources[source_offsets]
        is_left &= ~alike
    for one in zip(to[is_left].tolist(), source[is_left].tolist(), nbytes[is_left].tolist(), strict=True):
        _copy(*one)


class _Memory:
    """All memory between two addresses, for NumPy; what of it nobody asks for need not be there."""

    def __init__(self, first: int, last: int, nbytes: int) -> None:
        # An element of so many bytes begins at each byte.
        self.__array_interface__ = {
            "version": 3,
            "data": (first, False),
            "shape": (last - first + 1,),
            "strides": (1,),
            "typestr": f"|V{nbytes}",
        }


def _elements(addresses: Integers, nbytes: int) -> tuple[NDArray[np.void], Integers]:
    """Return an array of elements of so many bytes, and where in it those at the addresses are."""
    first = int(addresses.min())
    return np.asarray(_Memory(first, int(addresses.max()), nbytes)), addresses - first


@dataclass(frozen=True, eq=False)
class Places:
    """Bytes that lie at many places of this host's memory, in an order of their own.

    Attributes:
        addresses: of the first byte of each place.
        nbytes: how many there are at each, at least 1.
    """

    addresses: Integers
    nbytes: Integers

    @property
    def total(self) -> int:
        """How many bytes there are in all."""
        return int(self.nbytes.sum())

    def buffers(self) -> Iterator[memoryview]:
        """Yield all bytes, in order: those of large places where they are, and those of small ones copied together."""
        runs = self._runs()
        is_small = runs.nbytes < SMALL_NBYTES
        # Small ones that follow each other are one group, up to about so many bytes; a large one is a group by itself.
        group = np.cumsum(np.where(is_small, runs.nbytes, 0)) // TOGETHER_NBYTES
        is_first = np.append(True, ~(is_small[1:] & is_small[:-1]) | (group[1:] != group[:-1]))[: len(group)]
        for start, stop in itertools.pairwise([*np.flatnonzero(is_first).tolist(), len(group)]):
            some = Places(runs.addresses[start:stop], runs.nbytes[start:stop])
            if stop - start == 1:
                yield bytes_at(int(some.addresses[0]), int(some.nbytes[0]))
                continue
            gathered = memoryview(bytearray(some.total))
            some._copy_to(address_of(gathered))
            yield gathered

    def views(self) -> Iterator[memoryview]:
        """Yield the bytes of each place, where they are."""
        return map(bytes_at, self.addresses.tolist(), self.nbytes.tolist())

    def copy_to(self, address: int) -> None:
        """Copy all bytes, one behind the other, to an address."""
        self._runs()._copy_to(address)

    def _copy_to(self, address: int) -> None:
        copy_places(address + np.cumsum(self.nbytes) - self.nbytes, self.addresses, self.nbytes)

    def _runs(self) -> Places:
        """Return the places with those as one that follow each other in memory too, as pieces of a buffer do."""
        if not len(self.nbytes):
            return self
        first = np.flatnonzero(np.append(True, self.addresses[1:] != (self.addresses + self.nbytes)[:-1]))
        return Places(self.addresses[first], np.add.reduceat(self.nbytes, first))
