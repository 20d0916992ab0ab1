"""``plot``: the shard map as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..export.picture import draw
from ..export.shard_map import read_shard_map
from .command import Command, Report


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a checkpoint's directory, ours or stock Paddle's")
    parser.add_argument(
        "--out", default="shard_map.png", metavar="FILE", help="the picture, .png or .svg, which is written over (default: shard_map.png)"
    )


def _run(arguments: argparse.Namespace) -> tuple[Report, bool]:
    return draw(read_shard_map(Path(arguments.directory)), arguments.out), True


PLOT = Command("draw which rank holds what of each flat buffer", _add_arguments, _run)
