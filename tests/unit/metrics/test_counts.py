from __future__ import annotations

import numpy as np
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from classwise.metrics import confusion_matrix, correct_by_class


@st.composite
def judged(draw):
    """Labels and predictions of a few classes, some of which may not occur."""
    num_classes = draw(st.integers(2, 6))
    pairs = draw(st.lists(st.tuples(*[st.integers(0, num_classes - 1)] * 2), min_size=1, max_size=40))
    labels, predictions = np.array(pairs, dtype=np.int64).T
    return labels, predictions, num_classes


@given(judged())
@settings(deadline=None, max_examples=100)
def test_confusion_matrix_is_that_of_scikit_learn(case):
    labels, predictions, num_classes = case
    ours = confusion_matrix(labels, predictions, num_classes)
    theirs = sklearn.metrics.confusion_matrix(labels, predictions, labels=range(num_classes))
    assert ours.dtype == np.int64
    np.testing.assert_array_equal(ours, theirs)


@given(judged())
@settings(deadline=None, max_examples=100)
def test_correct_by_class_counts_one_class_at_a_time(case):
    labels, predictions, num_classes = case
    correct, n = correct_by_class(labels, predictions, num_classes)
    pairs = list(zip(labels.tolist(), predictions.tolist(), strict=True))
    assert correct.tolist() == [sum(pair == (k, k) for pair in pairs) for k in range(num_classes)]
    assert n.tolist() == [sum(label == k for label, _ in pairs) for k in range(num_classes)]


def test_no_examples_at_all():
    nothing = np.array([], dtype=np.int64)
    assert confusion_matrix(nothing, nothing, 2).tolist() == [[0, 0], [0, 0]]
    correct, n = correct_by_class(nothing, nothing, 2)
    assert (correct.tolist(), n.tolist()) == ([0, 0], [0, 0])
