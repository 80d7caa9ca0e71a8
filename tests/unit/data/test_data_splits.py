from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from classwise.core.errors import InputError
from classwise.data import balanced_split, balanced_subset

LABELS = st.lists(st.integers(0, 4), min_size=0, max_size=80)


@given(LABELS, st.integers(0, 6), st.integers(0, 2**40))
def test_split_is_a_balanced_partition_or_an_error(labels, per_class, seed):
    counts = np.bincount(np.array(labels, dtype=int), minlength=5)
    if ((counts > 0) & (counts <= per_class)).any():
        with pytest.raises(InputError, match="examples; expected"):
            balanced_split(labels, per_class, seed, 5)
        return
    train, validation = balanced_split(labels, per_class, seed, 5)
    assert sorted([*train, *validation]) == list(range(len(labels)))
    assert (np.diff(train) > 0).all()
    assert (np.diff(validation) > 0).all()
    drawn = np.bincount(np.array(labels, dtype=int)[validation], minlength=5)
    assert drawn.tolist() == [per_class if count else 0 for count in counts]
    again = balanced_split(labels, per_class, seed, 5)
    assert (train == again[0]).all()
    assert (validation == again[1]).all()


@given(LABELS, st.integers(0, 6), st.none() | st.integers(0, 9))
def test_subset_takes_available_examples_in_order(labels, per_class, seed):
    chosen = balanced_subset(labels, per_class, 5, seed)
    assert (np.diff(chosen) > 0).all()
    for label in range(5):
        own = [i for i, other in enumerate(labels) if other == label]
        taken = [i for i in chosen if labels[i] == label]
        assert len(taken) == min(per_class, len(own))
        if seed is None:
            assert taken == own[:per_class]


def test_seeds_differ_and_every_example_is_drawn():
    labels = np.repeat([0, 1], 20)
    drawn = {tuple(balanced_split(labels, 5, seed, 2)[1]) for seed in range(30)}
    assert len(drawn) == 30
    assert {i for one in drawn for i in one} == set(range(40))


def test_draw_of_a_class_is_independent_of_the_others():
    labels = np.array([0] * 10 + [1] * 10)
    alone = balanced_split(labels[:10], 3, 7, 2)[1]
    assert balanced_split(labels, 3, 7, 2)[1][:3].tolist() == alone.tolist()


def test_errors():
    with pytest.raises(InputError, match="class 1 has 2 examples; expected 3 or more to hold out 2 per class"):
        balanced_split([0, 0, 0, 1, 1], 2, 0, 2)
    with pytest.raises(InputError, match=r"label 5 at index 1; expected 0\.\.1"):
        balanced_subset([0, 5], 1, 2)
    with pytest.raises(InputError, match="-1 examples per class"):
        balanced_subset([0, 1], -1, 2)
    with pytest.raises(InputError, match="seed = -1"):
        balanced_split([0, 0], 1, -1, 1)
