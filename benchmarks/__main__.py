"""Run the benchmarks and write ``RESULTS.md`` and a plot: ``python -m benchmarks``, from the root of the project."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path

from .bench import Bench
from .cases import cases
from .report import write
from .sizes import FULL, QUICK


def main() -> None:
    """Parse the command line, run, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("cases", nargs="*", help="of big, many, scale, async, gather, step; by default all")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: to try the command")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument(
        "--patience", type=float, default=30, help="seconds after which a contender is not asked again (default: %(default)s)"
    )
    parser.add_argument("--without-torch", action="store_true", help="leave PyTorch out, though it is there")
    parser.add_argument("--directory", type=Path, help="where to write checkpoints; by default a temporary directory")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="where RESULTS.md goes (default: beside this)")
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    known = cases(sizes, options.quick)
    unknown = set(options.cases) - known.keys()
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    with_torch = not options.without_torch and importlib.util.find_spec("torch") is not None
    if not with_torch:
        print("PyTorch is not installed, or was left out: no comparison with FSDP2 and DCP")
    command = " ".join(["python -m benchmarks", *options.cases, *_said(options, parser)])
    options.output.mkdir(exist_ok=True)
    failed = []
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="benchmarks-") as directory:
        bench = Bench(Path(directory), 1 if options.quick else options.repeats, options.patience, with_torch)
        for name in options.cases or known:
            try:
                known[name](bench)
            except RuntimeError as error:
                failed.append(name)
                print(f"{name} did not come to its end: {error}")
            bench.clear()
            # After each case, so that it is there if the next one is interrupted.
            write(options.output, bench.results, _versions(with_torch), sizes, command, (time.monotonic() - start) / 60)
    print(f"{options.output / 'RESULTS.md'} is written")
    if failed:
        sys.exit(1)


def _said(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Return the options that change what is measured and were given."""
    names = ("quick", "repeats", "patience", "without_torch")
    given = {name: getattr(options, name) for name in names if getattr(options, name) != parser.get_default(name)}
    return [f"--{name.replace('_', '-')}" + ("" if value is True else f" {value:g}") for name, value in given.items()]


def _versions(with_torch: bool) -> dict[str, str]:
    from importlib.metadata import version

    from paddle_fsdp_ckpt import __version__

    names = ["paddlepaddle", "safetensors", "numpy", *(["torch"] if with_torch else [])]
    return {"paddle_fsdp_ckpt": __version__, **{name: version(name) for name in names}}


if __name__ == "__main__":
    main()
