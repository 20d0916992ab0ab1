"""Loads with something allowed to differ; run on the ranks."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import paddle
from checkpoint_cases import MODELS as CHECKPOINT_MODELS
from checkpoint_cases import VOCABULARY, Outcome, Tied, held, train
from harness import this_rank
from paddle import nn
from paddle.optimizer import lr
from strict_cases import MODELS, Refusal, attempt, backward, changes, copied, make, snapshot

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt.fsdp import named_parameters

Ranges = dict[str, Any]
"""Key -> (first element and past the last, dtype, bytes) of this rank's piece."""


class Counting(Tied):
    """A tied model with a buffer."""

    DTYPE = "int64"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", paddle.ones([3], self.DTYPE))


class Measuring(Counting):
    DTYPE = "float32"


class Backwards(Tied):
    """The same model under names that sort the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.zembed, self.aout = self.embed, self.out
        del self.embed, self.out

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.zembed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + paddle.matmul(x, self.aout.weight, transpose_y=True)


LARGER = 17


class Grown(Tied):
    """The same with a larger vocabulary, of which steps use the first tokens only."""

    def __init__(self) -> None:
        super().__init__()
        width = self.embed.weight.shape[1]
        self.embed = nn.Embedding(LARGER, width)
        self.out = nn.Embedding(LARGER, width)
        self.out.weight = self.embed.weight
        self.head.weight = paddle.create_parameter([width, LARGER], "float32")

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return super().forward(tokens)[..., :VOCABULARY]


class Renamed(Tied):
    """The same with another name for a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = self.head
        del self.head

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        self.__dict__["head"] = self.lm_head
        return super().forward(tokens)


class ByItself(Tied):
    """The same without a second name for the embedding, which it looks up for its head."""

    EMBEDDING = "embed"

    def __init__(self) -> None:
        super().__init__()
        embedding = self.embed
        del self.embed, self.out
        self.add_sublayer(self.EMBEDDING, embedding)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        embedding = self._sub_layers[self.EMBEDDING]
        x = embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + paddle.matmul(x, embedding(paddle.arange(VOCABULARY)), transpose_y=True)


class BackwardsByItself(ByItself):
    """Of which checkpoints of Backwards have the states under the name that it lacks."""

    EMBEDDING = "zembed"


MODELS.update({"by itself": ByItself, "backwards by itself": BackwardsByItself})
MODELS.update({"counting": Counting, "measuring": Measuring, "backwards": Backwards, "grown": Grown, "renamed": Renamed})


def backwards_name(name: str) -> str:
    """The name in a plain Tied of a name in Backwards."""
    first, _, rest = name.partition(".")
    return f"{ {'zembed': 'embed', 'aout': 'out'}.get(first, first) }.{rest}"


def constant_name(name: str) -> str:
    return "embed.weight"


def number_name(name: str) -> Any:
    return 3


def failing_name(name: str) -> str:
    raise LookupError(name)


def save(path: str, model: str = "base", optimizer: str | None = "adamw", more: int = 3) -> tuple[Outcome, Outcome]:
    """Train, save, go on: what was saved, and the uninterrupted run."""
    made, stepper = make(model, optimizer)
    train(made, stepper, 0, 2)
    ckpt.save(path, model=made, optimizer=stepper, step=2)
    saved = Outcome([], held(made, stepper))
    return saved, Outcome(train(made, stepper, 2, 2 + more), held(made, stepper))


def load(path: str, model: str, optimizer: str, stale: int, options: dict[str, Any], more: int = 3) -> tuple[Outcome, Outcome, Outcome]:
    """What there was, what there is after the load, and after a few more steps."""
    made, stepper = make(model, optimizer, seed=3)
    train(made, stepper, 40, 40 + stale)
    before = Outcome([], held(made, stepper)) if stale else Outcome([], {})
    report = ckpt.load(path, model=made, optimizer=stepper, **options)
    loaded = Outcome([], held(made, stepper), report)
    return before, loaded, Outcome(train(made, stepper, 2, 2 + more), held(made, stepper))


def refused(path: str, model: str, optimizer: str | None, options: list[dict[str, Any]]) -> Refusal:
    """A load with this rank's options, in the middle of an accumulation."""
    made, stepper = make(model, optimizer, seed=3)
    if stepper is not None:
        train(made, stepper, 40, 41)
        backward(made)
    mine = options[this_rank().rank % len(options)]
    given = {"model": made, "optimizer": stepper, **mine}
    return attempt(lambda: ckpt.load(path, **given, timeout_seconds=30), made, *[stepper] * (stepper is not None))


