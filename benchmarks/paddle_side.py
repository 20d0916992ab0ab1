"""What runs in Paddle's processes: this package, and stock Paddle on the state dicts that this package gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.storage.index import read_index

from . import plain
from .measure import Measurement, measure
from .sizes import Size


class _Block(nn.Layer):
    def __init__(self, parameters: int, shape: tuple[int, int]) -> None:
        super().__init__()
        for number in range(parameters):
            value = nn.initializer.Constant(number + 1.0)
            self.add_parameter(f"w{number}", self.create_parameter(list(shape), dtype="bfloat16", default_initializer=value))


_model: Any = None
_optimizer: Any = None
_manager: Any = None


def build(size: Size) -> int:
    """Make a sharded model with all states of its optimizer; return how many bytes this rank keeps."""
    global _model, _optimizer
    _model = nn.Sequential(*[_Block(count, size.shape) for count in size.blocks()])
    _optimizer = paddle.optimizer.AdamW(1e-3, parameters=_model.parameters(), multi_precision=True)
    ckpt.fully_shard(_model, optimizer=_optimizer)
    ckpt.init_optimizer_state(_optimizer)
    weights = _state().values()
    return sum(int(one.local_tensor._numel()) * int(one.local_tensor.element_size()) for one in weights)


def save(path: str) -> Measurement:
    """Save with this package, which waits for the disk."""
    return measure(lambda: ckpt.save(path, model=_model, optimizer=_optimizer))


def load(path: str, check_digests: bool = True) -> Measurement:
    """Load with this package."""
    return measure(lambda: ckpt.load(path, model=_model, optimizer=_optimizer, check_digests=check_digests))


def index(path: str) -> Measurement:
    """Read what a checkpoint says about itself."""
    return measure(lambda: read_index(Path(path)))


def stock_save(path: str, safetensors: bool) -> Measurement:
    """Save with stock Paddle, and wait for the disk."""

    def call() -> None:
        dist.save_state_dict(_state(), path, safetensors=safetensors)
        if dist.get_world_size() > 1:
            dist.barrier()  # it waits for nobody, and what another rank still writes has a name that goes
        if dist.get_rank() == 0:
            plain.sync(path)

    return measure(call)


def stock_load(path: str) -> Measurement:
    """Load with stock Paddle; on the CPU wheel its way between layouts calls ``cuda()`` on every tensor, which is a copy here."""
    original = paddle.Tensor.cuda
    paddle.Tensor.cuda = lambda tensor, *_: tensor.clone()
    try:
        return measure(lambda: dist.load_state_dict(_state(), path, safetensors=True))
    finally:
        paddle.Tensor.cuda = original


def _state() -> dict[str, Any]:
    return {**ckpt.sharded_state_dict(_model), **ckpt.optimizer_sharded_state_dict(_optimizer)}


def open_manager(root: str) -> None:
    """Make a manager that saves in the background."""
    global _manager
    _manager = ckpt.CheckpointManager(root, max_to_keep=1, async_save=True)


def background_save(step: int) -> Measurement:
    """Begin to save in the background: what a training loop waits for."""
    return measure(lambda: _manager.save(step, model=_model, optimizer=_optimizer))


def wait_for_background() -> Measurement:
    """Wait until the save in the background is done."""
    return measure(lambda: _manager.wait())


def gather() -> Measurement:
    """Gather each whole tensor once."""

    def call() -> None:
        for _ in ckpt.iter_full_parameters(_model):
            pass

    return measure(call)


def plain_gather(nbytes: int, times: int) -> Measurement:
    """Gather as many bytes with bare collectives.

    Args:
        nbytes: that each rank brings to one of them.
        times: how many there are.
    """
    own = paddle.zeros([nbytes // 2], dtype="bfloat16")

    def call() -> None:
        for _ in range(times):
            dist.all_gather([], own)

    return measure(call)
