"""PaddleFormers' ``Trainer`` over a sharded model, with its checkpoints in a :class:`~paddle_fsdp_ckpt.CheckpointManager`.

Written against the ``Trainer`` of PaddleFormers 0.4.1, the methods of which it overrides.
"""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddleformers.trainer import Trainer

from paddle_fsdp_ckpt import CheckpointError, CheckpointManager, fully_shard

_REFUSED = (
    "amp_master_grad",
    "enable_auto_parallel",
    "enable_zero_cost_checkpoint",
    "fp16",
    "load_best_model_at_end",
    "offload_optim",
    "sharding",
    "tensorwise_offload_optimizer",
    "to_static",
    "use_expert_parallel",
    "use_hybrid_parallel",
)
"""Arguments by which the Trainer would reduce, move, save or load parameters and gradients in ways of its own."""

_TRAINER_STATE = "trainer_state.json"


class ShardedTrainer(Trainer):
    """A ``Trainer`` that shards its model, and saves to and resumes from a ``CheckpointManager``.

    All ranks must make it, and call it, alike. Which steps are saved is up to both: the Trainer's ``save_steps``, and what
    ``checkpoints.should_save`` says; which stay, and whether a save is written in the background, is up to ``checkpoints`` alone.
    ``save_model`` is an error: convert a checkpoint with ``paddle-fsdp-ckpt convert``.
    """

    def __init__(self, *args: Any, checkpoints: CheckpointManager, **kwargs: Any) -> None:
        """Make it.

        Args:
            *args: as for ``Trainer``.
            checkpoints: open until training is over.
            **kwargs: as for ``Trainer``.

        Raises:
            CheckpointError: the Trainer's arguments ask for what can't be had with a sharded model.
        """
        super().__init__(*args, **kwargs)
        refused = [name for name in _REFUSED if getattr(self.args, name, False)]
        if refused:
            raise CheckpointError(f"ShardedTrainer can't train with {', '.join(refused)}; leave them out of the TrainingArguments")
        self._checkpoints = checkpoints
        self._is_sharded = False
        self._saved_step = 0
        self._generators: tuple[Any, ...] | None = None

    def train(self, resume_from_checkpoint: bool | None = None, ignore_keys_for_eval: list[str] | None = None) -> Any:
        """Train, from the beginning or, with ``resume_from_checkpoint=True``, from the newest checkpoint where there is one.

        Raises:
            CheckpointError: ``resume_from_checkpoint`` is a path; the manager knows where checkpoints are.
        """
        if not isinstance(resume_from_checkpoint, bool | None):
            raise CheckpointError("resume_from_checkpoint is True, False or None: checkpoints are in the root of the CheckpointManager")
        if not resume_from_checkpoint or self._checkpoints.latest_step() is None:
            return super().train(None, ignore_keys_for_eval)
        # The Trainer reads its own state from a directory; the rest is not there, and given back by the methods below.
        with tempfile.TemporaryDirectory() as directory:
            return super().train(directory, ignore_keys_for_eval)

    def _wrap_model(self, model: nn.Layer, training: bool = True) -> nn.Layer:
        if training and not self._is_sharded:
            fully_shard(model, optimizer=self.optimizer)
            self._is_sharded = True
        return model

    def _load_from_checkpoint(self, resume_from_checkpoint: str | None = None) -> None:
        """Leave the weights as they are until the model is sharded."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore everything; by now the model is sharded, and its optimizer there."""
        if checkpoint is None:
            return
        self._checkpoints.restore(model=self.model, optimizer=self.optimizer)
        report = self._checkpoints.restored
        assert report is not None
        states = {rank: state["trainer"] for rank, state in report.rank_states.items()}
        # Of this rank where as many ranks saved; else all take what the first rank knew.
        Path(checkpoint, _TRAINER_STATE).write_text(json.dumps(states[min(states)]), encoding="utf-8")
        self._saved_step = report.step
        self._generators = random.getstate(), np.random.get_state(), paddle.get_rng_state()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Put the random number generators where they were; the Trainer calls this once the batches that were seen are skipped."""
        if self._generators is not None:
            of_python, of_numpy, of_paddle = self._generators
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            paddle.set_rng_state(of_paddle)
            self._generators = None

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self._checkpoints.has_schedule:  # else only the Trainer's own says when
            self.control.should_save |= self._checkpoints.should_save(self.state.global_step)
        self.control.should_training_stop |= self._checkpoints.should_stop
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: nn.Layer, metrics: dict[str, Any] | None = None) -> None:
        step = self.state.global_step
        if step > self._saved_step:
            state = {"trainer": dataclasses.asdict(self.state)}
            self._checkpoints.save(step, model=self.model, optimizer=self.optimizer, rank_state=state)
            self._saved_step = step
