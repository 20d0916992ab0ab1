"""Models of many forms: blocks, tied and frozen parameters, parameters and experts that a step doesn't use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import paddle
from harness import this_rank
from paddle import nn
from paddle.nn import functional as F
from paddle.optimizer import AdamW, Momentum
from scenario_table import Scenarios, adamw, sgd
from training_models import (
    AttentionBlock,
    ExpertNet,
    LoRALinear,
    Net,
    Odd,
    SavingBlock,
    Unused,
    WeirdlyNamedThing,
)
from training_runs import VOCABULARY, Run

SCENARIOS = Scenarios()
scenario = SCENARIOS.scenario
_add = SCENARIOS.add


for _count in (1, 2, 5, 12):
    _add(f"blocks_{_count}", functools.partial(Net, _count))
_add("blocks_of_any_name", functools.partial(Net, 2, None, WeirdlyNamedThing), adamw)
_add("attention_blocks", functools.partial(Net, 3, None, AttentionBlock), adamw)
_add("tied_by_matmul_in_the_root", functools.partial(Net, 2, "matmul"), adamw)
_add("tied_by_matmul_in_the_root_sgd", functools.partial(Net, 3, "matmul"))
_add("tied_by_the_same_parameter", functools.partial(Net, 2, "same"), adamw)
_add("tied_by_the_same_parameter_sgd", functools.partial(Net, 2, "same"))
_add("parameters_smaller_than_the_world", functools.partial(Net, 2, None, Odd))
_add("parameters_smaller_than_the_world_adamw", functools.partial(Net, 2, None, Odd), adamw)
_add("pylayers_that_save_weights", functools.partial(Net, 2, None, SavingBlock))


def _adapters(model: nn.Layer) -> Any:
    return adamw(model)


def _lora() -> nn.Layer:
    model = Net(3, None, LoRALinear)
    for layer in (model.embed, model.norm, model.head):
        for parameter in layer.parameters():
            parameter.stop_gradient = True
    return model


_add("everything_frozen_but_adapters", _lora, sgd)
_add("everything_frozen_but_adapters_adamw", _lora, adamw)


def _frozen(which: Callable[[str], bool], tied: str | None = None) -> nn.Layer:
    model = Net(3, tied)
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = which(name)
    return model


_add("first_frozen", lambda: _frozen(lambda name: name.startswith(("embed", "blocks.0"))))
_add("between_frozen", lambda: _frozen(lambda name: name.startswith("blocks.1")))
_add("last_frozen", lambda: _frozen(lambda name: name.startswith(("blocks.2", "norm", "head"))))
_add("biases_frozen", lambda: _frozen(lambda name: name.endswith("bias")))
_add("all_but_biases_frozen", lambda: _frozen(lambda name: not name.endswith("bias")), adamw)
_add("tied_and_frozen", lambda: _frozen(lambda name: name.startswith("embed"), "same"))
_add("one_trains", lambda: _frozen(lambda name: name != "blocks.1.up.weight"), adamw)


@scenario
def freeze_and_unfreeze(run: Run) -> None:
    model = Net(3)
    first, later = model.blocks[1].parameters(), model.embed.parameters()
    for parameter in later:
        parameter.stop_gradient = True
    optimizer = run.start(model, lambda model: AdamW(0.01, parameters=model.parameters()))
    run.train(model, optimizer, 2)
    for parameter in first:
        parameter.stop_gradient = True
    run.train(model, optimizer, 2, first=2)
    for parameter in [*first, *later]:
        parameter.stop_gradient = False
    run.train(model, optimizer, 2, first=4)


def _branch_loss(used: Callable[[Run, int], bool]) -> Callable[[Run, nn.Layer, int], paddle.Tensor]:
    def loss(run: Run, model: nn.Layer, step: int) -> paddle.Tensor:
        tokens = run.batch(step)
        return F.cross_entropy(model(tokens, used(run, step)).reshape([-1, VOCABULARY]), tokens.reshape([-1]))

    return loss


@scenario
def parameters_unused_for_ever_or_in_a_step(run: Run) -> None:
    model = Unused()
    run.train(model, run.start(model, adamw), 4, _branch_loss(lambda _, step: step % 2 == 1))


@scenario
def parameters_unused_in_a_step_and_gradients_dropped(run: Run) -> None:
    model = Unused()
    optimizer = run.start(model, lambda model: Momentum(0.1, parameters=model.parameters()))
    for step in range(4):
        loss = _branch_loss(lambda _, step: step % 2 == 1)(run, model, step)
        run.step(model, optimizer, loss, set_to_zero=False)
    run.note_weights(model)


@scenario
def parameters_unused_on_one_rank(run: Run) -> None:
    model = Unused()
    optimizer = run.start(model, adamw)
    for step in range(3):
        tokens = run.batch(step)
        if run.sharded:
            loss = F.cross_entropy(model(tokens, run.rank == 0).reshape([-1, VOCABULARY]), tokens.reshape([-1]))
        else:
            loss = _by_parts(model, tokens)
        run.step(model, optimizer, loss, set_to_zero=False)
    run.note_weights(model)


def _by_parts(model: nn.Layer, tokens: paddle.Tensor) -> paddle.Tensor:
    parts = tokens.split(this_rank().world_size)
    losses = [F.cross_entropy(model(part, number == 0).reshape([-1, VOCABULARY]), part.reshape([-1])) for number, part in enumerate(parts)]
    return paddle.add_n(losses) / len(losses)


# Experts: a rank's tokens miss some, or all ranks' do.

_add(
    "experts_missed_by_a_rank",
    lambda: ExpertNet(lambda tokens: tokens[:, :1].expand([-1, 5]) % 4),
    sgd,
    loss=lambda r, m, s: _flat_loss(r, m, s),
)
_add("experts_missed_by_all", lambda: ExpertNet(lambda tokens: tokens % 2), adamw, loss=lambda r, m, s: _flat_loss(r, m, s))


def _flat_loss(run: Run, model: nn.Layer, step: int) -> paddle.Tensor:
    tokens = run.batch(step)
    return F.cross_entropy(model(tokens), tokens.reshape([-1]))
