"""Balance adversarial training: the two points of the path that it uses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from classwise.attacks import PGD
from classwise.core.errors import InputError
from classwise.core.types import ClassControls
from classwise.objectives import BAT


class Line(nn.Module):
    """Two classes on one pixel: class 1 from 0.5 on."""

    def forward(self, x: Tensor) -> Tensor:
        value = x.flatten(1)[:, 0]
        return torch.stack([0.5 - value, value - 0.5], 1)


@pytest.mark.parametrize(
    ("tau", "after"), [(0, [0.51, 0.6, 0.31, 0.6]), (1, [0.61, 0.7, 0.31, 0.6]), (2, [0.61, 0.8, 0.31, 0.6])]
)
def test_both_points_of_a_path_by_hand(tau: int, after: list[float]) -> None:
    """Label 0, steps of 0.1 upwards within 0.3 of the image, four steps.

    0.31 goes 0.41, 0.51, 0.61, 0.61: the last correct point is 0.41, the first wrong one 0.51. 0.6 is wrong from the
    start, which is its x_lc, and goes 0.7, 0.8, 0.9, 0.9. 0.01 goes 0.11, 0.21, 0.31, 0.31 and is never wrong: its end
    is both points. 0.3 goes 0.4, then 0.5, a tie that counts for the first class, then 0.6, where it stays: 0.5 is the
    last correct one, 0.6 the first wrong one, and there is nowhere left to go.
    """
    x = torch.tensor([0.31, 0.6, 0.01, 0.3], dtype=torch.float64).view(4, 1, 1, 1)
    attack = PGD(steps=4, step_size=0.1, eps=0.3, loss="ce", start="zero")
    found = BAT(tau=tau, attack=attack).perturb(Line(), x, torch.zeros(4, dtype=torch.int64), ClassControls.uniform(2))
    before = [0.41, 0.6, 0.31, 0.5]
    assert found.flatten().tolist() == pytest.approx(before + after)


def walk(model: nn.Module, x: Tensor, start: Tensor, y: int, steps: int, size: float, radius: float) -> list[Tensor]:
    """All iterates of one image under PGD on KL(p(x) ‖ p(x')), step by step."""
    p = model(x[None]).softmax(1).detach()
    points = [start]
    for _ in range(steps):
        here = points[-1].clone().requires_grad_()
        q = model(here[None]).softmax(1)
        (p * (p / q).log()).sum().backward()
        moved = points[-1] + size * here.grad.sign()
        points.append(torch.minimum(torch.maximum(moved, x - radius), x + radius).clamp(0, 1))
    return points


@pytest.mark.parametrize("tau", [1, 2])
def test_points_equal_those_of_single_images(tau: int) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    for parameter in model.parameters():
        parameter.data *= 3
    x, y = torch.rand(40, 1, 3, 3, dtype=torch.float64), torch.randint(3, (40,))
    y = torch.where(torch.arange(40) < 30, model(x).argmax(1), y)
    attack = replace(BAT().attack, steps=6, eps=0.3)
    controls = replace(ClassControls.uniform(3), eps_scale=torch.tensor([1.0, 0.5, 1.5]))
    found = BAT(tau=tau, attack=attack).perturb(model, x, y, controls, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    crossings = set()
    for i, label in enumerate(y.tolist()):
        scale = controls.eps_scale[label].item()
        start = (x[i] + 0.001 * noise[i]).clamp(0, 1)
        points = walk(model, x[i], start, label, 6, 2.5 * 0.3 / 6 * scale, 0.3 * scale)
        wrong = [t for t, point in enumerate(points) if model(point[None]).argmax() != label]
        first = wrong[0] if wrong else None
        crossings.add(first)
        before = points[-1] if first is None else points[max(first - 1, 0)]
        after = points[-1] if first is None else points[min(first + tau, 6)]
        assert torch.allclose(found[i], before, atol=1e-12)
        assert torch.allclose(found[40 + i], after, atol=1e-12)
    assert {None, 0} < crossings  # never, from the start, and on the way


def test_targets_are_refused() -> None:
    controls = replace(ClassControls.uniform(2), targets=torch.eye(2).flip(0))
    with pytest.raises(InputError, match="objective 'bat' does not support policies that set targets"):
        BAT(attack=replace(BAT().attack, eps=0.1)).perturb(
            Line(), torch.rand(2, 1, 1, 1), torch.tensor([0, 1]), controls
        )
