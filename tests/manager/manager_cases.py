"""What runs on the ranks to train under a manager, stop, and go on."""

from __future__ import annotations

import copy
import logging
import os
import random
import runpy
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
import stand_in_visualdl
from harness import hybrid_groups, this_rank
from paddle import nn
from paddle.amp import grad_scaler
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight
from paddle.distributed.launch.context.args_envs import parse_args
from paddle.nn import functional as F

import paddle_fsdp_ckpt as ckpt
from paddle_fsdp_ckpt import CheckpointManager
from paddle_fsdp_ckpt.storage import system_errors
from paddle_fsdp_ckpt.storage.read_lock import reading, removing

GLOBAL_BATCH = 12


class Model(nn.Layer):
    """Small, with dropout, so that a resumed run must draw the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 7)
        self.down = nn.Linear(7, 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.2))


def call(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call one of these functions with arguments by name too."""
    return globals()[name](*arguments, **options)


def build(seed: int = 1, shards: int = 0) -> tuple[Model, Any]:
    """Make and shard a model; with ``shards``, replicas of so many ranks train it."""
    paddle.seed(seed)
    model = Model()
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    ckpt.fully_shard(model, optimizer=optimizer, **(hybrid_groups(shards) if shards else {}))
    paddle.seed(1000 * seed + this_rank().rank)
    random.seed(seed)
    np.random.seed(seed)
    return model, optimizer


def train_step(model: Model, optimizer: Any) -> float:
    """One step on data drawn from numpy's global generator, which is alike on all ranks."""
    place = this_rank()
    rows = GLOBAL_BATCH // place.world_size
    x = paddle.to_tensor(np.random.randn(GLOBAL_BATCH, 4).astype("float32")[place.rank * rows :][:rows])
    loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    value = loss.detach().clone()
    if place.world_size > 1:
        dist.all_reduce(value)
    return value.item() / place.world_size + random.random()


def weights(model: Model) -> dict[str, np.ndarray]:
    return {key: weight.local_tensor.numpy().copy() for key, weight in ckpt.sharded_state_dict(model).items()}


def run(root: str, first: int, last: int, every: int = 1, shards: int = 0, **options: Any) -> tuple[list[float], list[int]]:
    """Train the steps first to last from what was restored, saving; return losses and what the root holds."""
    model, optimizer = build(first + 1, shards)
    losses = []
    with CheckpointManager(root, **options) as checkpoints:
        start = checkpoints.restore(model=model, optimizer=optimizer) or 0
        assert start == first
        for step in range(start, last):
            losses.append(train_step(model, optimizer))
            if (step + 1) % every == 0:
                checkpoints.save(step + 1, model=model, optimizer=optimizer, metrics={"loss": losses[-1]})
        checkpoints.wait()
        steps = checkpoints.all_steps()
    return losses, steps


def restore_only(root: str, options: dict[str, Any] | None = None, **arguments: Any) -> tuple[int | None, Any]:
    model, optimizer = build(seed=77)
    with CheckpointManager(root, **(options or {})) as checkpoints:
        step = checkpoints.restore(model=model, optimizer=optimizer, **arguments)
        report = checkpoints.restored
        return step, None if report is None else (report.skipped, report.fell_back_from, str(report))


def refuse(root: str, call: str, options: dict[str, Any] | None = None, **arguments: Any) -> tuple[str, str, bool]:
    """Call something that must raise: its kind, its text, and whether model and optimizer are as they were."""
    model, optimizer = build(seed=77)
    before = weights(model)
    checkpoints = CheckpointManager(root, **(options or {}))
    try:
        getattr(checkpoints, call)(model=model, optimizer=optimizer, **arguments)
    except ckpt.CheckpointError as error:
        same = all(np.array_equal(before[key], value) for key, value in weights(model).items())
        return type(error).__name__, str(error), same
    finally:
        checkpoints.close()
    raise AssertionError("it did not raise")


def save_in_used_root(root: str, *, resume: bool, step: int, **options: Any) -> list[int]:
    model, optimizer = build(seed=5)
    with CheckpointManager(root, **options) as checkpoints:
        if resume:
            checkpoints.restore(model=model, optimizer=optimizer)
        checkpoints.save(step, model=model, optimizer=optimizer)
        return checkpoints.all_steps()


def go_back(root: str, step: int, later: int, *, discard_later: bool) -> tuple[list[int], list[int]]:
    model, optimizer = build(seed=5)
    with CheckpointManager(root) as checkpoints:
        checkpoints.restore(model=model, optimizer=optimizer, step=step, discard_later=discard_later)
        before = checkpoints.all_steps()
        checkpoints.save(later, model=model, optimizer=optimizer)
        return before, checkpoints.all_steps()


