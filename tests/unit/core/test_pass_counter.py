"""Counting passes through models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from classwise.core import pass_counter
from classwise.core.pass_counter import count_passes


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


def test_images_and_gradients_are_counted() -> None:
    model, x = linear(), torch.rand(5, 1, 2, 2)
    with count_passes(model) as passes:
        model(x)
        with torch.no_grad():
            model(x.requires_grad_())
        assert (passes.calls, passes.forwards, passes.backwards) == (2, 10, 0)
        logits = model(x)
        for k in range(3):
            torch.autograd.grad(logits[:, k].sum(), x, retain_graph=True)
        assert (passes.forwards, passes.backwards) == (15, 15)
        (model(x) + model(x)).sum().backward()
        assert (passes.forwards, passes.backwards) == (25, 25)
    model(x).sum().backward()
    assert (passes.calls, passes.forwards, passes.backwards) == (5, 25, 25)
    assert not model._forward_pre_hooks


def test_gradients_of_weights_alone_are_not_counted() -> None:
    model = linear()
    with count_passes(model) as passes:
        model(torch.rand(5, 1, 2, 2)).sum().backward()
    assert (passes.forwards, passes.backwards) == (5, 0)


def test_several_modules_share_a_count_and_gradients_can_be_left_out() -> None:
    one, other, x = linear(), linear(), torch.rand(5, 1, 2, 2, requires_grad=True)
    with count_passes(one, other, gradients=False) as passes:
        (one(x) + other(x)).sum().backward()
    assert (passes.calls, passes.forwards, passes.backwards) == (2, 10, 0)


def test_reports_are_limited_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pass_counter.time, "monotonic", lambda: now[0])
    reports: list[int] = []
    model = linear()
    with count_passes(model, report=lambda passes: reports.append(passes.calls)):
        for _ in range(10):
            now[0] += 0.4
            model(torch.rand(1, 1, 2, 2))
    assert reports == [3, 6, 9]
