"""Models whose whole tensors are known, and what runs on the ranks to gather and scatter them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from harness import this_rank
from paddle import nn
from paddle.nn import functional as F

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp import ShardedParameter, runtime_of


class Adapted(nn.Layer):
    """A frozen matrix, and a low-rank adapter beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        for parameter in self.base.parameters():
            parameter.stop_gradient = True
        self.down = nn.Linear(width, 2, bias_attr=False)
        self.up = nn.Linear(2, width, bias_attr=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.base(x) + self.up(self.down(x))


class Net(nn.Layer):
    """Tied embedding, adapters in nested blocks, a convolution, BatchNorm's buffers, a scalar and a parameter of one element."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.LayerList([nn.Sequential(Adapted(width), nn.GELU(), Adapted(width)) for _ in range(2)])
        self.conv = nn.Conv1D(width, 4, 3, padding=1)
        self.norm = nn.BatchNorm1D(4)
        self.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.5))
        self.head = nn.Linear(4, width)
        self.out = nn.Embedding(11, width)
        self.out.weight = self.embed.weight
        self.register_buffer("steps", paddle.to_tensor([3], dtype="int64"))

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = F.relu(self.norm(self.conv(x.transpose([0, 2, 1])))).transpose([0, 2, 1])
        return paddle.matmul(self.head(x) * self.scale, self.out.weight, transpose_y=True)


BUFFERS = {"steps", "norm._mean", "norm._variance"}


def values_of(model: nn.Layer, shift: float = 0.0) -> dict[str, np.ndarray]:
    """Give each tensor of a plain model values of its own, and return them under every name."""
    by_id: dict[int, np.ndarray] = {}
    for number, (_, tensor) in enumerate(model.state_dict().items()):
        if id(tensor) not in by_id:
            value = (np.arange(int(np.prod(tensor.shape))).reshape(tensor.shape) * 0.01 + number + shift).astype(tensor.numpy().dtype)
            by_id[id(tensor)] = value
            tensor.set_value(value)
    return {name: by_id[id(tensor)] for name, tensor in model.state_dict().items()}


def sharded(shift: float = 0.0, make: Callable[[nn.Layer], Any] | None = None) -> tuple[nn.Layer, dict[str, np.ndarray], Any]:
    """Return a sharded model, the values that it had, and its optimizer."""
    model = Net()
    right = values_of(model, shift)
    optimizer = None if make is None else make(model)
    ckpt.fully_shard(model, optimizer=optimizer)
    return model, right, optimizer


def assert_same(found: dict[str, Any], right: dict[str, np.ndarray]) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        assert list(found[name].shape) == list(value.shape), name
        assert found[name].stop_gradient
        np.testing.assert_array_equal(found[name].numpy(), value, err_msg=name)


def gather_everything() -> None:
    model, right, _ = sharded()
    pairs = list(ckpt.iter_full_parameters(model))
    assert_same(dict(pairs), {name: value for name, value in right.items() if name not in BUFFERS})
    named = dict(pairs)
    assert named["out.weight"] is named["embed.weight"]
    assert_same(ckpt.full_state_dict(model, to_rank=None), right)
    last = this_rank().world_size - 1
    assert_same(ckpt.full_state_dict(model, to_rank=last), right if this_rank().rank == last else {})
    # Owned: another value of the weights leaves them as they are.
    for parameter in model.parameters():
        if isinstance(parameter, ShardedParameter):
            parameter.set_value(np.zeros(parameter.shape, "float32"))
    assert_same(named, {name: value for name, value in right.items() if name not in BUFFERS})


@contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """Give the elements of each of Paddle's all-gathers inside the block, as they happen."""
    real, seen = dist.stream.all_gather, []

    def count(out: Any, tensor: paddle.Tensor, *args: Any, **options: Any) -> Any:
        seen.append(int(tensor.size))
        return real(out, tensor, *args, **options)

    dist.stream.all_gather = count
    try:
        yield seen
    finally:
        dist.stream.all_gather = real


def patterns_of_no_name(is_sharded: bool) -> list[str]:
    """Return what is warned of where patterns are of no name, after a look at what is warned of where all are."""
    model = sharded()[0] if is_sharded else Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dict(ckpt.iter_full_parameters(model, include=["head.*", "out.*"], exclude="*.bias"))
        ckpt.full_state_dict(model, include=["head.*", "steps"])
        dict(ckpt.iter_full_parameters(model, include=lambda name: False))
        assert not [one for one in caught if "nothing is called" in str(one.message)]
        dict(ckpt.iter_full_parameters(model, include=["head.*", "nope.*"], exclude=["hed.*"]))
        ckpt.full_state_dict(model, exclude=["stps"])
    own = [one for one in caught if "nothing is called" in str(one.message)]
    assert all(one.filename == __file__ for one in own)
    return [str(one.message) for one in own]


def gather_some() -> tuple[int, list[int], list[int], int]:
    """Return how many gathers the adapters took, the sizes of those of everything and of the flat buffers, and how many nothing took."""
    model, right, _ = sharded()
    runtime = runtime_of(model)
    assert runtime is not None
    with counted_gathers() as of_adapters:
        adapters = dict(ckpt.iter_full_parameters(model, include=["blocks.*"], trainable_only=True))
    with counted_gathers() as of_nothing:
        assert not dict(ckpt.iter_full_parameters(model, include=["nothing.*"]))
    with counted_gathers() as of_all:
        assert dict(ckpt.iter_full_parameters(model, device="cpu")).keys() == right.keys() - BUFFERS
    wanted = {name: value for name, value in right.items() if name.startswith("blocks.") and ".base." not in name}
    assert_same(adapters, wanted)
    ends = ckpt.iter_full_parameters(model, include=lambda name: name.endswith("weight"), exclude=["out.*", "blocks.*"], dtype="float64")
    found = dict(ends)
    # One pattern, and patterns that can be looked at once only.
    for one in ("steps", iter(["ste*", "nothing"])):
        assert ckpt.full_state_dict(model, include=one, to_rank=None).keys() == {"steps"}
    assert dict(ckpt.iter_full_parameters(model, include=(name for name in right), exclude="[!h]*")).keys() == {"head.weight", "head.bias"}
    assert found.keys() == {"embed.weight", "conv.weight", "norm.weight", "head.weight"}
    for name, tensor in found.items():
        assert tensor.dtype == paddle.float64
        np.testing.assert_array_equal(tensor.numpy(), right[name].astype("float64"))
    assert all(not runtime_unit.is_gathered for runtime_unit in runtime.units)
    return len(of_adapters), of_all, [buffer.layout.shard_numel for buffer in runtime.buffers], len(of_nothing)


def _peak_of(call: Callable[[], None]) -> int:
    """Return the most bytes of Paddle's allocator that a call needs beside what there was."""
    before = paddle.device.core.host_memory_stat_current_value("Allocated", 0)
    paddle.device.core.host_memory_stat_reset_peak_value("Allocated", 0)
    call()
    return int(paddle.device.core.host_memory_stat_peak_value("Allocated", 0)) - before


def peaks() -> dict[str, tuple[int, int]]:
    """Return the bytes that gathering and scattering may need, and did: nine tensors in each of 8 flat buffers, over 2 ranks."""
    model = nn.Sequential(*[nn.Sequential(*[nn.Linear(64, 64, bias_attr=False) for _ in range(9)]) for _ in range(8)])
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer, unit_layers=[nn.Sequential])
    ckpt.init_optimizer_state(optimizer)
    runtime = runtime_of(model)
    assert runtime is not None
    buffer, tensor = 9 * 64 * 64 * 4, 64 * 64 * 4
    assert [one.layout.nbytes for one in runtime.buffers] == [buffer] * 8
    whole = ckpt.full_state_dict(model, to_rank=0)

    def iterate(**options: Any) -> Callable[[], None]:
        def call() -> None:
            for _ in ckpt.iter_full_parameters(model, **options):
                pass

        return call

    states = _peak_of(lambda: ckpt.full_optimizer_state_dict(optimizer, to_rank=0) and None)
    all_states = 0 if this_rank().rank else 2 * 8 * buffer
    return {
        "all states where they are wanted, a state of a buffer, and this rank's part of it": (all_states + buffer * 3 // 2, states),
        "a buffer and the two tensors handed out last": (buffer + 2 * tensor, _peak_of(iterate())),
        "the same in a dtype twice as large": (buffer + 4 * tensor, _peak_of(iterate(dtype="float64", to_rank=0))),
        # Of the 8 buffers each rank has half a second time.
        "a buffer, new shards, and a part on its way to them": (
            8 * buffer // 2 + buffer + buffer // 2,
            _peak_of(lambda: ckpt.load_full_state_dict(model, ((name, whole[name]) for name in whole))),
        ),
    }


def leave_early(when: int) -> str:
    """Stop on the last rank after ``when`` tensors, and return what the others say."""
    model, right, _ = sharded()
    place = this_rank()
    said = ""
    if place.rank == place.world_size - 1:
        pairs = ckpt.iter_full_parameters(model)
        for _ in range(when):
            next(pairs)
        del pairs
    else:
        with pytest.raises(ckpt.RankFailedError) as caught:
            list(ckpt.iter_full_parameters(model))
        said = str(caught.value)
    # The group is as it was.
    assert_same(ckpt.full_state_dict(model, to_rank=None), right)
    for count, _ in enumerate(ckpt.iter_full_parameters(model), 1):  # all leave alike
        if count == when:
            break
    assert_same(ckpt.full_state_dict(model, to_rank=None), right)
    return said


def change_in_the_middle(kind: str) -> list[str]:
    """Write to the weights after the first tensor, and return what the iterator says then, or how many tensors came."""
    model, right, optimizer = sharded(make=lambda m: paddle.optimizer.SGD(0.01, parameters=m.parameters()))
    if kind == "plain":
        model = Net()
        values_of(model)
        optimizer = paddle.optimizer.SGD(0.01, parameters=model.parameters(), weight_decay=0.1)
    said = []
    for include in (None, ["head.*"], ["embed.*"]):
        pairs = ckpt.iter_full_parameters(model, include=include)
        first = next(pairs)
        if kind == "set_value":
            model.out.weight.set_value(np.zeros([11, 6], "float32"))
        elif kind == "load":
            ckpt.load_full_state_dict(model, {**right, "scale": np.ones([1], "float32")})
        else:
            tokens = paddle.arange(10).reshape([2, 5])
            model(tokens).sum().backward()
            optimizer.step()
            optimizer.clear_grad()
        try:
            said.append(str(len([first, *pairs])))
        except ckpt.ShardingError as error:
            said.append(str(error))
    assert dict(ckpt.iter_full_parameters(model)).keys() >= {"embed.weight", "out.weight", "head.bias"}
    return said


def ask_for_different_things() -> str:
    model = Net()
    ckpt.fully_shard(model)
    with pytest.raises(ckpt.ShardingError) as caught:
        ckpt.iter_full_parameters(model, include=["embed.*" if this_rank().rank else "head.*"])
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    ckpt.bind_optimizer(optimizer)
    calls: list[tuple[Callable[[int], Any], str]] = [
        (lambda rank: ckpt.full_state_dict(model, to_rank=rank), "to_rank"),
        (lambda rank: ckpt.full_optimizer_state_dict(optimizer, to_rank=rank), "to_rank"),
        (lambda rank: ckpt.load_full_state_dict(model, {}, from_rank=rank), "from_rank"),
    ]
    for call, what in calls:
        with pytest.raises(ckpt.CheckpointError, match=f"{what} is 7"):
            call(7)
        with pytest.raises(ckpt.ShardingError, match="differs between ranks"):
            call(7 if this_rank().rank else 0)
    return str(caught.value)


def step_after_a_gather(gathers: bool) -> tuple[list[float], dict[str, np.ndarray]]:
    paddle.seed(5)
    model, _, optimizer = sharded(make=lambda m: paddle.optimizer.AdamW(0.01, parameters=m.parameters()))
    losses = []
    for step in range(3):
        tokens = paddle.to_tensor(np.random.RandomState(step + this_rank().rank).randint(0, 11, [4, 5]))
        loss = F.cross_entropy(model(tokens).reshape([-1, 11]), tokens.reshape([-1]))
        if gathers:
            ckpt.full_state_dict(model)
        loss.backward()
        if gathers:
            ckpt.full_state_dict(model)
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.item())
    pieces = {key: weight.local_tensor.numpy().copy() for key, weight in ckpt.sharded_state_dict(model).items()}
    return losses, pieces


