"""Which room may import which, what works without Paddle, and what asking for the rest then says."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import RankPool

import paddle_fsdp_ckpt
from paddle_fsdp_ckpt import requirements

PACKAGE = "paddle_fsdp_ckpt"
ROOT = Path(paddle_fsdp_ckpt.__file__).parent
FACE = "__init__"

_NOUNS = ("errors", "layout", "pieces", "warn")
_RUNTIME = (*_NOUNS, "fsdp", "optim")
_OFFLINE = (*_NOUNS, "storage")
_CHECKPOINT = (*_RUNTIME, "progress", "shardings", "state_dict", "subjects", "storage", "host_memory", "meeting", "saved_run")

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "version": (),
    "errors": (),
    "requirements": ("errors",),
    "progress": (),
    "warn": (),
    FACE: (
        "averaging",
        "errors",
        "fsdp",
        "gather",
        "gather_states",
        "huggingface_loading",
        "huggingface_report",
        "loading",
        "manager",
        "optim",
        "requirements",
        "saving",
        "scatter",
        "state_dict",
        "storage",
        "training",
        "unsharding",
    ),
    "__main__": ("cli",),
    "layout": ("errors",),
    "optimizer_states": (),
    "division": ("errors", "layout"),
    "pieces": ("errors", "layout"),
    "fsdp": (*_NOUNS, "host_memory"),
    "optim": (*_NOUNS, "fsdp", "optimizer_states"),
    "training": _RUNTIME,
    "shardings": (*_RUNTIME, "division"),
    "several_models": (*_RUNTIME, "shardings"),
    "subjects": (*_RUNTIME, "shardings", "several_models"),
    "state_dict": (*_RUNTIME, "shardings", "subjects"),
    "gather": (*_RUNTIME, "shardings", "subjects", "host_memory", "storage"),
    "gather_states": (*_RUNTIME, "gather", "subjects"),
    "scatter": (*_RUNTIME, "shardings", "subjects"),
    "averaging": (*_RUNTIME, "shardings", "subjects"),
    "unsharding": (*_RUNTIME, "gather_states", "optimizer_states"),
    "storage": _NOUNS,
    "host_memory": ("errors",),
    "rendezvous": ("errors", "storage"),
    "meeting": ("errors", "shardings", "storage", "rendezvous"),
    "differing_values": ("errors", "meeting", "storage"),
    "saved_run": ("errors", "lora_layers", "optim", "storage", "subjects"),
    "lora_layers": ("errors", "fsdp"),
    "base_weights": ("errors", "fsdp", "host_memory", "lora_layers", "meeting", "storage", "subjects"),
    "save_plan": _CHECKPOINT,
    "save_comparison": ("differing_values", "errors", "host_memory", "meeting", "storage", "subjects", "warn"),
    "saving": (*_CHECKPOINT, "base_weights", "lora_layers", "save_comparison", "save_plan"),
    "loading": (*_CHECKPOINT, "base_weights", "lora_layers", "optimizer_states"),
    "manager": (*_CHECKPOINT, "differing_values", "saving", "loading", "warn"),
    "export": (*_OFFLINE, "optimizer_states"),
    "huggingface_reading": ("errors", "export", "fsdp", "host_memory", "layout", "meeting", "storage"),
    "huggingface_report": ("errors", "loading"),
    "huggingface_allowed": ("errors", "export", "loading", "storage"),
    "huggingface_origins": ("errors", "export", "layout", "loading", "pieces", "storage", "subjects"),
    "huggingface_loading": (
        *_CHECKPOINT,
        "export",
        "huggingface_allowed",
        "huggingface_origins",
        "huggingface_reading",
        "huggingface_report",
        "loading",
    ),
    "cli": (*_OFFLINE, "export", "optimizer_states", "progress"),
    "integrations": (FACE,),
    "demo": (FACE, "errors"),
}
"""What each room (a module, or a folder of them) may import besides itself and ``version``."""

WITHOUT_PADDLE = {"version", "errors", "warn", "layout", "division", "progress", "optimizer_states", "pieces", "storage", "export", "cli"}
BRIDGES_TO_PADDLE = {"storage/flex.py"}

WITHOUT_FILES = {"fsdp", "optim"}
FILE_MODULES = {"io", "mmap", "pathlib", "safetensors", "shutil", "tempfile"}
FILE_CALLS = {"open", "os.open", "io.open", "paddle.save", "paddle.load"}

FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def room_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def imported_modules(source: str, file: str) -> Iterator[str]:
    """Absolute names of all that a file imports, anywhere in it.

    ``from a import b`` gives both ``a`` and ``a.b``; where ``a`` is this package, ``a.b`` alone, which may be a room of it.
    """
    parts = [PACKAGE, *file.removesuffix(".py").split("/")]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*parts[: len(parts) - node.level]] if node.level else []
            base += node.module.split(".") if node.module else []
            if base != [PACKAGE]:
                yield ".".join(base)
            yield from (".".join([*base, alias.name]) for alias in node.names)


def imported_rooms(source: str, file: str) -> set[str]:
    """The rooms of this package that a file imports; a name taken from the package itself is of the public face."""
    rooms = set()
    for module in imported_modules(source, file):
        parts = module.split(".")
        if parts[0] == PACKAGE:
            rooms.add(parts[1] if len(parts) > 1 and (parts[1] in MAY_IMPORT or is_room(parts[1])) else FACE)
    return rooms - {room_of(file)}


def is_room(name: str) -> bool:
    return (ROOT / name).is_dir() or (ROOT / f"{name}.py").exists()


def wrong_imports(source: str, file: str) -> set[str]:
    """What a file imports and may not: rooms by their names, other modules by theirs."""
    room = room_of(file)
    wrong = imported_rooms(source, file) - {*MAY_IMPORT[room], "version"}
    tops = {module.split(".")[0] for module in imported_modules(source, file)}
    if room in WITHOUT_PADDLE and file not in BRIDGES_TO_PADDLE:
        wrong |= tops & {"paddle"}
    if room in WITHOUT_FILES:
        wrong |= tops & FILE_MODULES
    return wrong


def calls(source: str) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(file) for file in FILES}
    assert rooms <= set(MAY_IMPORT), "say in MAY_IMPORT what a new room may import"


@pytest.mark.parametrize("file", FILES)
def test_file_imports_only_what_its_room_may(file: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    assert not wrong_imports(source, file)
    if room_of(file) != FACE:
        assert not {call for call in calls(source) if call.endswith(("import_module", "__import__"))}, "an import that this test can't see"
    if room_of(file) in WITHOUT_FILES:
        assert not calls(source) & FILE_CALLS


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        ("layout.py", "from .errors import CheckpointError", set()),
        ("layout.py", "from .pieces import Piece", {"pieces"}),
        ("layout.py", "from . import pieces", {"pieces"}),
        ("layout.py", "from paddle_fsdp_ckpt import pieces", {"pieces"}),
        ("layout.py", "import paddle_fsdp_ckpt.pieces", {"pieces"}),
        ("layout.py", "import paddle_fsdp_ckpt", {FACE}),
        ("layout.py", "from . import fully_shard", {FACE}),
        ("layout.py", "from .version import __version__", set()),
        ("layout.py", "def f():\n    import paddle.nn", {"paddle"}),
        ("fsdp/unit.py", "from .runtime import Runtime\nfrom ..layout import Slot\nimport paddle", set()),
        ("fsdp/unit.py", "from ..storage.reader import execute_read", {"storage"}),
        ("fsdp/unit.py", "from .. import storage", {"storage"}),
        ("fsdp/__init__.py", "from .unit import Unit\nfrom ..optim import bind_optimizer", {"optim"}),
        ("fsdp/unit.py", "from pathlib import Path", {"pathlib"}),
        ("storage/flex.py", "import paddle", set()),
        ("storage/reader.py", "if True:\n    from paddle.distributed import get_rank", {"paddle"}),
        ("storage/reader.py", "from ..fsdp.unit import Unit", {"fsdp"}),
        ("demo/worker.py", "from paddle_fsdp_ckpt import fully_shard", set()),
        ("demo/worker.py", "from ..saving import save", {"saving"}),
    ],
)
def test_wrong_imports_are_found(file: str, source: str, wrong: set[str]) -> None:
    assert wrong_imports(source, file) == wrong


def run_python(script: str) -> str:
    """Run a script in a process of its own; its assertions are this test's."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=ROOT.parent, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


