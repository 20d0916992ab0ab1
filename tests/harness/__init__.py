"""Runs module-level functions on several ranks of a real ``paddle.distributed`` job, in processes that outlive a test.

``pool.py`` is the side of the tests, ``worker.py`` the side of the ranks, ``messages.py`` what passes between them. Fixtures
``ranks``, ``single`` and ``fresh_ranks`` in ``conftest.py`` are how tests get at it. ``pieces.py`` puts together what ranks held.
``groups.py`` makes further groups of ranks, ``logs.py`` collects what one logs.
``scripts.py`` is for scripts that are started without the pool.
"""

from .groups import hybrid_groups, separate_stores
from .logs import logged
from .messages import Outcome, RankError
from .pieces import StatePiece, assemble, assert_equal_states
from .pool import RankPool, RankPools, RanksFailed
from .rank import ThisRank, this_rank
from .scripts import on_two_ranks, run_script, script_environment

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
    "hybrid_groups",
    "logged",
    "on_two_ranks",
    "run_script",
    "script_environment",
    "separate_stores",
    "this_rank",
]
