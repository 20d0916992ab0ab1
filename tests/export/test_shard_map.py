"""The shard map of real checkpoints against the runtime's own buffers, and the pictures of it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import planned_models
import pytest
from harness import RankPool

from paddle_fsdp_ckpt.cli.main import main
from paddle_fsdp_ckpt.export.picture import draw
from paddle_fsdp_ckpt.export.shard_map import read_shard_map
from paddle_fsdp_ckpt.layout import FlatBuffer, Range
from paddle_fsdp_ckpt.pieces import Piece
from paddle_fsdp_ckpt.storage.format import MANIFEST_NAME, rank_file_name
from paddle_fsdp_ckpt.storage.manifest import Manifest, utc_now
from paddle_fsdp_ckpt.storage.writer import write_rank_file

Ranks = Callable[[int], RankPool]

UNITS: dict[str, planned_models.Units] = json.loads(Path(__file__).with_name("paddleformers_units.json").read_text())


@pytest.mark.parametrize(("case", "world_size"), [("qwen3_moe", 3), ("llama/tied", 2), ("qwen2", 1)])
def test_buffers_are_those_of_the_runtime(case: str, world_size: int, tmp_path: Path, ranks: Ranks) -> None:
    saved = tmp_path / "saved"
    results = ranks(world_size).run(planned_models.shard_and_save, str(saved), UNITS[case], "AdamW", {"multi_precision": True})
    layouts: list[FlatBuffer] = results[0][0]
    found = read_shard_map(saved)
    assert (found.is_exact, found.world_size) == (True, world_size)
    right = {layout.name: layout for layout in layouts}
    assert sorted(right) == sorted(f"{name}/{one.dtype}" for one in found.buffers for name in one.copies)
    for one in found.buffers:
        layout = right[f"{one.name}/{one.dtype}"]
        assert (one.numel, one.shard_numel) == (layout.numel, layout.shard_numel)
        assert [(place.name, place.range) for place in one.places] == [(slot.name, slot.range) for slot in layout.slots]
        for place, slot in zip(one.places, layout.slots, strict=True):
            owned = {rank: layout.local_range(slot, rank) for rank in range(world_size)}
            assert place.parts == {rank: part for rank, part in owned.items() if part.numel}
    units = [name for one in found.buffers for name in one.copies]
    assert units[0].endswith("embed_tokens") and [name for name in units if "layers" not in name] == [
        name for name, _ in UNITS[case] if "layers" not in name
    ]


def write_cut_evenly(path: Path) -> None:
    """A checkpoint whose two parameters are each cut in the middle, as no runtime cuts them."""
    path.mkdir()
    records = []
    for rank, part in enumerate((Range(0, 5), Range(5, 10))):
        pieces = [Piece(name, "float32", (10,), (0,), (10,), part) for name in ("blocks.0.weight", "blocks.0.bias")]
        records.append(write_rank_file(path / rank_file_name(rank), [(piece, np.zeros(5, np.float32).data) for piece in pieces]))
    (path / MANIFEST_NAME).write_text(Manifest(3, 2, utc_now(), {}, [], None, tuple(records)).to_json())


def test_what_was_cut_otherwise_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cut_evenly(tmp_path / "saved")
    found = read_shard_map(tmp_path / "saved")
    (buffer,) = found.buffers
    assert not found.is_exact and buffer.padding == 0
    assert [place.range for place in buffer.places] == [Range(0, 10), Range(10, 20)]
    assert main(["plot", str(tmp_path / "saved"), "--out", str(tmp_path / "map.svg")]) == 0
    assert "padding isn't known" in capsys.readouterr().out
    text = (tmp_path / "map.svg").read_text()
    assert ">blocks.0<" in text
    assert ">rank 0<" in text and "Not cut as fully_shard does by default" in text


def test_pictures(tmp_path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {
        "embed.weight": [100, 16],
        **{f"layers.{i}.experts.{j}.weight": [16, 16] for i in range(3) for j in range(20)},
        "norm.bias": [3],
    }
    units: planned_models.Units = [("all of it", [([name], shape, "float32") for name, shape in shapes.items()])]
    ranks(2).run(planned_models.shard_and_save, str(tmp_path / "saved"), units, "SGD", {})
    assert main(["plot", str(tmp_path / "saved"), "--out", str(tmp_path / "map.png"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    found = read_shard_map(tmp_path / "saved")
    for name in ("one.svg", "two.svg"):
        draw(found, tmp_path / name)
    text = (tmp_path / "one.svg").read_text()
    for said in (
        "saved: parameters on 2 ranks",
        ">embed.weight<",
        ">experts.*  (20 parameters)<",
        ">layers.0 ... 2<",
        "norm.bias",
        ">padding<",
    ):
        assert said in text
    assert text == (tmp_path / "two.svg").read_text()
    # A number alone would look as a rank's.
    buffers = [replace(found.buffers[0], name="0", copies=("0",)), replace(found.buffers[-1], name="2", copies=("2", "3"))]
    draw(replace(found, buffers=tuple(buffers)), tmp_path / "two.svg")
    assert all(said in (tmp_path / "two.svg").read_text() for said in (">layer 0<", ">layer 2 ... 3<"))
    # A long name is two lines, and what has no room even so is cut off at the beginning.
    long = ("model.layers.0.mlp.shared_expert.up_gate_proj", "model.layers.1.mlp.shared_expert.up_gate_proj")
    buffers = [replace(found.buffers[0], copies=long), replace(found.buffers[-1], copies=("x" * 30 + "y" * 33,))]
    draw(replace(found, buffers=tuple(buffers)), tmp_path / "two.svg")
    text = (tmp_path / "two.svg").read_text()
    assert all(
        f">{said}<" in text for said in ("model.layers.0 ... 1.mlp.", "shared_expert.up_gate_proj", "\N{HORIZONTAL ELLIPSIS}" + "y" * 33)
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["map.png", "one.svg", "saved", "two.svg"]
    assert main(["plot", str(tmp_path / "saved"), "--out", str(tmp_path / "map.jpg")]) == 2
    assert "pictures are written as .png or .svg" in capsys.readouterr().err
    assert main(["plot", str(tmp_path / "saved"), "--out", str(tmp_path / "nowhere" / "map.png")]) == 2
    assert f"there is no directory '{tmp_path / 'nowhere'}' for 'map.png'; make it" in capsys.readouterr().err
    assert main(["plot", str(tmp_path / "nowhere")]) == 2


def test_without_matplotlib_the_extra_is_named(tmp_path: Path) -> None:
    write_cut_evenly(tmp_path / "saved")
    script = """
        import sys
        class NoMatplotlib:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "matplotlib":
                    raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        sys.meta_path.insert(0, NoMatplotlib())
        from paddle_fsdp_ckpt.cli.main import main
        sys.exit(main(["plot", sys.argv[1], "--out", sys.argv[1] + ".png"]))
        """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60, check=False)
    assert done.returncode == 2
    assert "plot needs matplotlib" in done.stderr and "pip install 'paddle_fsdp_ckpt[plot]'" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "saved.png").exists()
