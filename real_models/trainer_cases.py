"""Train with PaddleFormers' own ``Trainer``, plain, or sharded with its checkpoints in a ``CheckpointManager``."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from harness import this_rank
from paddleformers.trainer import Trainer, TrainerCallback, TrainingArguments
from tiny_models import build
from training_cases import BATCH_SIZE, LENGTH, STEPS, Outcome, Training

from paddle_fsdp_ckpt import CheckpointManager
from paddle_fsdp_ckpt.demo.text import Batches, read_corpus
from paddle_fsdp_ckpt.integrations.paddleformers import ShardedTrainer


class Watcher(TrainerCallback):
    """Notes the losses, and ends a training early, as one that is killed."""

    def __init__(self, stop_after: int) -> None:
        self.losses: list[float] = []
        self._stop_after = stop_after

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.losses += [logs["loss"]] if logs and "loss" in logs else []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self._stop_after


def train_plain(changes: dict[str, Any]) -> list[float]:
    """Train in one process with the Trainer as it is, the text in its order; the last loss is of an evaluation."""
    watcher = Watcher(STEPS)
    trainer = Trainer(**_arguments(changes, shuffle=False), callbacks=[watcher])
    trainer.train()
    return [*watcher.losses, trainer.evaluate()["eval_loss"]]


def train_sharded(changes: dict[str, Any], root: str, shuffle: bool, stop_after: int, resume: bool = False) -> Outcome:
    """Train with a sharded model, and save all three steps; the last loss is of an evaluation."""
    watcher = Watcher(stop_after)
    with CheckpointManager(root) as checkpoints:
        arguments = _arguments(changes, shuffle=shuffle, seed=12 if resume else 11)
        trainer = ShardedTrainer(**arguments, checkpoints=checkpoints, callbacks=[watcher])
        trainer.train(resume_from_checkpoint=True)
        losses = [*watcher.losses, trainer.evaluate()["eval_loss"]]
    return Outcome(losses, Training(trainer.model, trainer.optimizer, trainer.lr_scheduler).held())


def make_with(settings: dict[str, Any]) -> None:
    """Make a trainer with further arguments."""
    with CheckpointManager(this_rank().scratch / "root") as checkpoints:
        ShardedTrainer(**_arguments({}, shuffle=False, **settings), checkpoints=checkpoints)


def _arguments(changes: dict[str, Any], *, shuffle: bool, seed: int = 11, **settings: Any) -> dict[str, Any]:
    rows = [row for step in range(STEPS - 2) for row in Batches(read_corpus(), BATCH_SIZE, LENGTH, seed=3).whole(step)]
    arguments = TrainingArguments(
        output_dir=str(this_rank().scratch),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH_SIZE // this_rank().world_size,
        per_device_eval_batch_size=BATCH_SIZE // this_rank().world_size,
        dataloader_shuffle=shuffle,
        learning_rate=1e-2,
        weight_decay=0.3,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=3,
        save_strategy="steps" if this_rank().world_size > 1 else "no",
        disable_tqdm=True,
        report_to=[],
        **settings,
    )
    data = {"train_dataset": rows, "eval_dataset": rows[: 2 * BATCH_SIZE], "data_collator": _collate}
    return {"model": build("qwen3_moe", seed=seed, **changes), "args": arguments, **data}


def _collate(rows: list[np.ndarray]) -> dict[str, paddle.Tensor]:
    tokens = np.stack(rows)
    return {"input_ids": paddle.to_tensor(tokens[:, :-1]), "labels": paddle.to_tensor(tokens[:, 1:])}
