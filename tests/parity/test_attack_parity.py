"""FGSM and PGD against torchattacks, foolbox and ART, from the same start, on trained networks.

All except ART run in float64, where rounding cannot flip the sign of a gradient, so the images themselves must agree.
ART supports only float32, as does the real network: there the verdicts must agree.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from classwise.attacks import FGSM, PGD, BallAttack
from classwise.data import balanced_subset, load_data, to_float
from classwise.models.load import load_model

# numpy 2 warns of the way ART reads a tensor in its own code
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

EPS = 0.1


def agree(model: nn.Module, ours: Tensor, theirs: Tensor, clean: Tensor, y: Tensor) -> None:
    """Require equal images, and that the attack changed them."""
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


def by_art(art: Any, name: str, model: nn.Module, x: Tensor, y: Tensor, **settings: Any) -> Tensor:
    """An attack of ART on a float32 model."""
    classifier = art.estimators.classification.PyTorchClassifier(
        model=model,
        loss=nn.CrossEntropyLoss(),
        input_shape=tuple(x.shape[1:]),
        nb_classes=10,
        clip_values=(0, 1),
        device_type="cpu",
    )
    attack = getattr(art.attacks.evasion, name)(classifier, batch_size=len(x), **settings)
    return torch.from_numpy(attack.generate(x.numpy(), y.numpy()))


@torch.no_grad()
def broken(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).argmax(1) != y


@pytest.mark.parametrize(
    ("ours", "name", "settings"),
    [
        (FGSM(eps=EPS), "FastGradientMethod", {"eps": EPS}),
        (
            PGD(eps=EPS, step_size=0.02, steps=12, start="zero"),
            "ProjectedGradientDescentPyTorch",
            {"eps": EPS, "eps_step": 0.02, "max_iter": 12, "verbose": False},
        ),
        (
            PGD(eps=0.8, norm="L2", step_size=0.2, steps=12, start="zero"),
            "ProjectedGradientDescentPyTorch",
            {"norm": 2, "eps": 0.8, "eps_step": 0.2, "max_iter": 12, "verbose": False},
        ),
    ],
    ids=["FGSM", "Linf PGD", "L2 PGD"],
)
def test_broken_examples_are_those_of_art(
    art: Any, trained: tuple[nn.Module, Tensor, Tensor], ours: BallAttack, name: str, settings: dict[str, Any]
) -> None:
    model, x, y = trained
    model, x = copy.deepcopy(model).float(), x.float()
    theirs = broken(model, by_art(art, name, model, x, y, **settings), y)
    found = broken(model, ours(model, x, y), y)
    assert theirs.sum() > broken(model, x, y).sum() + 20
    assert (found == theirs).double().mean() >= 0.99


def test_broken_examples_on_a_trained_network(
    torchattacks: Any, foolbox: Any, art: Any, real_data: Path, real_checkpoints: Path
) -> None:
    """ResNet-18 trained with TRADES: one image of every class, five steps from the image itself."""
    model = load_model("resnet18", weights=real_checkpoints / "cifar10_resnet18_trades.safetensors")
    data = load_data("cifar10", split="test")
    rows = balanced_subset(data.labels, 1, 10)
    x, y = to_float(data.images[rows]), torch.from_numpy(np.asarray(data.labels[rows]))
    eps, step_size, steps = 8 / 255, 3 / 255, 5
    ours = PGD(eps="8/255", step_size=step_size, steps=steps, start="zero")(model, x, y)
    theirs = {
        "torchattacks": torchattacks.PGD(model, eps=eps, alpha=step_size, steps=steps, random_start=False)(x, y),
        "foolbox": foolbox.attacks.LinfPGD(abs_stepsize=step_size, steps=steps, random_start=False).run(
            foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu"), x, y, epsilon=eps
        ),
        "art": by_art(
            art,
            "ProjectedGradientDescentPyTorch",
            model,
            x,
            y,
            eps=eps,
            eps_step=step_size,
            max_iter=steps,
            verbose=False,
        ),
    }
    found = broken(model, ours, y)
    assert broken(model, x, y).sum() < found.sum() < len(x)
    for name, images in theirs.items():
        assert torch.equal(broken(model, images, y), found), name
