"""Fixtures that run functions on the ranks of a real job; see ``harness``."""

from __future__ import annotations

from harness.fixtures import fresh_ranks, rank_pools, ranks, single

__all__ = ["fresh_ranks", "rank_pools", "ranks", "single"]
