"""Tensors that are to be written, and their bytes in the order of the file: made when they are needed, or ahead by several threads."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass


@dataclass(frozen=True)
class OutputTensor:
    """A tensor that is to be written.

    Attributes:
        name: of the tensor.
        dtype: Paddle's dtype name.
        shape: of the tensor.
        nbytes: how many bytes its values have.
        batch: tensors that follow each other with the same number are read together, and so best made by one thread.
        blocks: yields the bytes of its values, row-major; a block is valid until the next is asked for.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    batch: int
    blocks: Callable[[], Iterator[memoryview]]


def blocks_in_order(tensors: Sequence[OutputTensor], workers: int) -> Generator[tuple[OutputTensor, Iterable[memoryview]], None, None]:
    """Yield each tensor with the blocks of its bytes, which must be used up before the next is asked for.

    Args:
        tensors: in this order.
        workers: how many threads make them. One: each block when it is asked for. More: whole tensors, no more than one batch a thread
            and another one in memory at a time.
    """
    if workers == 1:
        yield from ((tensor, tensor.blocks()) for tensor in tensors)
        return
    groups = [list(group) for _, group in itertools.groupby(tensors, key=lambda tensor: tensor.batch)]
    pool = ThreadPoolExecutor(workers)
    ahead: deque[tuple[list[OutputTensor], Future[list[memoryview]]]] = deque()
    try:
        for group in groups:
            ahead.append((group, pool.submit(_make, group)))
            if len(ahead) > workers:
                yield from _finished(*ahead.popleft())
        while ahead:
            yield from _finished(*ahead.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def _finished(group: list[OutputTensor], made: Future[list[memoryview]]) -> Iterator[tuple[OutputTensor, Iterable[memoryview]]]:
    for tensor, data in zip(group, made.result(), strict=True):
        yield tensor, (data,)


def _make(group: list[OutputTensor]) -> list[memoryview]:
    made = []
    for tensor in group:
        data = memoryview(bytearray(tensor.nbytes))
        end = 0
        for block in tensor.blocks():
            data[end : end + len(block)] = block
            end += len(block)
        made.append(data[:end])
    return made
