"""What runs in the processes that train one model: on our runtime, on Paddle's own fused one, and unfused."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight
from paddle.nn import functional as F

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp.paddle_on_cpu import paddle_runtime_on_cpu

from .measure import Measurement, measure

_FEATURES = 64
_ROWS = 128


class TransformerLayer(nn.Layer):
    """A residual block; Paddle's runtime cuts into units by this class name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Add to ``[rows, width]`` what two layers make of it."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class _Model(nn.Layer):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Linear(_FEATURES, width, bias_attr=False)
        self.blocks = nn.LayerList([TransformerLayer(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 1)

    def get_input_embeddings(self) -> nn.Layer:
        """Paddle's runtime gives this layer a buffer of its own."""
        return self.embed

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


_model: Any = None
_optimizer: Any = None
_batch: Any = None
_reduces = False
_managers: dict[str, Any] = {"background": None, "blocking": None}
_ballast: dict[str, ShardedWeight] = {}
_root = ""
_stack = ExitStack()


def build(runtime: str, width: int, blocks: int) -> None:
    """Make the model and its AdamW.

    Args:
        runtime: ``ours``, ``prefetch`` (ours, with a unit fetched ahead), ``paddle``, or ``unfused``, where each gradient is averaged over
            the ranks by itself.
        width: of the model.
        blocks: of the model.
    """
    global _model, _optimizer, _batch, _reduces
    paddle.seed(1)
    _batch = paddle.to_tensor(np.random.RandomState(dist.get_rank()).randn(_ROWS, _FEATURES).astype("float32"))
    if runtime == "paddle":
        from paddle.distributed.fsdp import fully_shard

        _stack.enter_context(paddle_runtime_on_cpu())
        mesh = dist.ProcessMesh(list(range(dist.get_world_size())), dim_names=["dp"])
        dist.auto_parallel.set_mesh(mesh)
        _model = _Model(width, blocks)
        fully_shard(_model, mesh=mesh)
        _batch = dist.auto_parallel.api.dtensor_from_local(_batch, mesh, [dist.Shard(0)])
    else:
        _model = _Model(width, blocks)
    _optimizer = paddle.optimizer.AdamW(1e-3, parameters=_model.parameters())
    if runtime in ("ours", "prefetch"):
        ckpt.fully_shard(_model, optimizer=_optimizer, prefetch=int(runtime == "prefetch"))
    _reduces = runtime == "unfused"


def step() -> Measurement:
    """Train one step."""
    return measure(_step)


def _step() -> None:
    _model(_batch).square().mean().backward()
    if _reduces:
        with paddle.no_grad():
            for parameter in _model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad.scale_(1.0 / dist.get_world_size())
    _optimizer.step()
    _optimizer.clear_grad()


def open_managers(root: str, ballast: tuple[int, ...]) -> None:
    """Make a manager that saves in the background and one that doesn't, and let each save once.

    Args:
        root: where to.
        ballast: the shape of a rank's part of a tensor of float32 that is saved beside the model, so that a save takes many steps.
    """
    global _root
    _root = root
    whole = (ballast[0] * dist.get_world_size(), *ballast[1:])
    offset = (ballast[0] * dist.get_rank(), *[0] * (len(ballast) - 1))
    _ballast["ballast"] = ShardedWeight("ballast", paddle.zeros(ballast), ballast, whole, offset)
    for kind in _managers:
        _managers[kind] = ckpt.CheckpointManager(f"{root}/{kind}", max_to_keep=1, async_save=kind == "background")
        _save(kind)
        _managers[kind].wait()


def steps(count: int, kind: str | None = None) -> Measurement:
    """Train some steps, the first right behind a save of the given kind, if any."""

    def call() -> None:
        if kind is not None:
            _save(kind)
        for _ in range(count):
            _step()

    return measure(call)


def steps_one_by_one(count: int, beside_saves: bool) -> Measurement:
    """Train some steps, and add up what each took by itself.

    Args:
        count: how many.
        beside_saves: count a step only where a save in the background was being written from its beginning to its end. Where one was not,
            the next save begins, outside of what is measured; so a disk can be as fast as it likes.
    """
    spent: list[tuple[float, float]] = []

    def call() -> None:
        saves = 0
        target: Path | None = None
        while len(spent) < count:
            if beside_saves and target is None:
                if saves == count:
                    raise RuntimeError(f"only {len(spent)} steps ended before a save did, in {saves} saves")
                wait_for_background()
                target = Path(_root) / "background" / f"step_{_save('background'):08}"
                saves += 1
            cpu_start, start = time.process_time(), time.perf_counter()
            _step()
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            if target is not None and _is_there(target):
                target = None
            else:
                spent.append((seconds, cpu_seconds))

    return replace(measure(call), seconds=sum(one for one, _ in spent), cpu_seconds=sum(one for _, one in spent))


def _is_there(path: Path) -> bool:
    """Tell whether any rank sees it: they go on alike."""
    seen = paddle.to_tensor([float(path.exists())])
    if dist.get_world_size() > 1:
        dist.all_reduce(seen)
    return bool(seen.item() > 0)


def wait_for_background() -> None:
    """Wait until the save in the background is done."""
    _managers["background"].wait()


def _save(kind: str) -> int:
    manager = _managers[kind]
    number = (manager.latest_step() or 0) + 1
    manager.save(number, model=_model, optimizer=_optimizer, sharded=_ballast)
    return number