def warned_of_going_back(root: str) -> list[list[str]]:
    """Restore an earlier step, the same where later ones may go, and the newest; return what each warns of."""
    model, optimizer = build(seed=5)
    told = []
    for options in ({"step": 1}, {"step": 1, "discard_later": True}, {}):
        with CheckpointManager(root) as checkpoints, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoints.restore(model=model, optimizer=optimizer, **options)
        told.append([str(one.message) for one in caught if "discard_later" in str(one.message)])
    return told


def fall_back_and_go_on(root: str, later: int) -> tuple[int | None, list[int]]:
    model, optimizer = build(seed=5)
    with CheckpointManager(root) as checkpoints:
        step = checkpoints.restore(model=model, optimizer=optimizer, fall_back=True)
        checkpoints.save(later, model=model, optimizer=optimizer)
        return step, checkpoints.all_steps()


def average_of(model: Model, fill: float) -> dict[str, Any]:
    """A tensor for each weight, cut as it is: an average of the weights, say."""
    average = {}
    for key, weight in ckpt.sharded_state_dict(model).items():
        average[key] = copy.copy(weight)
        average[key].local_tensor = paddle.full(weight.local_tensor.shape, fill) + weight.local_tensor.detach()
    return average


EXTRA = {"epoch": 3, "nested": [1.5, None, "x"], "@array": True, "order": np.arange(5, dtype="uint32"), "big": np.float64(2.5)}


def everything() -> tuple[Any, ...]:
    """A schedule of its own, and a scaler that is enabled as it would be on a GPU."""
    schedule = paddle.optimizer.lr.StepDecay(0.5, step_size=2)
    kept = grad_scaler._dygraph_tracer
    grad_scaler._dygraph_tracer = lambda: SimpleNamespace(_expected_place=SimpleNamespace(is_gpu_place=lambda: True))
    try:
        return schedule, paddle.amp.GradScaler(init_loss_scaling=64.0)
    finally:
        grad_scaler._dygraph_tracer = kept


def save_everything(root: str, *, async_save: bool, shards: int = 0) -> dict[str, np.ndarray]:
    model, optimizer = build(3, shards)
    schedule, scaler = everything()
    for _ in range(3):
        schedule.step()
    scaler._scale = paddle.to_tensor([8.0])
    average = average_of(model, 1.0)
    own = {key: weight.local_tensor.numpy().copy() for key, weight in average.items()}
    extra = copy.deepcopy(EXTRA) | {"tensor": paddle.to_tensor([1.0, 2.0]).astype("bfloat16")}
    with CheckpointManager(root, async_save=async_save) as checkpoints:
        checkpoints.save(
            10,
            model=model,
            optimizer=optimizer,
            lr_scheduler=schedule,
            grad_scaler=scaler,
            extra_state=extra,
            rank_state={"sample": this_rank().rank * 100, "seen": np.array([this_rank().rank])},
            sharded=average,
        )
        # All of this must not be in the checkpoint.
        schedule.step()
        extra["order"][:] = 0
        for weight in average.values():
            weight.local_tensor.zero_()
    return own


def restore_everything(root: str) -> tuple[Any, ...]:
    model, optimizer = build(seed=4)
    schedule, scaler = everything()
    average = average_of(model, 5.0)
    with CheckpointManager(root) as checkpoints:
        checkpoints.restore(model=model, optimizer=optimizer, lr_scheduler=schedule, grad_scaler=scaler, sharded=average)
        report = checkpoints.restored
    assert report is not None
    extra = dict(report.extra_state)
    tensor = extra.pop("tensor")
    described = (str(tensor.dtype), tensor.astype("float32").tolist())
    pieces = {key: (weight.flattened_range, weight.local_tensor.numpy().copy()) for key, weight in average.items()}
    return schedule.last_epoch, float(scaler._scale.item()), extra, described, report.rank_states, pieces, report.differences


