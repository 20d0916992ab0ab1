"""A model with LoRA adapters on a frozen base, and what runs on the ranks to train, save and load it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from harness import hybrid_groups, this_rank
from harness.training import held, train_on_tokens
from paddle import nn
from paddle.nn import functional as F

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import base_weights
from paddle_fsdp_ckpt.fsdp import Communicator, runtime_of

VOCABULARY, WIDTH, RANK = 11, 6, 2
BATCH = 12


class LoRALinear(nn.Layer):
    """A frozen weight, in bfloat16 or not, and adapters in float32, named as in PaddleFormers."""

    def __init__(self, fan_in: int, fan_out: int, dtype: str) -> None:
        super().__init__()
        self.weight = self.create_parameter([fan_in, fan_out], dtype=dtype)
        self.bias = self.create_parameter([fan_out], dtype=dtype, is_bias=True)
        self.lora_A = self.create_parameter([fan_in, RANK])
        self.lora_B = self.create_parameter([RANK, fan_out])
        self.scaling = 8 / RANK
        self.merged = False

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        # Paddle's CPU kernels know no bfloat16.
        whole = F.linear(x, self.weight.astype("float32"), self.bias.astype("float32"))
        return whole + (x @ self.lora_A @ self.lora_B) * self.scaling


class Block(nn.Layer):
    """Two of them; a unit."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.up = LoRALinear(WIDTH, 3 * WIDTH, dtype)
        self.down = LoRALinear(3 * WIDTH, WIDTH, dtype)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Adapted(nn.Layer):
    """Tokens in, logits out; a tied base, and a buffer."""

    def __init__(self, dtype: str = "bfloat16") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.LayerList([Block(dtype) for _ in range(2)])
        self.head = nn.Embedding(VOCABULARY, WIDTH)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", paddle.to_tensor([3], dtype="int64"))
        for name, parameter in self.named_parameters():
            parameter.stop_gradient = "lora_" not in name

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return paddle.matmul(x, self.head.weight, transpose_y=True)


def adapted(seed: int, base: int = 7, dtype: str = "bfloat16") -> nn.Layer:
    """Return a plain model: other seeds give other adapters, other ``base`` another base."""
    model = Adapted(dtype)
    for name, parameter in model.named_parameters():
        random = np.random.RandomState([seed if "lora_" in name else base, sum(map(ord, name))])
        values = paddle.to_tensor((random.standard_normal(parameter.shape) * 0.3).astype("float32"))
        parameter.set_value(values.astype(parameter.dtype))
    return model


def optimizer_of(model: nn.Layer, every: bool = True) -> Any:
    parameters = model.parameters() if every else [one for one in model.parameters() if not one.stop_gradient]
    return paddle.optimizer.AdamW(0.02, parameters=parameters, weight_decay=0.1, grad_clip=nn.ClipGradByGlobalNorm(0.5))


def build(seed: int, base: int = 7, dtype: str = "bfloat16", every: bool = True) -> tuple[nn.Layer, Any]:
    model = adapted(seed, base, dtype)
    optimizer = optimizer_of(model, every)
    ckpt.fully_shard(model, optimizer=optimizer)
    return model, optimizer


def train(model: nn.Layer, optimizer: Any, first: int, last: int, alone: bool = False) -> list[float]:
    """Train over the steps first to last on this rank's rows; the losses are of the global batch."""

    def loss_of(tokens: paddle.Tensor) -> paddle.Tensor:
        return F.cross_entropy(model(tokens).reshape([-1, VOCABULARY]), tokens.reshape([-1]))

    return train_on_tokens(loss_of, optimizer, range(first, last), vocabulary=VOCABULARY, shape=(BATCH, 5), alone=alone)


def train_plain() -> tuple[list[float], dict[str, np.ndarray]]:
    """Train without any sharding, and return the losses and the adapters."""
    model = adapted(1)
    losses = train(model, optimizer_of(model), 0, 4, alone=True)
    return losses, {name: parameter.numpy() for name, parameter in model.named_parameters() if "lora_" in name}


