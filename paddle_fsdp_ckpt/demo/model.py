"""A small decoder in the shape of Qwen3, dense or mixture of experts, made of plain Paddle layers.

Layers and parameters carry the names that Qwen3 has in Paddle and Hugging Face checkpoints. Nothing here knows of sharding.
"""

from __future__ import annotations

from dataclasses import dataclass

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

_INITIALIZER_STD = 0.02


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder, named as in the configuration of Qwen3.

    Attributes:
        vocab_size: number of different tokens.
        hidden_size: width of the residual stream.
        intermediate_size: inner width of the MLP; of each expert, where there are experts.
        num_hidden_layers: number of decoder layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key and value heads; each serves the same number of query heads.
        head_dim: width of one head.
        rms_norm_eps: what RMSNorm adds to the mean square.
        rope_theta: base of the rotary wavelengths.
        tie_word_embeddings: whether the head that scores the next token uses the embedding's weight.
        num_experts: number of experts that replace each MLP; 0 for a dense model.
        num_experts_per_tok: number of experts that a token goes through.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"{self.num_attention_heads} query heads can't share {self.num_key_value_heads} key and value heads equally")
        if self.head_dim % 2:
            raise ValueError(f"rotary positions turn pairs: head_dim must be even, not {self.head_dim}")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(f"a token can't go through {self.num_experts_per_tok} of {self.num_experts} experts")


def _normal() -> nn.initializer.Normal:
    return nn.initializer.Normal(0.0, _INITIALIZER_STD)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, weight_attr=paddle.ParamAttr(initializer=_normal()), bias_attr=False)


class RMSNorm(nn.Layer):
    """Divides by the root of the mean square over the last axis, then scales each channel."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = self.create_parameter([size], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``."""
        return x * paddle.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rotary_tables(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all positions' angles, each ``[length, head_dim / 2]``."""
    frequencies = theta ** (-paddle.arange(0, head_dim, 2, dtype="float32") / head_dim)
    angles = paddle.outer(paddle.arange(length, dtype="float32"), frequencies)
    return paddle.cos(angles), paddle.sin(angles)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel ``i`` of ``[..., length, head_dim]`` with channel ``i + head_dim / 2`` by their position's angle ``i``."""
    first, second = paddle.chunk(x, 2, axis=-1)
    return paddle.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nn.Layer):
    """Causal attention with grouped queries, normalised queries and keys, and rotary positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.key_value_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = _linear(config.hidden_size, self.heads * self.head_dim)
        self.k_proj = _linear(config.hidden_size, self.key_value_heads * self.head_dim)
        self.v_proj = _linear(config.hidden_size, self.key_value_heads * self.head_dim)
        self.o_proj = _linear(self.heads * self.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix the tokens of ``[batch, length, hidden]``; each sees itself and those before it."""
        batch, length, _ = x.shape
        query = rotate(self.q_norm(self._split(self.q_proj(x), self.heads)), cos, sin)
        key = rotate(self.k_norm(self._split(self.k_proj(x), self.key_value_heads)), cos, sin)
        value = self._split(self.v_proj(x), self.key_value_heads)

        group = self.heads // self.key_value_heads
        key, value = key.repeat_interleave(group, axis=1), value.repeat_interleave(group, axis=1)
        scores = query @ key.transpose([0, 1, 3, 2]) * self.head_dim**-0.5
        future = paddle.triu(paddle.full([length, length], float("-inf")), diagonal=1)
        mixed = F.softmax(scores + future, axis=-1) @ value
        return self.o_proj(mixed.transpose([0, 2, 1, 3]).reshape([batch, length, self.heads * self.head_dim]))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        batch, length, _ = x.shape
        return x.reshape([batch, length, heads, self.head_dim]).transpose([0, 2, 1, 3])


class SwiGLU(nn.Layer):
    """The MLP of a dense decoder, and each expert of a mixture."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to each token."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def route(scores: Tensor, experts_per_token: int) -> tuple[Tensor, Tensor]:
    """Choose experts by the router's scores ``[tokens, experts]``.

    Returns:
        Each token's experts, and their weights, which add up to one; both ``[tokens, experts_per_token]``.
    """
    weights, experts = paddle.topk(F.softmax(scores, axis=-1), experts_per_token, axis=-1)
    return experts, weights / weights.sum(-1, keepdim=True)


class MixtureOfExperts(nn.Layer):
    """Sends each token through the few experts that the router chooses for it; an expert that no token chose isn't run."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.experts_per_token = config.num_experts_per_tok
        self.gate = _linear(config.hidden_size, config.num_experts)
        self.experts = nn.LayerList([SwiGLU(config) for _ in range(config.num_experts)])

    def forward(self, x: Tensor) -> Tensor:
        """Apply to each token its experts, and add their results by the router's weights."""
        tokens = x.reshape([-1, x.shape[-1]])
        chosen, weights = route(self.gate(tokens), self.experts_per_token)
        result = paddle.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            here = chosen == number
            rows = here.any(-1).nonzero().flatten()
            if rows.shape[0] == 0:
                continue
            weight = (weights * here.astype(weights.dtype)).sum(-1, keepdim=True)
            result = paddle.index_add(result, rows, 0, expert(paddle.gather(tokens, rows)) * paddle.gather(weight, rows))
        return result.reshape(x.shape)


class DecoderLayer(nn.Layer):
    """Attention, then the MLP or the experts, each normalised before and added to the residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MixtureOfExperts(config) if config.num_experts else SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the layer to ``[batch, length, hidden]``."""
        between = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return between + self.mlp(self.post_attention_layernorm(between))


class Decoder(nn.Layer):
    """From token numbers to the residual stream after the last layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, weight_attr=paddle.ParamAttr(initializer=_normal()))
        self.layers = nn.LayerList([DecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``[batch, length, hidden]`` for ``[batch, length]`` tokens."""
        cos, sin = rotary_tables(tokens.shape[1], self.head_dim, self.rope_theta)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Head(nn.Layer):
    """Scores every token of the vocabulary, by a weight of its own or by one that it shares."""

    def __init__(self, config: DecoderConfig, shared: Tensor | None) -> None:
        super().__init__()
        if shared is None:
            shared = self.create_parameter([config.vocab_size, config.hidden_size], default_initializer=_normal())
        self.weight = shared

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., vocab]`` scores for ``[..., hidden]``."""
        return paddle.matmul(x, self.weight, transpose_y=True)


class CausalLM(nn.Layer):
    """A decoder with a head: scores for the token that follows each token."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = Head(config, self.model.embed_tokens.weight if config.tie_word_embeddings else None)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``[batch, length, vocab]`` scores for ``[batch, length]`` tokens."""
        return self.lm_head(self.model(tokens))
