"""How much memory converting a large checkpoint takes: the kernel's own figure, of a process that does nothing else.

    python benchmarks/convert_memory.py [--gigabytes 4] [--ranks 4] [--workers 1]

It writes a synthetic checkpoint of a Qwen3 mixture of experts in float32, converts it to the files of a Hugging Face model in bfloat16 and
back, each in a process of its own, and prints how long that took and the most memory that it had. Exit status 1 where that is above
``--most`` megabytes (600). No Paddle is needed, and about two and a half times the checkpoint's size on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from paddle_fsdp_ckpt.export.config import read_config
from paddle_fsdp_ckpt.export.planning.architecture import planned_units
from paddle_fsdp_ckpt.export.planning.pieces import planned_layout, rank_pieces
from paddle_fsdp_ckpt.storage.format import MANIFEST_NAME, rank_file_name
from paddle_fsdp_ckpt.storage.manifest import Manifest, utc_now
from paddle_fsdp_ckpt.storage.writer import write_rank_file

_CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 50_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 384,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}
_LAYER_NBYTES = 4 * 64 * 3 * 1024 * 384


def main() -> int:
    """Run the command line, and return the exit status."""
    parser = argparse.ArgumentParser(description="Measure the memory of converting a large checkpoint.")
    parser.add_argument("--gigabytes", type=float, default=4, help="size of the checkpoint (default: 4)")
    parser.add_argument("--ranks", type=int, default=4, help="that saved it (default: 4)")
    parser.add_argument("--workers", type=int, default=1, help="of the conversion (default: 1)")
    parser.add_argument("--most", type=float, default=600, metavar="MB", help="what is too much (default: 600)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        layers = max(1, round(arguments.gigabytes * 1e9 / _LAYER_NBYTES))
        (root / "config.json").write_text(json.dumps(_CONFIG | {"num_hidden_layers": layers}))
        written = _write_checkpoint(root, arguments.ranks)
        size = sum(path.stat().st_size for path in (root / "saved").iterdir())
        print(f"a checkpoint of {size / 1e9:.2f} GB on {arguments.ranks} ranks, the largest tensor {written / 1e6:.0f} MB")
        workers = ["--workers", str(arguments.workers)]
        out = [str(root / "model"), "--config", str(root), "--dtype", "bf16"]
        peaks = [
            _run("convert", str(root / "saved"), "--to", "hf", *out, *workers),
            _run("convert", str(root / "model"), "--to", "fc", str(root / "again"), "--dtype", "fp32", *workers),
        ]
    return int(max(peaks) > arguments.most)


def _write_checkpoint(root: Path, ranks: int) -> int:
    """Write the checkpoint, and return how many bytes its largest tensor has."""
    layout = planned_layout(planned_units(read_config(root), "float32"), ranks)
    most = max(slot.numel for buffer in layout.buffers for slot in buffer.slots)
    values = np.random.RandomState(0).standard_normal(most).astype(np.float32)
    (root / "saved").mkdir()
    records = []
    for rank in range(ranks):
        pieces = [(piece, values[: piece.numel].data) for piece in rank_pieces(layout, rank, lambda _: ())]
        records.append(write_rank_file(root / "saved" / rank_file_name(rank), pieces))
    manifest = Manifest(1, ranks, utc_now(), {}, [], None, tuple(records))
    (root / "saved" / MANIFEST_NAME).write_text(manifest.to_json())
    return 4 * most


_MEASURED = """
import sys
from pathlib import Path
from paddle_fsdp_ckpt.cli.main import main
status = main(sys.argv[1:])
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
sys.exit(status)
"""
"""The figure is that of the program itself; what the system says of a child that ended counts its parent in."""


def _run(*command: str) -> float:
    """Run a command, and return the most memory that it had, in megabytes."""
    started = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", _MEASURED, *command], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    peak = int(done.stdout.split()[-1]) * 1024 / 1e6
    print(f"{command[0]} --to {command[3]}: {time.perf_counter() - started:.1f} s, {peak:.0f} MB", flush=True)
    return peak


if __name__ == "__main__":
    sys.exit(main())
