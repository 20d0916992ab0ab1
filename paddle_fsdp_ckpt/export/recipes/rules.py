"""What a recipe is made of: rules that say which tensors of a Hugging Face model a key of a Paddle model becomes, and how."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...errors import CheckpointError, MismatchError, counted, listing
from ...layout import Range
from ...pieces import Piece
from ..config import ModelConfig

EQUAL, BY_HEADS = "equal", "qkv"
SPLITS = (EQUAL, BY_HEADS)
"""The values of :attr:`Rule.split`."""

_EXAMPLES, _FORMS = 3, 5
"""How many rules, and how many forms of keys, a message shows."""
_ALIKE = 2
"""How many parts at their ends make keys alike."""
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]*)(?![^.])", re.ASCII)
_DRAFTED = re.compile(r"\{n+\}")
_PLACEHOLDER = re.compile(r"\{(\*?)([a-z_]+)\}")


@dataclass(frozen=True)
class Rule:
    """What becomes of the keys of one form.

    Attributes:
        source: form of the keys: ``{name}`` stands for a whole number, ``{*name}`` for any text.
        targets: the names that the tensors get; of several, the tensor's parts in this order. Empty: the key is left out.
        transpose: whether the matrix lies the other way round: Paddle's ``Linear`` keeps [in, out], Hugging Face [out, in].
        split: how several targets share the *first* axis of what the tensor is after the transposition: ``"equal"``, one after another in
            equal parts; ``"qkv"``, for each key-value head the rows of its queries, of its key, and of its value.
        unstack: the placeholder of the targets that numbers the key's first axis, each index of which is a tensor by itself.
        tied_to: the key whose tensor this may share, and then lies as that one does; what ``tie_word_embeddings`` is about.
        shape: the configuration's fields that the tensor's shape must be.
    """

    source: str
    targets: tuple[str, ...]
    transpose: bool = False
    split: str | None = None
    unstack: str | None = None
    tied_to: str | None = None
    shape: tuple[str, ...] = ()

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        pattern, end = "", 0
        for found in _PLACEHOLDER.finditer(self.source):
            pattern += re.escape(self.source[end : found.start()]) + f"(?P<{found[2]}>{'.+' if found[1] else '0|[1-9][0-9]*'})"
            end = found.end()
        return re.compile(pattern + re.escape(self.source[end:]))

    def match(self, key: str) -> dict[str, str] | None:
        """Return what the placeholders stand for in a key; None where it is of another form."""
        found = self._pattern.fullmatch(key)
        return None if found is None else found.groupdict()

    @property
    def form(self) -> str:
        """The source without the names of its placeholders."""
        return _PLACEHOLDER.sub(r"{\1}", self.source)

    @property
    def is_plain(self) -> bool:
        """Whether the key becomes just one tensor."""
        return len(self.targets) == 1 and self.unstack is None

    def lies_as(self, other: Rule) -> bool:
        """Whether the keys of both rules become just one tensor each, and equal ones where the keys' tensors are equal."""
        return self.is_plain and other.is_plain and self.transpose == other.transpose

    def target_name(self, values: Mapping[str, str]) -> str:
        """Return the name of the only tensor that a key becomes, given what its placeholders stand for."""
        (target,) = self.targets
        return _fill(target, values)

    def target_names(self, values: Mapping[str, str], shape: Sequence[int]) -> list[str]:
        """Return the names of all tensors that a key of this shape becomes, given what its placeholders stand for."""
        numbers = range(shape[0] if shape else 0)
        filled = [values] if self.unstack is None else [{**values, self.unstack: str(number)} for number in numbers]
        return [_fill(target, names) for names in filled for target in self.targets]

    def inverse(self) -> Rule | None:
        """Return the rule that makes the key of the tensor; None where that takes several tensors or keys."""
        if not self.is_plain or set(_PLACEHOLDER.findall(self.source)) != set(_PLACEHOLDER.findall(self.targets[0])):
            return None
        return Rule(self.targets[0], (self.source,), self.transpose, shape=self.shape[::-1] if self.transpose else self.shape)

    def check(self) -> None:
        """Raise unless the rule makes sense.

        Raises:
            ValueError: it doesn't.
        """
        strange = [form for form in (self.source, *self.targets) if set("{}") & set(_PLACEHOLDER.sub("", form))]
        if strange:
            raise ValueError(f"'{strange[0]}' has a brace that is of no placeholder, {{name}} or {{*name}}, with small letters and _ only")
        names = [found[2] for found in _PLACEHOLDER.finditer(self.source)]
        known = {*names, self.unstack}
        unknown = [found[2] for target in self.targets for found in _PLACEHOLDER.finditer(target) if found[2] not in known]
        if len(set(names)) != len(names) or self.unstack in names:
            raise ValueError(f"'{self.source}' has a placeholder twice")
        if unknown:
            raise ValueError(f"'{self.source}' has no placeholder {{{unknown[0]}}}, and its targets have")
        if self.unstack is not None and not all(f"{{{self.unstack}}}" in target for target in self.targets):
            raise ValueError(f"'{self.source}' is to be unstacked by {{{self.unstack}}}, and not all of its targets have that")
        if self.tied_to is not None and not self.is_plain:
            raise ValueError(f"'{self.source}' may be tied, and so must have just one target")
        if self.split not in (None, *SPLITS) or (self.split is None) != (len(self.targets) < 2):
            raise ValueError(f"'{self.source}' has {len(self.targets)} targets and split = {self.split!r}; several need one of {SPLITS}")
        if self.split == BY_HEADS and len(self.targets) != 3:
            raise ValueError(
                f"'{self.source}' is to be split by heads, and has {len(self.targets)} targets instead of query, key and value"
            )


