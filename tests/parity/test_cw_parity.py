"""The attacks of Carlini & Wagner against foolbox, torchattacks and ART, on trained networks.

PGD on the margin is deterministic if it starts at the image: the results are equal in float64. The searches for the
smallest perturbation differ in detail: our distances must be as small, and our verdicts must not be weaker.
"""

# B batch, K classes

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from classwise.attacks import CWL2, CWPGD, CWLinf
from classwise.attacks.losses import margin
from classwise.core.threat import Threat
from classwise.data import balanced_subset, load_data, to_float
from classwise.models.load import load_model

# numpy 2 warns of the way ART reads a tensor in its own code
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

EPS = 0.1
Trained = tuple[nn.Module, Tensor, Tensor]


@torch.no_grad()
def broken(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).argmax(1) != y


@torch.no_grad()
def right(trained: Trained, size: int) -> Trained:
    """The network with the first images that it classifies correctly."""
    model, x, y = trained
    rows = (model(x).argmax(1) == y).nonzero().squeeze(1)[:size]
    return model, x[rows], y[rows]


def classifier(art: Any, model: nn.Module, x: Tensor, loss: Any = None) -> Any:
    return art.estimators.classification.PyTorchClassifier(
        model=model,
        loss=loss or nn.CrossEntropyLoss(),
        input_shape=tuple(x.shape[1:]),
        nb_classes=10,
        clip_values=(0, 1),
        device_type="cpu",
    )


def no_weaker(ours: Tensor, theirs: Tensor, y: Tensor) -> None:
    """Never weaker by more than one example of a class."""
    for label in y.unique():
        assert ours[y == label].sum() >= theirs[y == label].sum() - 1


def margin_pgd_of_foolbox(foolbox: Any, steps: int, step_size: float) -> Any:
    """Foolbox's PGD with our loss."""

    class MarginPGD(foolbox.attacks.LinfPGD):  # type: ignore[misc, name-defined]
        def get_loss_fn(self, model: Any, labels: Any) -> Any:
            def loss(inputs: Any) -> Any:
                logits = model(inputs)
                return type(logits)(margin(labels.raw)(logits.raw).sum())

            return loss

    return MarginPGD(abs_stepsize=step_size, steps=steps, random_start=False)


def test_cw_pgd_equals_foolbox(foolbox: Any, trained: Trained) -> None:
    model, x, y = trained
    bounded = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    theirs = margin_pgd_of_foolbox(foolbox, 12, 0.02).run(bounded, x, y, epsilon=EPS)
    ours = CWPGD(eps=EPS, step_size=0.02, steps=12, start="zero")(model, x, y)
    assert torch.allclose(ours, theirs, atol=1e-9, rtol=0)
    assert broken(model, ours, y).sum() > broken(model, x, y).sum() + 20


def test_cw_pgd_breaks_the_same_examples_as_art(art: Any, trained: Trained) -> None:
    model, x, y = trained
    model, x = copy.deepcopy(model).float(), x.float()

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return margin(target if target.dim() == 1 else target.argmax(1))(logits).sum()

    attack = art.attacks.evasion.ProjectedGradientDescentPyTorch(
        classifier(art, model, x, loss), eps=EPS, eps_step=0.02, max_iter=12, batch_size=len(x), verbose=False
    )
    theirs = broken(model, torch.from_numpy(attack.generate(x.numpy(), y.numpy())), y)
    ours = broken(model, CWPGD(eps=EPS, step_size=0.02, steps=12, start="zero")(model, x, y), y)
    assert (ours == theirs).double().mean() >= 0.99


def test_cw_l2_is_as_close_as_foolbox(foolbox: Any, trained: Trained) -> None:
    model, x, y = right(trained, 25)
    ours = CWL2(search_steps=6, steps=100, initial_c=0.01)
    _, distances = ours.closest(model, x, y)
    bounded = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    # Twice our steps: in tanh space the black background needs them.
    attack = foolbox.attacks.L2CarliniWagnerAttack(binary_search_steps=6, steps=200, initial_const=0.01)
    theirs = attack.run(bounded, x, y)
    reference = torch.where(broken(model, theirs, y), (theirs - x).flatten(1).norm(dim=1), torch.inf)
    assert reference.isfinite().double().mean() > 0.9
    assert (distances / reference).median() <= 1.01  # some searches end in different local minima
    eps = float(reference.median())
    found = broken(model, ours.within(Threat.parse(eps, "L2"))(model, x, y), y)
    no_weaker(found, reference <= eps, y)


