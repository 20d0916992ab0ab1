"""Small questions about Paddle's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from typing import Any, TypeVar

import paddle

from ..layout import Range

_T = TypeVar("_T")

_FEW = 256
"""Of so many tensors, what is asked for is in the processor's cache after the first question to all of them."""


@dataclass(frozen=True)
class TensorFacts:
    """What many tensors are; entry ``i`` of each list is of the same one.

    Attributes:
        addresses: of their first elements.
        shapes: as Paddle gives them.
        dtypes: Paddle's.
        contiguous: whether their values lie one behind the other.
    """

    addresses: list[int] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    dtypes: list[paddle.dtype] = field(default_factory=list)
    contiguous: list[bool] = field(default_factory=list)

    def add(self, few: Sequence[paddle.Tensor], usual: Sequence[list[int]] = ()) -> None:
        """Add a few tensors. Where their shapes are the usual ones it keeps just those lists, which may be the same for many."""
        self.addresses.extend([one.data_ptr() for one in few])
        shapes = [one.shape for one in few]
        self.shapes.extend(usual if shapes == usual else shapes)
        self.dtypes.extend([one.dtype for one in few])
        self.contiguous.extend([one.is_contiguous() for one in few])

    @property
    def are_plain(self) -> bool:
        """Whether all have values, one behind the other."""
        return all(self.addresses) and all(self.contiguous)


def facts_of(tensors: Sequence[paddle.Tensor]) -> TensorFacts:
    """Return what many tensors are; sooner where they stand in the order in which they were made."""
    facts = TensorFacts()
    for few in few_at_a_time(tensors):
        facts.add(few)
    return facts


def few_at_a_time(things: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yield some after the other, so few that several questions to all of them take little longer than one."""
    for first in range(0, len(things), _FEW):
        yield things[first : first + _FEW]


def row_by_row(tables: Sequence[Iterable[paddle.Tensor]]) -> list[paddle.Tensor]:
    """Return the first tensors of all tables, then the second ones, and so on: those of an optimizer as it made them, nearly."""
    return [tensor for row in zip_longest(*tables) for tensor in row if tensor is not None]


def dtype_name(tensor: paddle.Tensor) -> str:
    """Return Paddle's dtype name, such as ``float32``."""
    return _name_of(tensor.dtype)


def dtype_names(tensors: Sequence[paddle.Tensor]) -> list[str]:
    """Return the same of each of many tensors."""
    return names_of_dtypes([tensor.dtype for tensor in tensors])


def names_of_dtypes(dtypes: Sequence[paddle.dtype]) -> list[str]:
    """Return Paddle's names of many dtypes."""
    # Paddle has one object for each dtype, and takes long to compare others; list.count looks first whether they are the same.
    if dtypes and dtypes.count(dtypes[0]) == len(dtypes):
        return [_name_of(dtypes[0])] * len(dtypes)
    names = {number: _name_of(dtype) for number, dtype in {id(one): one for one in dtypes}.items()}
    return [names[id(one)] for one in dtypes]


def lie_on_host(tensors: Iterable[paddle.Tensor]) -> bool:
    """Tell whether the values of all tensors are in this host's memory."""
    # From its documentation: nothing where Paddle knows no device but the host. To ask each tensor takes longer than all else.
    return not paddle.device.get_available_device() or all(tensor.place.is_cpu_place() for tensor in tensors)


@lru_cache
def _name_of(dtype: paddle.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def initialize_if_lazy(tensor: paddle.Tensor) -> None:
    """Give a parameter, or a buffer that is one, its initial values where it was made under ``paddle.LazyGuard`` and has none yet."""
    if is_lazy(tensor):
        tensor.initialize()


def is_lazy(tensor: paddle.Tensor) -> bool:
    """Tell whether a tensor was made under ``paddle.LazyGuard``, and has no values yet."""
    return not tensor._is_initialized() and getattr(tensor, "_init_func", None) is not None


def why_without_values(tensor: paddle.Tensor) -> str | None:
    """Return, in words, why a tensor that should have values has none that lie in memory, and the way out; None where it has."""
    if 0 in tensor.shape:
        return None
    if not tensor._is_initialized():  # of which some raise when they are asked for an address
        return (
            "it has no values, since it was given none or something let go of its memory (as _clear_data() does); give it some: "
            "paddle.assign(values, tensor)"
        )
    if tensor.data_ptr() is None:
        return "it is sparse, which a checkpoint can't hold; put a dense one in its place (to_dense())"
    return None


def flat_view(flat: paddle.Tensor, wanted: Range) -> paddle.Tensor:
    """Return a 1-D view of ``flat``; of shape [0] for an empty range."""
    if wanted.numel:
        return flat._slice(wanted.start, wanted.stop)
    view = flat._slice(0, 1)
    view.get_tensor()._set_dims([0])
    return view


def own_view(flat: paddle.Tensor) -> paddle.Tensor:
    """Return a 1-D tensor that shares the memory of ``flat``, 1-D and not empty, and has a shape of its own."""
    # A quarter of the time of _slice, but without FLAGS_use_stride_kernel a copy.
    view = flat.view(flat.shape)
    return view if view.data_ptr() == flat.data_ptr() else flat._slice(0, flat.shape[0])


def tensors_in(outputs: Any) -> Iterator[paddle.Tensor]:
    """Yield the tensors in a layer's outputs: nested tuples, lists, dicts and objects with attributes."""
    if isinstance(outputs, paddle.Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        for value in outputs.values():
            yield from tensors_in(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from tensors_in(value)
    elif hasattr(outputs, "__dataclass_fields__"):
        for name in outputs.__dataclass_fields__:
            yield from tensors_in(getattr(outputs, name))
