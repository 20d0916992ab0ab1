"""Keys that are made when they are asked for are the list that they stand for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_fsdp_ckpt.shardings import SuffixedNames

_TABLES = st.lists(st.tuples(st.lists(st.text(max_size=3), max_size=4), st.text(max_size=3)), max_size=4)


@given(tables=_TABLES, others=_TABLES, start=st.integers(-20, 20), stop=st.integers(-20, 20))
def test_names_with_suffixes(tables: list[tuple[list[str], str]], others: list[tuple[list[str], str]], start: int, stop: int) -> None:
    expected = [name + suffix for names, suffix in (*tables, *others) for name in names]
    keys = SuffixedNames.joined([SuffixedNames(*tables), SuffixedNames(*others)])
    assert len(keys) == len(expected)
    assert list(keys) == expected
    assert [keys[number] for number in range(-len(expected), len(expected))] == expected * 2
    assert keys[start:stop] == expected[start:stop]
    for outside in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            keys[outside]
