from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classwise.config.spec import build
from classwise.core.errors import InputError
from classwise.training.schedules import SCHEDULES, Constant, Cosine, Cyclic, MultiStep, Step
from each import for_each


@for_each(
    ("schedule", "epochs", "points"),
    [
        (Constant(), 10, {0: 1, 5.5: 1, 10: 1}),
        (Step(every=30, gamma=0.1), 100, {0: 1, 29.99: 1, 30: 0.1, 59.9: 0.1, 60: 0.01, 99.9: 0.001}),
        (Step(every=1, gamma=0.5), 3, {0.9: 1, 1: 0.5, 2.5: 0.25}),
        (MultiStep(milestones=(75, 90), gamma=0.1), 100, {0: 1, 74.99: 1, 75: 0.1, 89.9: 0.1, 90: 0.01, 100: 0.01}),
        (MultiStep(milestones=(), gamma=0.1), 100, {0: 1, 99: 1}),
        (Cosine(), 30, {0: 1, 7.5: (1 + math.sqrt(0.5)) / 2, 10: 0.75, 15: 0.5, 20: 0.25, 30: 0}),
        (Cosine(warmup=5), 25, {0: 0, 1: 0.2, 2.5: 0.5, 5: 1, 15: 0.5, 25: 0, 26: 0}),
        (Cyclic(peak=0.4), 10, {0: 0, 1: 0.25, 2: 0.5, 4: 1, 7: 0.5, 8.5: 0.25, 10: 0}),
        (Cyclic(peak=0.5), 30, {0: 0, 7.5: 0.5, 15: 1, 22.5: 0.5, 30: 0, 31: 0}),
    ],
    ids=repr,
)
def test_known_points(schedule, epochs, points):
    assert {time: schedule(time, epochs) for time in points} == pytest.approx(points, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
@given(epochs=st.integers(1, 200), share=st.floats(0, 1))
@settings(deadline=None, max_examples=50)
def test_factor_is_between_zero_and_one(name, epochs, share):
    schedule = build("schedule", SCHEDULES, name)
    factor = schedule(share * epochs, epochs)
    assert 0 <= factor <= 1
    assert factor == schedule(share * epochs, epochs)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("step:every=0", "every must be at least 1 epoch, got 0"),
        ("cyclic:peak=0", "peak must lie between 0 and 1, got 0.0"),
        ("cyclic:peak=1", "peak must lie between 0 and 1, got 1.0"),
        ("step:gamma=nan", "must be a finite number"),
        ("cosin", "did you mean 'cosine'"),
        ("cosine:warm=3", "did you mean 'warmup'"),
    ],
)
def test_impossible_settings(spec, complaint):
    with pytest.raises(InputError, match=complaint):
        build("schedule", SCHEDULES, spec)


def test_settings_from_a_table():
    assert build("schedule", SCHEDULES, {"name": "multistep", "milestones": [3, 5], "gamma": "1/2"}) == MultiStep(
        milestones=(3, 5), gamma=0.5
    )
