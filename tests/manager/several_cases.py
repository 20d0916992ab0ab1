"""What runs on the ranks to save and load several models at once."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
from harness import hybrid_groups, this_rank
from paddle import nn
from trainer_state_cases import everything

import paddle_fsdp_ckpt as ckpt

ROWS = 12


def small(width: int) -> nn.Layer:
    return nn.Sequential(nn.Linear(3, width), nn.GELU(), nn.Linear(width, 1))


def build(seed: int, shards: int = 0) -> Any:
    """An actor, a critic with BatchNorm and a joint part of both, all sharded, and a plain head; three optimizers over them.

    With ``shards``, replicas of so many ranks train them.
    """
    paddle.seed(seed)
    models = {"actor": small(50), "critic": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1D(4)), "joint": small(2), "head": small(3)}
    schedule = paddle.optimizer.lr.StepDecay(0.05, step_size=2)
    optimizers = {
        "actor": paddle.optimizer.AdamW(schedule, parameters=[*models["actor"].parameters(), *models["joint"].parameters()]),
        "critic": paddle.optimizer.Momentum(0.01, parameters=models["critic"].parameters()),
        "head": paddle.optimizer.Adam(0.02, parameters=models["head"].parameters()),
    }
    for name in ("actor", "critic", "joint"):
        ckpt.fully_shard(models[name], **(hybrid_groups(shards) if shards else {}))
    for name in ("actor", "critic"):
        ckpt.bind_optimizer(optimizers[name])
    return SimpleNamespace(models=models, optimizers=optimizers, schedule=schedule)


def train(run: Any, first: int, last: int) -> list[float]:
    """Some steps, and the loss of each on this rank. The head, which nobody reduces, is given the same on all ranks."""
    place = this_rank()
    losses = []
    for step in range(first, last):
        x = np.random.RandomState(step).randn(ROWS, 3).astype("float32")
        own = paddle.to_tensor(x[place.rank :: place.world_size])
        out = run.models["actor"](own) + run.models["critic"](own).mean(-1, keepdim=True) * run.models["joint"](own)
        loss = (out - 1).square().mean() + run.models["head"](paddle.to_tensor(x)).square().mean()
        loss.backward()
        for one in run.optimizers.values():
            one.step()
            one.clear_grad()
        run.schedule.step()
        losses.append(loss.item())
    return losses


def save_and_go_on(path: str, steps: int) -> list[float]:
    run = build(1)
    train(run, 0, steps)
    ckpt.save(path, model=run.models, optimizer=run.optimizers, step=steps)
    return train(run, steps, steps + 3)


def load_and_go_on(path: str, steps: int, again: str) -> tuple[list[float], bool]:
    run = build(2)
    report = ckpt.load(path, model=run.models, optimizer=list(run.optimizers.values())[::-1])
    ckpt.save(again, model=run.models, optimizer=run.optimizers, step=steps)
    return train(run, steps, steps + 3), report.is_exact


def _sharded_ones(run: Any) -> dict[str, Any]:
    return {
        "model": {name: model for name, model in run.models.items() if name != "head"},
        "optimizer": {name: one for name, one in run.optimizers.items() if name != "head"},
    }


def save_replicas(path: str, steps: int) -> tuple[list[float], dict[str, bytes], str]:
    """Train replicas of 2 ranks, save, and go on; return the losses, this rank's pieces as saved, and what is said of a plain model."""
    run = build(1, shards=2)
    train(run, 0, steps)
    ckpt.save(path, **_sharded_ones(run), step=steps)
    saved = _pieces(run)
    text = refusal(lambda: ckpt.save(f"{path} mixed", model=run.models))
    return train(run, steps, steps + 3), saved, text


def load_replicas(path: str, steps: int, shards: int, again: str) -> tuple[list[float], dict[str, bytes]]:
    """Load into other models, save those, and go on, with the plain head as it was then."""
    run, other = build(2, shards), build(1, shards)
    train(other, 0, steps)
    run.models["head"], run.optimizers["head"] = other.models["head"], other.optimizers["head"]
    assert ckpt.load(path, **_sharded_ones(run)).is_exact
    ckpt.save(again, **_sharded_ones(run), step=steps)
    pieces = _pieces(run)
    return train(run, steps, steps + 3), pieces


def _pieces(run: Any) -> dict[str, bytes]:
    """This rank's weights and states, by model or optimizer."""
    found = {}
    for kind, objects in _sharded_ones(run).items():
        for name, one in objects.items():
            weights = ckpt.sharded_state_dict(one) if kind == "model" else {}
            if kind == "optimizer" and name == "critic":  # the other one steps two models
                weights = ckpt.optimizer_sharded_state_dict(one)
            found |= {f"{name} {key} {weight.flattened_range}": weight.local_tensor.numpy().tobytes() for key, weight in weights.items()}
    return found


