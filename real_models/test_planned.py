"""``plan`` knows the parameters of PaddleFormers' models before there are any."""

from __future__ import annotations

import json
from pathlib import Path

import planned_cases
import pytest
from harness import RankPool
from shared_settings import SETTINGS

from paddle_fsdp_ckpt.export.config import read_config
from paddle_fsdp_ckpt.export.planning.architecture import planned_units


@pytest.mark.parametrize("family", SETTINGS)
def test_parameters_are_those_of_the_model(single: RankPool, tmp_path: Path, family: str) -> None:
    """Names, shapes and dtypes, in the same units and order."""
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS[family] | {"model_type": family}))
    planned = [
        (unit.name, [(one.names, one.shape, one.dtype) for one in unit.parameters])
        for unit in planned_units(read_config(tmp_path), "float32")
    ]
    assert single.run(planned_cases.units, family) == [planned]
