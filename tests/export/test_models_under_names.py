"""Exports of a checkpoint that holds models under names, where nobody said which is meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lora_models
import made_models
import numpy as np
import pytest
from harness import RankPool
from published import as_in_paddle, config_of, published
from test_huggingface import assert_equal, read_model, write_config

from paddle_fsdp_ckpt.cli.main import main
from paddle_fsdp_ckpt.errors import CheckpointError, MismatchError
from paddle_fsdp_ckpt.export.huggingface import export_huggingface
from paddle_fsdp_ckpt.export.peft import export_peft

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_which_model_is_asked_for(family: str, tmp_path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = published(family)
    arrays = as_in_paddle(family, tensors, fused=False)
    models = {"model": arrays, "ema": {name: value * 2 for name, value in arrays.items()}}
    ranks(1).run(made_models.save_several, str(tmp_path / "saved"), models)
    config = write_config(tmp_path / "config", config_of(family))
    command = ["convert", str(tmp_path / "saved"), "--to", "hf", str(tmp_path / "out"), "--config", str(config)]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "holds several models: ema, model; say which by --model (model_name=)" in message
    assert "no rule" not in message
    assert main([*command, "--model", "ema"]) == 0
    assert_equal(read_model(tmp_path / "out"), {name: value * 2 for name, value in tensors.items()})


def test_one_model_under_a_name_and_what_is_beside_it(tmp_path: Path, ranks: Ranks) -> None:
    arrays = as_in_paddle("qwen3", published("qwen3"), fused=False)
    config = write_config(tmp_path / "config", config_of("qwen3"))
    for name, beside in (("alone", {}), ("beside", {"reward": {"score.weight": np.ones((4, 1), np.float32)}})):
        ranks(1).run(made_models.save_several, str(tmp_path / name), {"actor": arrays, **beside})
        with pytest.raises(MismatchError, match=r"what lies under actor, without that name: .* Then say so by --model actor"):
            export_huggingface(tmp_path / name, tmp_path / "out", config=config)
        export_huggingface(tmp_path / name, tmp_path / f"{name} out", config=config, model_name="actor")


def test_adapters_of_several_models(tmp_path: Path, ranks: Ranks) -> None:
    arrays = as_in_paddle("qwen3", published("qwen3"), fused=False)
    adapted = arrays | lora_models.adapters_for(["model.layers.0.self_attn.o_proj.weight"], arrays, {})
    ranks(1).run(made_models.save_several, str(tmp_path / "saved"), {"actor": adapted, "critic": adapted})
    ranks(1).run(made_models.save_several, str(tmp_path / "plain"), {"actor": arrays, "critic": arrays})
    for merge in (False, True):
        with pytest.raises(MismatchError, match="holds several models: actor, critic; say which"):
            export_huggingface(tmp_path / "saved", tmp_path / "out", recipe="qwen3", merge_lora=merge)
    with pytest.raises(MismatchError, match="holds several models: actor, critic; say which"):
        export_peft(tmp_path / "saved", tmp_path / "out", recipe="qwen3", lora_alpha=4)
    export_peft(tmp_path / "saved", tmp_path / "out", recipe="qwen3", lora_alpha=4, model_name="critic")
    with pytest.raises(CheckpointError, match="holds no LoRA layers"):
        export_peft(tmp_path / "plain", tmp_path / "other", recipe="qwen3")