def _bytes(model: nn.Layer, stepper: Any) -> dict[str, bytes | None]:
    weights = {**ckpt.sharded_state_dict(model), **ckpt.optimizer_sharded_state_dict(stepper)}
    return {key: copied(weight.local_tensor) for key, weight in weights.items()}


def _scheduled(seed: int) -> tuple[nn.Layer, Any, lr.LRScheduler]:
    paddle.seed(seed)
    made = Tied()
    rate = lr.ExponentialDecay(0.01, 0.9)
    stepper = paddle.optimizer.AdamW(rate, parameters=made.parameters())
    ckpt.fully_shard(made, optimizer=stepper)
    return made, stepper, rate


def load_parts(path: str, parts: list[str]) -> tuple[set[str], bool, Any]:
    """Which kinds of keys changed, whether the schedule did, and the report; what changed is what was saved."""
    made, stepper, rate = _scheduled(1)
    train(made, stepper, 0, 2)
    rate.step(7)
    ckpt.save(path, model=made, optimizer=stepper)
    saved = _bytes(made, stepper)
    made, stepper, rate = _scheduled(2)
    train(made, stepper, 40, 43)
    before = _bytes(made, stepper)
    flags = snapshot(made)
    report = ckpt.load(path, model=made, optimizer=stepper, parts=set(parts))
    after = _bytes(made, stepper)
    weights = ckpt.sharded_state_dict(made)
    changed = {"model" if key in weights else "optimizer" for key in after if after[key] != before[key]}
    for key, value in after.items():
        part = "model" if key in weights else "optimizer"
        assert value == (saved if part in parts else before)[key], key
    if parts == ["learning_rate"]:
        assert [key for key in changes(flags, snapshot(made)) if not key.endswith(".unit")] == []
    return changed, rate.last_epoch == 7, report


def _low_precision(sharded: bool, seed: int, dtype: str = "bfloat16") -> tuple[nn.Layer, Any]:
    paddle.seed(seed)
    made = CHECKPOINT_MODELS["tied"]()
    if dtype != "float32":
        made.to(dtype=dtype)
    stepper = paddle.optimizer.AdamW(0.01, parameters=made.parameters(), multi_precision=dtype != "float32")
    if sharded:
        ckpt.fully_shard(made, optimizer=stepper)
        ckpt.init_optimizer_state(stepper)
    else:
        stepper._create_accumulators(paddle.static.default_main_program().global_block(), made.parameters())
    return made, stepper


def masters_follow(path: str, sharded: bool) -> dict[str, bool]:
    """Case 6: only the model is loaded, and the optimizer given; its master weights follow, save those of what is missing."""
    made, _ = _low_precision(sharded, 1)
    made.head.weight.set_value(paddle.full([10, 13], 0.5, "bfloat16"))
    ckpt.save(path, model=made)
    made, stepper = _low_precision(sharded, 2)
    for name, master in stepper._master_weights.items():
        paddle.assign(master + 1e-5, master)
        assert name
    before = {name: copied(master) for name, master in stepper._master_weights.items()}
    accumulators = {acc: {owner: copied(t) for owner, t in tensors.items()} for acc, tensors in stepper._accumulators.items()}
    names = {named.parameter.name: sorted(named.names)[0] for named in named_parameters(made)}
    kept = [owner for owner in before if names[owner].startswith("blocks.0.")]
    options: dict[str, Any] = {"key_map": _without_block, "allow_missing": ["blocks.0.*"], "allow_unexpected": ["blocks.0.*"]}
    report = ckpt.load(path, model=made, optimizer=stepper, parts={"model"}, **options)
    after = {name: copied(master) for name, master in stepper._master_weights.items()}
    head = [owner for owner in before if names[owner] == "head.weight"]
    kept_states = accumulators == {
        acc: {owner: copied(t) for owner, t in tensors.items()} for acc, tensors in stepper._accumulators.items()
    }
    ckpt.save(f"{path}_all", model=made, optimizer=stepper)
    told = [
        any("master weights were loaded" in one for one in ckpt.load(f"{path}_all", model=made, optimizer=stepper, parts=parts).differences)
        for parts in ({"optimizer"}, {"model", "optimizer"}, {"model"}, {"learning_rate"}, {"model", "learning_rate"})
    ]
    return {
        "missing stay": all(after[owner] == before[owner] for owner in kept),
        "others follow": all(after[owner] != before[owner] for owner in before if owner not in kept),
        "to the values": all(set(np.frombuffer(after[owner], np.float32)) == {0.5} for owner in head),
        "states stay": kept_states,
        "masters alone are told of": told == [True, False, False, False, False],
        "reported": all(key.startswith("blocks.0.") for key in report.missing) and len(report.missing) == 6,
    }


