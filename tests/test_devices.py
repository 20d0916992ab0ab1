"""The package asks for no kind of device: what names one is listed here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import paddle_fsdp_ckpt

ROOT = Path(paddle_fsdp_ckpt.__file__).parent
DEVICE = re.compile(r"cuda|gpu|xpu|nccl|bkcl", re.IGNORECASE)

NAMED = {"manager/random_state.py": {"default_cuda_generator", "default_xpu_generator"}}
"""Paddle keeps the generators of each kind of device by themselves."""


def test_no_kind_of_device_is_wired_in() -> None:
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if devices := {name for name in names if DEVICE.search(name)}:
            found[path.relative_to(ROOT).as_posix()] = devices
    assert found == NAMED
