"""Loads into models of which some parameters have another shape, and what errors offer, followed; run on the ranks."""

from __future__ import annotations

import ast
import re
from typing import Any

import numpy as np
import paddle
from checkpoint_cases import train
from option_cases import copied
from paddle import nn
from strict_cases import MODELS, make

import paddle_fsdp_ckpt as ckpt


def _offered(message: str) -> dict[str, Any]:
    """What an error offers, as arguments of ``load``."""
    options: dict[str, Any] = {}
    way_out = message.split("\nWay out: ")[1]
    for name, text in re.findall(r"(allow_\w+)=(\[[^\]]*\])", way_out):
        options[name] = ast.literal_eval(text)
    options.update(dict.fromkeys(re.findall(r"(cast|copy_tied)=True", way_out), True))
    return options


def follow(path: str, model: str, optimizer: str) -> list[tuple[str, str, list[str]]]:
    """Load what doesn't fit; then again with each way out that the error offers: which, and what then differs; the message first."""
    made, stepper = make(model, optimizer, seed=3)
    try:
        ckpt.load(path, model=made, optimizer=stepper)
    except ckpt.MismatchError as error:
        message = str(error)
    found = [("message", message, [])]
    ways: dict[str, dict[str, Any]] = {"options": _offered(message)} if "may differ" in message else {}
    if 'parts={"model"}' in message.split("\nWay out: ")[1]:
        ways["weights"] = {"parts": {"model"}}
    resize = re.search(r"resize=(\[[^\]]*\])", message)
    if resize:
        ways["resize"] = {"resize": ast.literal_eval(resize[1])}
    key_map = re.search(r"key_map=(\{.*\})", message)
    if key_map:
        ways["key_map"] = {"key_map": ast.literal_eval(key_map[1])}
    for name, options in ways.items():
        made, stepper = make(model, optimizer, seed=3)
        report = ckpt.load(path, model=made, optimizer=stepper, **options)
        train(made, stepper, 2, 3)
        found.append((name, str(options), [*report.unused_options, *(["exact"] if report.is_exact else [])]))
    return found


def _low_precision(model: str, seed: int) -> tuple[nn.Layer, Any]:
    paddle.seed(seed)
    made = MODELS[model]()
    made.to(dtype="bfloat16")
    stepper = paddle.optimizer.AdamW(0.01, parameters=made.parameters(), multi_precision=True)
    ckpt.fully_shard(made, optimizer=stepper)
    ckpt.init_optimizer_state(stepper)
    for weight in ckpt.optimizer_sharded_state_dict(stepper).values():
        if weight.is_flattened or weight.local_tensor.size > 1:
            paddle.assign(weight.local_tensor + seed / 8, weight.local_tensor)
    return made, stepper


def _contents(model: nn.Layer, stepper: Any) -> dict[str, bytes | None]:
    weights = {**ckpt.sharded_state_dict(model), **ckpt.optimizer_sharded_state_dict(stepper)}
    return {key: copied(weight.local_tensor) for key, weight in weights.items()}


def with_master_weights(path: str) -> dict[str, bool]:
    """All, and then the model alone, into a larger vocabulary in low precision: what of the master weights is what."""
    options: dict[str, Any] = {"allow_other_shape": ["embed.weight", "head.weight"]}
    made, stepper = _low_precision("base", 1)
    ckpt.save(path, model=made, optimizer=stepper)
    saved = _contents(made, stepper)
    made, stepper = _low_precision("grown", 2)
    before = _contents(made, stepper)
    report = ckpt.load(path, model=made, optimizer=stepper, **options)
    after = _contents(made, stepper)
    grown = ("embed.", "out.", "head.")
    others = {key for key in before if not key.startswith(grown)}
    result = {
        "others loaded": all(after[key] == saved[key] for key in others) and any(before[key] != saved[key] for key in others),
        "weights stay": all(after[key] == before[key] for key in ("embed.weight", "out.weight", "head.weight") if key in before),
        "no states": after.keys() == others | {key for key in before if key.endswith(".weight") and key.startswith(grown)},
        "told": report.started_afresh == ["embed.weight", "head.weight"],
    }
    made, stepper = _low_precision("grown", 2)
    report = ckpt.load(path, model=made, optimizer=stepper, parts={"model"}, **options)
    after = _contents(made, stepper)
    masters = [key for key in before if key.endswith(".w_0")]
    stay = {key for key in masters if key.startswith(grown)}
    follow_them = [key for key in masters if key not in stay]
    wide = {key: _as_float32(after[key.removesuffix(".w_0")]) for key in follow_them}
    return result | {
        "masters stay": all(after[key] == before[key] for key in stay),
        "masters follow": all(np.array_equal(np.frombuffer(after[key] or b"", np.float32), wide[key]) for key in follow_them),
        "model alone told": [one.key for one in report.other_shape] == ["embed.weight", "head.weight"] and not report.started_afresh,
    }


def _as_float32(bits: bytes | None) -> np.ndarray:
    """The values of bfloat16 bits, by numpy."""
    return (np.frombuffer(bits or b"", np.uint16).astype(np.uint32) << 16).view(np.float32)


def restored(root: str) -> tuple[int | None, list[str], bool, str]:
    """A manager's step of a smaller vocabulary, restored into a larger one."""
    made, stepper = make("base", "adamw")
    train(made, stepper, 0, 2)
    with ckpt.CheckpointManager(root) as manager:
        manager.save(2, model=made, optimizer=stepper)
    made, stepper = make("grown", "adamw", seed=3)
    with ckpt.CheckpointManager(root) as manager:
        step = manager.restore(model=made, optimizer=stepper, allow_other_shape=["embed.*", "head.*"])
        report = manager.restored
    assert report is not None
    return step, [one.key for one in report.load.other_shape], report.load.is_exact, str(report)


class SmallBesideLarge(nn.Layer):
    """Of two ranks the second keeps nothing of the first parameter."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.small, self.large = self.create_parameter([numel]), self.create_parameter([2000])

    def forward(self) -> paddle.Tensor:
        return self.small.square().sum() + self.large.square().mean()


def given_then_kept(path: str) -> np.ndarray:
    """Give a parameter whole values, load a checkpoint that has it in another shape, save and step: what this rank has of it."""
    models = []
    for numel in (4, 5):
        made = SmallBesideLarge(numel)
        stepper = paddle.optimizer.SGD(0.25, parameters=made.parameters())
        models.append((ckpt.fully_shard(made, optimizer=stepper), stepper))
    (first, its_own), (made, stepper) = models
    ckpt.save(path, model=first, optimizer=its_own)
    made.small.set_value(paddle.full([5], 3.0))
    ckpt.load(path, model=made, optimizer=stepper, allow_other_shape=["small"])
    ckpt.save(f"{path}_kept", model=made, optimizer=stepper)
    made().backward()
    stepper.step()
    weights = ckpt.sharded_state_dict(made)
    return weights["small"].local_tensor.numpy().copy() if "small" in weights else np.zeros(0, "float32")
