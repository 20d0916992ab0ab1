"""What a load did, for the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..errors import FEW, counted, listing
from ..pieces import only_difference
from ..storage.json_values import JsonValue


class CastKey(NamedTuple):
    """A key whose values were converted, or taken from another key of the same parameter.

    Attributes:
        key: what was loaded.
        source: the key of the checkpoint that held the values: the same, or the parameter's master weight, or, for a master weight, the
            parameter itself.
        saved: Paddle's name of the dtype in the checkpoint.
        now: the dtype of the object.
        may_have_rounded: ``now`` lacks some values of ``saved``; values that it lacks are the nearest that it has.
    """

    key: str
    source: str
    saved: str
    now: str
    may_have_rounded: bool

    def __str__(self) -> str:
        source = "" if self.source == self.key else f" of '{self.source}'"
        return f"'{self.key}': {self.saved}{source} -> {self.now}{' (rounded)' if self.may_have_rounded else ''}"


class OtherShape(NamedTuple):
    """A parameter or buffer that kept its values, since the checkpoint has others of another shape.

    Attributes:
        key: its name in the objects.
        saved: the whole shape in the checkpoint.
        now: that of the object.
    """

    key: str
    saved: tuple[int, ...]
    now: tuple[int, ...]

    def __str__(self) -> str:
        return f"'{self.key}': {list(self.saved)} in it, {list(self.now)} here"


class Resized(NamedTuple):
    """A parameter or buffer, or one's state, of which the leading rows, or columns, were loaded that both have.

    Attributes:
        key: its name in the objects.
        source: what it comes from, as the checkpoint or the files name it.
        saved: the whole shape there, its dimensions in the order of ``now``.
        now: that of the object; they differ in one dimension.
    """

    key: str
    source: str
    saved: tuple[int, ...]
    now: tuple[int, ...]

    def __str__(self) -> str:
        dimension = only_difference(self.saved, self.now)
        assert dimension is not None
        names = {len(self.now) - 1: ("column", "columns"), 0: ("row", "rows")}
        one, several = names.get(dimension, (f"index of dimension {dimension}", f"indices of dimension {dimension}"))
        more = self.now[dimension] - self.saved[dimension]
        stay = "left as it was" if more == 1 else "left as they were"
        rest = f"{counted(more, one, several)} {stay}" if more > 0 else f"{counted(-more, one, several)} of it left out"
        source = "" if self.source == self.key else f" of '{self.source}'"
        return f"'{self.key}': {list(self.saved)}{source} in it, {list(self.now)} here, {rest}"


RESIZED = ("key of another size, loaded as far as both have it", "keys of another size, loaded as far as both have them")
"""What reports call one such key, and several."""


@dataclass(frozen=True)
class LoadNotes:
    """What one rank has to report, or all of them together; see :class:`LoadReport`."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    casts: list[CastKey] = field(default_factory=list)
    other_shape: list[OtherShape] = field(default_factory=list)
    started_afresh: list[str] = field(default_factory=list)
    used_options: list[str] = field(default_factory=list)
    resized: list[Resized] = field(default_factory=list)

    def to_json(self) -> JsonValue:
        """Return the notes as plain JSON data."""
        return asdict(self)


def merge_notes(ranks: Sequence[JsonValue]) -> LoadNotes:
    """Return the notes of all ranks as one, or those of one rank, from what :meth:`LoadNotes.to_json` returned."""

    def union(kind: str) -> list[str]:
        return sorted({one for notes in ranks for one in notes[kind]})

    casts = sorted({CastKey(*one) for notes in ranks for one in notes["casts"]})
    shapes = sorted({OtherShape(key, tuple(saved), tuple(now)) for notes in ranks for key, saved, now in notes["other_shape"]})
    resized = sorted({Resized(key, source, tuple(saved), tuple(now)) for notes in ranks for key, source, saved, now in notes["resized"]})
    return LoadNotes(union("missing"), union("unexpected"), casts, shapes, union("started_afresh"), union("used_options"), resized)


