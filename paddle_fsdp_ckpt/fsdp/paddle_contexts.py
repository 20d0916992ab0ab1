"""The contexts that Paddle's own ``paddle.distributed.fsdp.fully_shard`` registers: where, what of them is relied on, how they let go.

There are two of them, with the same fused buffers: that of Paddle 3.3's auto-parallel mode
(``paddle.distributed.auto_parallel.fully_shard_fusion``), whose parameters are distributed tensors, and that of the development version's
manual mode (``paddle.distributed.fsdp.fully_shard_fusion``, after pull request PaddlePaddle/Paddle#79724), whose parameters are plain ones.
The second was written against its public source, and is tested with objects of its shape only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import paddle
import paddle.distributed as dist

from ..errors import ShardingError, listing

_CONTEXT = (
    "model",
    "comm_sync_and_reset_status",
    "buffer_manager.buffer_groups",
    "buffer_manager._fsdp_group",
    "comm_manager.buffer_cnt_in_using",
    "comm_manager.need_zero_grads",
    "comm_manager.finish_grads_sync",
)
_GROUP = (
    "params",
    "grads_use_cnt",
    "grads_buffer",
    "params_buffer.data_buffer",
    "params_buffer.param_offsets",
    "params_buffer.total_buffer_size",
    "params_buffer.fsdp_degree",
    "params_buffer.status",
    "params_buffer.comm_task",
    "params_buffer.clear_tmp_buffer",
)


class PaddleContext(ABC):
    """One ``FullyShardFusion`` of Paddle's, whichever version made it.

    Attributes:
        raw: Paddle's object.
    """

    written_for: ClassVar[str]
    """The version of Paddle whose attributes are relied on."""

    averages_gradients: ClassVar[bool]
    """Whether gradients are the mean over ranks; otherwise their sum, which is right for distributed tensors as inputs only."""

    loses_partial_gradients: ClassVar[bool]
    """Whether a buffer's gradient is lost where one of its parameters got none, or where a backward follows another too soon."""

    loses_set_values: ClassVar[bool]
    """Whether values given to a parameter are lost without an error."""

    _context_attributes: ClassVar[tuple[str, ...]] = _CONTEXT
    _group_attributes: ClassVar[tuple[str, ...]] = _GROUP
    _counts: ClassVar[tuple[str, ...]] = ("grads_use_cnt",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank's position among those that the model is cut over."""

    @abstractmethod
    def _check_group(self) -> None:
        """Raise where the buffers are cut over other ranks than :attr:`group`."""

    @property
    def group(self) -> Any:
        """Paddle's group of the ranks that the model is cut over."""
        return self.raw.buffer_manager._fsdp_group

    @property
    def buffer_groups(self) -> list[Any]:
        """Paddle's fused buffers, each with its parameters."""
        return list(self.raw.buffer_manager.buffer_groups)

    @property
    def answers_decay_by_name(self) -> bool:
        """Whether Paddle itself asks ``apply_decay_param_fun`` with the names of parameters, and refuses buffers that mix them."""
        return hasattr(self.raw, "bind_decay_param_fun")

    def check(self) -> None:
        """Raise where something is missing that is relied on.

        Raises:
            ShardingError: it says what, or that the buffers are not all cut over the same ranks.
        """
        missing = list(self._missing())
        if missing:
            raise ShardingError(
                f"Paddle's fully_shard in version {paddle.__version__} is not the one of {self.written_for} that this was written for: its "
                f"{type(self.raw).__name__} lacks {listing(dict.fromkeys(missing))}; use Paddle {self.written_for}, or "
                "paddle_fsdp_ckpt.fully_shard"
            )
        self._check_group()

    def _missing(self) -> Iterator[str]:
        absent = [name for name in self._context_attributes if not _has(self.raw, name)]
        yield from absent
        if not absent:
            for group in self.buffer_groups:
                yield from (f"buffer_groups[...].{name}" for name in self._group_attributes if not _has(group, name))

    def let_go_of_weights(self) -> None:
        """Let go of all gathered weights, so that each next use gathers anew. All ranks must call it, outside forward and backward.

        Paddle's own leaves buffers alone that were gathered ahead and not used, and counts of layers that a forward did not use.
        """
        for group in self.buffer_groups:
            gathered = group.params_buffer
            if gathered.comm_task is not None:
                gathered.comm_task.wait()
                gathered.comm_task = None
            gathered.clear_tmp_buffer()
            gathered.status = type(gathered.status).FREED
            for count in self._counts:
                setattr(group, count, 0)
        self.raw.comm_manager.buffer_cnt_in_using = 0

    def drop_gradients(self) -> None:
        """Let all gradients be zero, and none under way. All ranks must call it, outside forward and backward."""
        self.raw.comm_manager.finish_grads_sync()
        for group in self.buffer_groups:
            if group.grads_buffer is not None:
                group.grads_buffer.clear_tmp_buffer()
                group.grads_buffer.data_buffer.zero_()
                for parameter in group.params:
                    parameter.main_grad = None
            group.grads_use_cnt = 0
        self.raw.comm_manager.need_zero_grads = True

    def incomplete_gradients(self) -> list[Any]:
        """Return the buffers in which some parameters got a gradient and others did not, since the last complete one."""
        return [group for group in self.buffer_groups if group.grads_use_cnt] if self.loses_partial_gradients else []


class AutoParallelContext(PaddleContext):
    """That of Paddle 3.3's auto-parallel mode."""

    written_for = "3.3.1"
    averages_gradients = False
    loses_partial_gradients = True
    loses_set_values = False
    _context_attributes = (*_CONTEXT, "mesh")
    _group_attributes = (*_GROUP, "params_use_cnt")
    _counts = ("grads_use_cnt", "params_use_cnt")

    @property
    def rank(self) -> int:
        """The position in the mesh."""
        return int(self.raw.mesh.process_ids.index(dist.get_rank()))

    def _check_group(self) -> None:
        shape = list(self.raw.mesh.shape)
        if shape != [self.group.nranks]:
            raise ShardingError(
                f"Paddle's fully_shard was given a mesh of shape {shape}, and cuts wrongly over one of several dimensions; "
                'give it dist.ProcessMesh(ranks, dim_names=["dp"])'
            )


class ManualContext(PaddleContext):
    """That of the development version's manual mode. Its buffers are also keyed by expert, ranks and ``no_weight_decay``."""

    written_for = "3.4 (development, pull request 79724)"
    averages_gradients = True
    loses_partial_gradients = False
    loses_set_values = True
    _group_attributes = (*_GROUP, "fsdp_group", "no_decay")

    @property
    def rank(self) -> int:
        """The position in the group."""
        return int(self.group.rank)

    def _check_group(self) -> None:
        elsewhere = [
            parameter.name
            for group in self.buffer_groups
            if group.fsdp_group is not self.group and list(group.fsdp_group.ranks) != list(self.group.ranks)
            for parameter in group.params
        ]
        if elsewhere:
            raise ShardingError(
                f"Paddle's fully_shard cut {len(elsewhere)} parameters over other ranks than the rest, as under expert parallelism: "
                f"{listing(elsewhere)}; this can't save or load those yet. Train without expert parallelism"
            )


def registered_context() -> PaddleContext | None:
    """Return the context of the model that Paddle's own ``fully_shard`` cut last in this process, or None; nothing of it is checked."""
    for raw in (_registered_by_development(), _registered_by_release()):
        if raw is not None:
            return AutoParallelContext(raw) if hasattr(raw, "mesh") else ManualContext(raw)
    return None


def _registered_by_development() -> Any:
    try:
        from paddle.distributed.fsdp import _fsdp_context
    except ImportError:  # a release
        return None
    return _fsdp_context.get_fsdp_context()


def _registered_by_release() -> Any:
    try:
        from paddle.distributed.auto_parallel.fully_shard_fusion import get_fsdp_context
    except ImportError:  # another version, which registers elsewhere
        return None
    return get_fsdp_context()


def check_not_cut_before(what: str, parameters: Iterable[Any]) -> None:
    """Raise where Paddle's own ``fully_shard`` cut parameters, and the process's context is not that of them.

    Args:
        what: whose parameters they are.
        parameters: Paddle's.

    Raises:
        ShardingError: some were cut for another context, which the process has no more.
    """
    context = registered_context()
    own = {id(getattr(group, "grads_buffer", None)) for group in _groups_of(context)}
    buffers = (getattr(parameter, "_fusion_buffer", None) for parameter in parameters)
    # Other parts of Paddle use the same attribute for buffers of theirs.
    if any(type(one).__name__ == "TensorFusionBuffer" and id(one) not in own for one in buffers):
        now = "no model is" if context is None else f"a {type(getattr(context.raw, 'model', None)).__name__} cut later is"
        raise ShardingError(
            f"Paddle's fully_shard cut {what}, and {now} what the process trains now: Paddle has room for one, which every optimizer "
            "steps, so that the others never train. Cut one model only, or use paddle_fsdp_ckpt.fully_shard for all"
        )


def _groups_of(context: PaddleContext | None) -> list[Any]:
    return list(getattr(getattr(context and context.raw, "buffer_manager", None), "buffer_groups", None) or [])


def _has(value: Any, dotted: str) -> bool:
    for name in dotted.split("."):
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True
