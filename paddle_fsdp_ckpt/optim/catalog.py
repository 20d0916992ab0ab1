"""Which optimizers may step a sharded model, and the states that each keeps: the table of :mod:`~paddle_fsdp_ckpt.optimizer_states`.

An optimizer without a row is refused by name, with the reason where it is known; :func:`register_optimizer` gives a row to a class from
elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar

import paddle

from ..errors import UnsupportedOptimizerError
from ..optimizer_states import CATALOG, REFUSALS, OptimizerEntry, StateKind, row

__all__ = [
    "CATALOG",
    "REFUSALS",
    "OptimizerEntry",
    "StateKind",
    "check_own_methods",
    "check_states_known",
    "entry_of",
    "register_optimizer",
    "state_name",
]


_REGISTERED_ATTRIBUTE = "_fully_shard_states"
"""Where a registered class has its own row; on the class itself, so that it lives as long, and a subclass must be registered anew."""

_HARMLESS = {"__init__", "__doc__", "__module__", "__annotations__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__"}
"""What a subclass may define anew of what its base has, and still is known to step as the base does."""

_MAY_BE_WRAPPED = {"step", "minimize", "clear_grad", "clear_gradients"}
"""Methods that an object may have of its own, such as one around its class's: parameters have no data in them that could be changed."""

_C = TypeVar("_C", bound=type)


def register_optimizer(cls: _C, *, elementwise: Sequence[str] = (), scalar: Sequence[str] = (), stacked: Sequence[str] = ()) -> _C:
    """Let an optimizer class of your own step, save and load sharded models, and say which states it keeps. Call it on every rank.

    By registering it you promise that, whatever its settings:

    - its update is *elementwise*: the new value of an element depends on that element, its gradient and its states, and on numbers that are
      the same on every rank; never on other elements, as norms, means, sorting or factored states do. It is given 1-D pieces of parameters,
      of any length from 1 on, or some of the parameters only;
    - it updates in ``_append_optimize_op``, as Paddle's own do; before and after, parameters have no data, and gradients are pieces;
    - all that it keeps from one step to the next are accumulators, made by ``_add_accumulator`` in ``_create_accumulators``.

    A subclass of an optimizer of ``paddle.optimizer`` needs no registration where it has only another constructor and new methods.

    Args:
        cls: a subclass of ``paddle.optimizer.Optimizer``. What its base class keeps must be named too.
        elementwise: names of the accumulators with one value an element, without the optimizer's own ``name=`` and leading underscores.
        scalar: of those with one value a parameter, of shape [] or [1], the same on every rank.
        stacked: of those of shape [n, elements], with n values an element.

    Returns:
        ``cls``.

    Raises:
        UnsupportedOptimizerError: it is no class of optimizer, one of Paddle's, one that updates as a refused one of these, or was
            registered otherwise; or a name is given twice.
    """
    if not (isinstance(cls, type) and issubclass(cls, paddle.optimizer.Optimizer)):
        raise UnsupportedOptimizerError(f"register_optimizer: {cls!r} is not a subclass of paddle.optimizer.Optimizer")
    name = f"{cls.__module__}.{cls.__name__}"
    if _is_paddles(cls):
        reason = f", and can't be registered: {REFUSALS[cls.__name__]}" if cls.__name__ in REFUSALS else " already"
        raise UnsupportedOptimizerError(f"register_optimizer: {name} is known{reason}")
    updater = next(one for one in cls.__mro__ if "_append_optimize_op" in vars(one))
    if _is_paddles(updater) and updater.__name__ in REFUSALS:
        raise UnsupportedOptimizerError(f"register_optimizer: {name} updates as {updater.__name__} does: {REFUSALS[updater.__name__]}")
    names = [*elementwise, *scalar, *stacked]
    strange = sorted({one for one in names if names.count(one) > 1 or one != one.lstrip("_") or not one})
    if strange:
        raise UnsupportedOptimizerError(
            f"register_optimizer: {name}: name each accumulator once, without leading underscores, not {', '.join(map(repr, strange))}"
        )
    entry = row(*elementwise, scalar=scalar, stacked=stacked)
    known = vars(cls).get(_REGISTERED_ATTRIBUTE)
    if known not in (None, entry):
        raise UnsupportedOptimizerError(f"register_optimizer: {name} was registered with other states already")
    setattr(cls, _REGISTERED_ATTRIBUTE, entry)
    return cls


