"""A flat buffer with this rank's data: its shard, and, while they are needed, the whole of it and the gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import paddle

from ..layout import ITEM_SIZES, FlatBuffer, Slot
from .communication import Communicator, StartedCollective
from .lent_memory import ends_with_piece
from .parameter_shard import ParameterShard
from .saved_weights import SAVED_WEIGHTS
from .tensors import flat_view, initialize_if_lazy

if TYPE_CHECKING:
    from paddle.base.framework import EagerParamBase

    from .unit import Unit


class LiveBuffer:
    """One flat buffer: this rank's shard, and, while they are needed, the whole buffer and the gradients."""

    def __init__(
        self, unit: Unit, layout: FlatBuffer, parameters: list[EagerParamBase], first_index: int, communicator: Communicator
    ) -> None:
        self.unit = unit
        self.layout = layout
        self.communicator = communicator
        self.shard: paddle.Tensor = self._fuse(parameters)
        self.whole: paddle.Tensor | None = None
        self._prefetched: StartedCollective | None = None
        self._reduction: tuple[StartedCollective, float] | None = None
        self._whole_gradient: paddle.Tensor | None = None
        self._filled_slots: set[int] = set()  # by their offset
        self._gradient_shard: paddle.Tensor | None = None
        self._zeros: set[ParameterShard] = set()
        self.shards = [
            ParameterShard(self, slot, first_index + position, parameter)
            for position, (slot, parameter) in enumerate(zip(layout.slots, parameters, strict=True))
        ]
        self.dtype = self.shard.dtype
        self.is_lent_apart = ends_with_piece(self.shard)
        self._local_pieces = sum(shard.range.numel > 0 for shard in self.shards)

    def _fuse(self, parameters: list[EagerParamBase]) -> paddle.Tensor:
        """Copy the parameters, as the first rank has them, into a flat buffer, and return this rank's shard."""
        with paddle.no_grad():
            whole = paddle.zeros([self.layout.numel], dtype=self.layout.dtype)
            for slot, parameter in zip(self.layout.slots, parameters, strict=True):
                # On every rank, so that their random number generators stay alike.
                initialize_if_lazy(parameter)
                paddle.assign(parameter.detach().reshape([-1]), flat_view(whole, slot.range))
            self.communicator.broadcast(whole)
            mine = self.layout.shard(self.communicator.rank)
            return whole if self.communicator.alone else whole[mine.start : mine.stop].clone()

    # Data.

    def gather(self) -> None:
        """Fetch the whole buffer. A collective operation."""
        if self.whole is None:
            # Always fresh memory: a view that a graph kept of an earlier one must not see other values.
            if self._prefetched is not None:
                self.whole, self._prefetched = self._prefetched.finish(), None
            else:
                self.whole = self.shard if self.communicator.alone else self.communicator.all_gather(self.shard)
            SAVED_WEIGHTS.add(self, self.whole)

    def prefetch(self) -> None:
        """Begin to fetch the whole buffer. A collective operation."""
        if self.whole is None and self._prefetched is None and not self.communicator.alone:
            self._prefetched = self.communicator.start_all_gather(self.shard)

    def drop_prefetched(self) -> None:
        """Let go of what :meth:`prefetch` fetched."""
        if self._prefetched is not None:
            self._prefetched.finish()
            self._prefetched = None

    def release(self) -> None:
        """Let go of the whole buffer."""
        self.drop_prefetched()
        if self.whole is not None:
            SAVED_WEIGHTS.remove(self)
            self.whole = None

    # Gradients.

    def add_gradient(self, slot: Slot, gradient: paddle.Tensor) -> None:
        """Add a parameter's whole gradient of this rank, not reduced yet."""
        with paddle.no_grad():
            if self._whole_gradient is None:
                self._whole_gradient = paddle.empty([self.layout.numel], dtype=self.layout.gradient_dtype)
            view = flat_view(self._whole_gradient, slot.range)
            flat = gradient.detach().reshape([-1]).astype(self.layout.gradient_dtype)
            if slot.offset in self._filled_slots:
                view.add_(flat)
            else:
                self._filled_slots.add(slot.offset)
                paddle.assign(flat, view)

    def zero_pending(self, slot: Slot) -> None:
        """Forget what :meth:`add_gradient` added for ``slot``."""
        self._filled_slots.discard(slot.offset)

    @property
    def has_pending_gradient(self) -> bool:
        """Whether some gradient of this rank is not reduced yet."""
        return self._whole_gradient is not None

    def reduce_gradient(self, mean: bool, finish: bool = True) -> None:
        """Reduce the pending gradient over the ranks and add this rank's part to its shard. A collective operation.

        Args:
            mean: or sum.
            finish: or only begin, for :meth:`finish_reduction`.
        """
        self.finish_reduction()
        with paddle.no_grad():
            factor = 1.0 / self.communicator.overall_world_size if mean else 1.0
            self._reduction = self.communicator.start_reduce_scatter(self._take_whole_gradient(), sync_op=finish), factor
        if finish:
            self.finish_reduction()

    def finish_reduction(self) -> None:
        """Complete what :meth:`reduce_gradient` began. A collective operation, where it did."""
        if self._reduction is None:
            return
        (started, factor), self._reduction = self._reduction, None
        with paddle.no_grad():
            part = started.finish()
            if factor != 1.0:
                part.scale_(factor)
            if self._gradient_shard is None:
                self._gradient_shard = part
                return
            self._gradient_shard.add_(part)
            for shard in self._zeros:  # replaced, as Paddle does after clear_grad(), since 0 + -0 is 0
                paddle.assign(flat_view(part, shard.buffer_range), flat_view(self._gradient_shard, shard.buffer_range))
            self._zeros.clear()

    def _take_whole_gradient(self) -> paddle.Tensor:
        """Return the pending gradient, zero where none was added, and forget it. What padding holds does not matter."""
        whole, filled = self._whole_gradient, self._filled_slots
        self._whole_gradient, self._filled_slots = None, set()
        if whole is None:
            return paddle.zeros([self.layout.numel], dtype=self.layout.gradient_dtype)
        for slot in self.layout.slots:
            if slot.offset not in filled:
                flat_view(whole, slot.range).zero_()
        return whole

    def gradient_shard(self) -> paddle.Tensor:
        """Return this rank's shard of the reduced gradient, made of zeros where there is none."""
        self.finish_reduction()
        if self._gradient_shard is None:
            self._gradient_shard = paddle.zeros([self.layout.shard_numel], dtype=self.layout.gradient_dtype)
        for shard in self._zeros:
            flat_view(self._gradient_shard, shard.buffer_range).zero_()
        self._zeros.clear()
        return self._gradient_shard

    def note_zero(self, shard: ParameterShard) -> None:
        """Let a parameter's piece of the gradient count as zero; the memory is freed once all pieces do."""
        self.finish_reduction()
        if self._gradient_shard is not None:
            if shard.range.numel:
                self._zeros.add(shard)
            if len(self._zeros) == self._local_pieces:  # none, where this rank keeps nothing but padding
                self._gradient_shard = None
                self._zeros.clear()

    def memory_bytes(self) -> tuple[int, int]:
        """Return (bytes of this rank's shards: data and gradient; bytes of whole buffers: data and gradient not reduced yet)."""
        local = [self.shard, self._gradient_shard]
        whole = [None if self.communicator.alone else self.whole, self._whole_gradient]
        local_bytes, whole_bytes = (
            sum(int(tensor.element_size()) * tensor.shape[0] for tensor in group if tensor is not None) for group in (local, whole)
        )
        whole_bytes += self.layout.nbytes if self._prefetched is not None else 0
        whole_bytes += self.layout.numel * ITEM_SIZES[self.layout.gradient_dtype] if self._reduction is not None else 0
        return local_bytes, whole_bytes
