"""Random number generators go on where they were, and no two ranks draw alike that did not before."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_fsdp_ckpt.errors import CorruptCheckpointError
from paddle_fsdp_ckpt.manager.random_state import capture_random_state, random_state_for, restore_random_state


def draw() -> list[float]:
    return [
        random.gauss(0, 1),
        random.random(),
        np.random.randn(),
        np.random.rand(),
        *paddle.randn([3]).tolist(),
        *paddle.randperm(5).tolist(),
    ]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    paddle.seed(number)


def test_all_draw_on_as_they_would_have() -> None:
    seed(3)
    for _ in range(3):  # an odd number of gaussians: half a pair is kept
        draw()
    saved = json.loads(json.dumps(capture_random_state()))
    right = [draw() for _ in range(300)]
    seed(4)
    assert restore_random_state(saved) == []
    assert [draw() for _ in range(300)] == right


def test_capturing_draws_nothing() -> None:
    seed(3)
    right = draw()
    seed(3)
    capture_random_state()
    assert draw() == right


def states(*seeds: int) -> dict[int, dict[str, object]]:
    saved = {}
    for rank, number in enumerate(seeds):
        seed(number)
        saved[rank] = capture_random_state()
    return saved


def drawn_by(world_size: int, saved: dict[int, dict[str, object]]) -> list[list[float]]:
    drawn = []
    for rank in range(world_size):
        restore_random_state(random_state_for(rank, world_size, saved, len(saved)))
        drawn.append(draw())
    return drawn


def drawn_after(number: int) -> list[float]:
    seed(number)
    return draw()


def test_as_many_ranks_get_their_own() -> None:
    assert drawn_by(2, states(1, 2)) == [drawn_after(1), drawn_after(2)]


def test_fewer_ranks_get_the_first_ones() -> None:
    assert drawn_by(2, states(1, 2, 3)) == [drawn_after(1), drawn_after(2)]


def test_more_ranks_get_new_ones_each() -> None:
    drawn = drawn_by(4, states(1, 2))
    assert drawn[:2] == [drawn_after(1), drawn_after(2)]
    for numbers in zip(*(one[:7] for one in drawn), strict=True):
        assert len(set(numbers)) == 4
    assert drawn_by(4, states(1, 2)) == drawn


def test_what_was_alike_stays_alike() -> None:
    assert drawn_by(4, states(1, 1)) == [drawn_after(1)] * 4


def test_of_one_rank_python_and_numpy_are_alike_and_paddle_is_not() -> None:
    one, other = drawn_by(2, states(1))
    assert one == drawn_after(1)
    assert other[:4] == one[:4]
    assert other[4:] != one[4:]


def test_what_was_not_saved_is_said() -> None:
    saved = capture_random_state()
    del saved["numpy"]
    assert restore_random_state(saved) == ["no state of the random number generator 'numpy' was saved; it was left as it is"]


@pytest.mark.parametrize("name", ["python", "numpy", "paddle cpu"])
@pytest.mark.parametrize("state", [[], [1, 2], "x", {"seed": "x", "y": 1}])
def test_nonsense_is_refused(name: str, state: object) -> None:
    with pytest.raises(CorruptCheckpointError, match=f"generator '{name}' can't be restored"):
        restore_random_state(capture_random_state() | {name: state})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("python", lambda state: [state[0], [-1] * 625, None]),
        ("numpy", lambda state: [state[0], [2**70] * 624, *state[2:]]),
        ("numpy", lambda state: [*state[:2], 625, *state[3:]]),
        ("numpy", lambda state: [*state[:2], -1, *state[3:]]),
        ("paddle cpu", lambda state: [*state[:2], 5]),
        ("paddle cpu", lambda state: [*state[:2], "1 2 3"]),
        ("paddle cpu", lambda state: [*state[:2], state[2].rpartition(" ")[0] + " 313"]),
        ("paddle cpu", lambda state: [*state[:2], state[2].replace("1", "x")]),
    ],
)
def test_crafted_states_are_refused(name: str, change: Callable[[Any], object]) -> None:
    """Those with a place beyond the words would be read beyond their memory."""
    saved = capture_random_state()
    with pytest.raises(CorruptCheckpointError, match=f"generator '{name}' can't be restored"):
        restore_random_state(saved | {name: change(saved[name])})
    assert capture_random_state()[name][:2] == saved[name][:2]
