"""Recompute's backwards, which run a piece of a forward again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

import paddle


class RunningBackward:
    """Stands for one backward that runs a piece of a forward again.

    Attributes:
        is_reentrant: whether what runs again gets a backward of its own. Otherwise it runs only for what it saves.
    """

    def __init__(self, *, is_reentrant: bool) -> None:
        self.is_reentrant = is_reentrant


def running_backwards() -> list[RunningBackward]:
    """Return the backwards on the stack that may run a piece of a forward again, the innermost first."""
    found: list[RunningBackward] = []
    frame = sys._getframe(1).f_back
    while frame is not None:
        owner = _owner(frame)
        if owner is not None:
            if not hasattr(owner, "_fully_shard_running"):
                owner._fully_shard_running = RunningBackward(is_reentrant=isinstance(owner, paddle.autograd.PyLayerContext))
            found.append(owner._fully_shard_running)
        frame = frame.f_back
    return found


def keeps_marked_tensors(pack: Callable[..., Any]) -> bool:
    """Tell whether a saved-tensor hook is that of recompute in Paddle 3.3.1: it keeps a tensor that has ``main_grad``, others it copies."""
    return isinstance(pack, FunctionType) and pack.__name__ == "inner_pack" and "main_grad" in pack.__code__.co_consts


def _owner(frame: FrameType) -> Any:
    """Return an object that lives as long as the backward of a frame and belongs to it alone; None where the frame is of something else."""
    if frame.f_code.co_name == "backward":
        context = frame.f_locals.get("ctx")
        return context if isinstance(context, paddle.autograd.PyLayerContext) else None
    # The hook of recompute with use_reentrant=False, in Paddle and in PaddleFormers.
    if frame.f_code.co_name == "unpack":
        inner = frame.f_locals.get("inner_pack")
        return inner if isinstance(inner, FunctionType) else None
    return None
