"""Small models of many shapes for the training scenarios."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional as F
from training_runs import VOCABULARY

WIDTH = 6


class Block(nn.Layer):
    """A feed-forward block with a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: paddle.Tensor, scale: Any = 1.0) -> paddle.Tensor:
        return x + scale * self.down(F.gelu(self.up(self.norm(x))))


class WeirdlyNamedThing(Block):
    """A block by another name."""


class Net(nn.Layer):
    """Embedding, blocks, norm, and a head that may be tied to the embedding in one of several ways.

    Args:
        blocks: how many.
        tied: ``"matmul"`` (the root's forward uses the embedding's weight), ``"same"`` (the head holds the same Parameter), or None.
    """

    def __init__(self, blocks: int = 2, tied: str | None = None, block: type[nn.Layer] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.LayerList([block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.tied = tied
        if tied is None:
            self.head = nn.Linear(WIDTH, VOCABULARY)
        elif tied == "same":
            self.head = TransposedHead(self.embed.weight)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(tokens)
        early = self.embed.weight if self.tied == "matmul" else None
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) if early is None else F.linear(x, early.T)


class TransposedHead(nn.Layer):
    """A head that shares the embedding's weight."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight
        self.bias = self.create_parameter([VOCABULARY], is_bias=True)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return F.linear(x, self.weight.T, self.bias)


class Attention(nn.Layer):
    """Self attention, with reshapes, transposes and a softmax in its graph."""

    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).reshape([rows, length, 3, self.heads, width // self.heads]).transpose([2, 0, 3, 1, 4]).unbind(0)
        scores = F.softmax(q.matmul(k, transpose_y=True) / width**0.5, axis=-1)
        return self.out(scores.matmul(v).transpose([0, 2, 1, 3]).reshape([rows, length, width]))


class AttentionBlock(nn.Layer):
    """Attention and feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = Block()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.mlp(x + self.attention(self.norm(x)))


class LoRALinear(nn.Layer):
    """A frozen linear layer with trainable adapters."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        for parameter in self.base.parameters():
            parameter.stop_gradient = True
        self.a = self.create_parameter([width, 2])
        self.b = self.create_parameter([2, width])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return F.gelu(self.base(x) + x.matmul(self.a).matmul(self.b)) + x


class Odd(nn.Layer):
    """Parameters of 1, 3, 6 and 7 elements, a 0-D one too, in the layer itself."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.one = self.create_parameter([1])
        self.three = self.create_parameter([3])
        self.six = self.create_parameter([6])
        self.seven = self.create_parameter([7])
        self.scalar = self.create_parameter([])
        self.matrix = self.create_parameter([width, width])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        factor = self.one.sum() + self.three.square().sum() + self.seven.sum() + self.scalar + 1.0
        return x + factor * F.gelu(x.matmul(self.matrix)) + self.six


class Images(nn.Layer):
    """Convolutions whose 3-D and 4-D weights really are cut."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2D(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2D(16) if norm else None
        self.second = nn.Conv2D(16, 9, 3, padding=1)
        self.third = nn.Conv1D(9, 20, 3)
        self.head = nn.Linear(20, 4)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.first(x)
        x = F.relu_(x if self.norm is None else self.norm(x))
        x = F.relu(self.second(x)).flatten(2)
        return self.head(self.third(x).mean(-1))


class Experts(nn.Layer):
    """A block of experts; each token goes to one, told by the token itself, so a rank may miss some."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.experts = nn.LayerList([Block() for _ in range(experts)])

    def forward(self, x: paddle.Tensor, choice: paddle.Tensor) -> paddle.Tensor:
        out = paddle.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = paddle.nonzero(choice == number).flatten()
            if mine.shape[0]:
                out = out + paddle.scatter(paddle.zeros_like(x), mine, expert(paddle.gather(x, mine)))
        return x + out


class ExpertNet(nn.Layer):
    """Experts in blocks; ``choose`` says which expert a token goes to."""

    def __init__(self, choose: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.LayerList([Experts() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.choose = choose

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(tokens.flatten())
        for block in self.blocks:
            x = block(x, self.choose(tokens).flatten())
        return self.head(x)


class Recomputed(nn.Layer):
    """Blocks under recompute: around each, or inside each."""

    def __init__(self, inside: bool, use_reentrant: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.LayerList([InnerRecompute(use_reentrant) if inside else AttentionBlock() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.inside, self.use_reentrant = inside, use_reentrant

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x) if self.inside or number == 1 else recompute(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class WithSideOutputs(nn.Layer):
    """Blocks under recompute that is not reentrant, which also return a loss of their own."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.LayerList([SideOutput() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        x, side = self.embed(tokens), paddle.zeros([])
        for block in self.blocks:
            x, own = recompute(block, x, use_reentrant=False)
            side = side + own
        return self.head(x), side


class SideOutput(nn.Layer):
    """A gated block that returns the mean square of its gate too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        x = x + F.tanh(self.up(x))
        gate = self.gate(x)
        return x * F.sigmoid(gate), gate.square().mean()


class InnerRecompute(nn.Layer):
    """A block that recomputes two of its layers."""

    def __init__(self, use_reentrant: bool = True) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = Block()
        self.scale = self.create_parameter([WIDTH])
        self.use_reentrant = use_reentrant

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        how = {"use_reentrant": self.use_reentrant}
        return x + recompute(self.attention, x, **how) * self.scale + recompute(self.mlp, x, **how)


class Outputs(nn.Layer):
    """A layer whose outputs are nested, given keyword inputs, with a None among them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.b = Block()

    def forward(self, *, hidden: paddle.Tensor, scale: float) -> dict[str, Any]:
        return {"one": (self.a(hidden, scale=scale), None), "two": [self.b(hidden)], "none": None, "number": 3}


class Nested(nn.Layer):
    """Uses layers with odd outputs, one of them in two places, and a layer that returns its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = ReturnsParameter()
        self.parts = nn.LayerList([Outputs(), Outputs()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: paddle.Tensor) -> tuple[paddle.Tensor, None]:
        x, position = self.embed(tokens), self.position()
        for part in (self.parts[0], self.parts[1], self.parts[0]):
            out = part(hidden=x, scale=0.5)
            x = out["one"][0] + out["two"][0]
        return self.head(x + position), None


class ReturnsParameter(nn.Layer):
    """A layer that returns its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([5, WIDTH])

    def forward(self) -> paddle.Tensor:
        return self.weight


class SideOutputs(nn.Layer):
    """Leaves losses on its layers, for the loop to add."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.LayerList([LeavesLoss() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        # Weights of other units, used here: a regularizer of one's own, and a sub-layer of a block.
        self.penalty = self.blocks[0].gate.weight.square().mean() + self.embed.weight.abs().mean()
        return self.head(x + self.blocks[1].gate(x).mean(-1, keepdim=True))


class LeavesLoss(nn.Layer):
    """A block with ``self.aux_loss``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.mlp = Block()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.aux_loss = F.softmax(self.gate(x), axis=-1).square().mean()
        return self.mlp(x)


class Unused(nn.Layer):
    """A layer with a branch that is used when the loop says so."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.LayerList([BlockWithBranch() for _ in range(2)])
        self.never = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: paddle.Tensor, branch: bool) -> paddle.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, branch)
        return self.head(x)


class BlockWithBranch(nn.Layer):
    """A block with a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.main = Block()
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(2, 3)

    def forward(self, x: paddle.Tensor, branch: bool) -> paddle.Tensor:
        x = self.main(x)
        return x + self.branch(x) if branch else x


class _SavingMatmul(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        ctx.save_for_backward(x, weight)
        return x.matmul(weight)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        x, weight = ctx.saved_tensor()
        assert weight.shape == [WIDTH, WIDTH]
        assert x.shape[-1] == WIDTH
        flat = x.reshape([-1, WIDTH])
        return gradient.matmul(weight.T), flat.T.matmul(gradient.reshape([-1, WIDTH]))


class SavingBlock(nn.Layer):
    """A block around a PyLayer that saves its weight, whole and as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = self.create_parameter([WIDTH])
        self.weight = self.create_parameter([WIDTH, WIDTH])
        self.other = self.create_parameter([2, WIDTH, WIDTH])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = F.gelu(_SavingMatmul.apply(x, self.weight) + self.bias) + x
        return _SavingMatmul.apply(x, self.other[1]) + _SavingMatmul.apply(x, self.weight.T)


class Recurrent(nn.Layer):
    """Recurrent layers, which are LayerLists with a forward of their own that uses the cells' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 7, num_layers=2, direction="bidirectional")
        self.gru = nn.GRU(14, 5)
        self.loop = nn.RNN(nn.SimpleRNNCell(5, 6))
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x, _ = self.lstm(self.embed(tokens))
        x, _ = self.gru(x)
        x, _ = self.loop(x)
        return self.head(x)


class Transformer(nn.Layer):
    """Paddle's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0), 3)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.encoder(self.embed(tokens)))


class Collections(nn.Layer):
    """Parameters and layers in every kind of collection, one layer in two places, and weights that hooks compute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.scales = nn.ParameterList([self.create_parameter([WIDTH]) for _ in range(3)])
        self.named = nn.LayerDict({"a": Block(), "b": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())})
        self.normed = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.shared = Block()
        self.also_shared = nn.LayerList([self.shared, Block()])
        self.bias = self.create_parameter([WIDTH], is_bias=True)
        self.model = nn.Linear(WIDTH, VOCABULARY)
        self.unused = None

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(tokens)
        for number, scale in enumerate(self.scales):
            x = x * (1 + scale) + self.scales[(number + 1) % 3]
        for name in ("a", "b"):
            x = self.named[name](x)
        x = self.shared(self.normed(x))
        for layer in self.also_shared:
            x = layer(x)
        return self.model(x + self.bias)


class Nestedly(nn.Layer):
    """Blocks in blocks, recomputed at two levels, the embedding tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.groups = nn.LayerList([nn.Sequential(InnerRecompute(), AttentionBlock()) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(tokens)
        for group in self.groups:
            x = recompute(group, x)
        return recompute(self.finish, recompute(self.norm, x))

    def finish(self, x: paddle.Tensor) -> paddle.Tensor:
        return F.linear(self.norm(x), self.embed.weight.T)


class PartlyWithoutGradient(nn.Layer):
    """Begins and ends its forward without gradients, and has them on in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second, self.third = Block(), Block(), Block()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    @paddle.no_grad()
    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.first(self.embed(tokens))
        with paddle.enable_grad():
            x = self.head(self.second(x).matmul(self.third.up.weight[:, :WIDTH]))
        self.third(x[:, :, :WIDTH])
        return x