@dataclass(frozen=True)
class LoadReport:
    """What a load did. Keys are as the objects name them, where it doesn't say otherwise; lists are of all ranks together.

    Attributes:
        path: the checkpoint.
        step: the step it was saved at, or None.
        world_size: how many ranks saved it.
        extra_state: what was given to ``save``.
        loaded: how many keys this rank loaded.
        parts: which parts were loaded: ``"model"``, ``"optimizer"``, ``"learning_rate"``; the last only where each optimizer goes on
            with the schedule, or the number, that was saved.
        without_state: parameters of the optimizers for which the checkpoint has no state, because they never had a gradient.
            They have none now either.
        not_asked_for: keys of the checkpoint, as it names them, that belong to a part that was not loaded.
        differences: in words, settings of the optimizers, and scalings of LoRA layers, that were saved otherwise and were left as they are.
        missing: keys that the checkpoint lacks, as ``allow_missing`` allows. Parameters and buffers kept their values, save those that it
            has under another of their names.
        other_shape: parameters and buffers that have another shape in the checkpoint, as ``allow_other_shape`` allows. They kept their
            values.
        resized: parameters and buffers that have another size in one dimension in the checkpoint, as ``resize`` allows: the leading rows,
            or columns, that both have were loaded, of their states too. States are named only where their parameter isn't.
        started_afresh: parameters whose states were not in the checkpoint, or not all, as ``allow_missing`` allows, or had another shape,
            as ``allow_other_shape`` does, or could not be resized. They have none now: the next step begins them as that of a new
            optimizer would.
        unexpected: keys of the checkpoint, as it names them, that were loaded nowhere, as ``allow_unexpected`` allows, or because another
            tied name's values were taken, or the parameter started afresh.
        casts: what was converted, as ``cast`` allows.
        mapped: name of a parameter or buffer -> its name in the checkpoint, where ``key_map`` made them differ.
        copied_tied: in words, what is tied on one side only and was copied, as ``copy_tied`` allows.
        damaged: key or file of the checkpoint, as it names them -> in words, why it could not be loaded, as ``salvage`` allows. Where
            that is ``manifest.json``, all that it says of the run may be wrong: step, ``extra_state``, settings. Keys that begin with
            ``@paddle_fsdp_ckpt/`` are of what a ``CheckpointManager`` keeps beside the model, which only its ``restore`` reads.
        base: parameters that the checkpoint leaves to the base, since they didn't train when it was saved; they are as they were before.
        other_base: those of them that are not what they were when it was saved, as ``allow_other_base`` allows.
        not_restored: in words, what a ``CheckpointManager`` saved besides and was not given back: schedulers that did not come back with
            their optimizers, scalers, and tensors given as ``sharded``. ``load`` gives none back; ``restore`` what it is given.
        unused_options: patterns and entries of ``key_map`` that nothing needed; perhaps they are misspelt.
    """

    path: Path
    step: int | None
    world_size: int
    extra_state: JsonValue
    loaded: int
    parts: list[str] = field(default_factory=list)
    without_state: list[str] = field(default_factory=list)
    not_asked_for: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    other_shape: list[OtherShape] = field(default_factory=list)
    resized: list[Resized] = field(default_factory=list)
    started_afresh: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    casts: list[CastKey] = field(default_factory=list)
    mapped: dict[str, str] = field(default_factory=dict)
    copied_tied: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    base: list[str] = field(default_factory=list)
    other_base: list[str] = field(default_factory=list)
    not_restored: list[str] = field(default_factory=list)
    unused_options: list[str] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        """Whether the objects hold all that the checkpoint holds, just as it was saved: nothing left out, converted, resized or renamed."""
        return not (
            self.not_asked_for
            or self.differences
            or self.missing
            or self.other_shape
            or self.resized
            or self.started_afresh
            or self.unexpected
            or self.casts
            or self.mapped
            or self.copied_tied
            or self.damaged
            or self.other_base
            or self.not_restored
        )

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        lines = [f"loaded '{self.path}'{step}, saved by {counted(self.world_size, 'rank')}: {', '.join(self.parts) or 'nothing'}"]
        lines += [f"{counted(len(items), *what)}: {listing(items, FEW)}" for what, items in self._deviations() if items]
        if self.is_exact:
            lines.append("everything in it, as it was saved")
        return "\n- ".join(lines)

    def _deviations(self) -> list[tuple[tuple[str, str], list[str]]]:
        """Return what one of them is called, and several are; and all of them."""
        return [
            (("key missing, left as it was", "keys missing, left as they were"), self.missing),
            (
                ("key of another shape in it, left as it was", "keys of another shape in it, left as they were"),
                [str(one) for one in self.other_shape],
            ),
            (RESIZED, [str(one) for one in self.resized]),
            (("parameter whose states start afresh", "parameters whose states start afresh"), self.started_afresh),
            (("key of the checkpoint left out", "keys of the checkpoint left out"), self.unexpected),
            (("key of the checkpoint not asked for", "keys of the checkpoint not asked for"), self.not_asked_for),
            (("key converted", "keys converted"), [str(one) for one in self.casts]),
            (
                ("name that differs in the checkpoint", "names that differ in the checkpoint"),
                [f"'{name}' is '{other}' there" for name, other in self.mapped.items()],
            ),
            (("tied on one side only, and copied", "tied on one side only, and copied"), self.copied_tied),
            (("damaged, and not loaded", "damaged, and not loaded"), [f"'{name}': {why}" for name, why in self.damaged.items()]),
            (
                (
                    "parameter of another base than the one that it was saved with",
                    "parameters of another base than the one that it was saved with",
                ),
                self.other_base,
            ),
            (("thing saved besides, and not restored", "things saved besides, and not restored"), self.not_restored),
            (("setting differs", "settings differ"), self.differences),
            (
                ("parameter without a gradient so far, and without state", "parameters without a gradient so far, and without state"),
                self.without_state,
            ),
            (("parameter left to the base, unchanged", "parameters left to the base, unchanged"), self.base),
            (("option not needed", "options not needed"), self.unused_options),
        ]