def train_sharded(every: bool) -> tuple[list[float], dict[str, np.ndarray], list[str], list[str], int]:
    """The same sharded; and the kinds of flat buffers, the keys of the states, and how many buffers it took to gather the adapters."""
    model, optimizer = build(1, every=every)
    losses = train(model, optimizer, 0, 4)
    gathered: list[int] = []
    real = Communicator.all_gather

    def count(self: Communicator, shard: paddle.Tensor) -> paddle.Tensor:
        gathered.append(shard.shape[0])
        return real(self, shard)

    Communicator.all_gather = count  # type: ignore[method-assign]
    try:
        whole = ckpt.full_state_dict(model, trainable_only=True, to_rank=None)
    finally:
        Communicator.all_gather = real  # type: ignore[method-assign]
    runtime = runtime_of(model)
    assert runtime is not None
    kinds = sorted({f"{buffer.layout.dtype} {not buffer.shards[0].parameter.stop_gradient}" for buffer in runtime.buffers})
    states = sorted(ckpt.full_optimizer_state_dict(optimizer, to_rank=None))
    return losses, {name: tensor.numpy() for name, tensor in whole.items()}, kinds, states, len(gathered)


def counting(monkeypatched: list[int]) -> Callable[..., int]:
    real = base_weights.sum_of_elements

    def count(data: memoryview, itemsize: int, first: int, seed: int) -> int:
        monkeypatched[0] += len(data) // itemsize
        return real(data, itemsize, first, seed)

    return count


def save_adapters(path: str) -> tuple[Any, Any, list[int]]:
    """Train, save what trains twice, and go on; how many elements each save summed over."""
    model, optimizer = build(1)
    train(model, optimizer, 0, 3)
    counted = [0]
    sums = []
    real, base_weights.sum_of_elements = base_weights.sum_of_elements, counting(counted)
    try:
        ckpt.save(path, model=model, optimizer=optimizer, step=3, trainable_only=True)
        sums.append(counted[0])
        train(model, optimizer, 3, 4)
        ckpt.save(path + " later", model=model, optimizer=optimizer, step=4, trainable_only=True)
        sums.append(counted[0])
        if this_rank().rank == this_rank().world_size - 1:  # one rank forgets; the others need not sum anew
            ckpt.sharded_state_dict(model)
        ckpt.save(path + " again", model=model, optimizer=optimizer, step=4, trainable_only=True)
        sums.append(counted[0])
        ckpt.save(path + " once more", model=model, optimizer=optimizer, step=4, trainable_only=True)
        sums.append(counted[0])
    finally:
        base_weights.sum_of_elements = real
    losses = train(model, optimizer, 4, 6)
    return losses, held(model, optimizer), sums


def adapters_of_replicas(path: str, shards: int, save: bool) -> dict[str, np.ndarray]:
    """Train replicas of so many ranks and save what trains; or load that onto the same base, as one model over all ranks."""
    model = adapted(1 if save else 99)
    optimizer = optimizer_of(model)
    ckpt.fully_shard(model, optimizer=optimizer, **(hybrid_groups(shards) if save else {}))
    if save:
        train(model, optimizer, 0, 2)
        ckpt.save(path, model=model, optimizer=optimizer, trainable_only=True)
    else:
        ckpt.load(path, model=model, optimizer=optimizer)
    return {name: value.numpy() for name, value in ckpt.full_state_dict(model, include=["*lora_*"], to_rank=None).items()}


