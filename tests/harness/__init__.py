"""Runs module-level functions on several ranks of a real ``paddle.distributed`` job, in processes that outlive a test.

``pool.py`` is the side of the tests, ``worker.py`` the side of the ranks, ``messages.py`` what passes between them. Fixtures
``ranks``, ``single`` and ``fresh_ranks`` in ``conftest.py`` are how tests get at it. ``pieces.py`` puts together what ranks held.
"""

from .messages import Outcome, RankError
from .pieces import StatePiece, assemble, assert_equal_states
from .pool import RankPool, RankPools, RanksFailed
from .rank import ThisRank, this_rank

__all__ = [
    "Outcome",
    "RankError",
    "RankPool",
    "RankPools",
    "RanksFailed",
    "StatePiece",
    "ThisRank",
    "assemble",
    "assert_equal_states",
    "this_rank",
]
