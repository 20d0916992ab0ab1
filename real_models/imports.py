"""What the ranks of a new pool import first."""

from __future__ import annotations

import importlib


def import_paddleformers() -> None:
    """Import what most tests use."""
    importlib.import_module("training_cases")


def import_torch() -> None:
    """Import transformers with PyTorch, and peft."""
    importlib.import_module("torch_cases")
    importlib.import_module("peft")
