"""Weights with the product of their LoRA matrices added: ``weight + scaling * lora_A @ lora_B``, a strip at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import CheckpointError, MismatchError, counted, listing
from ..layout import Range
from ..pieces import Piece
from ..storage.base_parameter import BaseParameter
from ..storage.casts import convert
from ..storage.index import CheckpointIndex
from ..storage.plan import FLOATING_DTYPES
from .base_of_adapters import base_by_names, described_parameter
from .contents import Contents, contents_of
from .lora import Adapter, find_adapters, is_lora_key, unwrapped, weight_names, without_lora
from .model_tensors import stored_piece
from .output import OutputTensor
from .recipes.rules import TensorSource
from .statistics import as_float64
from .tensors import TensorReader
from .values import BATCH_NUMEL, Array, check_values, copy_transposed, iter_values, read_values


@dataclass(frozen=True, eq=False)
class AdaptedModel:
    """A base, and the adapters that belong to it, from one checkpoint or two.

    Attributes:
        base: index of the base.
        contents: what of it is the model's.
        adapted: index of the checkpoint with the adapters, by the base's names; the same for one checkpoint.
        adapters: key of a weight of the base, or of its master weight -> what is added to it.
        replaced: key of the base -> what the other checkpoint has in its place, since that trained too.
    """

    base: CheckpointIndex
    contents: Contents
    adapted: CheckpointIndex
    adapters: Mapping[str, Adapter]
    replaced: Mapping[str, Piece]


def adapted_model(
    index: CheckpointIndex, base: CheckpointIndex | None, *, alpha: float | None, master_weights: bool, allow_other_base: bool
) -> AdaptedModel:
    """Find the adapters of a checkpoint, and the weights that they belong to.

    Args:
        index: of the checkpoint with the adapters.
        base: index of the one with the base; None where that is the same.
        alpha: see :func:`~.lora.find_adapters`.
        master_weights: see there.
        allow_other_base: merge into a base that is not what it was when the adapters were saved.

    Raises:
        MismatchError: they don't fit each other; it lists what doesn't.
        CheckpointError: something is missing that is needed.
    """
    if base is None:
        if index.manifest is not None and index.manifest.base:
            raise CheckpointError(
                f"'{index.path}' was saved without its base; give that by --base DIR (base=), or export the adapters, --to peft"
            )
        owner, adapted, trained = index, index, list[str]()
    else:
        adapted = unwrapped(index, weight_names(index), lambda names: all(name in base for name in names))
        said = base_of(adapted)
        trained = [key for key in contents_of(adapted).model if not is_lora_key(key)]
        owner = base_by_names(base, list(dict.fromkeys([*said, *weight_names(adapted), *trained])), said)
        _check_base(adapted, owner, trained, allow_other_base=allow_other_base)
    of_adapted = contents_of(adapted)
    replaced = {key: stored_piece(adapted, of_adapted, key, master_weights=master_weights) for key in trained}
    contents = _contents_without(without_lora(contents_of(owner)), of_adapted, replaced.keys())
    adapters = find_adapters(adapted, alpha=alpha, master_weights=master_weights)
    wrong = [
        f"'{one.weight.key}' must be {list(one.weight.global_shape)}"
        for one in adapters
        if one.weight.key not in owner or owner.global_shape(one.weight.key) != one.weight.global_shape
    ]
    if wrong:
        raise MismatchError(f"'{owner.path}' lacks the weights of LoRA layers, or has others: {listing(wrong)}; give the right base")
    no_numbers = [f"'{one.weight.key}' {dtype}" for one in adapters if (dtype := owner.dtypes[one.weight.key]) not in FLOATING_DTYPES]
    if no_numbers:
        raise MismatchError(
            f"'{owner.path}' has weights of LoRA layers that are no floating point numbers, as of a quantized model: {listing(no_numbers)}"
            "; give the base as it was before it was quantized (--allow-other-base), or export the adapters, --to peft"
        )
    masters = contents.masters if master_weights else {}
    check_values(adapted, [piece.key for one in adapters for piece in (one.a, one.b)] + sorted({piece.key for piece in replaced.values()}))
    by_key = {masters.get(one.weight.key, one.weight.key): one for one in adapters}
    names_of = {name: names for names in contents.tied or () for name in names}
    tied = [" = ".join(names_of[one.weight.key]) for one in adapters if one.weight.key in names_of]
    if tied:
        raise MismatchError(f"weights of LoRA layers are tied, so that others would change with them: {listing(tied)}")
    return AdaptedModel(owner, contents, adapted, by_key, replaced)


def base_of(adapted: CheckpointIndex) -> dict[str, BaseParameter]:
    """Return what a checkpoint of adapters says of its base; nothing where it has none, or is stock Paddle's."""
    return {} if adapted.manifest is None else dict(adapted.manifest.base or {})


def _contents_without(base: Contents, adapted: Contents, trained: Collection[str]) -> Contents:
    """Return what of a base is the model's, where the values of some keys are those of the other checkpoint.

    They have no master weight in the base, then, and are only tied if the other checkpoint's model has both names for one tensor too.
    """
    elsewhere = {key: key for key in trained if key in base.masters or key in adapted.masters}
    still_tied = {name for names in adapted.tied or () for name in names if all(one in trained for one in names)}
    return replace(base, masters=base.masters | elsewhere, apart=frozenset(key for key in trained if key not in still_tied))