NO_PADDLE = """
import sys

class NoPaddle:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "paddle":
            raise ModuleNotFoundError("No module named 'paddle'", name="paddle")

sys.meta_path.insert(0, NoPaddle())
"""


def test_offline_half_works_without_paddle() -> None:
    offline = [file for file in FILES if room_of(file) in WITHOUT_PADDLE and file not in BRIDGES_TO_PADDLE]
    modules = [f"{PACKAGE}.{file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}" for file in offline]
    assert f"{PACKAGE}.storage.reader" in modules
    run_python(f"{NO_PADDLE}\nimport importlib, {PACKAGE}\nfor module in {modules}: importlib.import_module(module)")


def test_without_paddle_a_name_that_needs_it_says_so() -> None:
    output = run_python(f"""{NO_PADDLE}
import {PACKAGE}
from {PACKAGE} import CheckpointError
for name in ("fully_shard", "save", "load", "sharded_state_dict", "bind_optimizer", "local_parameters"):
    try:
        getattr({PACKAGE}, name)
    except ImportError as error:
        assert isinstance(error, CheckpointError)
        print(error)
    else:
        raise AssertionError(name)
try:
    from {PACKAGE} import fully_shard
except {PACKAGE}.PaddleRequiredError as error:
    print(error)
""")
    lines = output.splitlines()
    assert len(lines) == 7
    assert lines[0] == lines[6]
    assert lines[0].startswith("paddle_fsdp_ckpt.fully_shard needs PaddlePaddle 3.3 or newer, which is not installed; on CPU: ")
    assert "pip install 'paddle_fsdp_ckpt[cpu]'" in lines[0]
    assert "paddlepaddle-gpu" in lines[0]


