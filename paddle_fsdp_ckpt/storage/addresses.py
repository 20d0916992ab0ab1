"""Memory by its address: where there are many thousand small places, to make a view of each would take longer than to copy their bytes.

Whoever gives an address keeps the memory alive, and in its place.
"""

from __future__ import annotations

import ctypes

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
