"""The other libraries, if they are installed, and a trained network."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from classwise.data import load_data, to_float
from classwise.models import digits_cnn


def _library(name: str) -> Any:
    with warnings.catch_warnings():  # warnings of the library's own imports
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed")


@pytest.fixture(scope="session")
def torchattacks() -> Any:
    return _library("torchattacks")


@pytest.fixture(scope="session")
def foolbox() -> Any:
    return _library("foolbox")


@pytest.fixture(scope="session")
def art() -> Any:
    """Modules of the Adversarial Robustness Toolbox: attacks and estimators."""
    _library("art.attacks.evasion")
    _library("art.estimators.classification")
    return _library("art")


@pytest.fixture(scope="session")
def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """A briefly trained digits network in float64, and some test images."""
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
