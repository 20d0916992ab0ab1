"""README's training loop, and the average of the weights in docs/, run as they stand; links of all pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import on_two_ranks, run_script

PROJECT = Path(__file__).resolve().parent.parent
README = PROJECT / "README.md"
PAGES = [README, PROJECT / "CHANGELOG.md", PROJECT / "benchmarks" / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]


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
    page = (PROJECT / "docs" / "several_models.md").read_text()
    marked = re.search(r"<!-- tests/test_readme.py runs this -->\n```python\n(.*?)```", page, re.DOTALL)
    assert marked is not None
    told = """
found, right = plain_model.state_dict(), full_state_dict(average, to_rank=None)
same = [bool((found[name] == value).all()) for name, value in right.items()]
print("from", start, *same, bool((found["0.weight"] == first["0.weight"]).all()))
"""
    code = marked[1].replace("fully_shard, load", "full_state_dict, fully_shard, load")
    before = "plain_model = copy.deepcopy(model)\n"
    assert before in code
    code = code.replace(before, f"{before}first = copy.deepcopy(model).state_dict()\n")
    (tmp_path / "train.py").write_text(code + told)
    for start in (0, 10):  # the second one goes on from the last step
        logs = run_script(tmp_path, on_two_ranks("train.py"))
        assert logs.count(f"from {start} True True True True False") == 2


def anchors(page: Path) -> set[str]:
    """The names that links give a page's sections, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target
