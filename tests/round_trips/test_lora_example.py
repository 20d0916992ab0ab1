"""The example of docs/lora.md with LoRA adapters runs as it stands, and so do the commands after it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paddle
from harness import RankPool
from safetensors.numpy import load_file

from paddle_fsdp_ckpt.cli.main import main
from paddle_fsdp_ckpt.storage.index import read_index

TEXT = Path(__file__).resolve().parent.parent.parent / "docs" / "lora.md"


def run_example(code: str, directory: str) -> dict[str, np.ndarray]:
    """Run it, and return what its model holds in the end, with the adapters merged."""
    import paddle_fsdp_ckpt as ckpt

    before = Path.cwd()
    os.chdir(directory)
    try:
        names: dict[str, object] = {"__name__": "example"}
        exec(code, names)
    finally:
        os.chdir(before)
    model = names["model"]
    assert isinstance(model, paddle.nn.Layer)
    whole = {name: tensor.numpy() for name, tensor in ckpt.full_state_dict(model, to_rank=None).items()}
    for layer in ("0", "2"):
        whole[f"{layer}.weight"] = whole[f"{layer}.weight"] + 2.0 * whole[f"{layer}.lora_A"] @ whole[f"{layer}.lora_B"]
    return whole


def test_the_example_with_adapters(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    found = re.search(r"<!-- tests/round_trips runs this -->\n```python\n(.*?)```\n\n```bash\n(.*?)```", TEXT.read_text(), re.DOTALL)
    assert found is not None
    whole = ranks(2).run(run_example, found[1], str(tmp_path))[0]
    stored = set(read_index(tmp_path / "checkpoints" / "adapters_10").stored)
    assert {"0.lora_A", "2.lora_B", "2.lora_B.moment1_0"} <= stored
    assert not {"0.weight", "2.bias"} & stored
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        for command in found[2].splitlines():
            assert main(command.split()[1:]) == 0
    finally:
        os.chdir(before)
    merged = load_file(tmp_path / "merged" / "model-00001-of-00001.safetensors")
    assert merged.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, value in merged.items():
        np.testing.assert_allclose(value, whole[name], rtol=1e-5, atol=1e-6)
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert adapters["base_model.model.0.lora_A.weight"].shape == (4, 16)
    assert np.abs(adapters["base_model.model.2.lora_B.weight"]).max() > 0
