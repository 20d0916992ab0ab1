"""The parameters of a model that only its ``config.json`` describes: names, shapes and dtypes, unit by unit, as Paddle would hold them.

Names and order are those of PaddleFormers 0.4.1 (``paddleformers/transformers/{llama,qwen2,qwen2_moe,qwen3,qwen3_moe}/modeling.py``), with
separate projections; units are those that ``fully_shard`` finds there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...errors import CheckpointError
from ..config import TIED, ModelConfig

_ROUTER_DTYPE = "float32"
"""The router of a mixture of experts stays in this."""

_MOST_EXPERTS = 1 << 16
"""In all layers together: with more, a plan would take minutes."""


@dataclass(frozen=True)
class PlannedParameter:
    """A parameter that there will be.

    Attributes:
        names: its structured names, more than one when it is tied.
        shape: its whole shape.
        dtype: Paddle's dtype name.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class PlannedUnit:
    """The parameters that are gathered and released together, in the order of the model."""

    name: str
    parameters: tuple[PlannedParameter, ...]


@dataclass(frozen=True)
class _Family:
    """In what a family differs from the others.

    Attributes:
        decoder: what the names of its decoder begin with.
        biases: which of ``qkvo`` have one, given the configuration.
        norms_of_heads: whether each head's query and key are normalised.
        experts: whether there are experts in place of some MLPs.
        shared_expert: whether there is one that all tokens go through.
        transposed_head: whether a head that is not tied is [hidden, vocabulary].
        head_dim: how wide a head is where the configuration doesn't say; None for the hidden size divided by the heads.
    """

    decoder: str
    biases: Callable[[ModelConfig], str]
    norms_of_heads: bool = False
    experts: bool = False
    shared_expert: bool = False
    transposed_head: bool = False
    head_dim: int | None = None


def _as_asked(config: ModelConfig) -> str:
    return "qkvo" if config.flag("attention_bias", False) else ""


def _always(config: ModelConfig) -> str:
    del config
    return "qkv"


def _unless_refused(config: ModelConfig) -> str:
    return "qkv" if config.flag("qkv_bias", True) else ""


_FAMILIES = {
    "llama": _Family("llama", _as_asked, transposed_head=True),
    "qwen2": _Family("model", _always),
    "qwen2_moe": _Family("model", _unless_refused, experts=True, shared_expert=True),
    "qwen3": _Family("model", _as_asked, norms_of_heads=True, head_dim=128),
    "qwen3_moe": _Family("model", _as_asked, norms_of_heads=True, experts=True),
}


def planned_units(config: ModelConfig, dtype: str) -> list[PlannedUnit]:
    """Return the units of a model, in the order in which ``fully_shard`` finds them.

    Args:
        config: of the model.
        dtype: Paddle's name of the type of all parameters, save routers.

    Raises:
        CheckpointError: the family is not known, or a field is missing, no number, or one that no model has.
    """
    family = _FAMILIES.get(config.model_type) if isinstance(config.model_type, str) else None
    if family is None:
        raise CheckpointError(
            f"'{config.path}' has model_type {config.model_type!r:.100}, and a plan can be made for {', '.join(_FAMILIES)} only"
        )
    hidden, vocabulary = config.count("hidden_size"), config.count("vocab_size")
    # PaddleFormers' models with experts don't tie, whatever their configuration says.
    is_tied = config.flag(TIED, False) and not family.experts
    embedding, head = f"{family.decoder}.embed_tokens", "lm_head.weight"
    names = (f"{embedding}.weight", head) if is_tied else (f"{embedding}.weight",)
    units = [PlannedUnit(embedding, (PlannedParameter(names, (vocabulary, hidden), dtype),))]
    for number in range(config.layers):
        name = f"{family.decoder}.layers.{number}"
        units.append(PlannedUnit(name, tuple(_layer(name, number, family, config, dtype))))
    norm = f"{family.decoder}.norm"
    units.append(PlannedUnit(norm, (PlannedParameter((f"{norm}.weight",), (hidden,), dtype),)))
    if not is_tied:
        shape = (hidden, vocabulary) if family.transposed_head else (vocabulary, hidden)
        units.append(PlannedUnit("lm_head", (PlannedParameter((head,), shape, dtype),)))
    return units


def _layer(name: str, number: int, family: _Family, config: ModelConfig, dtype: str) -> Iterator[PlannedParameter]:
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    width = config.count("head_dim", family.head_dim or hidden // heads)
    rows = {"q": heads * width, "o": hidden} | dict.fromkeys("kv", config.count("num_key_value_heads", heads) * width)
    biases = family.biases(config)
    for one in "qkvo":
        projection = f"{name}.self_attn.{one}_proj"
        yield PlannedParameter((f"{projection}.weight",), (heads * width if one == "o" else hidden, rows[one]), dtype)
        if one in biases:
            yield PlannedParameter((f"{projection}.bias",), (rows[one],), dtype)
    if family.norms_of_heads:
        yield from (PlannedParameter((f"{name}.self_attn.{one}_norm.weight",), (width,), dtype) for one in "qk")
    if family.experts and _has_experts(number, config):
        yield from _experts(f"{name}.mlp", family, config, dtype)
    else:
        yield from _mlp(f"{name}.mlp", hidden, config.count("intermediate_size"), dtype)
    for one in ("input_layernorm", "post_attention_layernorm"):
        yield PlannedParameter((f"{name}.{one}.weight",), (hidden,), dtype)


def _experts(name: str, family: _Family, config: ModelConfig, dtype: str) -> Iterator[PlannedParameter]:
    hidden, inner, count = config.count("hidden_size"), config.count("moe_intermediate_size"), _experts_of_a_layer(config)
    yield PlannedParameter((f"{name}.gate.weight",), (hidden, count), _ROUTER_DTYPE)
    for expert in range(count):
        yield from _mlp(f"{name}.experts.{expert}", hidden, inner, dtype)
    if family.shared_expert:
        yield from _mlp(f"{name}.shared_expert", hidden, config.count("shared_expert_intermediate_size"), dtype)
        yield PlannedParameter((f"{name}.shared_expert_gate.weight",), (hidden, 1), dtype)


def _experts_of_a_layer(config: ModelConfig) -> int:
    return config.count("num_experts", most=_MOST_EXPERTS // config.layers)


def _mlp(name: str, hidden: int, inner: int, dtype: str) -> Iterator[PlannedParameter]:
    for one, shape in (("gate", (hidden, inner)), ("up", (hidden, inner)), ("down", (inner, hidden))):
        yield PlannedParameter((f"{name}.{one}_proj.weight",), shape, dtype)


def _has_experts(number: int, config: ModelConfig) -> bool:
    without = config.get("mlp_only_layers") or []
    if not isinstance(without, list):
        raise CheckpointError(f"'{config.path}' has mlp_only_layers = {without!r:.100}, and a list is needed")
    return number not in without and (number + 1) % config.count("decoder_sparse_step", 1) == 0
