"""The demo's decoder against small references in numpy that loop where the model computes at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
import pytest

from paddle_fsdp_ckpt.demo.model import (
    Attention,
    CausalLM,
    DecoderConfig,
    MixtureOfExperts,
    RMSNorm,
    SwiGLU,
    rotary_tables,
    rotate,
    route,
)

Array = npt.NDArray[Any]

CONFIG = DecoderConfig(
    vocab_size=19,
    hidden_size=12,
    intermediate_size=10,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
)
MOE = dataclasses.replace(CONFIG, num_experts=5, num_experts_per_tok=2)


@pytest.fixture(autouse=True)
def _seed() -> None:
    paddle.seed(11)


def _random(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _close(actual: paddle.Tensor, expected: Array) -> None:
    np.testing.assert_allclose(actual.numpy(), expected, rtol=2e-5, atol=2e-6)


def _enlarge(layer: paddle.nn.Layer) -> None:
    """Replace the small initial weights by large ones, so that no mistake drowns in small numbers."""
    generator = np.random.default_rng(1)
    for parameter in layer.parameters():
        parameter.set_value(generator.standard_normal(parameter.shape).astype(np.float32))


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return np.stack([row / np.sqrt((row**2).mean() + eps) for row in x.reshape(-1, x.shape[-1])]).reshape(x.shape) * weight


def _turn(x: Array, position: int, theta: float) -> Array:
    """Turn a head's vector as complex numbers: channel i is the real part, channel i + half the imaginary part."""
    half = len(x) // 2
    numbers = [complex(x[i], x[i + half]) * np.exp(1j * position * theta ** (-2 * i / len(x))) for i in range(half)]
    return np.array([number.real for number in numbers] + [number.imag for number in numbers])


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max())
    return np.asarray(powers / powers.sum())


def _swiglu(mlp: SwiGLU, x: Array) -> Array:
    gate = x @ mlp.gate_proj.weight.numpy()
    return np.asarray((gate / (1 + np.exp(-gate)) * (x @ mlp.up_proj.weight.numpy())) @ mlp.down_proj.weight.numpy())


def test_rms_norm() -> None:
    norm = RMSNorm(8, eps=0.1)
    _enlarge(norm)
    x = _random(2, 3, 8)
    _close(norm(paddle.to_tensor(x)), _rms_norm(x, norm.weight.numpy(), 0.1))


def test_rotary_positions_turn_pairs_of_channels() -> None:
    x = _random(2, 7, 6)
    expected = np.array([[_turn(vector, position, 100.0) for position, vector in enumerate(head)] for head in x])
    _close(rotate(paddle.to_tensor(x), *rotary_tables(7, 6, 100.0)), expected)


def test_attention_with_grouped_queries() -> None:
    attention = Attention(CONFIG)
    _enlarge(attention)
    x = _random(2, 5, CONFIG.hidden_size)
    expected = np.array([_attend(attention, sequence) for sequence in x])
    actual = attention(paddle.to_tensor(x), *rotary_tables(5, CONFIG.head_dim, CONFIG.rope_theta))
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-4, atol=1e-4)