def masters_of_tied_follow(path: str, sharded: bool) -> list[float]:
    """Only the model is loaded, of a checkpoint that has one of a tied tensor's names: the master weight's values on this rank."""
    made, _ = _low_precision(sharded, 1)
    made.embed.weight.set_value(paddle.full([VOCABULARY, 10], 0.5, "bfloat16"))
    ckpt.save(path, model=made)
    made, stepper = _low_precision(sharded, 2)
    options: dict[str, Any] = {"allow_missing": ["embed.weight"], "allow_unexpected": ["embed.weight"]}
    ckpt.load(path, model=made, optimizer=stepper, parts={"model"}, key_map=_without_embedding, **options)
    master = stepper._master_weights.get(made.embed.weight.name)
    return [] if master is None else master.numpy().reshape(-1).tolist()


def _without_embedding(name: str) -> str:
    return name.replace("embed.", "gone.")


def _without_block(name: str) -> str:
    return name.replace("blocks.0.", "blocks.9.")


def to_low_precision(path: str, dtype: str) -> tuple[Ranges, Any]:
    """A float32 checkpoint into a low-precision model with master weights: this rank's pieces as float32 and bits, and the report."""
    made, stepper = _low_precision(True, 2, dtype)
    report = ckpt.load(path, model=made, optimizer=stepper, cast=True)
    return _ranges(made, stepper), report


def _ranges(model: nn.Layer, stepper: Any) -> Ranges:
    found: Ranges = {}
    for key, weight in {**ckpt.sharded_state_dict(model), **ckpt.optimizer_sharded_state_dict(stepper)}.items():
        flat = weight.flattened_range if weight.is_flattened else slice(0, int(np.prod(weight.global_shape)))
        dtype = str(weight.local_tensor.dtype).rpartition(".")[2]
        found[key] = ((flat.start, flat.stop), dtype, copied(weight.local_tensor))
    return found


def from_low_precision(path: str) -> tuple[Ranges, Ranges, Any]:
    """A bfloat16 checkpoint with master weights into a float32 model without."""
    made, stepper = _low_precision(True, 1)
    for key, weight in sorted(ckpt.optimizer_sharded_state_dict(stepper).items()):
        tensor = weight.local_tensor
        if key.endswith(".w_0"):
            paddle.assign(tensor + 1e-4 * paddle.rand(tensor.shape), tensor)
    ckpt.save(path, model=made, optimizer=stepper)
    saved = _ranges(made, stepper)
    made, stepper = _low_precision(True, 2, "float32")
    report = ckpt.load(path, model=made, optimizer=stepper, cast=True)
    return saved, _ranges(made, stepper), report


def _of_dtype(dtype: str, seed: int) -> tuple[nn.Layer, Any]:
    """A model whose optimizer keeps its states in the dtype of the parameters."""
    paddle.seed(seed)
    made = Tied()
    if dtype != "float32":
        made.to(dtype=dtype)
    stepper = paddle.optimizer.Momentum(0.01, parameters=made.parameters())
    ckpt.fully_shard(made, optimizer=stepper)
    ckpt.init_optimizer_state(stepper)
    return made, stepper


def states_of_another_dtype(path: str, dtypes: tuple[str, str]) -> tuple[Ranges, Ranges, Refusal, Any]:
    """Case 10: saved in one dtype; refused in another, and then converted."""
    made, stepper = _of_dtype(dtypes[0], 1)
    for weight in ckpt.optimizer_sharded_state_dict(stepper).values():
        tensor = weight.local_tensor
        paddle.assign(paddle.randn(tensor.shape).astype(tensor.dtype), tensor)
    ckpt.save(path, model=made, optimizer=stepper)
    saved = _ranges(made, stepper)
    made, stepper = _of_dtype(dtypes[1], 2)
    refusal = attempt(lambda: ckpt.load(path, model=made, optimizer=stepper), made, stepper)
    report = ckpt.load(path, model=made, optimizer=stepper, cast=True)
    return saved, _ranges(made, stepper), refusal, report


def _mixed(seed: int) -> tuple[nn.Layer, Any]:
    paddle.seed(seed)
    made = Tied()
    for block in made.blocks:
        for layer in (block.up, block.down):
            layer.to(dtype="bfloat16")
    stepper = paddle.optimizer.AdamW(0.01, parameters=made.parameters(), multi_precision=True)
    ckpt.fully_shard(made, optimizer=stepper)
    ckpt.init_optimizer_state(stepper)
    return made, stepper


