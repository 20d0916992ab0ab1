"""The README's training loop and its average of the weights run as they stand, started as the README says."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

from harness import on_two_ranks, run_script

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_training_loop_runs(tmp_path: Path) -> None:
    marked = re.search(r"<!-- tests/test_readme.py runs this -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert marked is not None
    (tmp_path / "train.py").write_text(marked[1])
    command = re.search(r"`python (-m paddle.distributed.launch [^`]*)`", README.read_text())
    assert command is not None
    logs = run_script(tmp_path, command[1].split())
    assert logs.count("10 {'epoch': 1}") == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints" / "step_10").iterdir()) == [
        "0.metadata",
        "0_0.safetensors",
        "1_0.safetensors",
        "manifest.json",
    ]


def test_the_average_of_the_weights_runs(tmp_path: Path) -> None:
    marked = re.search(r"  <!-- tests/test_readme.py runs this too -->\n  ```python\n(.*?)  ```", README.read_text(), re.DOTALL)
    assert marked is not None
    told = """
found, right = plain_model.state_dict(), full_state_dict(average, to_rank=None)
same = [bool((found[name] == value).all()) for name, value in right.items()]
print("from", start, *same, bool((found["0.weight"] == first["0.weight"]).all()))
"""
    code = dedent(marked[1]).replace("fully_shard, load", "full_state_dict, fully_shard, load")
    before = "plain_model = copy.deepcopy(model)\n"
    assert before in code
    code = code.replace(before, f"{before}first = copy.deepcopy(model).state_dict()\n")
    (tmp_path / "train.py").write_text(code + told)
    for start in (0, 10):  # the second one goes on from the last step
        logs = run_script(tmp_path, on_two_ranks("train.py"))
        assert logs.count(f"from {start} True True True True False") == 2