def load_adapters(path: str, stale: int = 0) -> tuple[Any, Any, Any]:
    """Load into a model with the same base and other adapters, and go on."""
    model, optimizer = build(99)
    train(model, optimizer, 50, 50 + stale)
    base = {name: value.numpy() for name, value in ckpt.full_state_dict(model, exclude=["*lora_*"], to_rank=None).items()}
    versions = ckpt.parameter_versions(model)
    report = ckpt.load(path, model=model, optimizer=optimizer)
    now = ckpt.parameter_versions(model)
    assert {name for name in now if now[name] == versions[name]} == {name for name in now if "lora_" not in name}
    for name, value in ckpt.full_state_dict(model, exclude=["*lora_*"], to_rank=None).items():
        np.testing.assert_array_equal(value.numpy(), base[name], err_msg=name)
    # The base was summed over for the load, and needn't be for the save.
    counted = [0]
    real, base_weights.sum_of_elements = base_weights.sum_of_elements, counting(counted)
    try:
        ckpt.save(path + f" of {this_rank().world_size}", model=model, optimizer=optimizer, trainable_only=True, overwrite=True)
    finally:
        base_weights.sum_of_elements = real
    assert (counted == [0]) == (this_rank().world_size > 1)  # alone, a rank can write past all counting, so it sums anew
    # A load that fails, and the same base again: rank 0 knows what it heard last.
    bias = ckpt.full_state_dict(model, include=["blocks.0.up.bias"], to_rank=None)["blocks.0.up.bias"]
    model.blocks[0].up.bias.set_value(bias * 2 + 1)
    with pytest.raises(ckpt.MismatchError):
        ckpt.load(path, model=model, optimizer=optimizer)
    model.blocks[0].up.bias.set_value(bias)
    ckpt.save(path + f" of {this_rank().world_size}", model=model, optimizer=optimizer, trainable_only=True, overwrite=True)
    ckpt.load(path + f" of {this_rank().world_size}", model=model, optimizer=optimizer)
    return report, train(model, optimizer, 4, 6), held(model, optimizer)


def load_wrongly(path: str, full: str) -> dict[str, str]:
    """What is said where the base, or the model, is another one."""
    said: dict[str, str] = {}

    def attempt(what: str, model: nn.Layer, optimizer: Any, **options: Any) -> None:
        before = {name: value.numpy() for name, value in ckpt.full_state_dict(model, to_rank=None).items()}
        with pytest.raises(ckpt.CheckpointError) as caught:
            ckpt.load(path, model=model, optimizer=optimizer, **options)
        said[what] = str(caught.value)
        for name, value in ckpt.full_state_dict(model, to_rank=None).items():
            np.testing.assert_array_equal(value.numpy(), before[name], err_msg=name)

    attempt("another base", *build(5, base=8))
    model, optimizer = build(5)
    bits = ckpt.full_state_dict(model, include=["blocks.1.down.bias"], to_rank=None)["blocks.1.down.bias"].numpy()
    bits[-1] ^= 1
    model.blocks[1].down.bias.set_value(paddle.to_tensor(bits))
    attempt("one bit", model, optimizer)
    swapped = adapted(5)
    rows = swapped.embed.weight.numpy()
    swapped.embed.weight.set_value(rows[[1, 0, *range(2, VOCABULARY)]])
    ckpt.fully_shard(swapped, optimizer=None)
    attempt("swapped rows", swapped, None, parts={"model"})
    attempt("another dtype", *build(5, dtype="float32"))
    smaller = adapted(5)
    ckpt.drop_submodules(smaller, ["blocks.1"])
    ckpt.fully_shard(smaller, optimizer=None)
    attempt("a smaller model", smaller, None, parts={"model"})
    plain = adapted(5, base=8)
    with pytest.raises(ckpt.MismatchError) as caught:
        ckpt.load(path, model=plain, parts={"model"})
    said["a plain model"] = str(caught.value)
    # Said explicitly, it is loaded.
    report = ckpt.load(path, model=model, optimizer=optimizer, allow_other_base=True)
    assert report.other_base == ["blocks.1.down.bias"]
    assert not report.is_exact
    right = adapted(99)
    right.blocks[1].up.scaling = np.float32(2)
    loaded = ckpt.load(path, model=right, parts={"model"})
    assert loaded.base == report.base
    assert loaded.differences == ["LoRA layers scale otherwise: 'blocks.1.up' by 4 then and by 2 now"]
    # Under another name, and for an optimizer of more or fewer parameters.
    wrapper = nn.Layer()
    wrapper.model = adapted(5)
    wrapped_optimizer = optimizer_of(wrapper, every=False)
    ckpt.fully_shard(wrapper, optimizer=wrapped_optimizer)
    ckpt.load(path, model=wrapper, optimizer=wrapped_optimizer, key_map={"model.": ""})
    ckpt.save(path + " wrapped", model=wrapper, optimizer=wrapped_optimizer, trainable_only=True, overwrite=True)
    ckpt.load(path + " wrapped", model=right, optimizer=optimizer_of(right), key_map={"": "model."})
    one = adapted(5)
    one.blocks[0].up.bias.stop_gradient = False
    with pytest.raises(ckpt.MismatchError) as caught:
        ckpt.load(path + " wrapped", model=one, optimizer=optimizer_of(one), key_map={"": "model."})
    said["trains now"] = str(caught.value)
    # Optimizer states alone need no base.
    other, other_optimizer = build(5, base=8)
    ckpt.load(path, model=other, optimizer=other_optimizer, parts={"optimizer"})
    # The base first, from a checkpoint of all, and then the adapters.
    ckpt.load(full, model=other, optimizer=other_optimizer)
    ckpt.load(path, model=other, optimizer=other_optimizer)
    return said


