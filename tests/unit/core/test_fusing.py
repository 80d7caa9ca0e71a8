"""Fusible functions are called directly outside ``fusing``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from classwise.core import fusing as fusing_module
from classwise.core.fusing import fusible, fusing


def test_function_is_compiled_within_fusing_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def compiler(function, *, dynamic):  # type: ignore[no-untyped-def]
        asked.append(f"compiled {function.__name__}, dynamic={dynamic}")
        return lambda *args: asked.append("fused") or function(*args)

    monkeypatch.setattr(fusing_module.torch, "compile", compiler)

    @fusible
    def double(x: Tensor) -> Tensor:
        """Twice."""
        return 2 * x

    x = torch.ones(3)
    assert double(x).tolist() == [2, 2, 2]
    assert double.__doc__ == "Twice."
    assert not asked
    with fusing():
        double(x)
        assert double(x).tolist() == [2, 2, 2]
    double(x)
    assert asked == ["compiled double, dynamic=False", "fused", "fused"]
