"""Runs module-level functions on several ranks of a real ``paddle.distributed`` job, in processes that outlive a test.

``pool.py`` is the side of the tests, ``worker.py`` the side of the ranks, ``messages.py`` what passes between them. Fixtures
``ranks``, ``single`` and ``fresh_ranks`` in ``conftest.py`` are how tests get at it.
"""

from .messages import Outcome, RankError
from .pool import RankPool, RankPools, RanksFailed
from .rank import ThisRank, this_rank

__all__ = ["Outcome", "RankError", "RankPool", "RankPools", "RanksFailed", "ThisRank", "this_rank"]
