"""Why a checkpoint doesn't fit the objects that are to be loaded: as lists, for all ranks together, and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from ..errors import MismatchError, listing
from .json_values import JsonValue

_LISTED = 20
_SENT = 1000
"""How many problems of a kind one rank tells the others of; they are counted beyond."""
_SEARCHED = 10_000
_COMPARED = 500
_PATTERNS = 5
"""How many patterns an error says in full."""


class KeyProblem(NamedTuple):
    """What is wrong with one key, in words, and on which ranks; none of them where it is wrong on all."""

    key: str
    text: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{_on_ranks(self.ranks)}'{self.key}': {self.text}"


class OtherProblem(NamedTuple):
    """What is wrong with the whole, in words, and on which ranks; none of them where it is wrong on all."""

    text: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{_on_ranks(self.ranks)}{self.text}"


@dataclass(frozen=True)
class WaysOut:
    """What would let a load go on that doesn't fit, as far as that is known.

    Attributes:
        allow_missing: patterns of just the keys that are missing, and of all states of what has none.
        allow_unexpected: patterns of just the keys that the objects lack.
        allow_other_shape: patterns of just the parameters and buffers of other shapes.
        resize: patterns of just those of them of which one dimension has another size.
        key_map: beginning of names in the objects -> what stands there in the checkpoint, where shapes and dtypes are the same.
        in_front: what stands in the checkpoint in front of all missing names of the model, where shapes and dtypes are the same.
        weights_fit: whether all would fit if only the model were loaded.
        has_same_shapes: whether anything that is to be loaded has the shape that it has in the checkpoint.
        words: option of ``load`` -> what is said of it, whatever else would be; nothing where that is empty.
    """

    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    allow_other_shape: tuple[str, ...] = ()
    resize: tuple[str, ...] = ()
    key_map: dict[str, str] = field(default_factory=dict)
    in_front: tuple[str, ...] = ()
    weights_fit: bool = False
    has_same_shapes: bool = True
    words: dict[str, str] = field(default_factory=dict)

    @property
    def all_resizable(self) -> bool:
        """Whether one dimension of each parameter and buffer of another shape has another size."""
        return len(self.resize) == len(self.allow_other_shape)

    def say(self, option: str, what: str) -> str:
        """Return an option of ``load`` with its patterns, or with the first of many; ``what`` says what they are of."""
        patterns = getattr(self, option)
        if 0 < len(patterns) <= _PATTERNS:
            return f"{option}={list(patterns)!r}"
        return f"{option}=[patterns of {what}{f', such as {patterns[0]!r}' if patterns else ''}]"


def _merge_ways_out(ranks: Sequence[JsonValue]) -> WaysOut:
    """Return the ways out of all ranks as one, from what ``asdict`` returned on each."""

    def union(option: str) -> tuple[str, ...]:
        return tuple(sorted({one for ways in ranks for one in ways[option]}))

    return WaysOut(
        union("allow_missing"),
        union("allow_unexpected"),
        union("allow_other_shape"),
        union("resize"),
        {here: saved for ways in ranks for here, saved in ways["key_map"].items()},
        union("in_front"),
        all(ways["weights_fit"] for ways in ranks),
        any(ways["has_same_shapes"] for ways in ranks),
    )


@dataclass(frozen=True)
class ReadProblems:
    """Why a checkpoint doesn't fit the objects that are to be loaded; all empty where it does.

    An explicit opt-out is ``dataclasses.replace(problems, unexpected=())``: the plan reads whatever has no problem.

    Attributes:
        path: the checkpoint directory.
        missing: keys that the objects have and the checkpoint lacks, sorted.
        unexpected: keys that the checkpoint has and the objects lack, sorted.
        wrong_shape: one a key whose whole tensors differ in shape.
        wrong_dtype: one a key whose dtypes differ.
        uncovered: one a target with elements that no file stores.
        conflicts: one a pair of files that hold different values for the same elements of a key.
        tied: names of one tensor here and of several there.
        others: all else, in whole sentences.
        nothing_matched: not one key of the objects is in the checkpoint.
        lost: in words, what is damaged of the checkpoint, where nothing of it is intact that the objects could want.
        beyond: name of one of the lists -> how many more there are at least.
        ways_out: what would let it go on.
    """

    path: Path
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    wrong_shape: tuple[KeyProblem, ...] = ()
    wrong_dtype: tuple[KeyProblem, ...] = ()
    uncovered: tuple[KeyProblem, ...] = ()
    conflicts: tuple[KeyProblem, ...] = ()
    tied: tuple[OtherProblem, ...] = ()
    others: tuple[OtherProblem, ...] = ()
    nothing_matched: bool = False
    lost: str = ""
    beyond: dict[str, int] = field(default_factory=dict)
    ways_out: WaysOut = field(default_factory=WaysOut)

    def __bool__(self) -> bool:
        return self.nothing_matched or any(getattr(self, kind) for kind in _LISTS)

    def raise_if_any(self) -> None:
        """Raise where there is a problem.

        Raises:
            MismatchError: it lists the problems, the first 20 of each kind and how many there are.
        """
        if self:
            raise MismatchError(str(self))

    def to_json(self) -> JsonValue:
        """Return the problems as plain JSON data, without the path; the first thousand of each kind and how many more."""
        value: JsonValue = {kind: getattr(self, kind)[:_SENT] for kind in _LISTS}
        value["beyond"] = {kind: len(getattr(self, kind)) - _SENT for kind in _LISTS if len(getattr(self, kind)) > _SENT}
        ways_out = {name: one[:_SENT] if isinstance(one, tuple) else one for name, one in asdict(self.ways_out).items()}
        return value | {"nothing_matched": self.nothing_matched, "ways_out": ways_out}

    def __str__(self) -> str:
        lines = [f"the checkpoint '{self.path}' doesn't fit the objects to load; nothing was changed"]
        if self.nothing_matched:
            lines.append(f"all of it that could match is damaged: {self.lost}" if self.lost else "not one key matches")
        lines += [str(one) for one in self.others]
        if self.tied:
            lines.append(self._line("tied", "tied on one side only", self.tied))
        if self.missing:
            lines.append(self._line("missing", "missing from the checkpoint", (f"'{key}'" for key in self.missing)))
            lines.extend(near_misses(self.missing, self.unexpected, self.ways_out.key_map, self.ways_out.in_front))
        if self.unexpected:
            lines.append(self._line("unexpected", "in the checkpoint, and not in the objects", (f"'{key}'" for key in self.unexpected)))
        lines += [self._line(kind, what, getattr(self, kind)) for kind, what in _KEY_PROBLEMS.items() if getattr(self, kind)]
        return "\n- ".join(lines) + f"\nWay out: {self._way_out()}"

    def _line(self, kind: str, what: str, items: Iterable[object]) -> str:
        count = len(getattr(self, kind)) + self.beyond.get(kind, 0)
        shown = [str(item) for item in items][:_LISTED]
        between = ",\n    " if kind == "wrong_shape" and len(shown) > 1 else ", "
        rest = f"{between}... ({count - len(shown)} more)" if count > len(shown) else ""
        return f"{count} {what}:{between.removeprefix(',')}{between.join(shown)}{rest}"

    def _options(self) -> list[str]:
        """Return the options of ``load`` that would let it go on, each as it is to be given."""
        ways, can_be_named = self.ways_out, not self.nothing_matched
        options = {
            "allow_missing": ways.say("allow_missing", "keys that keep their values") if self.missing and can_be_named else "",
            "allow_unexpected": ways.say("allow_unexpected", "keys to leave out") if self.unexpected and can_be_named else "",
            "resize": f"{ways.say('resize', 'what has another size')}, which loads the rows or columns that both have"
            if ways.resize and (ways.has_same_shapes or ways.all_resizable)
            else "",
            "allow_other_shape": ways.say("allow_other_shape", "what keeps its values, and starts its states afresh")
            if self.wrong_shape and ways.has_same_shapes
            else "",
            "cast": "cast=True" if any(CASTABLE in problem.text for problem in self.wrong_dtype) else "",
            "copy_tied": "copy_tied=True" if self.tied else "",
        }
        return [text for text in (options | ways.words).values() if text]

    def _way_out(self) -> str:
        options = self._options()
        either = f"; or say what may differ: {', '.join(options)}" if options else ""
        if self.conflicts:
            return (
                "either a file is damaged, or ranks saved different tensors under one name: give those distinct keys or offsets, or load "
                "another checkpoint"
            )
        if self.lost:
            return "restore from a copy what is damaged, or load another checkpoint; of this one nothing can be loaded into these objects"
        if self.wrong_shape and not self.ways_out.has_same_shapes:
            return f"nothing that is to be loaded has the shape that it has there; make the model with the sizes that it had then{either}"
        weights = '; or only the weights, which fit: parts={"model"}' if self.ways_out.weights_fit else ""
        return f"load it into the model and optimizer that it was saved from{either}{weights}"


CASTABLE = "(cast=True converts it)"
"""What ends the text of a ``wrong_dtype`` that a conversion would solve."""

_KEY_PROBLEMS = {
    "wrong_shape": "of another shape",
    "wrong_dtype": "of another dtype",
    "uncovered": "not stored whole",
    "conflicts": "stored twice",
}
_LISTS = tuple(one.name for one in fields(ReadProblems) if str(one.type).startswith("tuple"))


def merge_problems(path: Path, ranks: Sequence[JsonValue]) -> ReadProblems:
    """Return the problems of all ranks as one.

    Args:
        path: the checkpoint directory.
        ranks: what :meth:`ReadProblems.to_json` returned on each rank, in order.
    """

    def of_keys(kind: str) -> tuple[KeyProblem, ...]:
        return tuple(KeyProblem(*found) for found in _by_rank(ranks, kind))

    merged = ReadProblems(
        path,
        missing=tuple(sorted({key for one in ranks for key in one["missing"]})),
        unexpected=tuple(sorted({key for one in ranks for key in one["unexpected"]})),
        # Of which ranks the pieces are says nothing about it.
        wrong_shape=tuple(sorted(one._replace(ranks=()) for one in of_keys("wrong_shape"))),
        wrong_dtype=of_keys("wrong_dtype"),
        uncovered=of_keys("uncovered"),
        conflicts=of_keys("conflicts"),
        tied=tuple(OtherProblem(*found) for found in _by_rank(ranks, "tied")),
        others=tuple(OtherProblem(*found) for found in _by_rank(ranks, "others")),
        nothing_matched=all(one["nothing_matched"] for one in ranks),
        ways_out=_merge_ways_out([one["ways_out"] for one in ranks]),
    )
    counts = {kind: max(len(one[kind]) + one["beyond"].get(kind, 0) for one in ranks) for kind in _LISTS}
    return replace(merged, beyond={kind: count - len(getattr(merged, kind)) for kind, count in counts.items() if count > _SENT})


def _by_rank(ranks: Sequence[JsonValue], kind: str) -> Iterator[tuple[JsonValue, ...]]:
    """Yield each different problem of a kind with the ranks that have it, or with none where all do."""
    found: dict[tuple[JsonValue, ...], list[int]] = {}
    for rank, one in enumerate(ranks):
        for *what, _ in one[kind]:
            found.setdefault(tuple(what), []).append(rank)
    for words, having in found.items():
        yield (*words, () if len(having) == len(ranks) else tuple(having))


def _on_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: " if ranks else ""


def near_misses(
    missing: Collection[str], unexpected: Collection[str], renamed: Mapping[str, str] | None = None, fitting: Collection[str] = ()
) -> list[str]:
    """Say which missing keys are in the checkpoint under a name that begins otherwise, or is spelt nearly so, and what to do.

    Args:
        missing: keys that the objects have and the checkpoint lacks.
        unexpected: keys that the checkpoint has and the objects lack.
        renamed: beginnings of missing keys -> what may stand there for them in the checkpoint, by shapes and dtypes.
        fitting: what may stand in front of all of the missing keys of the model, by shapes and dtypes.
    """
    unchanged = set(missing).intersection(unexpected)
    if unchanged:
        text = f"{len(unchanged)} of these are in it under their own names: leave key_map out, or what of it renames them"
        return [text, *near_misses(set(missing) - unchanged, set(unexpected) - unchanged, renamed, fitting)]
    there = sorted(unexpected)[:_SEARCHED]
    prefixes = _changed_prefixes(sorted(missing)[:_SEARCHED], there)
    lines = [f"{len(keys)} of these are in it {_say_prefixes(here, saved)}" for (here, saved), keys in prefixes]
    if any(not one.isdisjoint(other) for (_, one), (_, other) in combinations(prefixes, 2)):
        return [
            *lines,
            "several of these have the same name in it; is it of one model, and several were given? Then load it into that one by itself",
        ]
    if prefixes:
        entries = ", ".join(f"{here!r}: {saved!r}" for here, saved in dict(pair for pair, _ in prefixes).items())
        return [*lines, f"was the model wrapped or renamed since? Then load with key_map={{{entries}}}"]
    in_front = prefixes_of_all(sorted(missing)[:_SEARCHED], there)
    if in_front:
        # States are only there where an optimizer is given, and then of just the model that it stepped.
        owners = {key.rpartition(".")[0] for key in there}
        stepped = [prefix for prefix in in_front if any(prefix + key in owners for key in missing)]
        likely, *others = [prefix for prefix in stepped or in_front if prefix in fitting] or stepped or in_front
        alternatives = f" (or {listing(map(repr, others))})" if others else ""
        text = (
            f"all of these are in it with one prefix in front, or with each of several: {listing(in_front)}; was this one of several "
            f"models? Then load with key_map={{'': {likely!r}}}{alternatives} and allow_unexpected=[patterns of the others]"
        )
        return [text]
    for key in sorted(missing)[:_LISTED]:
        close = get_close_matches(key, there[:_COMPARED], 1, 0.8)
        if close:
            lines.append(f"'{key}' is missing, and '{close[0]}' is there")
    if renamed:
        lines.append(f"do these have another name in it, with the same shapes and dtypes? Then load with key_map={dict(renamed)!r}")
    return lines


def _say_prefixes(here: str, saved: str) -> str:
    if not saved:
        return f"without their prefix '{here}'"
    return f"with '{saved}' for their '{here}'" if here else f"with the prefix '{saved}' in front"


def _changed_prefixes(missing: Sequence[str], there: Sequence[str]) -> list[tuple[tuple[str, str], set[str]]]:
    """Return up to three pairs (prefix of missing keys, prefix in the checkpoint), by how many keys they explain, and those in it."""
    by_ending: dict[str, list[str]] = {}
    for key in there:
        for ending in _endings(key):
            by_ending.setdefault(ending, []).append(key)
    found: dict[tuple[str, str], set[str]] = {}
    longest: dict[tuple[str, str], int] = {}
    for key in missing:
        ending = next((ending for ending in _endings(key) if ending in by_ending), "")
        # Where several keys end alike, nobody knows which one is meant.
        if ending and len(by_ending[ending]) == 1:
            pair = key[: len(key) - len(ending)], by_ending[ending][0][: -len(ending)]
            found.setdefault(pair, set()).add(by_ending[ending][0])
            longest[pair] = max(longest.get(pair, 0), ending.count("."))
    # One common last word, such as "weight", says nothing; a wrapper adds its prefix and changes nothing else.
    likely = Counter({pair: len(keys) for pair, keys in found.items() if len(keys) > 1 or longest[pair] or not all(pair)})
    pairs = {pair[0]: (pair, found[pair]) for pair, _ in reversed(likely.most_common(3))}
    return list(reversed(pairs.values()))


def prefixes_of_all(missing: Sequence[str], there: Sequence[str]) -> list[str]:
    """Return what stands in the checkpoint in front of each of the missing keys, where they are several."""
    known = set(there)
    prefixes = [key.removesuffix(missing[0]) for key in there if key.endswith(f".{missing[0]}")] if len(missing) > 1 else []
    return [prefix for prefix in prefixes[:_LISTED] if all(prefix + key in known for key in missing)]


def _endings(key: str) -> Iterator[str]:
    """Yield the key, and then what is left without its first names, the longest first."""
    yield key
    position = key.find(".")
    while position >= 0:
        yield key[position + 1 :]
        position = key.find(".", position + 1)
