"""What several commands are given."""

from __future__ import annotations

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
DTYPES |= {name: name for name in DTYPES.values()}
"""What is said on the command line -> Paddle's dtype name."""


def positive(text: str) -> int:
    """Return a whole number from 1 on.

    Raises:
        ValueError: the text is none.
    """
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} is less than 1")
    return number
