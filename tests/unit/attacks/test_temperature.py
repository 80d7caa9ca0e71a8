"""Temperature-PGD (Tian et al. 2021) is stronger than PGD on smooth outputs, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import classwise as cw
from classwise.attacks import PGD
from classwise.data import load_data, to_float
from classwise.models.load import build_model
from classwise.reporting import ClassReport

EPS = 0.15
SCALE = 15.0


class Sphere(nn.Module):
    """Hypersphere embedding (Pang et al. 2020): the logits are a multiple of cosines between features and classes."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.body = build_model("digits-cnn", num_classes=64, in_channels=1)
        self.centers = nn.Parameter(torch.randn(10, 64))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * normalize(self.body(x), dim=1) @ normalize(self.centers, dim=1).T


def trained(inside: float, outside: float) -> nn.Module:
    """A model adversarially trained on digits; the scale of the logits belongs to the model, or to training only."""
    data = load_data("digits", split="train")
    x, y = to_float(data.images), torch.from_numpy(data.labels)
    random = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Sphere(inside)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    attack = PGD(eps=EPS, steps=3)
    for _ in range(8):
        for rows in torch.randperm(len(x), generator=random).split(64):
            x_adv = attack(model, x[rows], y[rows], generator=random)
            optimizer.zero_grad()
            cross_entropy(outside * model(x_adv), y[rows]).backward()
            optimizer.step()
    return model.eval()


def attacked(model: nn.Module) -> ClassReport:
    report = cw.evaluate(model, "digits", attacks=["pgd:steps=20", "temperature-pgd:inv_t=2+5+10+50"], eps=EPS)
    assert report["natural"].overall.value > 90
    return report


@pytest.mark.parametrize(("inside", "outside", "smooth"), [(1.0, SCALE, True), (SCALE, 1.0, False)])
def test_temperature_pgd_beats_pgd_on_smooth_outputs_only(inside: float, outside: float, smooth: bool) -> None:
    model = trained(inside, outside)
    data = load_data("digits", split="test")
    with torch.no_grad():
        confidence = float(model(to_float(data.images)).softmax(1).amax(1).mean())
    assert (confidence < 0.2) if smooth else (confidence > 0.8)
    report = attacked(model)
    pgd, best = report["pgd"].overall.value, report["temperature-pgd"].overall.value
    sharpest = report["temperature-pgd:inv_t=50"].overall.value
    if smooth:  # ten points over three seeds
        assert best <= pgd - 6
        assert sharpest <= pgd - 6
    else:  # one point lower at the best of four temperatures, equal at the sharpest
        assert best >= pgd - 2
        assert sharpest >= pgd - 1
