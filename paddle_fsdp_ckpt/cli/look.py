"""``inspect`` and ``diff``: look into checkpoints."""

from __future__ import annotations

import argparse
import sys

from ..export.difference import compare
from ..export.inspection import inspect
from ..progress import ProgressLine
from .command import Command, Report
from .options import KEYS


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a checkpoint's directory, ours or stock Paddle's, or one in which such lie")
    parser.add_argument(
        KEYS, nargs="*", action="extend", metavar="PATTERN", help="list the keys too, all or those like a PATTERN, such as '*.weight'"
    )
    parser.add_argument("--stats", action="store_true", help="read the values of those keys, and say what they are like")


def _inspect(arguments: argparse.Namespace) -> tuple[Report, bool]:
    with ProgressLine(sys.stderr) as progress:
        keys = None if arguments.keys is None else arguments.keys or ["*"]
        report = inspect(arguments.directory, keys=keys, statistics=arguments.stats, progress=progress)
    return report, report.is_good


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("one", metavar="A", help="a checkpoint's directory")
    parser.add_argument("other", metavar="B", help="another's")
    parser.add_argument(
        KEYS, nargs="+", action="extend", metavar="PATTERN", help="compare the keys like a PATTERN, such as '*.weight', and nothing else"
    )
    parser.add_argument("--weights-only", action="store_true", help="compare parameters and buffers, and nothing else")


def _diff(arguments: argparse.Namespace) -> tuple[Report, bool]:
    with ProgressLine(sys.stderr) as progress:
        report = compare(arguments.one, arguments.other, keys=arguments.keys, weights_only=arguments.weights_only, progress=progress)
    return report, report.is_none


INSPECT = Command("say what a checkpoint holds", _add_inspect, _inspect, directories=1)
DIFF = Command("say in what two checkpoints differ; 0: in nothing, 1: in something", _add_diff, _diff, directories=2)
