"""A checkpoint's index by other names, everywhere where names stand: keys, ties, what was left out, LoRA layers, and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias, TypeVar

from ..storage.index import CheckpointIndex
from ..storage.json_values import JsonValue
from ..storage.manifest import Manifest
from .contents import contents_of

Rename: TypeAlias = "Callable[[str], str | None]"
"""Name -> its new one, or None where what it names is left out."""

_Value = TypeVar("_Value")


def renamed(index: CheckpointIndex, rename: Rename) -> CheckpointIndex:
    """Return the index of a checkpoint as if it had been saved by other names, or without some.

    What lies under the first name of a tied parameter, such as its states, then lies under the first that is left of it.

    Args:
        index: of the checkpoint.
        rename: gives no two keys one name.
    """
    contents = contents_of(index)
    first: dict[str, str | None] = {}
    tied = []
    for names in contents.tied or ():
        left = tuple(sorted(_present(map(rename, names))))
        first |= dict.fromkeys(names, left[0] if left else None)
        if len(left) > 1:
            tied.append(left)

    def of_parameter(name: str) -> str | None:
        return first[name] if name in first else rename(name)

    states = [(owner, key) for owner, by_state in contents.states.items() for key in by_state.values()]
    owners = {key: owner for owner, key in (*states, *contents.masters.items())}

    def of_key(key: str) -> str | None:
        if key not in owners:
            return rename(key)
        owner = of_parameter(owners[key])
        return None if owner is None else f"{owner}.{key.rpartition('.')[2]}"

    new = {key: name for key in index.stored if (name := of_key(key)) is not None}
    manifest = index.manifest
    new_manifest = None if manifest is None else _renamed_manifest(manifest, tuple(tied), rename, of_parameter)
    return replace(
        index,
        manifest=new_manifest,
        dtypes={name: index.dtypes[key] for key, name in new.items()},
        stored={name: index.stored[key] for key, name in new.items()},
    )


def _renamed_manifest(manifest: Manifest, tied: tuple[tuple[str, ...], ...], rename: Rename, of_parameter: Rename) -> Manifest:
    def of_layer(name: str) -> str | None:
        # A layer that is a model of its own has no dot behind its name, and what is in it does.
        inside = rename(f"{name}.weight" if name else "weight")
        return None if inside is None else inside.rpartition(".")[0]

    optimizers = [_renamed_optimizer(one, of_parameter) for one in manifest.optimizers]
    return replace(
        manifest,
        tied=tied,
        base=None if manifest.base is None else _by_new_name(manifest.base, of_parameter),
        lora=_by_new_name(manifest.lora, of_layer),
        optimizers=[one for one in optimizers if one["groups"]],
    )


def _renamed_optimizer(described: JsonValue, of_parameter: Rename) -> JsonValue:
    """Return what a manifest says about an optimizer, by other names; groups of which no parameter is left are left out."""
    groups = [group | {"parameters": _present(map(of_parameter, group["parameters"]))} for group in described["groups"]]
    return described | {
        "groups": [group for group in groups if group["parameters"]],
        "without_gradient": _present(map(of_parameter, described["without_gradient"])),
    }


def _by_new_name(by_name: Mapping[str, _Value], rename: Rename) -> dict[str, _Value]:
    return {new: value for name, value in by_name.items() if (new := rename(name)) is not None}


def _present(names: Iterable[str | None]) -> list[str]:
    return [name for name in names if name is not None]
