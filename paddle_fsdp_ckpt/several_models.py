"""Several models under names, saved and loaded as one: every key of a model begins with its name and a dot.

So ``{"actor": a, "critic": c}`` is to ``save`` and ``load`` what one model with the sub-layers ``actor`` and ``critic`` would be, save for
how they are kept: each is sharded by our own ``fully_shard``, by itself, or plain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paddle import nn
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from .errors import CheckpointError, ShardingError, listing
from .fsdp import Communicator, ParameterShard, paddle_runtime_of
from .layout import Range, Slot
from .optim import OptimizerState, SteppedParameter, binding_of, entry_of, optimizer_shards
from .shardings import CutByUs, FlatShard, Plain, Sharding, sharding_of


class NamedModels(nn.Layer):
    """A layer whose sub-layers are the models, so that their names in it are their names in a checkpoint."""

    def __init__(self, models: Mapping[str, nn.Layer]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_sublayer(name, model)


@dataclass(frozen=True, eq=False)
class ShardOfModel:
    """A parameter of one of several sharded models.

    Attributes:
        slot: its names among all models, and its shape.
        shard: the parameter itself.
    """

    slot: Slot
    shard: ParameterShard

    @property
    def range(self) -> Range:
        """What this rank keeps of it."""
        return self.shard.range

    @property
    def parameter(self) -> Any:
        """Paddle's parameter."""
        return self.shard.parameter


@dataclass(frozen=True)
class SeveralModels(Sharding):
    """How several models are kept, of which at least one is cut.

    Attributes:
        cut: those that our ``fully_shard`` sharded, by name.
        plain: those that nobody did, as one.
    """

    cut: Mapping[str, tuple[nn.Layer, CutByUs]]
    plain: NamedModels

    @property
    def gradients_pending(self) -> bool:
        """Of any of them."""
        return any(sharding.gradients_pending for _, sharding in self.cut.values())

    def dropped_gradients(self) -> list[str]:
        """Return those of each, by their names here."""
        return [f"{name}.{one}" for name, (_, sharding) in self.cut.items() for one in sharding.dropped_gradients()]

    def lost_weights(self) -> ShardingError | None:
        """Return that of any of them."""
        return next((error for _, sharding in self.cut.values() if (error := sharding.lost_weights()) is not None), None)

    @property
    def written(self) -> int:
        """Of all of them."""
        return sum(sharding.written for _, sharding in self.cut.values())

    @property
    def communicator(self) -> Communicator:
        """Over the ranks over which all of them are cut."""
        return next(sharding.communicator for _, sharding in self.cut.values())

    def bound_optimizers(self) -> list[Any]:
        """Return those of any of them."""
        return list({id(one): one for _, sharding in self.cut.values() for one in sharding.bound_optimizers()}.values())

    def flat_shards(self) -> list[FlatShard]:
        """Return those of each, by the names here.

        Raises:
            ShardingError: some models are plain.
        """
        if self.plain.sublayers():
            names = listing(name for name, _ in self.plain.named_children())
            raise ShardingError(
                f"model: of several, {names} is plain and others are sharded; with trainable_only, or on several replicas, save and load "
                "plain ones by themselves"
            )
        return [
            replace(one, layout=replace(one.layout, slots=tuple(_named_slot(name, slot) for slot in one.layout.slots)))
            for name, (_, sharding) in self.cut.items()
            for one in sharding.flat_shards()
        ]

    def warn_of_cuts(self) -> None:
        """We cut where it loads right."""

    def model_weights(self, model: nn.Layer) -> dict[str, ShardedWeight]:
        """Return the weights of each."""
        return self._weights(lambda sharding, one: sharding.model_weights(one))

    def written_model_weights(self, model: nn.Layer) -> dict[str, ShardedWeight]:
        """Return what this rank writes of each."""
        return self._weights(lambda sharding, one: sharding.written_model_weights(one))

    def _weights(self, weights_of: Callable[[Sharding, nn.Layer], dict[str, ShardedWeight]]) -> dict[str, ShardedWeight]:
        weights = weights_of(Plain(), self.plain)
        for name, (one, sharding) in self.cut.items():
            weights |= {f"{name}.{key}": _named(f"{name}.{key}", weight) for key, weight in weights_of(sharding, one).items()}
        return weights

    def written_state(self, state: OptimizerState) -> ShardedWeight | None:
        """Return what that model's sharding does, under the name here."""
        if not isinstance(state.shard, ShardOfModel):
            return Plain().written_state(state)
        weight = self._sharding_of(state.shard).written_state(replace(state, shard=state.shard.shard))
        return None if weight is None else _named(state.key, weight)

    def whole_keys(self, model: nn.Layer) -> set[str]:
        """Return those of each."""
        cut = {f"{name}.{key}" for name, (one, sharding) in self.cut.items() for key in sharding.whole_keys(one)}
        return cut | Plain().whole_keys(self.plain)

    def held_by(self, optimizers: Sequence[Any], model: nn.Layer | None) -> list[Sequence[SteppedParameter]]:
        """Return the shards of bound optimizers, which may be of several models, and whole parameters of the others."""
        for one in optimizers:
            entry_of(one)
        return [self._held(one) for one in optimizers]

    def _held(self, optimizer: Any) -> Sequence[SteppedParameter]:
        if binding_of(optimizer) is None:
            (held,) = Plain().held_by([optimizer], self.plain)
            return held
        names = {id(sharding.runtime): name for name, (_, sharding) in self.cut.items()}
        shards = optimizer_shards(optimizer)
        foreign = [shard.slot.name for shard in shards if id(shard.unit.runtime) not in names]
        if foreign:
            raise ShardingError(
                f"{len(foreign)} parameters of {type(optimizer).__name__} are of a sharded model that was not given: {listing(foreign)}; "
                "give all models that it steps"
            )
        return [_shard_of_model(names[id(shard.unit.runtime)], shard) for shard in shards]

    def weight_of(self, state: OptimizerState) -> ShardedWeight:
        """Describe it as that model's sharding does, under the name here."""
        if not isinstance(state.shard, ShardOfModel):
            return Plain().weight_of(state)
        sharding = self._sharding_of(state.shard)
        return _named(state.key, sharding.weight_of(replace(state, shard=state.shard.shard)))

    def _sharding_of(self, parameter: ShardOfModel) -> CutByUs:
        runtime = parameter.shard.unit.runtime
        return next(sharding for _, sharding in self.cut.values() if sharding.runtime is runtime)

    def has_gradient(self, parameter: SteppedParameter) -> bool:
        """Tell what its model's sharding does."""
        if isinstance(parameter, ShardOfModel):
            return self._sharding_of(parameter).has_gradient(parameter.shard)
        return Plain().has_gradient(parameter)

    def reset_gradient(self, parameter: SteppedParameter, present: bool) -> None:
        """Let its model's sharding do it."""
        if isinstance(parameter, ShardOfModel):
            self._sharding_of(parameter).reset_gradient(parameter.shard, present)
        else:
            Plain().reset_gradient(parameter, present)

    def values_written(
        self, model: nn.Layer | None, optimizers: Sequence[Any], stepped: Sequence[SteppedParameter], kept: Collection[str] = ()
    ) -> None:
        """Tell each of them."""
        shards = [one.shard for one in stepped if isinstance(one, ShardOfModel)]
        for name, (one, sharding) in self.cut.items():
            own = [key.removeprefix(f"{name}.") for key in kept if key.startswith(f"{name}.")]
            sharding.values_written(None if model is None else one, optimizers, shards, own)
        Plain().values_written(None if model is None else self.plain, optimizers, stepped, kept)