OPTIMIZERS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "adamw": lambda parameters: paddle.optimizer.AdamW(0.01, parameters=parameters, amsgrad=True),
    "asgd": lambda parameters: paddle.optimizer.ASGD(0.01, 3, parameters=parameters),
    "nadam": lambda parameters: paddle.optimizer.NAdam(0.01, parameters=parameters, name="opt"),
    "sgd": lambda parameters: paddle.optimizer.SGD(0.01, parameters=parameters),
}


class Rows(nn.Layer):
    """Its gradients are its inputs, whatever the number of ranks; ``idle`` never gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.second = nn.Linear(7, 2)
        self.idle = nn.Linear(4, 4)

    def forward(self, step: int) -> paddle.Tensor:
        parts = [self.first.weight, self.first.bias, self.second.weight, self.second.bias]
        factors = [paddle.arange(part.size, dtype="float32").reshape(part.shape) * 0.125 + step for part in parts]
        return sum(((part * factor).sum() for part, factor in zip(parts, factors, strict=True)), paddle.zeros([]))


def states_of(name: str, shards: bool) -> dict[str, np.ndarray]:
    """Take three steps, and return the whole states by key: gathered, or those of a plain model."""
    model = Rows()
    for number, parameter in enumerate(model.parameters()):
        parameter.set_value(np.arange(parameter.size, dtype="float32").reshape(parameter.shape) * 0.01 + number)
    optimizer = OPTIMIZERS[name](model.parameters())
    names = {parameter.name: structured for structured, parameter in model.named_parameters()}
    if shards:
        ckpt.fully_shard(model, optimizer=optimizer)
    for step in range(3):
        model(step).backward()
        optimizer.step()
        optimizer.clear_grad()
    if shards:
        found = ckpt.full_optimizer_state_dict(optimizer, to_rank=None)
        return {key: tensor.numpy() for key, tensor in found.items()}
    states = {}
    for accumulator, tensors in optimizer._accumulators.items():
        for owner, tensor in tensors.items():
            states[f"{names[owner]}.{accumulator.removeprefix('opt_').lstrip('_')}_0"] = tensor.numpy()
    return states


def scatter(kind: str) -> None:
    model, right, _ = sharded()
    plain = Net()
    new = values_of(plain, shift=1000.0)
    source = this_rank().world_size - 1
    given: Any = None
    if this_rank().rank == source:
        tensors = {name: paddle.to_tensor(value) for name, value in new.items()}
        given = {
            "dict": tensors,
            "numpy": new,
            "iterator": iter(tensors.items()),
            "backwards": iter(reversed(tensors.items())),
            "one name": {name: value for name, value in new.items() if name != "out.weight"},
        }[kind]
    ckpt.load_full_state_dict(model, given, from_rank=source)
    assert_same(ckpt.full_state_dict(model, to_rank=None), new)
    assert not any(np.array_equal(right[name], new[name]) for name in right)


def scatter_badly(kind: str) -> str:
    model, right, _ = sharded()
    new = values_of(Net(), shift=1000.0)
    if kind == "missing":
        del new["head.bias"], new["steps"]
    elif kind == "unexpected":
        new["head.skew"] = new["head.bias"]
    elif kind == "shape":
        new["conv.weight"] = new["conv.weight"].reshape(-1)
    elif kind == "dtype":
        new["scale"] = new["scale"].astype("float64")
    elif kind == "tied":
        new["out.weight"] = new["out.weight"] + 1
    elif kind == "twice":
        new = [*new.items(), ("scale", new["scale"])]
    elif kind == "raises":

        def broken() -> Any:
            yield from list(new.items())[:3]
            raise OSError("the pipe broke")

        source = broken()
    given = source if kind == "raises" else new
    with pytest.raises((ckpt.CheckpointError, OSError)) as caught:
        ckpt.load_full_state_dict(model, given if this_rank().rank == 0 else None)
    with pytest.raises(ckpt.ShardingError, match="from_rank of load_full_state_dict differs between ranks"):
        ckpt.load_full_state_dict(model, right, from_rank=this_rank().rank)
    assert_same(ckpt.full_state_dict(model, to_rank=None), right)
    return f"{type(caught.value).__name__}: {caught.value}"


def masters_follow() -> None:
    model = nn.Linear(6, 5)
    model.to(dtype="bfloat16")
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters(), multi_precision=True)
    ckpt.fully_shard(model, optimizer=optimizer)
    ckpt.init_optimizer_state(optimizer)
    new = {name: paddle.full(shape, 0.5, "bfloat16") for name, shape in (("weight", [6, 5]), ("bias", [5]))}
    ckpt.load_full_state_dict(model, new)
    masters = {key: tensor for key, tensor in ckpt.full_optimizer_state_dict(optimizer, to_rank=None).items() if key.endswith(".w_0")}
    assert masters.keys() == {"weight.w_0", "bias.w_0"}
    for tensor in masters.values():
        assert tensor.dtype == paddle.float32
        assert (tensor.numpy() == 0.5).all()


def plain_model() -> None:
    model = Net()
    right = values_of(model)
    assert_same(ckpt.full_state_dict(model), right if this_rank().rank == 0 else {})
    assert_same(ckpt.full_state_dict(model, to_rank=None, include=["head.*"]), {n: v for n, v in right.items() if n.startswith("head.")})
    tensors = dict(ckpt.iter_full_parameters(model))
    assert tensors["embed.weight"] is tensors["out.weight"]
    with pytest.raises(ckpt.ShardingError, match="set_state_dict"):
        ckpt.load_full_state_dict(model, right)
