"""What was compressed block by block comes back as it was, a bounded number of bytes at a time."""

from __future__ import annotations

import pytest

from paddle_fsdp_ckpt.storage.compressed import compressed, decompressed


@pytest.mark.parametrize("blocks", [[], [b""], [b"a", b"", b"bc"], [bytes(3 << 20), b"x" * 100, bytes(range(256)) * 9000]])
def test_bytes_come_back(blocks: list[bytes]) -> None:
    data = compressed(iter(blocks))
    got = list(decompressed(data))
    assert b"".join(got) == b"".join(blocks)
    assert max(map(len, got), default=0) <= 1 << 20
    assert len(data) < 100 + len(b"".join(blocks)) // 20
