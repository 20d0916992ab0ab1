"""``convert``: a checkpoint in another form."""

from __future__ import annotations

import argparse
import re
import sys

from ..export.huggingface import DEFAULT_MAX_SHARD_NBYTES, export_huggingface
from ..export.recipes import AUTO
from .command import Command, Report
from .progress import ProgressLine

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"([0-9]{1,15})\s*([A-Za-z]*)", re.ASCII)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the checkpoint's directory, ours or stock Paddle's")
    parser.add_argument("--to", required=True, choices=["hf"], help="hf: the files of a Hugging Face model")
    parser.add_argument("out", metavar="OUT", help="the directory to make; missing or empty")
    parser.add_argument("--config", metavar="DIR", help="where config.json and tokenizer files lie, which are copied")
    parser.add_argument(
        "--recipe",
        default=AUTO,
        metavar="NAME|FILE",
        help="the model's family, a file, or none to copy names and layouts as they are (default: what config.json says)",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="of all floating point tensors (default: each as it is stored)")
    parser.add_argument("--master-weights", action="store_true", help="take values from the optimizer's master weights, where it has some")
    parser.add_argument(
        "--max-shard-size", type=_size, default=DEFAULT_MAX_SHARD_NBYTES, metavar="SIZE", help="of a file, such as 500MB (default: 5GB)"
    )


def _run(arguments: argparse.Namespace) -> tuple[Report, bool]:
    with ProgressLine(sys.stderr) as progress:
        report = export_huggingface(
            arguments.directory,
            arguments.out,
            recipe=arguments.recipe,
            config=arguments.config,
            dtype=_DTYPES.get(arguments.dtype),
            master_weights=arguments.master_weights,
            max_shard_nbytes=arguments.max_shard_size,
            progress=progress,
        )
    return report, True


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text)
    nbytes = int(found[1]) * _UNITS.get(found[2].upper(), 0) if found else 0
    if not nbytes:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 5GB or 500MiB")
    return nbytes


CONVERT = Command("write a checkpoint's model as the files of a Hugging Face model", _add_arguments, _run)
