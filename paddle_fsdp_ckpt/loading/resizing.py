"""Parameters that have grown or shrunk in one dimension since they were saved, as a vocabulary does: what both have is loaded."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..pieces import Piece, only_difference
from ..storage.index import CheckpointIndex
from .options import Patterns
from .report import Resized
from .saved_names import RenamedCheckpoint

Shape = tuple[int, ...]


@dataclass
class Resizing:
    """Which keys of one load have another size in one dimension, and may.

    A target in a checkpoint of another size is a box that reaches beyond the tensor that is stored, or a part of it; so only its
    ``global_shape`` changes, and the plan reads the leading rows, or columns, that both have.

    Attributes:
        saved: the checkpoint.
        patterns: of parameters and buffers, as the objects name them.
        names_of: name -> all names of the same tensor, where it has several in the objects.
        owner_of: name of a parameter -> the name under which the checkpoint has its states, where that is another.
        shapes: name of a parameter or buffer -> its whole shape in the objects, as far as it was looked at.
        sources: name of a parameter or buffer -> the key of the checkpoint that its values come from.
        repeated: suffixes of states that hold one number for all of a parameter, an element each. Of what the checkpoint lacks they would
            be those of a new optimizer, and RAdam steps by the first that a rank keeps, so that ranks would step differently.
        found: key of the objects that is resized, a state's too -> what is reported of it.
    """

    saved: RenamedCheckpoint
    patterns: Patterns
    names_of: Mapping[str, Sequence[str]]
    owner_of: Mapping[str, str]
    shapes: dict[str, Shape] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)
    found: dict[str, Resized] = field(default_factory=dict)

    @property
    def index(self) -> CheckpointIndex:
        """Of the checkpoint."""
        return self.saved.index

    def learn(self, name: str, shape: Iterable[int], source: str | None = None) -> None:
        """Take the whole shape that a parameter or buffer has now, and the key of the checkpoint that its values come from, where known."""
        names = self.names_of.get(name, (name,))
        self.shapes.update(dict.fromkeys(names, tuple(shape)))
        if source is not None:
            self.sources.update(dict.fromkeys(names, source))

    def dimension(self, name: str) -> int | None:
        """Return the one dimension in which a parameter or buffer has another size in the checkpoint; None where it isn't so."""
        saved, now = self._saved_shape(name), self.shapes.get(name)
        return None if saved is None or now is None else only_difference(saved, now)

    def is_resized(self, name: str) -> bool:
        """Tell whether a parameter or buffer has another size in one dimension, and may."""
        return self.dimension(name) is not None and self.patterns.match_any(self.names_of.get(name, (name,)))

    def has_other_shape(self, piece: Piece) -> bool:
        """Tell whether what the checkpoint has for a piece is of another shape."""
        return piece.key in self.index and self.index.global_shape(piece.key) != piece.global_shape

    def fitted(self, name: str, key: str, piece: Piece) -> Piece:
        """Return what to read for a key of a parameter, of what is stored where that has another size and may; else the piece as it is.

        Args:
            name: of the parameter or buffer.
            key: itself, its master weight or a state.
            piece: what is wanted.
        """
        if not self.has_other_shape(piece) or not self.is_resized(name):
            return piece
        stored = self.index.global_shape(piece.key)
        if key.rpartition(".")[2] in self.repeated or not self._is_alike(name, stored, piece.global_shape):
            return piece
        self.found[key] = Resized(key, self.saved.original_key(piece.key), stored, piece.global_shape)
        return replace(piece, global_shape=stored)

    def of(self, keys: Collection[str]) -> list[Resized]:
        """Return what is reported of some keys; states are told of by their parameter where that is among them."""
        resized = {key: self.found[key] for key in keys if key in self.found}
        return [one for key, one in resized.items() if key in self.shapes or key.rpartition(".")[0] not in resized]

    def _saved_shape(self, name: str) -> Shape | None:
        names = (self.sources.get(name, name), name, self.owner_of.get(name, name), *self.names_of.get(name, ()))
        return next((self.index.global_shape(one) for one in names if one in self.index), None)

    def _is_alike(self, name: str, stored: Shape, wanted: Shape) -> bool:
        """Tell whether a state differs as its parameter does: one value an element, or layers of flattened ones, grown by rows."""
        saved, now = self._saved_shape(name), self.shapes[name]
        assert saved is not None
        if (stored, wanted) == (saved, now):
            return True
        flat = (stored[1:], wanted[1:]) == ((math.prod(saved),), (math.prod(now),)) and stored[:1] == wanted[:1]
        return flat and self.dimension(name) == 0