@dataclass(frozen=True)
class TensorSource:
    """Where a tensor of a Hugging Face model comes from.

    Attributes:
        name: what it is called there.
        shape: what shape it has there.
        slab: the part of the key's tensor that it is taken from: all of it, or one index of its first axis.
        ranges: the rows of the slab, or columns where it is transposed, that it consists of, one after another.
        transpose: whether the slab is transposed.
    """

    name: str
    shape: tuple[int, ...]
    slab: Piece
    ranges: tuple[Range, ...]
    transpose: bool = False

    @property
    def numel(self) -> int:
        """How many elements the tensor has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Recipe:
    """How the keys of a family of models are called, and lie, in Hugging Face's form.

    Attributes:
        name: of the family; what ``model_type`` says in a ``config.json``.
        rules: each key must fit just one; where it fits one of the ``own``, the others don't count.
        prefixes: of a family, what the rules' sources begin with, and what such names may begin with instead; see :mod:`.spelling`.
        family: the family's recipe, where this is that for names with another beginning.
        own: how many of the rules, the first, a file says itself; the others are of the recipe that it extends.
    """

    name: str
    rules: tuple[Rule, ...]
    prefixes: tuple[str, ...] = ()
    family: Recipe | None = None
    own: int = 0

    @property
    def own_rules(self) -> tuple[Rule, ...]:
        """Those that a file says itself."""
        return self.rules[: self.own]

    @property
    def base_rules(self) -> tuple[Rule, ...]:
        """Those that no file says, and that go on where the own ones don't take a key."""
        return self.rules[self.own :]

    @property
    def is_extended(self) -> bool:
        """Whether a file says some of the rules, and extends a recipe that has the others."""
        return bool(self.own_rules and self.base_rules)

    def extended(self, name: str, own: tuple[Rule, ...]) -> Recipe:
        """Return the recipe of this name with these rules, and then its own that aren't of the same form."""
        forms = {rule.form for rule in own}
        return replace(self, name=name, rules=(*own, *(rule for rule in self.rules if rule.form not in forms)), own=len(own))

    def rules_of(self, keys: Iterable[str]) -> dict[str, tuple[Rule, dict[str, str]]]:
        """Return for each key the rule that takes it, and what the placeholders stand for.

        Raises:
            MismatchError: keys that no rule takes, or several do; it lists them.
        """
        found = {key: self._matches(key) for key in keys}
        without = [key for key, matches in found.items() if not matches]
        several = [
            f"'{key}' by {' and '.join(repr(rule.source) for rule, _ in matches)}" for key, matches in found.items() if len(matches) > 1
        ]
        texts = []
        if without:
            texts.append(f"{counted(len(without), 'key is', 'keys are')} taken by no rule: {_forms(without)}")
        if several:
            texts.append(f"{counted(len(several), 'key is', 'keys are')} taken by several rules: {listing(several)}")
        if texts:
            some_fit = len(without) < len(found)
            raise MismatchError(f"the recipe '{self.name}' doesn't fit; {'; '.join(texts)}. {self._way_out(without, some_fit=some_fit)}")
        return {key: matches[0] for key, matches in found.items()}

    def inverse(self) -> Recipe:
        """Return the recipe that makes keys of tensors; fused keys, and those of several tensors, it doesn't make."""
        own, base = ([made for rule in rules if (made := rule.inverse()) is not None] for rules in (self.own_rules, self.base_rules))
        return Recipe(self.name, (*own, *base), own=len(own))

    def fits(self, keys: Iterable[str]) -> bool:
        """Tell whether each key is taken by some rule."""
        return all(any(rule.match(key) is not None for rule in self.rules) for key in keys)

    def _way_out(self, without: Sequence[str], *, some_fit: bool) -> str:
        """Say which names are expected, and how rules for those that there are would look."""
        expected = f"It takes names such as {', '.join(repr(rule.source) for rule in self.rules[:_EXAMPLES])}"
        drafts = [self._draft(form) for form in dict.fromkeys(map(_form, without))]
        shown = f", such as {'; '.join(drafts[:_EXAMPLES])}" if drafts else ""
        shown += f', and with "extends": "{self.name}" for just these names' if drafts and some_fit and not self.own else ""
        return (
            f"{expected}. Use the recipe of the model's family, or a FILE of rules (--recipe FILE, recipe= in Python), one for each form "
            f'of name{shown}; a Paddle Linear\'s weight, [in, out], needs "transpose". The recipe none copies everything as it is, '
            "which is right only where names and layouts are Hugging Face's"
        )

    def _draft(self, form: str) -> str:
        """Return a rule for keys of a form, by the rule for keys that end alike, where there is just one."""
        ending, numbers = form.split(".")[-_ALIKE:], form.count("{")
        alike = [rule for rule in self.rules if rule.is_plain and rule.source.split(".")[-_ALIKE:] == ending]
        alike = [rule for rule in alike if rule.source.count("{") == numbers]
        if len(alike) != 1:
            return draft_rule(form, form)
        placeholders = iter(_PLACEHOLDER.findall(alike[0].source))
        return draft_rule(_DRAFTED.sub(lambda _: f"{{{next(placeholders)[1]}}}", form), alike[0].targets[0], transpose=alike[0].transpose)

    def _matches(self, key: str) -> list[tuple[Rule, dict[str, str]]]:
        for rules in (self.own_rules, self.base_rules):
            found = ((rule, rule.match(key)) for rule in rules)
            matches = [(rule, values) for rule, values in found if values is not None]
            if matches:
                return matches
        return []


