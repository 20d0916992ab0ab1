"""The memory behind Paddle tensors as bytes of this host."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import paddle

_CHUNK_NUMEL = 1 << 20


def bytes_of(tensor: paddle.Tensor) -> memoryview:
    """Return a tensor's values as bytes, row-major: its own memory where that is on CPU and contiguous, writable; else a copy.

    The tensor must outlive the view and not be resized.
    """
    # .numpy() of a view copies the whole flat buffer on CPU, and from_dlpack knows no bfloat16.
    # tensor.contiguous() would change the tensor itself, and part it from those that share its memory.
    if is_direct(tensor):
        return direct_bytes(tensor)
    if not tensor.is_contiguous():
        values = np.ascontiguousarray(tensor.numpy())
        return values.reshape(-1).view(np.uint8).data if values.size else memoryview(bytearray())
    return memoryview(bytearray(direct_bytes(tensor.cpu())))


def direct_bytes(tensor: paddle.Tensor) -> memoryview:
    """Return the memory of a tensor for which :func:`is_direct` is true; see :func:`bytes_of`."""
    nbytes = nbytes_of(tensor)
    if nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


def nbytes_of(tensor: paddle.Tensor) -> int:
    """Return how many bytes a tensor's values have."""
    return math.prod(tensor.shape) * tensor.element_size()  # .size asks numpy, which is slow


def chunks_of(tensor: paddle.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's values as bytes, row-major: as :func:`bytes_of` where they are on CPU, else a copy of some at a time."""
    if tensor.place.is_cpu_place():
        yield bytes_of(tensor)
        return
    flat = tensor.flatten()
    for start in range(0, flat.shape[0], _CHUNK_NUMEL):
        yield bytes_of(flat._slice(start, min(flat.shape[0], start + _CHUNK_NUMEL)))


def is_direct(tensor: paddle.Tensor) -> bool:
    """Tell whether a tensor's values lie on CPU, one behind the other."""
    return bool(tensor.place.is_cpu_place()) and bool(tensor.is_contiguous())


class HostMemory:
    """A block of this host's memory for copies of tensors; pinned, so that a device copies into it by itself while others are prepared.

    Pinned memory, for tensors on a GPU, was not run: Paddle's CPU wheel has none.
    """

    def __init__(self, nbytes: int, *, is_pinned: bool = False) -> None:
        self.nbytes = nbytes
        self.is_pinned = is_pinned
        self._block = paddle.empty([nbytes], dtype="uint8", pin_memory=True) if is_pinned else None
        self.view = _large_pages(nbytes) if self._block is None else direct_bytes(self._block)

    def take(self, value: paddle.Tensor | memoryview, start: int) -> None:
        """Copy a value's bytes, row-major, to ``start``; those of a tensor on a device are there after :meth:`wait`."""
        if self._block is not None and not isinstance(value, memoryview) and is_on_device(value) and value.ndim and value.is_contiguous():
            copy_bytes(value, self._block, start)
            return
        data = value if isinstance(value, memoryview) else bytes_of(value)
        self.view[start : start + len(data)] = data

    def wait(self) -> None:
        """Wait until a device has copied all."""
        if self._block is not None:
            paddle.device.synchronize()


def _large_pages(nbytes: int) -> memoryview:
    """Return new memory in the system's large pages where it has them: to get small ones takes many times as long as to copy into them."""
    if not nbytes:
        return memoryview(bytearray())
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        block.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(block)


def is_on_device(tensor: paddle.Tensor) -> bool:
    """Tell whether a tensor's values are not in this host's memory."""
    return not tensor.place.is_cpu_place()


def copy_bytes(tensor: paddle.Tensor, block: paddle.Tensor, start: int) -> None:
    """Begin to copy the values of a contiguous tensor of at least one dimension, on any device, into a block of bytes (uint8, 1-D)."""
    nbytes = tensor._numel() * tensor.element_size()
    if nbytes:
        with paddle.no_grad():
            values = tensor.detach().view([-1])
            # Paddle 3.3.1 views a slice of another tensor at a wrong place where the size of an element is another.
            bits = (values.clone() if values._offset() else values).view("uint8")
            block._slice(start, start + nbytes).copy_(bits, False)


@contextmanager
def destinations(tensors: Sequence[paddle.Tensor]) -> Iterator[list[memoryview]]:
    """Give bytes to write the tensors' values into: their own memory where :func:`bytes_of` gives that, else copied to them at the end."""
    views = [bytes_of(tensor) for tensor in tensors]
    copied = [(tensor, view) for tensor, view in zip(tensors, views, strict=True) if not is_direct(tensor)]
    yield views
    with paddle.no_grad():
        for tensor, view in copied:
            if len(view):
                host = paddle.empty(tensor.shape, dtype=tensor.dtype).cpu()
                bytes_of(host)[:] = view
                if tensor.is_contiguous():
                    paddle.assign(host, tensor)
                else:
                    tensor[...] = host
