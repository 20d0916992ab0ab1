"""Loads into models of which some parameters have grown or shrunk in one dimension; run on the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from checkpoint_cases import Outcome, Tied, held, train
from option_cases import Grown
from paddle import nn
from strict_cases import MODELS, make

import paddle_fsdp_ckpt as ckpt


class GrownBackwards(Grown):
    """The larger vocabulary, under names that sort the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.zembed, self.aout = self.embed, self.out
        del self.embed, self.out

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        self.__dict__.update(embed=self.zembed, out=self.aout)
        return super().forward(tokens)


MODELS.update({"grown backwards": GrownBackwards})


def load_fresh(path: str, model: str, optimizer: str, options: dict[str, Any]) -> tuple[Outcome, Outcome, list[float]]:
    """What a new model and a new optimizer hold, what they hold after the load, with its report, and the losses of steps after it."""
    made, stepper = make(model, optimizer, seed=3)
    ckpt.init_optimizer_state(stepper)
    before = Outcome([], held(made, stepper))
    made, stepper = make(model, optimizer, seed=3)
    report = ckpt.load(path, model=made, optimizer=stepper, **options)
    return before, Outcome([], held(made, stepper), report), train(made, stepper, 2, 4)


def _typed(model: str, dtype: str, seed: int) -> tuple[nn.Layer, Any]:
    paddle.seed(seed)
    made = MODELS[model]()
    if dtype != "float32":
        made.to(dtype=dtype)
    stepper = paddle.optimizer.AdamW(0.01, parameters=made.parameters(), multi_precision=dtype != "float32")
    ckpt.fully_shard(made, optimizer=stepper)
    ckpt.init_optimizer_state(stepper)
    for key, weight in ckpt.optimizer_sharded_state_dict(stepper).items():
        if not key.endswith("pow_acc_0"):  # masters too get values that their parameters don't have
            paddle.assign(weight.local_tensor + seed / 1024, weight.local_tensor)
    return made, stepper


def save_typed(path: str, model: str, dtype: str) -> Outcome:
    made, stepper = _typed(model, dtype, 1)
    ckpt.save(path, model=made, optimizer=stepper)
    return Outcome([], held(made, stepper))


def load_typed(path: str, model: str, dtype: str, options: dict[str, Any]) -> tuple[Outcome, Outcome]:
    """What there was, what there is after the load."""
    made, stepper = _typed(model, dtype, 2)
    before = Outcome([], held(made, stepper))
    report = ckpt.load(path, model=made, optimizer=stepper, **options)
    return before, Outcome([], held(made, stepper), report)


def load_plain(path: str, out: str, options: dict[str, Any]) -> dict[str, np.ndarray]:
    """Load into a plain model and its optimizer, save it, and return what its weights were."""
    paddle.seed(3)
    made = Grown()
    stepper = paddle.optimizer.AdamW(0.01, parameters=made.parameters())
    before = {name: tensor.numpy().copy() for name, tensor in made.state_dict().items()}
    report = ckpt.load(path, model=made, optimizer=stepper, **options)
    assert [one.key for one in report.resized] == ["embed.weight", "head.weight"]
    ckpt.save(out, model=made, optimizer=stepper)
    train(made, stepper, 2, 3)
    return before


def load_several(path: str) -> dict[str, Any]:
    """Two models are saved, and one of them is loaded into a larger vocabulary; the other is as it was."""
    actor, critic = Tied(), Tied()
    for one in (actor, critic):
        ckpt.fully_shard(one, optimizer=None)
    ckpt.save(path, model={"actor": actor, "critic": critic})
    saved = {name: one.numpy() for name, one in ckpt.full_state_dict(actor).items()}
    paddle.seed(5)
    grown = ckpt.fully_shard(Grown(), optimizer=None)
    before = {name: one.numpy() for name, one in ckpt.full_state_dict(grown).items()}
    report = ckpt.load(path, model={"actor": grown, "critic": critic}, resize=["actor.*"])
    after = {name: one.numpy() for name, one in ckpt.full_state_dict(grown).items()}
    return {"saved": saved, "before": before, "after": after, "keys": [one.key for one in report.resized]}