def save_conflicts(root: str) -> list[str]:
    """What is said of tensors of the user's own that ranks give under one key: whole ones, and parts that overlap."""
    model, optimizer = build()
    rank = this_rank().rank
    value = paddle.full([4], float(rank))
    parts = {
        "whole": ShardedWeight("x", value, (4,), (4,), (0,)),
        "overlap": ShardedWeight("x", value, (4,), (6,), (2 * rank,)),
    }
    alike = ShardedWeight("x", paddle.arange(2 * rank, 2 * rank + 4).astype("float32"), (4,), (6,), (2 * rank,))
    said = []
    with CheckpointManager(root) as checkpoints:
        for step, weight in enumerate([*parts.values(), alike], start=1):
            try:
                checkpoints.save(step, model=model, optimizer=optimizer, sharded={"expert": weight})
                said.append("saved")
            except ckpt.CheckpointError as error:
                said.append(str(error))
    return said


def save_with_an_average(root: str) -> bool:
    """Save a tensor of the user's own that a rank has whole; tell whether its values were compared with those of other ranks."""
    from paddle_fsdp_ckpt import save_comparison

    model, optimizer = build()
    compared = []
    with pytest.MonkeyPatch.context() as patch, CheckpointManager(root) as checkpoints:
        patch.setattr(save_comparison, "digest", lambda data: compared.append(len(data)) or "")
        whole = ShardedWeight("average", paddle.ones([5]), (5,), (5,), (0,))
        checkpoints.save(1, model=model, optimizer=optimizer, sharded={"average": whole})
    return 20 in compared


def restore_parts(root: str) -> list[tuple[int | None, bool, bool, list[str]]]:
    """Restore some parts of a step over values that were changed; tell whether weights, and states, are those that were saved then."""
    model, optimizer = build()
    for _ in range(2):
        train_step(model, optimizer)

    def values() -> tuple[list[np.ndarray], list[np.ndarray]]:
        dicts = ckpt.sharded_state_dict(model), ckpt.optimizer_sharded_state_dict(optimizer)
        weights, states = ([one.local_tensor.numpy().copy() for _, one in sorted(parts.items())] for parts in dicts)
        return weights, states

    found = []
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(2, model=model, optimizer=optimizer)
        saved = values()
        for options in ({"optimizer": optimizer, "parts": {"model"}}, {}, {"optimizer": optimizer, "parts": ["optimizer"]}):
            train_step(model, optimizer)
            step = checkpoints.restore(model=model, **options)
            equal = [all(map(np.array_equal, now, then)) for now, then in zip(values(), saved, strict=True)]
            assert checkpoints.restored is not None
            found.append((step, *equal, checkpoints.restored.load.parts))
    return found


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(paddle.rand([1]).item())


def save_and_draw(root: str, *, alike: bool) -> tuple[float, float, float]:
    model, optimizer = build()
    seed = 5 if alike else 5 + this_rank().rank
    random.seed(seed)
    np.random.seed(seed)
    paddle.seed(seed)
    draws()
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer)
    return draws()


def restore_and_draw(root: str) -> tuple[float, float, float]:
    model, optimizer = build(seed=9)
    with CheckpointManager(root) as checkpoints:
        checkpoints.restore(model=model, optimizer=optimizer)
    return draws()


def keep_best(root: str) -> tuple[str, list[int]]:
    """Save without the metric that decides, then with it, then where it wasn't measured."""
    model, optimizer = build()
    with CheckpointManager(root, keep=[ckpt.KeepBest("loss", mode="min")]) as checkpoints:
        try:
            checkpoints.save(1, model=model, optimizer=optimizer, metrics={"accuracy": 0.5})
        except ckpt.CheckpointError as error:
            text = str(error)
        for step, loss in enumerate([0.5, 0.25, float("nan"), float("nan")], start=2):
            checkpoints.save(step, model=model, optimizer=optimizer, metrics={"loss": loss})
        return text, checkpoints.all_steps()


