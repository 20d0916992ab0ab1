"""``convert``: a checkpoint in another form."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from ..errors import CheckpointError
from ..export.from_huggingface import import_huggingface
from ..export.huggingface import DEFAULT_MAX_SHARD_NBYTES, export_huggingface
from ..export.peft import export_peft
from ..export.recipes import AUTO
from ..progress import ProgressLine
from .command import Command, Report
from .options import DTYPES, positive

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"([0-9]{1,15})\s*([A-Za-z]*)", re.ASCII)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", metavar="DIR", help="a checkpoint's directory, ours or stock Paddle's; with --to fc a Hugging Face model's"
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=["hf", "fc", "peft"],
        help="hf: a Hugging Face model out of a checkpoint; fc: a checkpoint out of a Hugging Face model (FlexCheckpoint is what Paddle "
        "calls its format, and ours is one of its kind); peft: LoRA adapters alone, out of a checkpoint",
    )
    parser.add_argument("out", metavar="OUT", help="the directory to make; missing or empty")
    parser.add_argument("--model", metavar="NAME", help="hf, peft: which one, where the checkpoint holds several under names")
    parser.add_argument("--config", metavar="DIR|FILE", help="hf, peft: config.json, or where it lies; hf copies it, with tokenizer files")
    parser.add_argument(
        "--recipe",
        default=AUTO,
        metavar="NAME|FILE",
        help="the model's family, a file, or none to copy names and layouts as they are (default: what config.json says)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of all floating point tensors (default: each as it is stored)")
    parser.add_argument(
        "--master-weights", action="store_true", help="hf: take values from the optimizer's master weights, where there are"
    )
    parser.add_argument(
        "--base", metavar="DIR", help="hf: the base of the LoRA adapters, to merge them into: a checkpoint, or a Hugging Face model"
    )
    parser.add_argument("--merge-lora", action="store_true", help="hf: merge the LoRA adapters in DIR into the weights there")
    parser.add_argument("--allow-other-base", action="store_true", help="hf: merge into another base than the one of the adapters")
    parser.add_argument("--lora-alpha", type=float, metavar="A", help="hf, peft: adapters scale by A / r (default: as the checkpoint says)")
    parser.add_argument("--optimizer", action="store_true", help="hf: write the optimizer's states too, into OUT/optimizer")
    parser.add_argument("--workers", type=positive, metavar="N", help="hf, fc: threads that read and convert (default: 1)")
    parser.add_argument("--max-shard-size", type=_size, metavar="SIZE", help="hf: of a file, such as 500MB (default: 5GB)")


def _run(arguments: argparse.Namespace) -> tuple[Report, bool]:
    with ProgressLine(sys.stderr) as progress:
        _check_options(arguments)
        return {"hf": _to_huggingface, "fc": _to_checkpoint, "peft": _to_peft}[arguments.to](arguments, progress), True


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise where options were given that are for another form."""
    of_forms = {
        "base": ["hf"],
        "merge_lora": ["hf"],
        "allow_other_base": ["hf"],
        "max_shard_size": ["hf"],
        "optimizer": ["hf"],
        "workers": ["hf", "fc"],
        "model": ["hf", "peft"],
        "config": ["hf", "peft"],
        "master_weights": ["hf", "peft"],
        "lora_alpha": ["hf", "peft"],
    }
    for name, forms in of_forms.items():
        if getattr(arguments, name) not in (None, False) and arguments.to not in forms:
            raise CheckpointError(f"--{name.replace('_', '-')} is for --to {' and '.join(forms)}; leave it out")


def _of_a_checkpoint(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what is said of a checkpoint's model, whatever it becomes."""
    return {
        "recipe": arguments.recipe,
        "config": arguments.config,
        "dtype": DTYPES.get(arguments.dtype),
        "master_weights": arguments.master_weights,
        "lora_alpha": arguments.lora_alpha,
        "model_name": arguments.model,
    }


def _to_huggingface(arguments: argparse.Namespace, progress: ProgressLine) -> Report:
    report = export_huggingface(
        arguments.directory,
        arguments.out,
        **_of_a_checkpoint(arguments),
        base=arguments.base,
        merge_lora=arguments.merge_lora,
        allow_other_base=arguments.allow_other_base,
        max_shard_nbytes=arguments.max_shard_size or DEFAULT_MAX_SHARD_NBYTES,
        optimizer=arguments.optimizer,
        workers=arguments.workers or 1,
        progress=progress,
    )
    if report.unchecked is not None:
        print(f"paddle-fsdp-ckpt: {report.unchecked}", file=sys.stderr)
    return report


def _to_checkpoint(arguments: argparse.Namespace, progress: ProgressLine) -> Report:
    return import_huggingface(
        arguments.directory,
        arguments.out,
        recipe=arguments.recipe,
        dtype=DTYPES.get(arguments.dtype),
        progress=progress,
        workers=arguments.workers or 1,
    )


def _to_peft(arguments: argparse.Namespace, progress: ProgressLine) -> Report:
    return export_peft(arguments.directory, arguments.out, **_of_a_checkpoint(arguments), progress=progress)


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text)
    nbytes = int(found[1]) * _UNITS.get(found[2].upper(), 0) if found else 0
    if not nbytes:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 5GB or 500MiB")
    return nbytes


CONVERT = Command(
    "write a checkpoint's model as a Hugging Face model, or as LoRA adapters; or such a model as a checkpoint", _add_arguments, _run
)
