"""FGSM and PGD against torchattacks and foolbox, from the same start, on a trained network.

All run in float64, where rounding cannot flip the sign of a gradient, so the images themselves must agree.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from classwise.attacks import FGSM, PGD, BallAttack
from classwise.data import load_data, to_float
from classwise.models import digits_cnn

EPS = 0.1


@pytest.fixture(scope="module")
def torchattacks() -> Any:
    return pytest.importorskip("torchattacks", reason="torchattacks is not installed")


@pytest.fixture(scope="module")
def foolbox() -> Any:
    with warnings.catch_warnings():  # its own imports, not ours
        warnings.simplefilter("ignore")
        return pytest.importorskip("foolbox", reason="foolbox is not installed")


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """A digits network after a little training, and the test images of the first classes."""
    data = load_data("digits", split="train")
    x, y = to_float(data.images), torch.from_numpy(data.labels)
    torch.manual_seed(0)
    model = digits_cnn()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    test = load_data("digits", split="test")
    model = model.double().eval()
    return model, to_float(test.images[:200]).double(), torch.from_numpy(test.labels[:200])


def agree(model: nn.Module, ours: Tensor, theirs: Tensor, clean: Tensor, y: Tensor) -> None:
    """The same images; and the attack did something, so that this is no agreement on nothing."""
    assert torch.allclose(ours, theirs, atol=1e-9, rtol=0)
    with torch.no_grad():
        assert (model(ours).argmax(1) == y).sum() < 0.8 * (model(clean).argmax(1) == y).sum()
        assert torch.equal(model(ours).argmax(1), model(theirs).argmax(1))


def test_fgsm_equals_torchattacks(torchattacks: Any, trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = trained
    theirs = torchattacks.FGSM(model, eps=EPS)(x, y)
    agree(model, FGSM(eps=EPS)(model, x, y), theirs, x, y)


@pytest.mark.parametrize("random_start", [False, True])
def test_pgd_equals_torchattacks(
    torchattacks: Any, trained: tuple[nn.Module, Tensor, Tensor], random_start: bool
) -> None:
    model, x, y = trained
    torch.manual_seed(7)
    theirs = torchattacks.PGD(model, eps=EPS, alpha=0.02, steps=12, random_start=random_start)(x, y)
    torch.manual_seed(7)  # both draw one uniform number per pixel from torch's global state
    ours = PGD(eps=EPS, step_size=0.02, steps=12, start="uniform" if random_start else "zero")
    agree(model, ours(model, x, y), theirs, x, y)


def test_l2_pgd_equals_torchattacks(torchattacks: Any, trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = trained
    theirs = torchattacks.PGDL2(model, eps=0.8, alpha=0.2, steps=12, random_start=False)(x, y)
    ours = PGD(eps=0.8, norm="L2", step_size=0.2, steps=12, start="zero")
    # They add 1e-10 to the length of the mean loss's gradient, which is no small thing beside the tiny gradients
    # of confident examples: those images differ in the third digit, the verdicts do not. foolbox agrees exactly.
    with torch.no_grad():
        assert torch.equal(model(ours(model, x, y)).argmax(1), model(theirs).argmax(1))


@pytest.mark.parametrize(
    ("ours", "name", "settings"),
    [
        (FGSM(eps=EPS), "LinfFastGradientAttack", {}),
        (PGD(eps=EPS, step_size=0.02, steps=12, start="zero"), "LinfPGD", {"abs_stepsize": 0.02, "steps": 12}),
        (
            PGD(eps=0.8, norm="L2", step_size=0.2, steps=12, start="zero"),
            "L2PGD",
            {"abs_stepsize": 0.2, "steps": 12},
        ),
    ],
    ids=["FGSM", "Linf PGD", "L2 PGD"],
)
def test_equals_foolbox(
    foolbox: Any,
    trained: tuple[nn.Module, Tensor, Tensor],
    ours: BallAttack,
    name: str,
    settings: dict[str, float],
) -> None:
    model, x, y = trained
    bounded = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    attack = getattr(foolbox.attacks, name)(random_start=False, **settings)
    theirs = attack.run(bounded, x, y, epsilon=ours.threat.eps)
    agree(model, ours(model, x, y), theirs, x, y)