def resume_otherwise(root: str) -> list[str]:
    """Resume with other schedules, and return what is logged."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                heard.append(record.getMessage())

    logger, listener = logging.getLogger("paddle_fsdp_ckpt"), Listener()

    def scheduled(step_size: int, rate: float) -> tuple[Model, Any, Any]:
        model = Model()
        optimizer = paddle.optimizer.AdamW(paddle.optimizer.lr.StepDecay(0.1, step_size), parameters=model.parameters())
        ckpt.fully_shard(model, optimizer=optimizer)
        return model, optimizer, paddle.optimizer.lr.ExponentialDecay(rate, 0.9)

    logger.addHandler(listener)
    try:
        for step_size, rate in ((3, 0.5), (4, 0.25)):
            model, optimizer, schedule = scheduled(step_size, rate)
            with CheckpointManager(root) as checkpoints:
                if not checkpoints.restore(model=model, optimizer=optimizer, lr_scheduler=schedule):
                    checkpoints.save(1, model=model, optimizer=optimizer, lr_scheduler=schedule)
    finally:
        logger.removeHandler(listener)
    return heard


def events_of(root: str) -> tuple[list[str], list[str]]:
    """The hook's events of two saves and a restore, and what was logged; the second call of the hook fails, which stops nothing."""
    model, optimizer = build()
    seen = []
    logged = Lines()
    log = logging.getLogger("paddle_fsdp_ckpt")

    def hook(event: Any) -> None:
        seen.append(f"{event.kind} {event.step}")
        if len(seen) == 2:
            raise ValueError("no such board")

    level = log.level
    log.addHandler(logged)
    log.setLevel(logging.INFO)
    try:
        with CheckpointManager(root, on_event=hook, max_to_keep=1) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, model=model, optimizer=optimizer, metrics={"loss": 0.5})
            checkpoints.restore(model=model, optimizer=optimizer)
    finally:
        log.removeHandler(logged)
        log.setLevel(level)
    return seen, logged.lines


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run_example(script: str, root: str, log: str) -> None:
    """Run the example twice, the second time from where the first ended."""
    kept = sys.argv
    sys.modules["visualdl"] = stand_in_visualdl
    try:
        for steps in ("20", "30"):
            command = [script, "--root", root, "--board", log, "--steps", steps]
            sys.argv = ["launch", *command]
            launched, _ = parse_args()  # which takes an option for its own where that begins alike
            assert [launched.training_script, *launched.training_script_args] == command
            sys.argv = command
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = kept
        sys.modules.pop("visualdl")


def fail_to_remove(root: str) -> tuple[list[int], list[int]]:
    """A step that can't be removed is there after the save, and gone after the next."""
    from paddle_fsdp_ckpt.manager import save_job as module

    model, optimizer = build()
    original = module.hide_step

    def refuse_once(where: Path, step: int) -> Path:
        raise PermissionError(13, "not today", str(where))

    with CheckpointManager(root, max_to_keep=1) as checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer)
        module.hide_step = refuse_once
        try:
            checkpoints.save(2, model=model, optimizer=optimizer)
        finally:
            module.hide_step = original
        kept = checkpoints.all_steps()
        checkpoints.save(3, model=model, optimizer=optimizer)
        return kept, checkpoints.all_steps()


def soak(root: str, saves: int) -> dict[str, int]:
    """The short form of ``ci/soak.py``."""
    path = Path(__file__).resolve().parents[2] / "ci" / "soak.py"
    return runpy.run_path(str(path))["soak"](root, saves)


def plain_load(path: str) -> tuple[Any, list[str], bool]:
    model, optimizer = build(seed=6)
    report = ckpt.load(path, model=model, optimizer=optimizer)
    return report.extra_state, report.unexpected, report.is_exact


def save_with_extra(root: str) -> None:
    model, optimizer = build()
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer, extra_state={"epoch": 2}, sharded=average_of(model, 1.0))


def save_plainly(root: str) -> None:
    model, optimizer = build()
    ckpt.save(f"{root}/step_00000003", model=model, optimizer=optimizer, step=3, extra_state={"epoch": 2})


def restore_plain(root: str) -> tuple[int | None, Any, dict[int, Any], list[str]]:
    model, optimizer = build(seed=6)
    with CheckpointManager(root) as checkpoints:
        step = checkpoints.restore(model=model, optimizer=optimizer)
        report = checkpoints.restored
    assert report is not None
    return step, report.extra_state, report.rank_states, report.differences


def restore_other(root: str, which: str) -> None:
    """Give a restore what was not saved."""
    model, optimizer = build(seed=6)
    schedule, scaler = everything()
    average = average_of(model, 5.0)
    more = {f"more.{key}": weight for key, weight in average.items()}
    options: dict[str, Any] = {
        "lr_scheduler": {"lr_scheduler": schedule},
        "grad_scaler": {"grad_scaler": scaler},
        "two schedules": {"lr_scheduler": [schedule, schedule]},
        "sharded": {"sharded": average | more},
        "less sharded": {"sharded": {"up.bias": average["up.bias"]} if "up.bias" in average else {}},
    }
    before = weights(model)
    checkpoints = CheckpointManager(root)
    try:
        checkpoints.restore(model=model, optimizer=optimizer, **options[which])
    finally:
        checkpoints.close()
        if any(not np.array_equal(before[key], value) for key, value in weights(model).items()):
            raise AssertionError("it changed something")


