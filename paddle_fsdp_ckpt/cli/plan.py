"""``plan``: what a run will need."""

from __future__ import annotations

import argparse
from itertools import chain

from ..export.planning.plan import DEFAULT_OPTIMIZER, plan_run
from ..optimizer_states import CATALOG
from .command import Command, Report
from .options import DTYPES, positives

_OPTIMIZERS = {name.lower(): name for name in CATALOG}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.json", help="a Hugging Face model's configuration, or the directory in which it lies")
    parser.add_argument(
        "--world-size",
        type=positives,
        nargs="+",
        action="extend",
        required=True,
        metavar="N",
        help="numbers of ranks, with blanks or commas between them",
    )
    parser.add_argument(
        "--optimizer",
        type=str.lower,
        choices=_OPTIMIZERS,
        default=DEFAULT_OPTIMIZER.lower(),
        help=f"a class of paddle.optimizer (default: {DEFAULT_OPTIMIZER.lower()})",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the parameters (default: what the configuration says, else fp32)")
    parser.add_argument(
        "--master-weights",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether the optimizer keeps float32 copies of parameters in fp16 and bf16 (default: yes)",
    )


def _run(arguments: argparse.Namespace) -> tuple[Report, bool]:
    report = plan_run(
        arguments.config,
        list(dict.fromkeys(chain.from_iterable(arguments.world_size))),
        optimizer=_OPTIMIZERS[arguments.optimizer],
        dtype=DTYPES.get(arguments.dtype),
        master_weights=arguments.master_weights,
    )
    return report, True


PLAN = Command(
    "say what a run will need on each rank, and what its checkpoints will be, from a model's configuration", _add_arguments, _run
)
