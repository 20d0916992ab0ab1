from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from paddle_fsdp_ckpt.storage.digests import CHUNK_NBYTES, Digester, chunk, chunks_of, count_chunks, digest, digest_of_parts

SIZES = st.one_of(st.integers(0, 5), st.integers(-3, 3).map(lambda n: n + CHUNK_NBYTES), st.integers(0, 5 * CHUNK_NBYTES))


@given(SIZES, SIZES)
def test_chunks_are_the_header_and_then_equal_parts_of_the_rest(header: int, rest: int) -> None:
    size = header + rest
    chunks = [chunk(number, size, header) for number in range(count_chunks(size, header))]
    expected = [(0, header)] if header else []
    expected += [(start, min(start + CHUNK_NBYTES, size)) for start in range(header, size, CHUNK_NBYTES)]
    assert [(one.start, one.stop) for one in chunks] == expected
    assert [one.number for one in chunks] == list(range(len(chunks)))


@given(st.integers(0, 100), st.integers(0, 3 * CHUNK_NBYTES), st.integers(1, 3 * CHUNK_NBYTES))
def test_the_chunks_of_a_range_are_those_that_meet_it(header: int, start: int, nbytes: int) -> None:
    start, stop = start + header, start + header + nbytes
    size = stop + 10
    meeting = [
        number for number in range(count_chunks(size, header)) if (one := chunk(number, size, header)).start < stop and start < one.stop
    ]
    assert list(chunks_of(start, stop, header)) == meeting


@pytest.mark.parametrize("header", [0, 8, 1000])
@pytest.mark.parametrize("size", [0, 1, 1000, CHUNK_NBYTES, CHUNK_NBYTES + 1000, 3 * CHUNK_NBYTES + 5])
def test_bytes_that_pass_by_in_any_parts_give_the_digests_of_the_chunks(header: int, size: int) -> None:
    size = max(size, header)
    data = memoryview(os.urandom(size))
    expected = "".join(xxh3_64_hexdigest(data[slice(*chunk(number, size, header)[1:])]) for number in range(count_chunks(size, header)))
    for part in (1 << 30, 100_003):
        digester = Digester(header)
        for start in range(0, size, part):
            digester.update(data[start : start + part])
        assert digester.finish() == expected


def test_a_digest_is_xxh3_of_the_bytes_wherever_they_lie() -> None:
    # From the test vectors of xxHash 0.8 (XXH3_64bits of no bytes), as any tool prints it: xxhsum -H3 /dev/null
    assert digest(b"") == "2d06800538d394c2"
    data = memoryview(os.urandom(5000))
    parts = [data[a:b] for a, b in itertools.pairwise([0, 1, 17, 17, 4000, 5000])]
    assert digest_of_parts(parts) == digest(data) == xxh3_64_hexdigest(data)