def save_full(path: str) -> None:
    model, optimizer = build(4)
    train(model, optimizer, 0, 1)
    ckpt.save(path, model=model, optimizer=optimizer)


def refuse_to_save(path: str) -> dict[str, str]:
    said = {}

    def attempt(what: str, model: nn.Layer, **options: Any) -> None:
        with pytest.raises(ckpt.CheckpointError) as caught:
            ckpt.save(path, model=model, trainable_only=True, **options)
        said[what] = str(caught.value)

    frozen = nn.Linear(3, 3)
    for parameter in frozen.parameters():
        parameter.stop_gradient = True
    ckpt.fully_shard(frozen, optimizer=None)
    attempt("nothing trains", frozen)
    model, _ = build(1)
    model.blocks[0].up.merged = True
    attempt("merged", model)
    model.blocks[0].up.merged = False
    if this_rank().rank == this_rank().world_size - 1:
        model.blocks[0].up.bias.stop_gradient = False
    attempt("frozen differently", model)
    return said


def freeze_later(path: str) -> tuple[list[str], list[str]]:
    """What trained before has states, and is stored; what never did belongs to the base. Resumed, both go on."""
    model, optimizer = build(1)
    train(model, optimizer, 0, 2)
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.0.up.lora"):
            parameter.stop_gradient = True
    optimizer.clear_grad(set_to_zero=False)
    ckpt.save(path, model=model, optimizer=optimizer, trainable_only=True)
    resumed, other = build(2)
    report = ckpt.load(path, model=resumed, optimizer=other)
    right, found = held(model, optimizer), held(resumed, other)
    assert right.keys() == found.keys()
    for key, piece in right.items():
        np.testing.assert_array_equal(found[key].values, piece.values, err_msg=key)
    return report.base, [name for name, _ in model.named_parameters() if "lora_" not in name]


def manage(root: str) -> list[str]:
    """A manager saves what trains, and restores it."""
    model, optimizer = build(1)
    with ckpt.CheckpointManager(root, async_save=True) as manager:
        train(model, optimizer, 0, 2)
        manager.save(2, model=model, optimizer=optimizer, trainable_only=True)
        right = held(model, optimizer)
    resumed, other = build(2)
    with ckpt.CheckpointManager(root) as manager:
        assert manager.restore(model=resumed, optimizer=other) == 2
        assert manager.restored is not None
        base = manager.restored.load.base
    for key, piece in held(resumed, other).items():
        np.testing.assert_array_equal(piece.values, right[key].values, err_msg=key)
    return base
