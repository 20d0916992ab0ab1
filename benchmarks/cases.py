"""The cases: what is compared, on how many ranks, with whom."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from . import paddle_side, plain, training_side
from .bench import OURS, PLAIN, Bench
from .group import Group
from .measure import Measurement
from .sizes import FULL, QUICK, Size

DCP = "PyTorch FSDP2 + DCP"
STOCK = "stock Paddle, safetensors"
DISTCP = "stock Paddle, .distcp"
_WITHOUT_DIGESTS = f"{OURS}, digests not checked"
_LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.cpu.x86_non_temporal_threshold=0x100000"}
"""The C library's own settings: memory in the system's large pages, and copies of 1 MiB and more past the processor's caches."""


class _Jobs:
    """A model on some ranks in Paddle, and the same in PyTorch where that is there."""

    def __init__(self, bench: Bench, stack: ExitStack, size: Size, world_size: int) -> None:
        self.bench = bench
        self.world_size = world_size
        # Both begin at the same time.
        self.paddle = stack.enter_context(bench.group("paddle", world_size))
        self.torch = stack.enter_context(bench.group("torch", world_size)) if bench.with_torch else None
        self.nbytes = sum(self.paddle.call(paddle_side.build, size))
        if self.torch is not None:
            self.torch.call(_torch_side().build, size)

    def save(self, operation: str, *, saved_as: str, with_distcp: bool = True, repeats: int | None = None) -> None:
        """Save with everybody, each to ``NAME-saved_as``, and wait for the disk."""
        self.bench.compare(operation, self.nbytes, self._savers(saved_as, with_distcp), repeats)
        plain.sync(self.bench.path(f"ours-{saved_as}"))

    def save_unmeasured(self, *, saved_as: str) -> None:
        """Save once with everybody from whom :meth:`load` loads."""
        for name, save in self._savers(saved_as, with_distcp=False).items():
            if name != PLAIN:
                save()

    def _savers(self, saved_as: str, with_distcp: bool) -> dict[str, Callable[[], list[Measurement]]]:
        fresh, paddle_job = self.bench.fresh, self.paddle
        contenders: dict[str, Callable[[], list[Measurement]]] = {
            PLAIN: lambda: paddle_job.call(plain.write, fresh(f"plain-{saved_as}"), self.nbytes // self.world_size),
            OURS: lambda: paddle_job.call(paddle_side.save, fresh(f"ours-{saved_as}")),
            STOCK: lambda: paddle_job.call(paddle_side.stock_save, fresh(f"stock-{saved_as}"), True),
        }
        if with_distcp:
            contenders[DISTCP] = lambda: paddle_job.call(paddle_side.stock_save, fresh(f"distcp-{saved_as}"), False)
        return contenders | self._torch(lambda job, side: job.call(side.save, fresh(f"dcp-{saved_as}")))

    def load(self, operation: str, *, saved_as: str) -> None:
        """Load with everybody what each saved as ``NAME-saved_as``."""
        path, paddle_job = self.bench.path, self.paddle
        files = sorted(str(file) for file in Path(path(f"ours-{saved_as}")).glob("*.safetensors"))
        contenders: dict[str, Callable[[], list[Measurement]]] = {
            PLAIN: lambda: paddle_job.call(plain.read, files, self.world_size),
            OURS: lambda: paddle_job.call(paddle_side.load, path(f"ours-{saved_as}")),
            _WITHOUT_DIGESTS: lambda: paddle_job.call(paddle_side.load, path(f"ours-{saved_as}"), False),
            STOCK: lambda: paddle_job.call(paddle_side.stock_load, path(f"stock-{saved_as}")),
        }
        contenders |= self._torch(lambda job, side: job.call(side.load, path(f"dcp-{saved_as}")))
        self.bench.compare(operation, self.nbytes, contenders)

    def load_cold(self, saved_as: str) -> None:
        """Load and read what the kernel no longer has in memory."""
        directory = self.bench.path(f"ours-{saved_as}")
        files = sorted(str(file) for file in Path(directory).glob("*.safetensors"))

        def cold(call: Callable[[], list[Measurement]]) -> Callable[[], list[Measurement]]:
            def contender() -> list[Measurement]:
                plain.forget(directory)
                return call()

            return contender

        contenders = {
            PLAIN: cold(lambda: self.paddle.call(plain.read, files, self.world_size)),
            OURS: cold(lambda: self.paddle.call(paddle_side.load, directory)),
        }
        self.bench.compare(f"load, cold, {self.world_size} ranks", self.nbytes, contenders)

    def _torch(self, call: Callable[[Group, Any], list[Measurement]]) -> dict[str, Callable[[], list[Measurement]]]:
        if self.torch is None:
            return {}
        job = self.torch
        return {DCP: lambda: call(job, _torch_side())}


def _torch_side() -> Any:
    # Only where PyTorch is there.
    return importlib.import_module("benchmarks.torch_side")


def save_and_load(bench: Bench, size: Size, with_cold: bool) -> None:
    """Save from 2 ranks, load into 2, 1 and 3; save from 1, load into 2."""
    with ExitStack() as stack:
        two = _Jobs(bench, stack, size, 2)
        two.save("save, 2 ranks", saved_as="of2")
        two.load("load, 2 to 2 ranks", saved_as="of2")
        if with_cold:
            two.load_cold("of2")
        with ExitStack() as inner:
            one = _Jobs(bench, inner, size, 1)
            one.load("load, 2 to 1 ranks", saved_as="of2")
            # Stock Paddle copies a flat buffer for each view of it that it pickles: several GB on one rank.
            one.save("save, 1 rank", saved_as="of1", with_distcp=False, repeats=1)
        two.load("load, 1 to 2 ranks", saved_as="of1")
    with ExitStack() as stack:
        _Jobs(bench, stack, size, 3).load("load, 2 to 3 ranks", saved_as="of2")


def save_many_keys(bench: Bench, size: Size) -> None:
    """Save from 2 ranks, the first time and later; read the index."""
    with ExitStack() as stack:
        two = _Jobs(bench, stack, size, 2)
        bench.compare("first save, 2 ranks", two.nbytes, {OURS: lambda: two.paddle.call(paddle_side.save, bench.fresh("first"))}, 1)
        two.save("save, 2 ranks", saved_as="of2")
    with bench.group("paddle", 1) as one:
        nbytes = sum(one.call(paddle_side.build, size))
        bench.compare("read the index", nbytes, {OURS: lambda: one.call(paddle_side.index, bench.path("ours-of2"))})


def load_many_keys(bench: Bench, size: Size) -> None:
    """Load into 1 rank what 2 saved."""
    with ExitStack() as stack:
        _Jobs(bench, stack, size, 2).save_unmeasured(saved_as="of2")
    with ExitStack() as stack:
        _Jobs(bench, stack, size, 1).load("load, 2 to 1 ranks", saved_as="of2")


def background(bench: Bench, size: Size) -> None:
    """How long training waits for a save that then goes on in the background."""
    with ExitStack() as stack:
        two = _Jobs(bench, stack, size, 2)
        two.paddle.call(paddle_side.open_manager, bench.fresh("manager"))
        steps = iter(range(1, 1000))
        nbytes = two.nbytes // 2
        contenders: dict[str, Callable[[], list[Measurement]]] = {
            "one copy": lambda: two.paddle.call(plain.copy, nbytes),
            "one copy, a tensor at a time": lambda: two.paddle.call(plain.copy, nbytes, size.keys),
            OURS: lambda: two.paddle.call(paddle_side.background_save, next(steps)),
        }
        if two.torch is not None:
            job = two.torch
            contenders[DCP] = lambda: job.call(_torch_side().background_save, bench.fresh("dcp-background"))
            contenders[DCP] = _then(contenders[DCP], lambda: job.call(_torch_side().wait_for_background))
        contenders[OURS] = _then(contenders[OURS], lambda: two.paddle.call(paddle_side.wait_for_background))
        into_new = {"one copy, into new memory": lambda: two.paddle.call(plain.copy_into_new_memory, nbytes)}
        bench.compare("first, training waits", two.nbytes, contenders | into_new, 1)
        bench.compare("later, training waits", two.nbytes, contenders)


def large_pages(bench: Bench, size: Size, step: tuple[int, int]) -> None:
    """What of ``big``, ``async`` and ``step`` depends most on how memory lies, in jobs that all have other settings of the C library."""
    with bench.environment(_LARGE_PAGES):
        background(bench, size)
        with ExitStack() as stack:
            two = _Jobs(bench, stack, size, 2)
            two.save_unmeasured(saved_as="of2")
            two.load("load, 2 to 2 ranks", saved_as="of2")
        with ExitStack() as stack:
            _Jobs(bench, stack, size, 3).load("load, 2 to 3 ranks", saved_as="of2")
        training_step(bench, step)


def beside_training(bench: Bench, model: tuple[int, int], ballast: tuple[int, ...], steps: int, world_size: int) -> None:
    """What saves in the background cost the steps that are trained meanwhile, and one save in either way the steps behind it."""
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    with bench.group("paddle", world_size) as group:
        group.call(training_side.build, "ours", *model)
        group.call(training_side.steps, 3)
        group.call(training_side.open_managers, bench.fresh("beside"), ballast)

        def then_wait(call: Callable[[], list[Measurement]]) -> Callable[[], list[Measurement]]:
            return _then(call, lambda: group.call(training_side.wait_for_background))

        each = {
            "no save": lambda: group.call(training_side.steps_one_by_one, steps, False),
            OURS: then_wait(lambda: group.call(training_side.steps_one_by_one, steps, True)),
        }
        bench.compare(f"{steps} steps, all beside a save, {ranks}", 0, each)
        kinds = {"no save": None, f"{OURS}, in the background": "background", f"{OURS}, training waits": "blocking"}
        behind = {name: then_wait(lambda kind=kind: group.call(training_side.steps, steps, kind)) for name, kind in kinds.items()}
        bench.compare(f"one save and {steps} steps, {ranks}", 0, behind)


def _then(call: Callable[[], list[Measurement]], after: Callable[[], object]) -> Callable[[], list[Measurement]]:
    """Return what measures ``call``, and then does ``after``."""

    def both() -> list[Measurement]:
        measured = call()
        after()
        return measured

    return both


def training_step(bench: Bench, size: tuple[int, int]) -> None:
    """One step of one model on 2 ranks."""
    names = {
        "Paddle's fused runtime": "paddle",
        OURS: "ours",
        f"{OURS}, prefetch=1": "prefetch",
        "unfused, gradients averaged one by one": "unfused",
    }
    with ExitStack() as stack:
        groups = {name: stack.enter_context(bench.group("paddle", 2)) for name in names}
        for name, group in groups.items():
            group.call(training_side.build, names[name], *size)
            for _ in range(3):
                group.call(training_side.step)
        contenders = {name: (lambda group=group: group.call(training_side.step)) for name, group in groups.items()}
        bench.compare("step, 2 ranks", 0, contenders, 4 * bench.repeats)


def gather(bench: Bench, size: Size) -> None:
    """Gather every whole parameter on 2 ranks."""
    nbytes = size.parameters * size.shape[0] * size.shape[1] * 2
    times = len(size.blocks())
    with ExitStack() as stack:
        two = _Jobs(bench, stack, size, 2)
        contenders: dict[str, Callable[[], list[Measurement]]] = {
            "bare collectives": lambda: two.paddle.call(paddle_side.plain_gather, nbytes // times // 2, times),
            OURS: lambda: two.paddle.call(paddle_side.gather),
        }
        if two.torch is not None:
            job = two.torch
            contenders["PyTorch FSDP2, full state dict"] = lambda: job.call(_torch_side().gather)
        bench.compare("gather, 2 ranks", nbytes, contenders)


@dataclass(frozen=True)
class Case:
    """What can be measured, and renewed, by itself.

    Attributes:
        about: the model in words.
        run: measures it.
    """

    about: str
    run: Callable[[Bench], None]


def cases(quick: bool) -> dict[str, Case]:
    """Return the cases by name, in the order of the results."""
    sizes = QUICK if quick else FULL
    big, many, scale = sizes["big"], sizes["many"], sizes["scale"]
    step = (32, 2) if quick else (512, 6)
    model, ballast, steps = ((32, 2), (1, 16), 4) if quick else ((256, 4), (1500, 1024, 128), 30)
    blocks = "A model of {1} blocks of width {0}"

    def beside(bench: Bench) -> None:
        for world_size in (2, 1):
            beside_training(bench, model, ballast, steps, world_size)

    return {
        "big": Case(str(big), lambda bench: save_and_load(bench, big, with_cold=True)),
        "many": Case(str(many), lambda bench: save_and_load(bench, many, with_cold=False)),
        "scale": Case(str(scale), lambda bench: save_many_keys(bench, scale)),
        "scale-load": Case(str(scale), lambda bench: load_many_keys(bench, scale)),
        "async": Case(str(big), lambda bench: background(bench, big)),
        "beside": Case(f"{blocks.format(*model)}, and {prod(ballast) * 4 / 1e9:.2f} GB a rank beside it that are saved too", beside),
        "gather": Case(str(big), lambda bench: gather(bench, big)),
        "step": Case(blocks.format(*step), lambda bench: training_step(bench, step)),
        "large-pages": Case(
            f"As big, async and step, with GLIBC_TUNABLES={_LARGE_PAGES['GLIBC_TUNABLES']} in all jobs",
            lambda bench: large_pages(bench, big, step),
        ),
    }
