"""Memory by its address: where there are many thousand small places, to make a view of each would take longer than to copy their bytes.

Whoever gives an address keeps the memory alive, and in its place.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from .buffers import small_together
from .columns import Integers

copy = ctypes.PyDLL(None).memmove
"""Copy ``nbytes`` bytes: ``copy(to_address, from_address, nbytes)``. Other threads wait, since to let them go on would take longer."""
copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
copy.restype = None


def address_of(buffer: memoryview | bytearray) -> int:
    """Return the address of writable, contiguous memory of at least one byte."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer))


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Return the bytes at an address, writable, 1-D."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


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
        for some in small_together(self._runs(), _nbytes_of):
            if len(some) == 1:
                yield bytes_at(*some[0])
                continue
            gathered = memoryview(bytearray(sum(map(_nbytes_of, some))))
            _copy_all(some, address_of(gathered))
            yield gathered

    def views(self) -> Iterator[memoryview]:
        """Yield the bytes of each place, where they are."""
        return map(bytes_at, self.addresses.tolist(), self.nbytes.tolist())

    def copy_to(self, address: int) -> None:
        """Copy all bytes, one behind the other, to an address."""
        _copy_all(self._runs(), address)

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Yield address and number of bytes of the places, those as one that follow each other in memory too, as pieces of a buffer do."""
        if not len(self.nbytes):
            return iter(())
        first = np.flatnonzero(np.append(True, self.addresses[1:] != (self.addresses + self.nbytes)[:-1]))
        return zip(self.addresses[first].tolist(), np.add.reduceat(self.nbytes, first).tolist(), strict=True)


_nbytes_of: Callable[[tuple[int, int]], int] = operator.itemgetter(1)


def _copy_all(places: Iterable[tuple[int, int]], address: int) -> None:
    for source, nbytes in places:
        copy(address, source, nbytes)
        address += nbytes
