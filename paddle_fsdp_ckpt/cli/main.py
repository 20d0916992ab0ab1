"""The commands, and what they print."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckpointError
from ..export.roots import entries_of, verify_root
from ..progress import ProgressLine
from ..storage.salvage import salvage
from ..storage.system_errors import describe_error
from ..storage.verify import verify
from ..version import __version__
from .command import Command, Report
from .convert import CONVERT
from .look import DIFF, INSPECT
from .options import directories_first, positive
from .plan import PLAN
from .plot import PLOT
from .show import show

GOOD, FOUND, CANNOT = 0, 1, 2
"""The exit statuses."""


def _verify(arguments: argparse.Namespace) -> tuple[Report, bool]:
    directory = Path(arguments.directory)
    entries = entries_of(directory)
    with ProgressLine(sys.stderr) as progress:
        if entries.checkpoints:
            in_root = verify_root(entries, workers=arguments.workers, progress=progress)
            return in_root, in_root.is_good
        report = verify(directory, workers=arguments.workers, progress=progress)
        return report, report.is_good


def _salvage(arguments: argparse.Namespace) -> tuple[Report, bool]:
    with ProgressLine(sys.stderr) as progress:
        report = salvage(arguments.directory, workers=arguments.workers, progress=progress, without_manifest=arguments.without_manifest)
    return report, report.is_whole


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the checkpoint's directory, or one in which such lie, of which each is checked")
    _add_workers(parser)


def _add_salvage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the checkpoint's directory")
    parser.add_argument(
        "--without-manifest", action="store_true", help="where manifest.json is lost, go by the headers of the other files, without digests"
    )
    _add_workers(parser)


def _add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=positive, metavar="N", help="threads that read (default: one a processor, 8 at most)")


_COMMANDS = {
    "verify": Command("check every byte of a checkpoint, and name all that is wrong", _add_verify, _verify),
    "salvage": Command("list what is intact in a damaged checkpoint, and what is not", _add_salvage, _salvage),
    "inspect": INSPECT,
    "diff": DIFF,
    "convert": CONVERT,
    "plan": PLAN,
    "plot": PLOT,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        # Keys and paths may hold what the locale can't encode; an error of Python's own would end with the status of something found.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    name, *words = list(sys.argv[1:] if arguments is None else arguments) or [""]
    count = _COMMANDS[name].directories if name in _COMMANDS else 0
    parsed = _parser().parse_args([*([name] if name else []), *(directories_first(words, count) if count else words)])
    try:
        report, is_good = _COMMANDS[parsed.command].run(parsed)
    except CheckpointError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(describe_error(error))
    try:
        show(report, as_json=parsed.json)
        sys.stdout.flush()
    except BrokenPipeError:  # such as | head, which has seen enough; Python would complain once more when it ends
        _leave_stdout()
    except OSError as error:  # such as of a full disk
        _leave_stdout()
        return _refuse(f"the report could not be written: {describe_error(error)}")
    return GOOD if is_good else FOUND


def _leave_stdout() -> None:
    """Let go of what could not be written; Python would try again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(text: str) -> int:
    print(f"paddle-fsdp-ckpt: {text}", file=sys.stderr)
    return CANNOT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paddle-fsdp-ckpt",
        description="Look into checkpoints of paddle_fsdp_ckpt and of stock Paddle, convert them, and plan them. Paddle isn't needed.",
        epilog="Exit status: 0 all is good, 1 it found something, 2 it can't.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        one = commands.add_parser(name, help=command.help, description=command.help)
        command.add_arguments(one)
        one.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser
