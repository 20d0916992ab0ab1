"""Make ``commands.md``: each command of the command line, run on small checkpoints, with what it printed.

    python docs/make_commands.py     # writes commands.md, and shard_map.png by the command plot

The checkpoints are made of a configuration and of random numbers that are the same each time; no Paddle is needed. A test compares the
page with what the commands print.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from paddle_fsdp_ckpt.cli.main import main as run_command  # noqa: E402
from paddle_fsdp_ckpt.export.config import read_config  # noqa: E402
from paddle_fsdp_ckpt.export.planning.architecture import planned_units  # noqa: E402
from paddle_fsdp_ckpt.export.planning.pieces import planned_layout, rank_pieces  # noqa: E402
from paddle_fsdp_ckpt.export.planning.states import planned_states  # noqa: E402
from paddle_fsdp_ckpt.pieces import Piece  # noqa: E402
from paddle_fsdp_ckpt.storage.format import MANIFEST_NAME, rank_file_name  # noqa: E402
from paddle_fsdp_ckpt.storage.manifest import Manifest  # noqa: E402
from paddle_fsdp_ckpt.storage.writer import write_rank_file  # noqa: E402

PAGE, PICTURE = "commands.md", "shard_map.png"
_LINES, _WIDTH = 28, 200
"""What is cut off on the page."""

_TINY = {
    "model_type": "qwen3_moe",
    "vocab_size": 500,
    "hidden_size": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_QWEN3_30B_A3B = json.loads((HERE / "qwen3_30b_a3b.json").read_text(encoding="utf-8"))

_TEXT: list[tuple[str, Sequence[str | tuple[str, ...]]]] = [
    (
        "**inspect** says what a checkpoint holds, and, of a directory in which checkpoints lie, which there are.",
        [
            ("inspect", "checkpoints"),
            ("inspect", "checkpoints/step_00000100", "--keys", "*.0.self_attn.*.weight"),
            ("inspect", "checkpoints/step_00000100", "--keys", "model.norm.*", "--stats"),
        ],
    ),
    (
        (
            "**verify** compares every byte with its digest: of one checkpoint, or of each in a directory. Here a bit of a third one "
            "was flipped. **salvage** says what is intact of it."
        ),
        [("verify", "checkpoints"), ("salvage", "checkpoints/step_00000300")],
    ),
    (
        (
            "**diff** compares two, saved on any numbers of ranks and with any param groups: which keys only one has, which shapes,"
            " dtypes, hyper-parameters, steps and `extra_state` differ, and, of every other key, how many elements differ in a bit "
            "and by how much at most: the model's first, and of these those that moved most. `--keys` compares such keys only, "
            "`--weights-only` parameters and buffers only. Its exit status is that of `diff`. Of stock Paddle's directories, keys "
            "and values only; of what a manager keeps for each rank by itself, nothing."
        ),
        [
            ("diff", "checkpoints/step_00000100", "checkpoints/step_00000200"),
            ("diff", "checkpoints/step_00000100", "checkpoints/step_00000200", "--keys", "*norm.weight"),
        ],
    ),
    (
        (
            "**convert** writes a checkpoint's model as the files of a Hugging Face model; with `--optimizer` the optimizer's states too, "
            "[in this form](optimizer_export.md)."
        ),
        [
            ("convert", "checkpoints/step_00000200", "--to", "hf", "my-model", "--config", "config", "--dtype", "bf16", "--optimizer"),
            ("convert", "checkpoints/step_00000100", "--to", "hf", "my-model", "--config", "config"),
        ],
    ),
    (
        "And such files as a checkpoint, with which a fine-tune can start:",
        [
            ("convert", "my-model", "--to", "fc", "start", "--dtype", "fp32"),
            ("diff", "checkpoints/step_00000200", "start", "--weights-only", "--keys", "*.0.self_attn.*"),
        ],
    ),
    (
        (
            "**plan** says what a run will need before there is one, from a `config.json` alone; here the real one of Qwen3-30B-A3B. "
            "`--optimizer`, `--dtype` and `--no-master-weights` say more of it. The layout is the one that `fully_shard` makes."
        ),
        [("plan", "Qwen3-30B-A3B/config.json", "--world-size", "8", "64", "1024")],
    ),
    (
        (
            "**plot** draws which rank holds what of each flat buffer, as `.png` or `.svg`. It needs matplotlib: "
            "`pip install 'paddle_fsdp_ckpt[plot]'`."
        ),
        [("plot", "checkpoints/step_00000200", "--out", PICTURE)],
    ),
]


def main() -> None:
    """Write the page and the picture."""
    with _in_a_new_directory():
        (HERE / PAGE).write_text(make_page(), encoding="utf-8")
        shutil.copyfile(PICTURE, HERE / PICTURE)


def make_page() -> str:
    """Make the checkpoints in the current directory, run the commands there, and return the page."""
    _make_checkpoints()
    lines = [
        "# The command line",
        "",
        "Made by `python docs/make_commands.py`, which runs each command and takes down what it prints;",
        "long outputs are cut here. All commands also have `--json`.",
    ]
    for text, commands in _TEXT:
        lines += ["", text]
        for command in commands:
            lines += ["", "```", *_run(command), "```"]
    return "\n".join([*lines, "", f"![The shard map]({PICTURE})", ""])


def _run(command: Sequence[str]) -> list[str]:
    """Run a command, and return its line and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = run_command(command)
    line = " ".join(f"'{word}'" if "*" in word else word for word in command)
    output = printed.getvalue().replace(f"{os.path.realpath('.')}/", "").rstrip("\n").split("\n")
    shown = [text if len(text) <= _WIDTH else f"{text[:_WIDTH]} [...]" for text in output[:_LINES]]
    shown += [f"[... {len(output) - _LINES} lines more]"] if len(output) > _LINES else []
    return [f"$ paddle-fsdp-ckpt {line}", *shown, *([f"(exit status {status})"] if status else [])]


def _make_checkpoints() -> None:
    for folder, fields in (("config", _TINY), ("Qwen3-30B-A3B", _QWEN3_30B_A3B)):
        Path(folder).mkdir()
        Path(folder, "config.json").write_text(json.dumps(fields, indent=1))
    for step, ranks, decay in ((100, 2, 0.1), (200, 3, 0.05), (300, 2, 0.1)):
        _write_checkpoint(Path("checkpoints", f"step_{step:08d}"), step, ranks, decay)
    with open("checkpoints/step_00000300/0_0.safetensors", "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def _write_checkpoint(path: Path, step: int, ranks: int, decay: float) -> None:
    path.mkdir(parents=True)
    layout = planned_layout(planned_units(read_config(Path("config")), "float32"), ranks)
    records = []
    for rank in range(ranks):
        pieces = list(rank_pieces(layout, rank, lambda dtype: planned_states("AdamW", dtype, master_weights=False)))
        records.append(write_rank_file(path / rank_file_name(rank), [(piece, _values(piece, step)) for piece in pieces]))
    names = [slot.name for buffer in layout.buffers for slot in buffer.slots]
    settings = {"weight_decay": decay, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "grad_clip": None}
    rate = 0.001 * (1 + math.cos(math.pi * step / 1000)) / 2
    schedule = {
        "scheduler": "CosineAnnealingDecay",
        "state": {"last_epoch": step, "last_lr": rate},
        "settings": {"T_max": 1000, "base_lr": 0.001},
    }
    optimizer = {
        "class": "AdamW",
        "groups": [{"parameters": names, "settings": settings}],
        "without_gradient": [],
        "learning_rate": schedule,
    }
    versions = {"paddle": "3.3.1", "paddle_fsdp_ckpt": "0.1.0"}
    created = f"2026-11-30T0{step // 100}:00:00+00:00"
    (path / MANIFEST_NAME).write_text(Manifest(step, ranks, created, versions, [optimizer], {"epoch": 1}, tuple(records)).to_json())


def _values(piece: Piece, step: int) -> memoryview:
    """Return values that depend on key and step alone; norms are the same at each step."""
    for state, beta in (("beta1_pow_acc_0", 0.9), ("beta2_pow_acc_0", 0.999)):
        if piece.key.endswith(state):
            return np.array([beta ** (step + 1)], np.float32).data
    seed = zlib.crc32(piece.key.encode()) + (0 if "norm" in piece.key else step)
    whole = np.random.RandomState(seed).standard_normal(piece.global_shape).astype(np.float32).reshape(-1)
    return whole[piece.box_range.start : piece.box_range.stop].data


@contextlib.contextmanager
def _in_a_new_directory() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


if __name__ == "__main__":
    main()