def load_one(path: str) -> tuple[str, list[str], dict[str, np.ndarray], list[str]]:
    """Of all models load the critic, then the actor into a plain one without its name; return what the strict load says first."""
    run = build(3)
    critic = {"critic": run.models["critic"]}
    text = refusal(lambda: ckpt.load(path, model=critic, optimizer=run.optimizers["critic"]))
    others = ["actor.*", "joint.*", "head.*"]
    report = ckpt.load(path, model=critic, optimizer=run.optimizers["critic"], allow_unexpected=others)
    plain = small(50)
    ckpt.load(path, model=plain, key_map={"": "actor."}, parts={"model"}, allow_unexpected=["critic.*", "joint.*", "head.*"])
    values = {f"critic.{name}": value.numpy() for name, value in ckpt.full_state_dict(run.models["critic"]).items()}
    values |= {f"actor.{name}": value.numpy() for name, value in plain.state_dict().items()}
    return text, report.unexpected, values, report.unused_options


def trained_alone(path: str) -> tuple[list[str], str, str]:
    """Freeze a layer of two models and save what trains of them; say what is stored, of another base, and of a plain model among them."""
    run = build(7)
    two = {name: run.models[name] for name in ("actor", "joint")}
    frozen = [model[0].weight for model in two.values()]
    for weight in frozen:
        weight.stop_gradient = True
    ckpt.save(path, model=two, optimizer=run.optimizers["actor"], trainable_only=True)
    report = ckpt.load(path, model=two, optimizer=run.optimizers["actor"])
    frozen[1].set_value(paddle.zeros([3, 2]))
    text = refusal(lambda: ckpt.load(path, model=two, optimizer=run.optimizers["actor"]))
    mixed = {**two, "head": run.models["head"]}
    return report.base, text, refusal(lambda: ckpt.save(f"{path} mixed", model=mixed, trainable_only=True))


def refusals(path: str) -> list[str]:
    """What is said of dicts that can't be saved."""
    run = build(4)
    actor, critic = run.models["actor"], run.models["critic"]
    bad: list[Any] = [{}, {"a.b": actor}, {"actor": actor, "same": actor}, {"actor": "no model"}]
    texts = [refusal(lambda one=one: ckpt.save(path, model=one)) for one in bad]
    return [*texts, refusal(lambda: ckpt.save(path, model={"critic": critic}, optimizer=run.optimizers["actor"]))]


def refusal(call: Any) -> str:
    try:
        call()
    except ckpt.CheckpointError as error:
        return str(error)
    raise AssertionError("it did not raise")


def under_a_manager(root: str) -> tuple[Any, ...]:
    """Save all with schedules and scalers by name; restore all, then one of each."""
    run = build(5)
    train(run, 0, 2)
    (one, scaler), (other, second) = everything(), everything()
    one.step()
    scaler._scale = paddle.to_tensor([8.0])
    with ckpt.CheckpointManager(root, async_save=True) as checkpoints:
        kept = {"lr_scheduler": {"warm": one, "cold": other}, "grad_scaler": {"actor": scaler, "critic": second}}
        checkpoints.save(2, model=run.models, optimizer=run.optimizers, **kept)
    fresh = build(6)
    (new, new_scaler), (unchanged, _) = everything(), everything()
    with ckpt.CheckpointManager(root) as checkpoints:
        text = refusal(lambda: checkpoints.restore(model=fresh.models, optimizer=fresh.optimizers, lr_scheduler={"hot": new}))
        checkpoints.restore(
            model={"critic": fresh.models["critic"]},
            optimizer={"critic": fresh.optimizers["critic"]},
            lr_scheduler={"warm": new},
            grad_scaler={"actor": new_scaler},
            allow_unexpected=["actor.*", "joint.*", "head.*"],
        )
        report = checkpoints.restored
    assert report is not None
    return text, new.last_epoch, unchanged.last_epoch, float(new_scaler._scale.item()), report.not_asked_for


def average_beside(path: str) -> tuple[np.ndarray, np.ndarray]:
    """An average of the weights as a second model, moved by hand: what a plain model gets of it, and the average by numpy."""
    paddle.seed(1)
    model = small(50)
    ema = copy.deepcopy(model)
    optimizer = paddle.optimizer.AdamW(0.05, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer)
    ckpt.fully_shard(ema, optimizer=None)
    right = ckpt.full_state_dict(ema, to_rank=None)["0.weight"].numpy()
    for step in range(3):
        model(paddle.full([2, 3], float(step))).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        with paddle.no_grad(), ckpt.local_parameters(model), ckpt.local_parameters(ema):
            for weight, average in zip(model.parameters(), ema.parameters(), strict=True):
                average.lerp_(weight, paddle.to_tensor(0.1))
        weights = ckpt.full_state_dict(model, to_rank=None)["0.weight"].numpy()
        right = right + np.float32(0.1) * (weights - right)
    ckpt.save(path, model={"model": model, "ema": ema}, optimizer=optimizer)
    plain = small(50)
    ckpt.load(path, model=plain, parts={"model"}, key_map={"": "ema."}, allow_unexpected=["model.*"])
    return plain[0].weight.numpy(), right
