"""Passes are counted on the host per example, also when the examples change."""

# B batch

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from classwise.attacks.problem import PassCounter

SIZE = 5
asked = st.tuples(st.lists(st.integers(0, SIZE - 1), max_size=8), st.integers(0, 3), st.integers(0, 3), st.booleans())


@given(st.lists(asked, max_size=12))
def test_counts_equal_those_added_one_by_one(questions: list[tuple[list[int], int, int, bool]]) -> None:
    tally = PassCounter(SIZE, "cpu")
    forwards, backwards = [0] * SIZE, [0] * SIZE
    rows, places = torch.arange(SIZE), list(range(SIZE))
    for some, forward, backward, same in questions:
        if not same:
            rows, places = torch.tensor(some, dtype=torch.int64), some
        tally.add(rows, forwards=forward, backwards=backward)
        for place in places:
            forwards[place] += forward
            backwards[place] += backward
    for _ in range(2):  # reading does not change it
        assert tally.effort.forwards.tolist() == forwards
        assert tally.effort.backwards.tolist() == backwards