def combine_models(models: Mapping[str, nn.Layer]) -> tuple[NamedModels, Sharding]:
    """Return several models as one, and how they are kept.

    Raises:
        CheckpointError: there are none, or something is no model, or not named by a str without dots.
        ShardingError: one is given twice, or cut by Paddle's own ``fully_shard``; or they are sharded over different ranks.
    """
    strange = [f"{name!r:.50}" for name, model in models.items() if not (_is_name(name) and isinstance(model, nn.Layer))]
    if strange or not models:
        raise CheckpointError(
            f"model: {f'not models under names: {listing(strange)}' if strange else 'the dict is empty'}; give one model, or a dict of "
            'several such as {"actor": actor, "critic": critic}, by names without dots'
        )
    ordered = dict(sorted(models.items()))
    by_paddle = [name for name, model in ordered.items() if paddle_runtime_of(model) is not None]
    if by_paddle:
        raise ShardingError(
            f"model: {listing(by_paddle)} was cut by Paddle's own fully_shard, beside which a process has room for no other; save and load "
            "it by itself, without a dict"
        )
    shardings = {name: sharding_of(model) for name, model in ordered.items()}
    cut = {name: (ordered[name], sharding) for name, sharding in shardings.items() if isinstance(sharding, CutByUs)}
    if not cut:
        return NamedModels(ordered), Plain()
    if len({id(sharding.runtime) for _, sharding in cut.values()}) < len(cut):
        raise ShardingError(f"model: one sharded model is given under several of the names {listing(cut)}; give each once")
    over = {name: _ranks_of_replicas(sharding.communicator) for name, (_, sharding) in cut.items()}
    first, *others = over.values()
    if any(one != first for one in others):
        raise ShardingError(
            f"model: they are sharded over different ranks: {listing(f'{name} over {_said(rows)}' for name, rows in over.items())}; save "
            "and load those by themselves"
        )
    plain = NamedModels({name: model for name, model in ordered.items() if name not in cut})
    return NamedModels(ordered), SeveralModels(cut, plain)


def _said(replicas: list[list[int]]) -> str:
    return " and ".join(map(str, replicas))


def _ranks_of_replicas(communicator: Communicator) -> list[list[int]]:
    return [[communicator.ranks[place] for place in row] for row in communicator.replicas]


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name != "" and "." not in name


def _shard_of_model(name: str, shard: ParameterShard) -> ShardOfModel:
    return ShardOfModel(_named_slot(name, shard.slot), shard)


def _named_slot(name: str, slot: Slot) -> Slot:
    return replace(slot, names=tuple(f"{name}.{one}" for one in slot.names))


def _named(key: str, weight: ShardedWeight) -> ShardedWeight:
    weight.key = key
    return weight