def _attend(attention: Attention, x: Array) -> Array:
    size, group = CONFIG.head_dim, CONFIG.num_attention_heads // CONFIG.num_key_value_heads
    rows = []
    for position in range(len(x)):
        heads = []
        for head in range(CONFIG.num_attention_heads):
            query_columns = slice(head * size, (head + 1) * size)
            columns = slice(head // group * size, (head // group + 1) * size)
            query = _head_vector(attention.q_norm, x[position] @ attention.q_proj.weight.numpy()[:, query_columns], position)
            seen = range(position + 1)
            keys = [_head_vector(attention.k_norm, x[other] @ attention.k_proj.weight.numpy()[:, columns], other) for other in seen]
            values = [x[other] @ attention.v_proj.weight.numpy()[:, columns] for other in seen]
            shares = _softmax(np.array([query @ key for key in keys]) / np.sqrt(size))
            heads.append(sum(share * value for share, value in zip(shares, values, strict=True)))
        rows.append(np.concatenate(heads) @ attention.o_proj.weight.numpy())
    return np.array(rows)


def _head_vector(norm: RMSNorm, x: Array, position: int) -> Array:
    return _turn(_rms_norm(x, norm.weight.numpy(), CONFIG.rms_norm_eps), position, CONFIG.rope_theta)


def test_swiglu() -> None:
    mlp = SwiGLU(CONFIG)
    _enlarge(mlp)
    x = _random(2, 3, CONFIG.hidden_size)
    np.testing.assert_allclose(mlp(paddle.to_tensor(x)).numpy(), _swiglu(mlp, x), rtol=1e-4, atol=1e-4)


def test_routing_takes_the_likeliest_experts_and_weights_add_up_to_one() -> None:
    scores = _random(9, 5)
    experts, weights = route(paddle.to_tensor(scores), 3)
    for row, chosen, share in zip(scores, experts.numpy(), weights.numpy(), strict=True):
        likeliest = np.argsort(-row)[:3]
        np.testing.assert_array_equal(chosen, likeliest)
        np.testing.assert_allclose(share, _softmax(row[likeliest]), rtol=1e-5)


def test_mixture_of_experts() -> None:
    mixture = MixtureOfExperts(MOE)
    _enlarge(mixture)
    x = _random(2, 3, MOE.hidden_size)
    expected = np.array([[_mix(mixture, token) for token in sequence] for sequence in x])
    np.testing.assert_allclose(mixture(paddle.to_tensor(x)).numpy(), expected, rtol=1e-4, atol=1e-4)


def _mix(mixture: MixtureOfExperts, token: Array) -> Array:
    likelihoods = _softmax(token @ mixture.gate.weight.numpy())
    chosen = np.argsort(-likelihoods)[: MOE.num_experts_per_tok]
    parts = [likelihoods[number] / likelihoods[chosen].sum() * _swiglu(mixture.experts[number], token) for number in chosen]
    return np.asarray(sum(parts))


def test_an_expert_without_tokens_is_not_run_and_gets_no_gradient() -> None:
    mixture = MixtureOfExperts(MOE)
    x = paddle.to_tensor(_random(1, 1, MOE.hidden_size))
    chosen, _ = route(mixture.gate(x.reshape([1, -1])), MOE.num_experts_per_tok)
    mixture(x).sum().backward()
    used = {number for number, expert in enumerate(mixture.experts) if expert.up_proj.weight.grad is not None}
    assert used == set(chosen.numpy().flatten().tolist())


@pytest.mark.parametrize("config", [CONFIG, MOE, dataclasses.replace(CONFIG, tie_word_embeddings=True)])
def test_the_model_scores_every_token_and_sees_no_later_one(config: DecoderConfig) -> None:
    model = CausalLM(config)
    _enlarge(model)
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, (2, 6))
    scores = model(paddle.to_tensor(tokens))
    assert scores.shape == [2, 6, config.vocab_size]
    changed = tokens.copy()
    changed[:, 4:] = (changed[:, 4:] + 1) % config.vocab_size
    other = model(paddle.to_tensor(changed))
    np.testing.assert_allclose(scores[:, :4].numpy(), other[:, :4].numpy(), rtol=1e-5, atol=1e-5)
    assert not np.allclose(scores[:, 4:].numpy(), other[:, 4:].numpy())


def test_names_are_those_of_qwen3() -> None:
    layer = {
        "input_layernorm.weight": [12],
        "self_attn.q_proj.weight": [12, 24],
        "self_attn.k_proj.weight": [12, 8],
        "self_attn.v_proj.weight": [12, 8],
        "self_attn.o_proj.weight": [24, 12],
        "self_attn.q_norm.weight": [4],
        "self_attn.k_norm.weight": [4],
        "post_attention_layernorm.weight": [12],
    }
    mlp = {"gate_proj.weight": [12, 10], "up_proj.weight": [12, 10], "down_proj.weight": [10, 12]}
    outside = {"model.embed_tokens.weight": [19, 12], "model.norm.weight": [12], "lm_head.weight": [19, 12]}
    dense = {**layer, **{f"mlp.{name}": shape for name, shape in mlp.items()}}
    moe = {
        **layer,
        "mlp.gate.weight": [12, 5],
        **{f"mlp.experts.{expert}.{name}": shape for expert in range(5) for name, shape in mlp.items()},
    }
    for config, names in ((CONFIG, dense), (MOE, moe)):
        expected = outside | {f"model.layers.{number}.{name}": shape for number in range(2) for name, shape in names.items()}
        assert {name: value.shape for name, value in CausalLM(config).state_dict().items()} == expected


def test_a_tied_head_is_the_embedding() -> None:
    model = CausalLM(dataclasses.replace(CONFIG, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= model.state_dict().keys()
    assert len(model.parameters()) == len(CausalLM(CONFIG).parameters()) - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 4}, "6 query heads can't share 4"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "5 of 4 experts"),
        ({"num_experts": 4}, "0 of 4 experts"),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