def save_mixed(path: str) -> Ranges:
    """Case 9: float32 norms and bfloat16 matrices in one group, with filled states."""
    made, stepper = _mixed(1)
    for weight in ckpt.optimizer_sharded_state_dict(stepper).values():
        paddle.assign(paddle.rand(weight.local_tensor.shape) + float(this_rank().rank), weight.local_tensor)
    for weight in ckpt.optimizer_sharded_state_dict(stepper).values():
        if not weight.is_flattened and weight.key.endswith("_pow_acc_0"):  # the same on all ranks
            paddle.assign(paddle.full(weight.local_tensor.shape, 0.25), weight.local_tensor)
    ckpt.save(path, model=made, optimizer=stepper)
    return _ranges(made, stepper)


def load_mixed(path: str) -> tuple[Ranges, bool]:
    made, stepper = _mixed(2)
    report = ckpt.load(path, model=made, optimizer=stepper)
    return _ranges(made, stepper), report.is_exact


def save_large_value(path: str) -> None:
    made, stepper = make("base")
    train(made, stepper, 0, 1)
    with ckpt.local_parameters(made):
        for parameter in made.parameters():
            if parameter.size:
                paddle.assign(paddle.full(parameter.shape, 7e4), parameter)
    ckpt.save(path, model=made, optimizer=stepper)


def half() -> nn.Layer:
    made = Tied()
    made.to(dtype="float16")
    return made


MODELS["half"] = half


class Wide(nn.Layer):
    def __init__(self, numel: int, dtype: str) -> None:
        super().__init__()
        self.weight = self.create_parameter([numel], dtype=dtype, default_initializer=nn.initializer.Constant(0.75))


def cast_memory(path: str) -> tuple[int, bool]:
    """How much Python and numpy allocated at most while a large parameter was converted, and whether its values are right."""
    numel = 8 << 20
    made = Wide(numel, "float32")
    ckpt.save(path, model=made)
    made = Wide(numel, "float64")
    made.weight.set_value(paddle.zeros([numel], "float64"))
    tracemalloc.start()
    ckpt.load(path, model=made, cast=True)
    traced = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return traced, bool((made.weight == 0.75).all())


def halved_optimizers(path: str) -> tuple[list[str], bool]:
    """A checkpoint of two optimizers, of which one alone is loaded with the rest left out."""
    paddle.seed(1)
    made = Tied()
    parameters = made.parameters()
    steppers = [
        paddle.optimizer.AdamW(0.01, parameters=parameters[:4]),
        paddle.optimizer.Momentum(0.05, parameters=parameters[4:]),
    ]
    ckpt.fully_shard(made, optimizer=steppers)
    for step in range(2):
        backward(made, step)
        for one in steppers:
            one.step()
            one.clear_grad()
    ckpt.save(path, model=made, optimizer=steppers)
    saved = [_bytes(made, one) for one in steppers]
    backward(made, 5)
    steppers[1].step()
    other = _bytes(made, steppers[1])
    report = ckpt.load(path, model=made, optimizer=steppers[0], allow_unexpected=["*.velocity_0"])
    weights = ckpt.sharded_state_dict(made)
    now = _bytes(made, steppers[1])
    assert _bytes(made, steppers[0]) == saved[0]
    return report.unexpected, all(now[key] == other[key] for key in now if key not in weights)


def _two_layers(dtype: str, seed: int) -> nn.Layer:
    paddle.seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype=dtype)


def one_of_a_model_and_its_average(path: str, dtype_of_average: str, with_optimizer: bool) -> tuple[str, bool]:
    """Return what is said where one model is given and the checkpoint has two, and whether what it offers first loads the trained one."""
    model, average = _two_layers("float32", 1), _two_layers(dtype_of_average, 2)
    stepper = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    model(paddle.ones([1, 4])).sum().backward()
    stepper.step()
    stepper.clear_grad()
    ckpt.save(path, model={"model": model, "ema": average}, optimizer=stepper)
    other = _two_layers("float32", 3)
    given = paddle.optimizer.AdamW(0.1, parameters=other.parameters()) if with_optimizer else None
    parts = None if with_optimizer else {"model"}
    try:
        ckpt.load(path, model=other, optimizer=given, parts=parts)
    except ckpt.CheckpointError as error:
        message = str(error)
    offered = message.split("key_map={'': '")[1].split("'")[0]
    ckpt.load(path, model=other, optimizer=given, parts=parts, key_map={"": offered}, allow_unexpected=["ema.*", "model.*"])
    pairs = zip(other.parameters(), model.parameters(), strict=True)
    return message, all(bool((one == right).all()) for one, right in pairs)
