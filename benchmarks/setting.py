"""On what was measured: the machine, the versions, and the commit of the project."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
# What decides about results: those themselves, and texts, may differ from the commit.
_CODE = ("paddle_fsdp_ckpt", "setup.py", "pyproject.toml", ":(glob)benchmarks/*.py")


def machine() -> str:
    """Return the machine in words."""
    model = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    system = f"Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores of {model}, {memory / (1 << 20):.0f} GiB, {system}{_large_pages()}"


def _large_pages() -> str:
    """Return whether the system gives memory in large pages to whoever doesn't ask for them; nothing where it doesn't say."""
    chosen = [word.strip("[]") for line in _lines("/sys/kernel/mm/transparent_hugepage/enabled") for word in line.split() if word[0] == "["]
    return f", transparent_hugepage={chosen[0]}" if chosen else ""


def versions(with_torch: bool) -> dict[str, str]:
    """Return versions by name."""
    from importlib.metadata import version

    from paddle_fsdp_ckpt import __version__

    names = ["paddlepaddle", "safetensors", "numpy", *(["torch"] if with_torch else [])]
    return {"paddle_fsdp_ckpt": __version__, **{name: version(name) for name in names}}


def commit(project: Path = PROJECT) -> str | None:
    """Return the commit that a project's working tree is on, with a "+" where its code differs; None outside of git."""
    # A copy of the project may lie in a repository of something else.
    if _git(project, "ls-files", "--error-unmatch", "benchmarks/__main__.py") is None:
        return None
    name = _git(project, "rev-parse", "--short=10", "HEAD")
    changes = _git(project, "status", "--porcelain", "--", *_CODE)
    return None if name is None else name.strip() + ("+" if changes != "" else "")


def _git(project: Path, *arguments: str) -> str | None:
    """Return what git says, None where it fails."""
    try:
        run = subprocess.run(["git", "-C", str(project), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return run.stdout if run.returncode == 0 else None


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