def test_too_old_or_broken_paddle_is_named() -> None:
    output = run_python(f"""
import sys, types
sys.modules["paddle"] = types.ModuleType("paddle")
sys.modules["paddle"].__version__ = "3.2.2"
import {PACKAGE}
try:
    {PACKAGE}.save
except {PACKAGE}.PaddleRequiredError as error:
    print(error)

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "paddle":
            raise ImportError("libgomp.so.1: cannot open shared object file")

del sys.modules["paddle"]
sys.meta_path.insert(0, Broken())
try:
    {PACKAGE}.save
except {PACKAGE}.PaddleRequiredError as error:
    print(error)
""")
    old, broken = output.splitlines()
    assert old.startswith("paddle_fsdp_ckpt.save needs PaddlePaddle 3.3 or newer, and 3.2.2 is installed; ")
    assert broken.endswith("the one installed can't be imported: libgomp.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    ("version", "enough"),
    [
        ("3.3.0", True),
        ("3.3.1", True),
        ("3.10.0", True),
        ("4.0.0", True),
        ("3.4.0.dev20260101", True),
        ("0.0.0", True),
        ("3.2.2", False),
        ("2.6.2", False),
    ],
)
def test_version_of_paddle(version: str, enough: bool) -> None:
    assert requirements.is_new_enough(version) is enough


def test_names_are_imported_only_when_used() -> None:
    loaded = "sorted(name for name in sys.modules if name.split('.')[0] in ('paddle', 'numpy', 'safetensors', 'paddle_fsdp_ckpt'))"
    output = run_python(f"import sys, {PACKAGE}\nprint({loaded})\n{PACKAGE}.MismatchError\nprint({loaded})")
    at_import, after_error = output.splitlines()
    assert at_import == str([PACKAGE, f"{PACKAGE}.version"])
    assert after_error == str([PACKAGE, f"{PACKAGE}.errors", f"{PACKAGE}.version"])


def test_public_names_are_listed_once_and_everywhere() -> None:
    table = paddle_fsdp_ckpt._MODULES
    assert sorted(paddle_fsdp_ckpt.__all__) == sorted([*table, "__version__"])
    assert set(paddle_fsdp_ckpt.__all__) <= set(dir(paddle_fsdp_ckpt))
    source = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    (for_checkers,) = [node for node in source.body if isinstance(node, ast.If)]
    homes = {alias.name: node.module for node in for_checkers.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert homes == table


def test_every_error_is_public() -> None:
    from paddle_fsdp_ckpt import errors

    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.CheckpointError)}
    assert classes <= set(paddle_fsdp_ckpt.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(paddle_fsdp_ckpt, "fully_shart")
    with pytest.raises(ImportError, match="fully_shart"):
        from paddle_fsdp_ckpt import fully_shart  # type: ignore[attr-defined]  # noqa: F401


def resolve_all() -> list[str]:
    return [name for name in paddle_fsdp_ckpt.__all__ if getattr(paddle_fsdp_ckpt, name) is None]


def test_every_public_name_resolves(single: RankPool) -> None:
    assert single.run(resolve_all) == [[]]
