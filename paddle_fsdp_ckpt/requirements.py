"""What this package needs of its surroundings: a PaddlePaddle that is new enough, and only where it is used."""

from __future__ import annotations

import re

from .errors import CheckpointError

OLDEST_PADDLE = (3, 3)

_WAY_OUT = (
    "on CPU: pip install 'paddle_fsdp_ckpt[cpu]'; on GPU: a paddlepaddle-gpu wheel from PaddlePaddle's own package index "
    "(https://www.paddlepaddle.org.cn/install/quick), as the one on PyPI is too old"
)


class PaddleRequiredError(CheckpointError, ImportError):
    """PaddlePaddle is missing, can't be imported, or is too old for what was asked."""


def require_paddle(what: str) -> None:
    """Import Paddle on behalf of ``what``.

    Raises:
        PaddleRequiredError: there is no Paddle, or none that is new enough.
    """
    needs = f"{what} needs PaddlePaddle {_dotted(OLDEST_PADDLE)} or newer"
    try:
        import paddle
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "paddle":
            raise PaddleRequiredError(f"{needs}, which is not installed; {_WAY_OUT}") from error
        raise PaddleRequiredError(f"{needs}, and the one installed can't be imported: {error}") from error
    if not is_new_enough(paddle.__version__):
        raise PaddleRequiredError(f"{needs}, and {paddle.__version__} is installed; {_WAY_OUT}")


def is_new_enough(version: str) -> bool:
    """Tell whether a version of Paddle will do. Paddle calls a build of its development branch ``0.0.0``: that will."""
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else (0, 0)
    return found == (0, 0) or found >= OLDEST_PADDLE


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