def save_other(root: str, which: str) -> None:
    """Give a save what can't be saved, or what differs between ranks."""
    model, optimizer = build()
    rank = this_rank().rank
    options: dict[str, Any] = {
        "extra_state": {"extra_state": {"rank": rank}},
        "step": {"step": 1 + rank},
        "tuple": {"rank_state": (1, 2)},
        "metrics": {"metrics": {"loss": "low"}},
        "lr_scheduler": {"lr_scheduler": 0.1},
        "grad_scaler": {"grad_scaler": 64.0},
        "sharded": {"sharded": {"x": paddle.ones([3])}},
    }
    checkpoints = CheckpointManager(root)
    try:
        checkpoints.save(**({"step": 1} | options[which]), model=model, optimizer=optimizer)
    finally:
        checkpoints.close()


def open_with(root: str, options: dict[str, Any]) -> None:
    CheckpointManager(root, **options).close()


def open_differently(root: str) -> None:
    CheckpointManager(f"{root}{this_rank().rank}").close()


def use_after_close(root: str) -> list[str]:
    model, _ = build()
    checkpoints = CheckpointManager(root)
    checkpoints.close()
    checkpoints.close()
    texts = []
    for use in (lambda: checkpoints.save(1, model=model), lambda: checkpoints.restore(model=model)):
        try:
            use()
        except ckpt.CheckpointError as error:
            texts.append(str(error))
    return texts


def leave_by_an_error(root: str) -> list[int]:
    """Leave the block by an error on every rank at once: nobody waits for another, and what was begun is finished."""
    model, optimizer = build()
    try:
        with CheckpointManager(root, async_save=True, stop_signals=[signal.SIGTERM]) as checkpoints:
            checkpoints.save(1, model=model, optimizer=optimizer)
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        return checkpoints.all_steps()


def stop_signals_while_closing(root: str, by_error: bool) -> list[int]:
    """Get another SIGTERM while the last save is being written, as from Paddle's launcher, which sends it three times in 0.6 seconds."""
    model, optimizer = build()
    checkpoints = CheckpointManager(root, async_save=True, stop_signals=[signal.SIGTERM])
    waits = checkpoints.wait

    def wait() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        waits()
        os.kill(os.getpid(), signal.SIGTERM)

    checkpoints.wait = wait  # type: ignore[method-assign]
    with suppress(ZeroDivisionError), checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer)
        if by_error:
            raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return checkpoints.all_steps()


def remove_while_read(root: str) -> tuple[list[bool], list[int], list[int]]:
    """Save with one step kept, while the first is being loaded; then again."""
    model, optimizer = build()
    free: list[bool] = []

    def look(name: str) -> str:
        with removing(Path(root) / "step_00000001") as is_free:
            free.append(is_free)
        return name

    with CheckpointManager(root, max_to_keep=1) as checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer)
        ckpt.load(Path(root) / "step_00000001", model=model, optimizer=optimizer, key_map=look)
        with reading(Path(root) / "step_00000001"):
            dist.barrier()
            checkpoints.save(2, model=model, optimizer=optimizer)
            kept = checkpoints.all_steps()
        dist.barrier()
        checkpoints.save(3, model=model, optimizer=optimizer)
        return free, kept, checkpoints.all_steps()


@contextmanager
def bad_disk(code: int, times: int | None = None) -> Iterator[None]:
    """Let the system give rank 1 an error for the values of step 3: always, or some times in a row."""
    read, failed = os.preadv, 0

    def fail(descriptor: int, *rest: Any) -> int:
        nonlocal failed
        if this_rank().rank == 1 and "step_00000003" in os.readlink(f"/proc/self/fd/{descriptor}") and failed != times:
            failed += 1
            raise OSError(code, os.strerror(code))
        return read(descriptor, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        patch.setattr(system_errors, "PAUSES_SECONDS", (0.0,) * len(system_errors.PAUSES_SECONDS))
        yield


def restore_from_a_bad_disk(root: str, code: int) -> tuple[str, str, tuple[int | None, list[int]] | None]:
    """Restore where rank 1 can't read step 3: kind and text; and with ``fall_back``, where that works."""
    with bad_disk(code):
        kind, text, same = refuse(root, "restore")
        assert same
        return kind, text, fall_back_and_go_on(root, 3) if "fall_back" in text else None


def restore_from_a_disk_that_stumbles(root: str, code: int) -> tuple[int | None, list[int]]:
    """Restore where rank 1 can't read step 3 at first, and save the next."""
    with bad_disk(code, times=2):
        return fall_back_and_go_on(root, 4)