def apply_rule(rule: Rule, values: Mapping[str, str], whole: Piece, config: ModelConfig | None) -> Iterator[TensorSource]:
    """Yield the tensors that a key becomes.

    Args:
        rule: that takes it.
        values: what its placeholders stand for.
        whole: the key's tensor; the rule's, or the one of its master weight.
        config: of the model; needed to split by heads, and to check shapes.

    Raises:
        MismatchError: the rule can't be applied to a tensor of this shape.
        CheckpointError: the configuration is needed, and lacks what is.
    """
    for number, slab in enumerate(_slabs(rule, whole)):
        shape = slab.local_shape if rule.unstack is None else slab.local_shape[1:]
        if rule.transpose and len(shape) != 2:
            raise MismatchError(f"'{whole.key}': '{rule.source}' says that it is transposed, and it has shape {list(whole.global_shape)}")
        rows = shape[-1] if rule.transpose else (shape or (1,))[0]
        others = shape[:1] if rule.transpose else shape[1:]
        names = values if rule.unstack is None else {**values, rule.unstack: str(number)}
        for target, ranges in zip(rule.targets, _split(rule, rows, whole, config), strict=True):
            numel = sum(one.numel for one in ranges)
            of_target = (numel, *others) if shape else ()
            _check_shape(rule, of_target, whole, config)
            yield TensorSource(_fill(target, names), of_target, slab, ranges, rule.transpose)


