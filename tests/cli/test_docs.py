"""The page about the command line shows what the commands print."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_what_the_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runpy.run_path(str(DOCS / "make_commands.py"))
    monkeypatch.chdir(tmp_path)
    page = made["make_page"]()
    assert page.splitlines() == (DOCS / "commands.md").read_text(encoding="utf-8").splitlines(), "run: python docs/make_commands.py"
    # The drawing itself depends on the version of matplotlib.
    assert (tmp_path / made["PICTURE"]).read_bytes()[:8] == (DOCS / made["PICTURE"]).read_bytes()[:8]
