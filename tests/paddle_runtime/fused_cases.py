"""A model cut by Paddle's own fully_shard on CPU, and what runs on the ranks to train, save and load it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from harness import StatePiece, assemble, this_rank
from harness.models import Block
from paddle import nn

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp.paddle_on_cpu import paddle_runtime_on_cpu
from paddle_fsdp_ckpt.fsdp.paddle_runtime import paddle_runtime_of, sharded_state_dict
from paddle_fsdp_ckpt.host_memory import bytes_of
from paddle_fsdp_ckpt.optim import split_weight_decay
from paddle_fsdp_ckpt.optim.fused import init_optimizer_state, optimizer_sharded_state_dict

GLOBAL_BATCH = 12
FEATURES = 4
Factory = Callable[[nn.Layer], Any]


class TransformerLayer(Block):
    """Paddle's runtime cuts into units by this class name."""


class WithoutEmbeddings(nn.Layer):
    """Parameters before and after the blocks share a buffer, and Paddle's runtime waits for ever in the first forward."""

    def __init__(self, width: int = 10, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width, bias_attr=False)
        self.blocks = nn.LayerList([TransformerLayer(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 1)
        self.register_buffer("scale", paddle.full([2], 0.5))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Blocks(WithoutEmbeddings):
    """The embedding has a buffer of its own, as Paddle's runtime asks for it."""

    def get_input_embeddings(self) -> nn.Layer:
        return self.embed


def _made_by(cls: str, rate: float, **settings: Any) -> dict[str, Factory]:
    make = getattr(paddle.optimizer, cls)
    shown = " ".join([cls.lower(), *(name for name in settings if name in ("amsgrad", "centered"))])
    return {
        shown: lambda model: make(rate, parameters=model.parameters(), **settings),
        f"{shown} named": lambda model: make(rate, parameters=model.parameters(), name="opt", **settings),
    }


OPTIMIZERS: dict[str, Factory] = {
    **_made_by("Adam", 0.01),
    **_made_by("AdamW", 0.01, weight_decay=0.1),
    **_made_by("AdamW", 0.01, amsgrad=True),
    **_made_by("Momentum", 0.01, weight_decay=0.1, use_nesterov=True),
    **_made_by("SGD", 0.01),
    **_made_by("Adamax", 0.01),
    **_made_by("RMSProp", 0.01, momentum=0.5, centered=True),
    **_made_by("NAdam", 0.01),
    **_made_by("RAdam", 0.01),
    **_made_by("Adadelta", 0.5),
    **_made_by("Adagrad", 0.01),
    **_made_by("Rprop", 0.01),
}
CLIPPED = {
    "adamw clipped": lambda model: paddle.optimizer.AdamW(0.01, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(0.5)),
    "sgd clipped by value": lambda model: paddle.optimizer.SGD(0.01, parameters=model.parameters(), grad_clip=nn.ClipGradByValue(0.05)),
}


def _decays_matrices(model: nn.Layer, **settings: Any) -> Any:
    matrices = {parameter.name for parameter in model.parameters() if len(parameter.shape) > 1}
    return paddle.optimizer.AdamW(
        0.01, parameters=model.parameters(), weight_decay=5.0, apply_decay_param_fun=lambda name: name in matrices, **settings
    )


DECAYED: dict[str, Factory] = {
    "adamw decay": _decays_matrices,
    "adamw decay clipped": lambda model: _decays_matrices(model, grad_clip=nn.ClipGradByGlobalNorm(0.5), name="opt"),
}
EVERY: dict[str, Factory] = {**OPTIMIZERS, **CLIPPED, **DECAYED}
STATES = {
    "Adam": {"moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0"},
    "AdamW": {"moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0"},
    "Momentum": {"velocity_0"},
    "SGD": set(),
    "Adamax": {"moment_0", "inf_norm_0", "beta1_pow_acc_0"},
    "RMSProp": {"momentum_0", "mean_square_0", "mean_grad_0"},
    "NAdam": {"moment1_0", "moment2_0", "momentum_decay_pow_0", "beta2_pow_0", "mu_product_0"},
    "RAdam": {"moment1_0", "moment2_0", "beta1_pow_0", "beta2_pow_0", "rho_0"},
    "Adadelta": {"avg_squared_grad_0", "avg_squared_update_0"},
    "Adagrad": {"moment_0"},
    "Rprop": {"prevs_0", "learning_rates_0"},
}


@dataclass
class Held:
    """What a rank holds, and the losses that led there."""

    losses: list[float]
    state: dict[str, StatePiece]


@contextmanager
def cut_by_paddle(
    optimizer: str, *, seed: int = 1, optimizer_first: bool = False, dtype: str = "float32", blocks: int = 3, width: int = 10
) -> Iterator[tuple[nn.Layer, Any]]:
    """A model cut by Paddle's own runtime, and an optimizer, made before or after."""
    from paddle.distributed.fsdp import fully_shard

    make = EVERY[optimizer]
    with paddle_runtime_on_cpu():
        mesh = dist.ProcessMesh(list(range(this_rank().world_size)), dim_names=["dp"])
        dist.auto_parallel.set_mesh(mesh)
        model = plain_model(seed, dtype, blocks, width)
        stepper = make(model) if optimizer_first else None
        fully_shard(model, mesh=mesh)
        stepper = stepper or make(model)
        if optimizer in DECAYED:
            split_weight_decay(model, stepper)
        yield model, stepper


@contextmanager
def partly_frozen(seed: int, base: float = 1.0) -> Iterator[tuple[nn.Layer, Any]]:
    """A frozen embedding, which comes first, and the rest in training."""
    from paddle.distributed.fsdp import fully_shard

    with paddle_runtime_on_cpu():
        mesh = dist.ProcessMesh(list(range(this_rank().world_size)), dim_names=["dp"])
        dist.auto_parallel.set_mesh(mesh)
        model = plain_model(seed)
        model.embed.weight.set_value(paddle.full(model.embed.weight.shape, base))
        model.embed.weight.stop_gradient = True
        fully_shard(model, mesh=mesh)
        yield model, paddle.optimizer.AdamW(0.01, parameters=model.parameters())


def plain_model(seed: int = 1, dtype: str = "float32", blocks: int = 3, width: int = 10) -> nn.Layer:
    paddle.seed(seed)
    model = Blocks(width, blocks)
    if dtype != "float32":
        for parameter in model.parameters():
            paddle.assign(parameter.astype(dtype), parameter)
    return model


def train(model: nn.Layer, optimizer: Any, first: int, last: int) -> list[float]:
    """Train over the steps first to last; the losses are over the global batch."""
    losses = []
    for step in range(first, last):
        batch = paddle.to_tensor(np.random.RandomState(step).randn(GLOBAL_BATCH, FEATURES).astype("float32"))
        target = batch.sum(-1, keepdim=True)
        if paddle_runtime_of(model) is not None:
            batch, target = (_share(one) for one in (batch, target))
        loss = (model(batch) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(np.asarray(loss.numpy()).item())
    return losses


def _share(batch: paddle.Tensor) -> paddle.Tensor:
    """This rank's rows, as a distributed tensor: a loss over it is the mean over all ranks' rows."""
    place = this_rank()
    rows = batch.shape[0] // place.world_size
    mine = batch[place.rank * rows : (place.rank + 1) * rows]
    return dist.auto_parallel.api.dtensor_from_local(mine, dist.auto_parallel.get_mesh(), [dist.Shard(0)])


def all_weights(model: nn.Layer, optimizer: Any) -> dict[str, Any]:
    return {**sharded_state_dict(model), **optimizer_sharded_state_dict(optimizer)}


def held(model: nn.Layer, optimizer: Any, losses: list[float] | None = None) -> Held:
    """Copy what this rank holds."""
    state = {}
    for key, weight in all_weights(model, optimizer).items():
        flat = (weight.flattened_range.start, weight.flattened_range.stop) if weight.is_flattened else None
        values = np.frombuffer(bytes(bytes_of(weight.local_tensor)), np.uint8)
        if str(weight.local_tensor.dtype).endswith("float32"):
            values = values.view(np.float32)
        state[key] = StatePiece(tuple(weight.global_shape), tuple(weight.global_offset), tuple(weight.local_shape), flat, values)
    return Held(losses or [], state)


def plain_held(model: nn.Layer, optimizer: Any, losses: list[float]) -> Held:
    """What an unsharded run holds, under the same keys."""
    state = {}
    for name, parameter in model.named_parameters():
        state[name] = _whole_piece(parameter)
        for accumulator, tensors in optimizer._accumulators.items():
            key = f"{name}.{accumulator.removeprefix('opt_').lstrip('_')}_0"
            state[key] = _whole_piece(tensors[parameter.name])
    state["scale"] = _whole_piece(model.scale)
    return Held(losses, state)


def _whole_piece(tensor: paddle.Tensor) -> StatePiece:
    shape = tuple(tensor.shape)
    return StatePiece(shape, (0,) * len(shape), shape, None, tensor.numpy().reshape(-1))


def whole(ranks: list[Held]) -> dict[str, np.ndarray]:
    """Put the ranks' pieces together."""
    return assemble([one.state for one in ranks])


def assert_goes_on_alike(resumed: list[Held], right: list[Held]) -> None:
    """Every rank: the same losses, and the same state bit for bit."""
    for mine, other in zip(resumed, right, strict=True):
        assert mine.losses == other.losses
        assert mine.state.keys() == other.state.keys()
        for key, piece in other.state.items():
            np.testing.assert_array_equal(mine.state[key].values, piece.values, err_msg=key)


def train_unsharded(optimizer: str, steps: int, width: int = 10) -> Held:
    model = plain_model(width=width)
    stepper = EVERY[optimizer](model)
    losses = train(model, stepper, 0, steps)
    return plain_held(model, stepper, losses)


def train_and_save(optimizer: str, path: str, optimizer_first: bool = False, blocks: int = 3, width: int = 10) -> tuple[Held, Held]:
    """Three steps, save, and three more: what was saved, and the uninterrupted run's end."""
    with cut_by_paddle(optimizer, optimizer_first=optimizer_first, blocks=blocks, width=width) as (model, stepper):
        losses = train(model, stepper, 0, 3)
        before = held(model, stepper, losses)
        ckpt.save(path, model=model, optimizer=stepper)
        after = held(model, stepper)
        assert before.state.keys() == after.state.keys()
        for key, piece in before.state.items():
            np.testing.assert_array_equal(piece.values, after.state[key].values, err_msg=f"saving changed {key}")
        return before, held(model, stepper, train(model, stepper, 3, 6))


def load_and_train(
    optimizer: str, path: str, used_steps: int = 0, stop_in: str = "step", blocks: int = 3, width: int = 10
) -> tuple[Held, Held]:
    """Other weights, perhaps a few steps of something else, load, and three more steps."""
    with cut_by_paddle(optimizer, seed=99, blocks=blocks, width=width) as (model, stepper):
        train(model, stepper, 50, 50 + used_steps)
        if stop_in == "forward":  # what it gathers is out of date after the load
            model(_share(paddle.ones([GLOBAL_BATCH, FEATURES])))
        if stop_in == "backward":  # and so is what is left of this gradient
            model(_share(paddle.ones([GLOBAL_BATCH, FEATURES]))).sum().backward()
        ckpt.load(path, model=model, optimizer=stepper)
        loaded = held(model, stepper)
        return loaded, held(model, stepper, train(model, stepper, 3, 6))


def load_into_plain(optimizer: str, path: str) -> Held:
    """The package's own load, into an unsharded model."""
    model = plain_model(99)
    stepper = EVERY[optimizer](model)
    ckpt.load(path, model=model, optimizer=stepper)
    return plain_held(model, stepper, [])


def load_into_ours(optimizer: str, path: str) -> list[float]:
    """The package's own load, into a model that our runtime cut; and what it does next."""
    model = plain_model(99)
    stepper = EVERY[optimizer](model)
    ckpt.fully_shard(model, optimizer=stepper)
    ckpt.load(path, model=model, optimizer=stepper)
    place = this_rank()
    rows = GLOBAL_BATCH // place.world_size
    losses = []
    for step in range(3, 6):
        batch = np.random.RandomState(step).randn(GLOBAL_BATCH, FEATURES).astype("float32")[place.rank * rows :][:rows]
        mine = paddle.to_tensor(batch)
        loss = (model(mine) - mine.sum(-1, keepdim=True)).square().mean()
        loss.backward()
        stepper.step()
        stepper.clear_grad()
        value = loss.detach().clone()
        dist.all_reduce(value)
        losses.append(value.item() / place.world_size)
    return losses


def fresh_state(optimizer: str) -> dict[str, tuple[int, ...]]:
    """The keys and shapes that an optimizer has before its first step."""
    with cut_by_paddle(optimizer) as (_, stepper):
        init_optimizer_state(stepper)
        return {key: tuple(weight.global_shape) for key, weight in optimizer_sharded_state_dict(stepper).items()}
