"""What several commands are given."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
DTYPES |= {name: name for name in DTYPES.values()}
"""What is said on the command line -> Paddle's dtype name."""


KEYS = "--keys"


def directories_first(words: Sequence[str], count: int) -> list[str]:
    """Return a command's words with its directories first, also where they are the last ones behind ``--keys``, which takes any number.

    Args:
        words: behind the command's name.
        count: of the directories.
    """
    outside: list[int] = []
    group: list[int] = []
    is_open = False
    for place, word in enumerate(words):
        if word.startswith("-"):
            is_open = len(word) > 2 and KEYS.startswith(word)
            group = [] if is_open else group
        elif is_open:
            group.append(place)
        else:
            outside.append(place)
    directories = sorted([*outside, *(group[len(outside) - count :] if len(outside) < count else [])])
    return [*(words[place] for place in directories), *(word for place, word in enumerate(words) if place not in directories)]


def positive(text: str) -> int:
    """Return a whole number from 1 on.

    Raises:
        argparse.ArgumentTypeError: the text is none.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 on")
    return number


def positives(text: str) -> list[int]:
    """Return whole numbers from 1 on, between commas.

    Raises:
        argparse.ArgumentTypeError: one of them is none.
    """
    return [positive(part) for part in text.split(",")]
