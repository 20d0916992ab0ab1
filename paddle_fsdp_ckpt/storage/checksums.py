"""A checksum of a tensor that doesn't depend on how it is cut: the sum, modulo 2**64, of one number for each element.

An element's number is made of its bits and a key of its position in the flattened tensor by the finalizer of splitmix64
(https://prng.di.unimi.it/splitmix64.c), which is a bijection of 64 bits; so is the key. So two tensors that differ in one element never
have the same sum, and two that differ in several, or in their order, do so with a chance of about 1 in 2**64. It tells tensors apart; it is
no proof against someone who means to deceive. The checksum of a tensor is a part of the format.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

CHECKSUM_LENGTH = 16
"""Hexadecimal digits of one checksum."""

_BLOCK_NUMEL = 1 << 15
_MODULUS = 1 << 64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_GOLDEN = 0x9E3779B97F4A7C15

Words = NDArray[np.uint64]


def seed_of(dtype: str, shape: Sequence[int]) -> int:
    """Return what the sums of tensors of this kind begin with, so that the same bits as another dtype or shape have another checksum."""
    return xxh3_64_intdigest(f"{dtype} {list(shape)}".encode())


def sum_of_elements(data: memoryview, itemsize: int, first: int, seed: int) -> int:
    """Return the sum of some elements' numbers. It needs little memory, however many they are.

    Args:
        data: their bytes, one element after another.
        itemsize: bytes of an element: 1, 2, 4 or 8.
        first: position of the first one in the flattened tensor.
        seed: see :func:`seed_of`.
    """
    elements = np.frombuffer(data, f"<u{itemsize}")
    words, scratch = np.empty(_BLOCK_NUMEL, np.uint64), np.empty(_BLOCK_NUMEL, np.uint64)
    total = start = 0
    while start < len(elements):
        block, offset = divmod(first + start, _BLOCK_NUMEL)
        bits = elements[start : start + _BLOCK_NUMEL - offset]
        some, other = words[: len(bits)], scratch[: len(bits)]
        # The key of a position: that of its block and that of its place there.
        np.add(_keys_in_a_block()[offset : offset + len(bits)], _mixed((seed + block * _GOLDEN) % _MODULUS), out=some)
        np.bitwise_xor(some, bits, out=some)
        _mix(some, other)
        total += int(some.sum(dtype=np.uint64))
        start += len(bits)
    return total % _MODULUS


def checksum_text(seed: int, sums: Sequence[int]) -> str:
    """Return the checksum of a tensor from the sums of all its parts."""
    return f"{(seed + sum(sums)) % _MODULUS:0{CHECKSUM_LENGTH}x}"


@cache
def _keys_in_a_block() -> Words:
    keys = np.arange(_BLOCK_NUMEL, dtype=np.uint64)
    np.multiply(keys, np.uint64(_GOLDEN), out=keys)
    _mix(keys, np.empty_like(keys))
    return keys


def _mixed(word: int) -> np.uint64:
    words = np.array([word], np.uint64)
    _mix(words, np.empty_like(words))
    return np.uint64(words[0])


def _mix(words: Words, scratch: Words) -> None:
    """Replace each word by another one, different words by different ones."""
    for shift, factor in _ROUNDS:
        np.right_shift(words, np.uint64(shift), out=scratch)
        np.bitwise_xor(words, scratch, out=words)
        np.multiply(words, np.uint64(factor), out=words)
    np.right_shift(words, np.uint64(_LAST_SHIFT), out=scratch)
    np.bitwise_xor(words, scratch, out=words)
