"""Print README's table of optimizers, made of what the tests try; with ``--write`` put it into README.md.

Rows and columns come from the catalogs and from the lists that parametrise the tests named here, so a test that goes, goes from the table.
``tests/test_optimizer_table.py`` fails where README.md has another one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
README = PROJECT / "README.md"
BEGIN, END = "<!-- ci/optimizer_table.py --write makes this table -->\n", "<!-- end of the table -->\n"
HEADER = ("optimizer", "our runtime", "Paddle's runtime", "bitwise", "reshards", "master weights", "notes")


def table() -> str:
    """Return the table, in Markdown."""
    sys.path[:0] = [str(PROJECT / part) for part in (".", "tests", "tests/optim", "tests/round_trips", "tests/paddle_runtime")]
    import test_catalog
    import test_every_optimizer as ours
    import test_fused_resume as paddles
    from optimizer_cases import VARIANTS

    from paddle_fsdp_ckpt.optim import CATALOG
    from paddle_fsdp_ckpt.optim.catalog import REFUSALS
    from paddle_fsdp_ckpt.optim.fused_checks import FUSED_CATALOG

    resumed = [VARIANTS[name] for name in _tried(ours.test_it_trains_as_one_process_and_resumes_bit_for_bit)]
    resharded = {VARIANTS[name].cls for name in _tried(ours.test_its_states_go_to_other_world_sizes)}
    masters = set(_tried(test_catalog.test_low_precision_states_go_to_other_world_sizes))
    fused_resumed = {_class_of(name, FUSED_CATALOG) for name in _tried(paddles.test_resume_on_2_ranks_is_bit_for_bit)}
    fused_resharded = {_class_of(name, FUSED_CATALOG) for name in _tried(paddles.test_3_ranks_load_what_2_saved)}
    rows = [HEADER, ("---",) * len(HEADER)]
    for cls in CATALOG:
        options = [variant.option for variant in resumed if variant.cls == cls and variant.option not in ("", "named")]
        rows.append(
            (
                cls,
                _yes(any(variant.cls == cls for variant in resumed)),
                "refused" if cls not in FUSED_CATALOG else _yes(cls in fused_resumed),
                _where(any(variant.cls == cls for variant in resumed), cls in fused_resumed),
                _where(cls in resharded, cls in fused_resharded),
                "saved and loaded" if cls in masters else "not tried",
                f"also {', '.join(options)}" if options else "",
            )
        )
    rows += [(cls, "refused", "refused", "", "", "", reason) for cls, reason in REFUSALS.items() if cls != "Optimizer"]
    return "".join(f"| {' | '.join(row)} |\n".replace("  ", " ") for row in rows)


def with_table(text: str) -> str:
    """Return README's text with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _tried(test: Callable[..., Any]) -> list[str]:
    """Return what a test with one parameter is run for."""
    (mark,) = test.pytestmark  # type: ignore[attr-defined]
    return list(mark.args[1])


def _class_of(name: str, classes: Iterable[str]) -> str:
    """Return the class that a case of the tests of Paddle's runtime is named after."""
    return next(cls for cls in classes if cls.lower() == name.split()[0])


def _yes(tried: bool) -> str:
    return "yes" if tried else "not tried"


def _where(ours: bool, paddles: bool) -> str:
    return {(True, True): "both", (True, False): "ours", (False, True): "Paddle's", (False, False): "not tried"}[ours, paddles]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(table())
