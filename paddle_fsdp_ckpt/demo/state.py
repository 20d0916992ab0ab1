"""The state that a job ends with: every rank writes what it holds, and the parent puts it together to compare jobs.

This is deliberately not the package's own ``save``: what a demo of saving compares must not depend on saving.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Part:
    """What one rank holds of one tensor.

    Attributes:
        values: the values, one after the other.
        start: where the first of them lies in the whole tensor, flattened.
        shape: the whole tensor's shape.
    """

    values: Array
    start: int
    shape: tuple[int, ...]


def write_parts(path: Path, parts: Mapping[str, Part]) -> None:
    """Write a rank's parts to a safetensors file, with their places in its header."""
    places = {key: json.dumps([part.start, part.shape]) for key, part in parts.items()}
    save_file({key: part.values.reshape(-1) for key, part in parts.items()}, path, metadata=places)


def read_whole(paths: Iterable[Path]) -> dict[str, Array]:
    """Put the parts of all ranks together to whole tensors."""
    whole: dict[str, Array] = {}
    missing: dict[str, npt.NDArray[np.bool_]] = {}
    for path in paths:
        with safe_open(path, framework="numpy") as file:
            for key, place in (file.metadata() or {}).items():
                start, shape = json.loads(place)
                values = file.get_tensor(key)
                flat = whole.setdefault(key, np.empty(shape, values.dtype)).reshape(-1)
                flat[start : start + values.size] = values
                missing.setdefault(key, np.ones(math.prod(shape), np.bool_))[start : start + values.size] = False
    incomplete = sorted(key for key, mask in missing.items() if mask.any())
    if incomplete:
        raise ValueError(f"no rank holds all of {', '.join(incomplete)}")
    return whole


def identical(first: Mapping[str, Array], second: Mapping[str, Array]) -> bool:
    """Return whether two states have the same tensors and are equal in every bit."""
    return first.keys() == second.keys() and all(
        first[key].dtype == second[key].dtype and first[key].shape == second[key].shape and first[key].tobytes() == second[key].tobytes()
        for key in first
    )


def largest_difference(first: Mapping[str, Array], second: Mapping[str, Array]) -> float:
    """Return the largest absolute difference of any element; infinite where the tensors aren't the same ones."""
    if {key: array.shape for key, array in first.items()} != {key: array.shape for key, array in second.items()}:
        return math.inf
    return max((float(np.max(np.abs(first[key] - second[key]), initial=0.0)) for key in first), default=0.0)