def entry_of(optimizer: Any) -> OptimizerEntry:
    """Return the states of an optimizer: the table's entry for its class, or what it was registered with.

    Raises:
        UnsupportedOptimizerError: its class is not known.
    """
    cls = type(optimizer)
    for base in cls.__mro__:
        entry = _own_entry(base)
        if entry is not None:
            changed = sorted(_changed(cls, base))
            if changed:
                raise UnsupportedOptimizerError(
                    f"{cls.__module__}.{cls.__name__} can't step a sharded model: it has its own {', '.join(changed)}, so its update may "
                    f"be another than {base.__name__}'s. Where every element is updated by itself, say so by register_optimizer"
                )
            return entry
    reason = f": {REFUSALS[cls.__name__]}" if _is_paddles(cls) and cls.__name__ in REFUSALS else ""
    way_out = "" if reason else ", and what register_optimizer was told of"
    raise UnsupportedOptimizerError(
        f"{cls.__module__}.{cls.__name__} can't step a sharded model{reason}; supported are {', '.join(CATALOG)} of paddle.optimizer"
        f"{way_out}"
    )


def check_own_methods(optimizer: Any) -> None:
    """Raise where an optimizer object has other methods than its class, as one has that was changed from outside.

    Raises:
        UnsupportedOptimizerError: naming them.
    """
    cls = type(optimizer)
    changed = sorted(name for name in set(vars(optimizer)) - _MAY_BE_WRAPPED if isinstance(getattr(cls, name, None), FunctionType))
    if changed:
        raise UnsupportedOptimizerError(
            f"{cls.__name__}: this object has its own {', '.join(changed)} in place of its class's, so its update may be another one; give "
            "fully_shard or bind_optimizer the optimizer as it was made"
        )


def check_states_known(optimizer: Any) -> None:
    """Raise where an optimizer keeps a state that is not known, or is no tensor, and so couldn't be saved.

    Raises:
        UnsupportedOptimizerError: naming it.
    """
    known = entry_of(optimizer).states
    for accumulator, tensors in optimizer._accumulators.items():
        state = state_name(optimizer, accumulator)
        if tensors and state not in known:
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} keeps a state '{state}' that is not in the table of its states; register_optimizer can "
                "be told of it, as elementwise=, scalar= or stacked="
            )
        _check_tensors(f"state '{state}'", tensors)
    _check_tensors("master weight", optimizer._master_weights)


def _check_tensors(what: str, values: Mapping[str, object]) -> None:
    """Raise where one of the values, by the names of what they are of, is no tensor."""
    if all(issubclass(kind, paddle.Tensor) for kind in set(map(type, values.values()))):
        return
    for name, value in values.items():
        if not isinstance(value, paddle.Tensor):
            raise UnsupportedOptimizerError(
                f"{what} of '{name}' is {'None' if value is None else f'a {type(value).__name__}'}, not a tensor, and can't be saved or "
                "loaded: put a tensor in its place, or take the entry out of the optimizer"
            )


def _own_entry(cls: type) -> OptimizerEntry | None:
    """Return what is known of a class itself, not of its bases."""
    if _is_paddles(cls):
        return CATALOG.get(cls.__name__)
    entry = vars(cls).get(_REGISTERED_ATTRIBUTE)
    return entry if isinstance(entry, OptimizerEntry) else None


def _is_paddles(cls: type) -> bool:
    return getattr(paddle.optimizer, cls.__name__, None) is cls


def _changed(cls: type, base: type) -> set[str]:
    """Return what a subclass has otherwise than its base, by which it may step otherwise."""
    between = cls.__mro__[: cls.__mro__.index(base)]
    own = set().union(*(vars(one) for one in between)) - _HARMLESS
    return {name for name in own if hasattr(base, name) or (name.startswith("__") and name.endswith("__"))}


def state_name(optimizer: Any, accumulator: str) -> str:
    """Return an accumulator's name as keys have it: without the optimizer's own name and leading underscores."""
    prefix = f"{optimizer._name}_" if optimizer._name is not None else ""
    return accumulator.removeprefix(prefix).lstrip("_")