def test_cw_l2_is_as_close_as_torchattacks(torchattacks: Any, trained: Trained) -> None:
    """Torchattacks uses a single c. With the same c our distances are equal, and with a search they are smaller."""
    model, x, y = right(trained, 20)
    theirs = torchattacks.CW(model, c=1, steps=200, lr=0.01)(x, y)
    reference = torch.where(broken(model, theirs, y), (theirs - x).flatten(1).norm(dim=1), torch.inf)
    _, same = CWL2(search_steps=1, steps=200, initial_c=1).closest(model, x, y)
    _, searched = CWL2(search_steps=5, steps=100, initial_c=1).closest(model, x, y)
    assert reference.isfinite().double().mean() > 0.9
    assert same.median() <= 1.02 * reference.median()
    assert (searched <= 1.02 * reference).double().mean() >= 0.9


@pytest.mark.parametrize(
    "ours", [CWL2(search_steps=5, steps=100, initial_c=0.01), CWLinf(steps=100)], ids=["L2", "Linf"]
)
def test_is_as_close_as_art(art: Any, trained: Trained, ours: CWL2 | CWLinf) -> None:
    model, x, y = right(trained, 6)
    model, x = copy.deepcopy(model).float(), x.float()
    estimator = classifier(art, model, x)
    if isinstance(ours, CWL2):
        attack = art.attacks.evasion.CarliniL2Method(
            estimator, binary_search_steps=5, max_iter=20, initial_const=0.01, batch_size=len(x), verbose=False
        )
    else:
        attack = art.attacks.evasion.CarliniLInfMethod(
            estimator, max_iter=30, learning_rate=0.05, initial_const=0.1, const_factor=10.0, verbose=False
        )
    theirs = torch.from_numpy(attack.generate(x.numpy(), y.numpy()))
    delta = (theirs - x).flatten(1)
    sizes = delta.norm(dim=1) if isinstance(ours, CWL2) else delta.abs().amax(1)
    reference = torch.where(broken(model, theirs, y), sizes, torch.inf)
    assert reference.isfinite().double().mean() > 0.5
    _, distances = ours.closest(model, x, y)
    assert distances.median() <= 1.02 * reference.median()
    eps = float(reference[reference.isfinite()].median())
    ball = ours.within(Threat.parse(eps, ours.norms[0]))(model, x, y)
    no_weaker(broken(model, ball, y), reference <= eps, y)


def test_broken_examples_on_a_trained_network(foolbox: Any, real_data: Path, real_checkpoints: Path) -> None:
    """ResNet-18 trained with TRADES, one image per class: PGD on the margin by foolbox and by us, and CW-Linf."""
    model = load_model("resnet18", weights=real_checkpoints / "cifar10_resnet18_trades.safetensors")
    data = load_data("cifar10", split="test")
    rows = balanced_subset(data.labels, 1, 10)
    x, y = to_float(data.images[rows]), torch.from_numpy(np.asarray(data.labels[rows]))
    bounded = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    theirs = margin_pgd_of_foolbox(foolbox, 5, 3 / 255).run(bounded, x, y, epsilon=8 / 255)
    ours = CWPGD(eps="8/255", step_size="3/255", steps=5, start="zero")(model, x, y)  # type: ignore[arg-type]
    found = broken(model, ours, y)
    assert broken(model, x, y).sum() < found.sum() < len(x)
    assert torch.equal(broken(model, theirs, y), found)
    searched = CWLinf(eps="8/255", search_steps=1, steps=15, initial_c=1)(model, x, y)
    no_weaker(broken(model, searched, y), found, y)
