"""The README's example of handing weights on runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from harness import on_two_ranks, run_script
from safetensors.numpy import load_file

README = Path(__file__).resolve().parent.parent.parent / "README.md"


def test_the_readme_example_hands_on_what_is_new(tmp_path: Path) -> None:
    marked = re.search(r"<!-- tests/gather runs this -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert marked is not None
    (tmp_path / "hand_on.py").write_text(marked[1])
    run_script(tmp_path, on_two_ranks("hand_on.py"))
    found = [
        {name: value for path in tmp_path.glob(f"weights_{sync}_*.safetensors") for name, value in load_file(path).items()}
        for sync in range(3)
    ]
    assert [sorted(tensors) for tensors in found] == [["0.bias", "0.weight", "2.bias", "2.weight"], *[["2.bias", "2.weight"]] * 2]
    assert found[0]["0.weight"].shape == (16, 64)
    assert (found[1]["2.weight"] != found[2]["2.weight"]).any()
