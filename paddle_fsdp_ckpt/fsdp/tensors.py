"""Small questions about Paddle's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import paddle

from ..layout import Range


def dtype_name(tensor: paddle.Tensor) -> str:
    """Return Paddle's dtype name, such as ``float32``."""
    return _name_of(tensor.dtype)


def dtype_names(tensors: Sequence[paddle.Tensor]) -> list[str]:
    """Return the same of each of many tensors."""
    # Paddle has one object for each dtype, and takes long to compare others; list.count looks first whether they are the same.
    dtypes = [tensor.dtype for tensor in tensors]
    if dtypes and dtypes.count(dtypes[0]) == len(dtypes):
        return [_name_of(dtypes[0])] * len(dtypes)
    names = {number: _name_of(dtype) for number, dtype in {id(one): one for one in dtypes}.items()}
    return [names[id(one)] for one in dtypes]


def lie_on_host(tensors: Sequence[paddle.Tensor]) -> bool:
    """Tell whether the values of all tensors are in this host's memory, those of each one behind the other."""
    # From its documentation: nothing where Paddle knows no device but the host. To ask each tensor takes longer than all else.
    if paddle.device.get_available_device() and not all(tensor.place.is_cpu_place() for tensor in tensors):
        return False
    return all(tensor.is_contiguous() for tensor in tensors)


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