def _check_base(adapted: CheckpointIndex, base: CheckpointIndex, trained: Sequence[str], *, allow_other_base: bool) -> None:
    """Check that a base is that of adapters, and has the keys that trained besides.

    Raises:
        MismatchError: the base lacks some of its keys, or is another one.
    """
    manifest = adapted.manifest
    if manifest is not None and manifest.base is None:
        raise CheckpointError(
            f"'{adapted.path}' was not saved with trainable_only, and holds its base itself; use --merge-lora (merge_lora=), without --base"
        )
    strange = [
        f"'{key}' {adapted.dtypes[key]} {list(adapted.global_shape(key))}"
        for key in trained
        if key not in base or base.global_shape(key) != adapted.global_shape(key) or base.dtypes[key] != adapted.dtypes[key]
    ]
    if strange:
        raise MismatchError(f"'{base.path}' lacks what '{adapted.path}' holds besides its LoRA layers, or has others: {listing(strange)}")
    said = base_of(adapted)
    lacking = [f"'{name}'" for name in said if name not in base]
    if lacking:
        raise MismatchError(f"'{base.path}' lacks {counted(len(lacking), 'parameter')} of the base of '{adapted.path}': {listing(lacking)}")
    check_values(base, list(said))
    other = [] if allow_other_base else [f"'{name}'" for name, one in said.items() if described_parameter(base, name) != one]
    if other:
        raise MismatchError(
            f"'{base.path}' is not the base of '{adapted.path}': {len(other)} of its {len(said)} parameters have other values, shapes or "
            f"dtypes: {listing(other)}; give that base, a Hugging Face model by the --recipe that it was loaded by "
            "(--allow-other-base, allow_other_base=, takes this one)"
        )


class MergingReader(TensorReader):
    """Reads the tensors of a base with the product of LoRA matrices added, and those that trained besides from where they are.

    Products and sums are of float64; their results are rounded once, to the dtype that the tensor gets.

    Args:
        model: the base and the adapters.
        dtype: see :class:`~.tensors.TensorReader`.
    """

    def __init__(self, model: AdaptedModel, dtype: str | None) -> None:
        super().__init__(model.base, dtype)
        self._model = model
        of_trained = {trained.key: model.adapters[key] for key, trained in model.replaced.items() if key in model.adapters}
        of_adapted = replace(model, base=model.adapted, adapters=of_trained, replaced={})
        self._trained = MergingReader(of_adapted, dtype) if model.replaced else None
        self._factors: tuple[Adapter, Array, Array] | None = None

    def output(self, source: TensorSource) -> OutputTensor:
        """Return a tensor as it is to be written; its values are read when they are."""
        trained = self._model.replaced.get(source.slab.key)
        if trained is not None and self._trained is not None:
            return self._trained.output(replace(source, slab=replace(source.slab, key=trained.key, dtype=trained.dtype)))
        if source.slab.key in self._model.adapters and source.slab.local_shape != source.slab.global_shape:
            raise MismatchError(f"'{source.slab.key}' is the weight of a LoRA layer, and can't be unstacked; use another recipe")
        return super().output(source)

    def check_overflows(self) -> None:
        """As :meth:`~.tensors.TensorReader.check_overflows`."""
        super().check_overflows()
        if self._trained is not None:
            self._trained.check_overflows()

    def _blocks(self, source: TensorSource, dtype: str) -> Iterator[memoryview]:
        adapter = self._model.adapters.get(source.slab.key)
        if adapter is None:
            yield from super()._blocks(source, dtype)
            return
        a, b = self._factors_of(adapter)
        for values in self._columns(source, a, b) if source.transpose else self._rows(source, a, b):
            merged, overflow = (values, 0) if dtype == "float64" else convert(values, "float64", dtype)
            if overflow:
                self._overflows[source.name] = self._overflows.get(source.name, 0) + overflow
            yield np.ascontiguousarray(merged).reshape(-1).view(np.uint8).data

    def _factors_of(self, adapter: Adapter) -> tuple[Array, Array]:
        """Return both matrices, the scaling in the first; the last ones are kept, for the parts of a fused weight.

        Threads may ask at once.
        """
        factors = self._factors
        if factors is None or factors[0] is not adapter:
            a, b = (
                as_float64(read_values(self._model.adapted, one), one.dtype).reshape(one.global_shape) for one in (adapter.a, adapter.b)
            )
            factors = self._factors = adapter, a * adapter.scaling, b
        return factors[1:]

    def _columns(self, source: TensorSource, a: Array, b: Array) -> Iterator[Array]:
        """Yield the tensor, which lies the other way round, a strip of rows at a time, each a strip of columns of the weight."""
        matrix = self._read_slab(source.slab).reshape(source.slab.global_shape)
        step = max(1, BATCH_NUMEL // matrix.shape[0])
        for columns in source.ranges:
            for start in range(columns.start, columns.stop, step):
                some = slice(start, min(start + step, columns.stop))
                strip = as_float64(matrix[:, some].reshape(-1), source.slab.dtype).reshape(matrix.shape[0], -1) + a @ b[:, some]
                block = np.empty(strip.shape[::-1], strip.dtype)
                copy_transposed(strip, block)
                yield block

    def _rows(self, source: TensorSource, a: Array, b: Array) -> Iterator[Array]:
        """Yield the tensor in runs of elements, as they lie in the weight."""
        width = b.shape[1]
        pieces = [replace(source.slab, flat_range=Range(one.start * width, one.stop * width)) for one in source.ranges]
        for part in iter_values(self._model.base, pieces):
            start = pieces[part.number].box_range.start + part.start
            rows = slice(start // width, -(-(start + len(part.values)) // width))
            product = (a[rows] @ b).reshape(-1)[start - rows.start * width :][: len(part.values)]
            yield as_float64(part.values, source.slab.dtype) + product
