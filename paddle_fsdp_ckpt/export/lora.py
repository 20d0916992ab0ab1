"""The LoRA layers of a checkpoint: ``weight`` [in, out], ``lora_A`` [in, r] and ``lora_B`` [r, out], as PaddleFormers 0.4.1 names them.

Such a layer computes with ``weight + scaling * lora_A @ lora_B``. The checkpoint says what ``scaling`` is; else it is ``lora_alpha / r``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import CheckpointError, MismatchError, listing
from ..pieces import Piece
from ..storage.index import CheckpointIndex
from ..storage.plan import FLOATING_DTYPES
from .contents import Contents, contents_of
from .recipes.rules import Recipe
from .recipes.spelling import spelled_for
from .renaming import renamed

WRAPPER = "model."
"""What PaddleFormers' ``LoRAModel`` puts before the names of the model that it wraps."""

_A, _B, _PREFIX = "lora_A", "lora_B", "lora_"


@dataclass(frozen=True)
class Adapter:
    """One LoRA layer.

    Attributes:
        layer: its name.
        a: ``lora_A``, or its master weight.
        b: ``lora_B``, or its master weight.
        scaling: what the product of both is multiplied by.
    """

    layer: str
    a: Piece
    b: Piece
    scaling: float

    @property
    def rank(self) -> int:
        """The number of columns of ``lora_A``."""
        return self.a.global_shape[1]

    @property
    def weight(self) -> Piece:
        """The key and shape of the layer's ``weight``, with the dtype of ``lora_A``."""
        shape = self.a.global_shape[0], self.b.global_shape[1]
        return Piece(_join(self.layer, "weight"), self.a.dtype, shape, (0, 0), shape)


def is_lora_key(key: str) -> bool:
    """Tell whether a key is one of a LoRA layer's own matrices."""
    return key.rpartition(".")[2].startswith(_PREFIX)


def without_lora(contents: Contents) -> Contents:
    """Return contents without the matrices of LoRA layers."""
    return replace(contents, model=tuple(key for key in contents.model if not is_lora_key(key)))


def find_adapters(index: CheckpointIndex, *, alpha: float | None, master_weights: bool) -> list[Adapter]:
    """Return the LoRA layers of a checkpoint; at least one.

    Args:
        index: of the checkpoint.
        alpha: ``lora_alpha``, where the checkpoint doesn't say how layers scale.
        master_weights: take the values of matrices that have a master weight from that.

    Raises:
        CheckpointError: there are none, or how they scale is not known.
        MismatchError: matrices that are something else than LoRA's, or ``alpha`` is not what the checkpoint says.
    """
    contents = contents_of(index)
    layers: dict[str, set[str]] = {}
    for key in contents.model:
        layer, _, matrix = key.rpartition(".")
        if is_lora_key(key):
            layers.setdefault(layer, set()).add(matrix)
    if not layers:
        raise CheckpointError(f"'{index.path}' holds no LoRA layers, which have matrices '{_A}' and '{_B}'")
    strange = [f"'{layer}' with {' and '.join(sorted(has))}" for layer, has in layers.items() if has != {_A, _B}]
    if strange:
        raise MismatchError(
            f"'{index.path}' holds layers that are no LoRA of just '{_A}' and '{_B}', so how they compute isn't known: {listing(strange)}"
        )

    def piece_of(layer: str, name: str) -> Piece:
        key = _join(layer, name)
        return index.whole_piece(contents.masters.get(key, key) if master_weights else key)

    pairs = {layer: (piece_of(layer, _A), piece_of(layer, _B)) for layer in layers}
    wrong = [
        f"'{layer}' with {a.dtype} {list(a.global_shape)} and {b.dtype} {list(b.global_shape)}"
        for layer, (a, b) in pairs.items()
        if not (len(a.global_shape) == len(b.global_shape) == 2 and a.global_shape[1] == b.global_shape[0])
        or not {a.dtype, b.dtype} <= FLOATING_DTYPES
    ]
    if wrong:
        raise MismatchError(f"'{index.path}': '{_A}' must be [in, r] and '{_B}' [r, out], and are not so: {listing(wrong)}")
    scalings = _scalings(index, {layer: a.global_shape[1] for layer, (a, _) in pairs.items()}, alpha)
    return [Adapter(layer, a, b, scalings[layer]) for layer, (a, b) in pairs.items()]


def _scalings(index: CheckpointIndex, ranks: dict[str, int], alpha: float | None) -> dict[str, float]:
    if alpha is not None and not math.isfinite(alpha):
        raise CheckpointError(f"--lora-alpha (lora_alpha=) is {alpha}, and a finite number is needed")
    said = {} if index.manifest is None else index.manifest.lora
    given = {} if alpha is None else {layer: alpha / rank for layer, rank in ranks.items()}
    unknown = [f"'{layer}'" for layer in ranks if layer not in said and layer not in given]
    if unknown:
        raise CheckpointError(
            f"'{index.path}' doesn't say how these LoRA layers scale: {listing(unknown)}; give --lora-alpha (lora_alpha=)"
        )
    other = [
        f"'{layer}' {said[layer]:g} instead of {given[layer]:g}"
        for layer in ranks
        if layer in said and layer in given and not math.isclose(said[layer], given[layer], rel_tol=1e-6)
    ]
    if other:
        raise MismatchError(
            f"--lora-alpha {alpha:g} is not what layers of '{index.path}' scaled by when it was saved: {listing(other)}; leave it out"
        )
    return {layer: said.get(layer, given.get(layer, 0.0)) for layer in ranks}


def weight_names(index: CheckpointIndex) -> list[str]:
    """Return the keys that the weights of LoRA layers have, whether the checkpoint holds them or not."""
    return [_join(key.rpartition(".")[0], "weight") for key in index.stored if key.rpartition(".")[2] == _A]


def unwrapped(index: CheckpointIndex, names: Sequence[str], fits: Callable[[Sequence[str]], bool]) -> CheckpointIndex:
    """Return the index of a checkpoint by names without the :data:`WRAPPER`, where they only fit so.

    Args:
        index: of the checkpoint.
        names: some of its names.
        fits: tells whether such names are right.
    """
    wrapped = all(key.startswith(WRAPPER) for key in index.stored)
    if not wrapped or fits(names) or not fits([name.removeprefix(WRAPPER) for name in names]):
        return index
    return renamed(index, lambda name: name.removeprefix(WRAPPER))


def fits_recipe(recipe: Recipe) -> Callable[[Sequence[str]], bool]:
    """Return the function that tells whether a recipe has rules for all of some names."""
    return lambda names: all(any(rule.match(name) is not None for rule in recipe.rules) for name in names)


def fits_spelled(recipe: Recipe, names: Sequence[str], *, is_wrapped: bool) -> bool:
    """Tell whether a recipe, or that for another beginning, has rules for all of some names; ``is_wrapped``: or without the wrapper."""
    forms = [names]
    if is_wrapped and all(name.startswith(WRAPPER) for name in names):
        forms.append([name.removeprefix(WRAPPER) for name in names])
    return any(spelled_for(recipe, form).fits(form) for form in forms)


def _join(layer: str, name: str) -> str:
    return f"{layer}.{name}" if layer else name
