"""What runs in PyTorch's processes: FSDP2's ``fully_shard``, the states of an AdamW with master weights, and DCP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from .measure import Measurement, measure
from .sizes import Size


class _Block(nn.Module):
    def __init__(self, parameters: int, shape: tuple[int, int]) -> None:
        super().__init__()
        for number in range(parameters):
            self.register_parameter(f"w{number}", nn.Parameter(torch.full(shape, number + 1.0, dtype=torch.bfloat16)))


_model: Any = None
_state: dict[str, Any] = {}
_pending: Any = None


def build(size: Size) -> int:
    """Make a sharded model, and states of the same kinds and sizes as AdamW's in Paddle; return how many bytes this rank keeps."""
    global _model, _state
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    _model = nn.Sequential(*[_Block(count, size.shape) for count in size.blocks()])
    for block in _model:
        fully_shard(block, mesh=mesh)
    fully_shard(_model, mesh=mesh)
    _state = {}
    for name, parameter in _model.state_dict().items():
        _state[name] = parameter
        for state in ("moment1_0", "moment2_0", "w_0"):
            _state[f"{name}.{state}"] = torch.zeros_like(parameter, dtype=torch.float32)
        for state in ("beta1_pow_acc_0", "beta2_pow_acc_0"):
            _state[f"{name}.{state}"] = torch.ones(1)
    return sum(_local(one).numel() * one.element_size() for one in _state.values())


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def save(path: str) -> Measurement:
    """Save with DCP, whose writer waits for the disk."""
    return measure(lambda: dcp.save(_state, checkpoint_id=path))


def load(path: str) -> Measurement:
    """Load with DCP."""
    return measure(lambda: dcp.load(_state, checkpoint_id=path))


def background_save(path: str) -> Measurement:
    """Begin to save in the background."""

    def call() -> None:
        global _pending
        _pending = dcp.async_save(_state, checkpoint_id=path)

    return measure(call)


def wait_for_background() -> Measurement:
    """Wait until the save in the background is done."""
    return measure(lambda: _pending.result())


def gather() -> Measurement:
    """Gather all whole tensors, which the state dict then holds at once."""
    return measure(lambda: get_model_state_dict(_model, options=StateDictOptions(full_state_dict=True)))
