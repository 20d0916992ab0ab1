"""The state of this process's random number generators as JSON values: Python's ``random``, numpy's global one, Paddle's.

Paddle's generators of the CPU and of this process's current device. Not kept: generators that somebody made for himself
(``numpy.random.default_rng()``; save their state in ``extra_state``), and those of fleet's tensor parallel layers.

At the number of ranks that saved, each rank gets its own state back. At another number a generator whose state was the same on all
ranks, as where all ranks shuffle alike, gets that on all; of the others each rank gets the state of the saved rank of its number, and
ranks beyond those are seeded from the state of the first rank and their own number: never two alike, and the same at each restore.
What one rank alone saved is taken as alike for Python and numpy, and as its own for Paddle. Where what some ranks saved is lost, theirs
are made from those that are left in the same way.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle.base import core

from ..errors import CorruptCheckpointError
from ..storage.json_values import JsonValue

_NUMPY_WORDS = 624
_PADDLE_WORDS = 312
"""Of the Mersenne twister of 32 bits, and of that of 64 bits, whose text in libstdc++ is the words and the place of the next."""


@dataclass(frozen=True)
class _Generator:
    """One generator of this process.

    Attributes:
        capture: returns its state as JSON values.
        restore: takes such a state.
        seed: starts it from a seed, 0 to 2**32 - 1.
    """

    capture: Callable[[], JsonValue]
    restore: Callable[[JsonValue], None]
    seed: Callable[[int], None]


def capture_random_state() -> dict[str, JsonValue]:
    """Return the states of all generators of this process, by name. None of them is advanced."""
    return {name: generator.capture() for name, generator in _generators().items()}


def random_state_for(rank: int, world_size: int, saved: Mapping[int, dict[str, JsonValue]], saved_ranks: int) -> dict[str, JsonValue]:
    """Return what a rank gives to :func:`restore_random_state`.

    Args:
        rank: this one.
        world_size: how many there are now.
        saved: rank -> what :func:`capture_random_state` returned on it: of this rank where as many saved and it is not lost, else of
            all, or of those that are left; at least one.
        saved_ranks: how many saved.
    """
    if saved_ranks == world_size and rank in saved:
        return saved[rank]
    return {name: _chosen(name, rank, {number: one.get(name) for number, one in saved.items()}) for name in saved[min(saved)]}


def _chosen(name: str, rank: int, saved: Mapping[int, JsonValue]) -> JsonValue:
    first = saved[min(saved)]
    # Of one rank alone nobody knows what would have been alike: data are usually shuffled by the former, dropout drawn from the latter.
    alike = all(one == first for one in saved.values()) if len(saved) > 1 else name in ("python", "numpy")
    if alike:
        return first
    if rank in saved:
        return saved[rank]
    digest = hashlib.sha256(f"{name} {rank} {json.dumps(first)}".encode()).digest()
    return {"seed": int.from_bytes(digest[:4], "little")}


def restore_random_state(state: dict[str, JsonValue]) -> list[str]:
    """Give each generator of this process its state, and return, in words, which have none: they are left as they are.

    Raises:
        CorruptCheckpointError: a state is not what :func:`capture_random_state` returns; no generator after it was changed.
    """
    left = []
    for name, generator in _generators().items():
        one = state.get(name)
        if one is None:
            left.append(f"no state of the random number generator '{name}' was saved; it was left as it is")
            continue
        try:
            if isinstance(one, dict) and one.keys() == {"seed"}:
                generator.seed(one["seed"])
            else:
                generator.restore(one)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError) as error:
            raise CorruptCheckpointError(f"the state of the random number generator '{name}' can't be restored: {error}") from error
    return left


def _generators() -> dict[str, _Generator]:
    found = {
        "python": _Generator(lambda: _plain(random.getstate()), lambda state: random.setstate(_as_tuples(state)), random.seed),
        "numpy": _Generator(_capture_numpy, _restore_numpy, np.random.seed),
        "paddle cpu": _paddle_generator(core.default_cpu_generator(), -1),
    }
    device, _, number = paddle.device.get_device().partition(":")
    if device != "cpu":
        found[f"paddle {device}"] = _paddle_generator(_device_generator(device, int(number)), int(number))
    return found


def _device_generator(device: str, number: int) -> Any:
    """Return Paddle's generator of a device, as ``paddle.get_rng_state`` finds it."""
    if device == "gpu":
        return core.default_cuda_generator(number)
    if device == "xpu":
        return core.default_xpu_generator(number)
    return core.default_custom_device_generator(core.CustomPlace(device, number))


def _plain(value: Any) -> JsonValue:
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _as_tuples(value: JsonValue) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def _capture_numpy() -> JsonValue:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return [kind, np.asarray(keys).tolist(), *rest]


def _restore_numpy(state: JsonValue) -> None:
    kind, keys, position, *rest = state
    if position not in range(_NUMPY_WORDS + 1):  # numpy would read beyond its words
        raise ValueError(f"it stands at word {position!r:.20}, and has {_NUMPY_WORDS}")
    np.random.set_state((kind, np.array(keys, np.uint32), position, *rest))


def _paddle_generator(generator: Any, device: int) -> _Generator:
    def capture() -> JsonValue:
        # What Paddle 3.3 pickles: device, seed, offset, and the text of a std::mt19937_64, as a list of characters.
        _, seed, offset, engine = generator.get_state().__getstate__()
        return [seed, offset, bytes(engine).decode()]

    def restore(state: JsonValue) -> None:
        seed, offset, engine = state
        words = [int(word) for word in engine.split(" ")]
        if len(words) != _PADDLE_WORDS + 1 or words[-1] not in range(_PADDLE_WORDS + 1):  # C++ would read beyond its words
            raise ValueError(f"an engine of {len(words) - 1} words stands at word {words[-1]}, and has {_PADDLE_WORDS}")
        kind: Any = type(generator.get_state())
        restored = kind.__new__(kind)
        restored.__setstate__((device, seed, offset, list(engine.encode())))
        generator.set_state(restored)

    return _Generator(capture, restore, lambda seed: generator.manual_seed(seed))
