"""README's table of optimizers is the one that the tests make."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "ci" / "optimizer_table.py"


def test_the_table_in_the_readme_is_what_the_tests_try() -> None:
    spec = importlib.util.spec_from_file_location("optimizer_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.README.read_text(encoding="utf-8")
    assert text.count(script.BEGIN) == text.count(script.END) == 1
    assert script.with_table(text) == text, "run: python ci/optimizer_table.py --write"
