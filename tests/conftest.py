"""Fixtures that run functions on the ranks of a real job; see ``harness``. Property tests may take as long as a busy machine needs."""

from __future__ import annotations

import hypothesis
from harness.fixtures import fresh_ranks, rank_pools, ranks, single

__all__ = ["fresh_ranks", "rank_pools", "ranks", "single"]

hypothesis.settings.register_profile("without deadline", deadline=None)
hypothesis.settings.load_profile("without deadline")
