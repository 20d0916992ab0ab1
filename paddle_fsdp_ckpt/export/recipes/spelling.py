"""A family's recipe for models that somebody wrote with the family's names, which begin otherwise than PaddleFormers' do.

So are the keys of a self-written Llama ``model.layers.0...``, as on Hugging Face's hub, or ``layers.0...``, and PaddleFormers'
``llama.layers.0...``.
Names don't say how such a model lays out its matrices; shapes must.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...errors import MismatchError, counted, listing
from .rules import Recipe, draft_rule

_TO_HIDDEN = ("o_proj.weight", "down_proj.weight")
"""How the keys of matrices end whose outputs, not inputs, are the model's hidden units."""


def spelled_for(recipe: Recipe, keys: Iterable[str]) -> Recipe:
    """Return the recipe, or that for the same names with another beginning: the one that takes most of the keys.

    Fused projections it doesn't take: how somebody else lays them out isn't known.

    Args:
        recipe: of a family, or any.
        keys: of all parameters and buffers of a model.
    """
    names = list(keys)
    spellings = [recipe, *(_spelled(recipe, prefix) for prefix in recipe.prefixes[1:])]
    for one in spellings:
        if one.fits(names):
            return one
    # Where none takes all, what the nearest says of the rest is the shortest error.
    return max(spellings, key=lambda one: sum(one.fits([name]) for name in names))


def check_layout(recipe: Recipe, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless shapes tell that a model's matrices lie as the recipe says; of a family's own names that is known.

    Args:
        recipe: as :func:`spelled_for` returned it.
        shapes: of all parameters and buffers, by their keys.

    Raises:
        MismatchError: they lie the other way round, or can't tell.
    """
    if recipe.family is None:
        return
    rules = recipe.rules_of(shapes)
    embedding = next((rule.tied_to for rule in recipe.rules if rule.tied_to is not None), None)
    if embedding is None:
        raise MismatchError(
            f"no rule of the recipe '{recipe.name}' says \"tied_to\", as that of a head does, so which is the embedding, whose last axis "
            "would say how matrices lie, isn't known; give the head's rule that"
        )
    if embedding not in shapes:
        raise MismatchError(f"the model has no '{embedding}', whose last axis would say how its matrices lie; write a FILE of rules for it")
    hidden = shapes[embedding][-1]
    turned, square, told = [], [], False
    for key, (rule, _) in rules.items():
        shape = shapes[key]
        if len(shape) != 2 or not rule.transpose or rule in recipe.own_rules:  # who wrote that rule knows
            continue
        if shape[0] == shape[1] == hidden:
            square.append((key, rule))
        elif rule.tied_to is None:  # a head's shape is compared with the embedding's, whose tensor it may be
            told = True
            if shape[int(key.endswith(_TO_HIDDEN))] != hidden:
                turned.append(f"'{key}' {list(shape)}")
    if turned:
        raise MismatchError(
            f"the recipe '{recipe.name}' takes matrices as Paddle's Linear keeps them, [in, out], with {hidden} hidden units, and "
            f"{counted(len(turned), 'lies', 'lie')} otherwise: {listing(turned)}. If names and layouts are Hugging Face's already, use the "
            "recipe none; else write a FILE of rules that says which to transpose"
        )
    heads = [one for one in square if one[1].tied_to is not None]
    undecided = heads or ([] if told else square)
    if undecided:
        rule = undecided[0][1]
        keys = listing(f"'{key}'" for key, _ in undecided)
        raise MismatchError(
            f"whether {counted(len(undecided), 'matrix is', 'matrices are')} [in, out] or [out, in] can't be told, since "
            f"{'it is' if len(undecided) == 1 else 'they are'} square: {keys}. Write a FILE of "
            f"rules, such as {draft_rule(rule.source, rule.targets[0], transpose=True)}; where names and layouts are Hugging Face's, "
            "use the recipe none"
        )


def _spelled(recipe: Recipe, prefix: str) -> Recipe:
    own = recipe.prefixes[0]

    def renamed(name: str) -> str:
        return prefix + name.removeprefix(own) if name.startswith(own) else name

    rules = tuple(
        replace(rule, source=renamed(rule.source), tied_to=None if rule.tied_to is None else renamed(rule.tied_to))
        for rule in recipe.base_rules
        if rule.is_plain or not rule.targets
    )
    spelled = replace(recipe, rules=rules, prefixes=(), family=recipe, own=0)
    return spelled.extended(recipe.name, recipe.own_rules)  # which say names as they are