def _slabs(rule: Rule, whole: Piece) -> Iterator[Piece]:
    if rule.unstack is None:
        yield whole
        return
    if len(whole.global_shape) < 2:
        raise MismatchError(f"'{whole.key}': '{rule.source}' says that it is stacked, and it has shape {list(whole.global_shape)}")
    count, *others = whole.global_shape
    for number in range(count):
        yield replace(whole, global_offset=(number, *(0 for _ in others)), local_shape=(1, *others))


def _split(rule: Rule, rows: int, whole: Piece, config: ModelConfig | None) -> list[tuple[Range, ...]]:
    if rule.split is None:
        return [(Range(0, rows),)] if rule.targets else []
    if rule.split == EQUAL:
        parts, rest = divmod(rows, len(rule.targets))
        if rest:
            raise MismatchError(f"'{whole.key}': {rows} rows can't be split into {len(rule.targets)} equal parts")
        return [(Range(i * parts, (i + 1) * parts),) for i in range(len(rule.targets))]
    if config is None:
        raise CheckpointError(
            f"'{whole.key}' holds query, key and value in one, and only config.json says how: give --config DIR (config= in Python)"
        )
    heads, groups = config.count("num_attention_heads"), config.count("num_key_value_heads")
    width, rest = divmod(rows, heads + 2 * groups)
    if rest or heads % groups:
        raise MismatchError(
            f"'{whole.key}': {rows} rows can't be those of {heads} query heads and {groups} key-value heads ('{config.path}')"
        )
    sizes = (heads // groups * width, width, width)
    starts = [group * sum(sizes) for group in range(groups)]
    offsets = (0, sizes[0], sizes[0] + sizes[1])
    return [tuple(Range(start + offset, start + offset + size) for start in starts) for offset, size in zip(offsets, sizes, strict=True)]


def _check_shape(rule: Rule, shape: tuple[int, ...], whole: Piece, config: ModelConfig | None) -> None:
    if not rule.shape or config is None:
        return
    wanted = tuple(config.count(name) for name in rule.shape)
    if shape != wanted:
        raise MismatchError(
            f"'{whole.key}' becomes {list(shape)}, and {' and '.join(rule.shape)} in '{config.path}' make it {list(wanted)}; give the "
            "configuration of this model"
        )


def draft_rule(source: str, target: str, *, transpose: bool = False) -> str:
    """Return a rule as a file of rules has it."""
    return json.dumps({"source": source, "targets": [target]} | ({"transpose": True} if transpose else {}))


def _form(key: str) -> str:
    """Return the form of a key, with placeholders for its numbers."""
    numbers = itertools.count()
    return _NUMBER.sub(lambda _: f"{{{'n' * (next(numbers) + 1)}}}", key)


def _forms(keys: Sequence[str]) -> str:
    """Return the first key of each form, and how many more are of it."""
    forms: dict[str, list[str]] = {}
    for key in keys:
        forms.setdefault(_form(key), []).append(key)
    shown = [f"'{first}'{f' and {len(others):,} like it' if others else ''}" for first, *others in forms.values()]
    rest = len(shown) - _FORMS
    return ", ".join(shown[:_FORMS]) + (f", ... ({counted(rest, 'more form')})" if rest > 0 else "")


def _fill(target: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: values[found[2]], target)
