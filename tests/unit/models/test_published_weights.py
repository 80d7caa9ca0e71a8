"""Published checkpoints: wrappers are removed, and their normalization is added to the model."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import save_file

from classwise.core.errors import InputError
from classwise.models import DigitsCNN, normalized
from classwise.models.load import load_model
from classwise.models.normalize import Normalized

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]
"""CIFAR-10 as many scripts have it; not among the named normalizations."""


@pytest.fixture
def network() -> DigitsCNN:
    torch.manual_seed(9)
    return DigitsCNN(in_channels=3).eval()


@pytest.fixture
def notes(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "classwise")
    return lambda: [record.getMessage() for record in caplog.records]


def prefixed(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in state.items()}


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda s: s, None),
        (lambda s: {"state_dict": prefixed(s, "module.")}, "read from 'state_dict'; removed 'module.' from every name"),
        (lambda s: {"net": prefixed(s, "module.model."), "epoch": 7}, "removed 'module.model.' from every name"),
        (lambda s: {"model_state_dict": prefixed(s, "model.")}, "removed 'model.' from every name"),
        (lambda s: {"ema": prefixed(s, "ema_model."), "epoch": 7}, "read from 'ema'; removed 'ema_model.'"),
        (lambda s: {"model": {"state_dict": prefixed(s, "net.")}}, "read from 'model' > 'state_dict'; removed 'net.'"),
        (
            lambda s: {"model": {**prefixed(s, "module.model."), **prefixed(s, "module.attacker.model.")}},
            "ignored the second copy under 'attacker'; removed 'module.model.'",
        ),
    ],
)
def test_the_log_reports_what_was_removed(tmp_path, network, notes, wrap, said):
    path = tmp_path / "weights.pt"
    torch.save(wrap(network.state_dict()), path)
    model = load_model("digits-cnn", weights=path, in_channels=3)
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(model(x), network(x))
    if said is None:
        assert notes() == []
    else:
        lines = notes()
        assert lines
        assert all(line.startswith(f"{path}: ") for line in lines)
        assert said in "; ".join(line.removeprefix(f"{path}: ") for line in lines)


@pytest.mark.parametrize(
    ("names", "shape", "prefix"),
    [
        (("mu", "sigma"), (1, 3, 1, 1), ""),
        (("mean", "std"), (3,), "model."),
        (("normalize.mean", "normalize.std"), (3, 1, 1), "model."),
        (("module.normalizer.new_mean", "module.normalizer.new_std"), (3, 1, 1), "module.model."),
        (("0.mean", "0.std"), (1, 3, 1, 1), "1."),
    ],
)
def test_normalization_of_a_file_is_added_to_the_model(tmp_path, network, notes, names, shape, prefix):
    path = tmp_path / "weights.pt"
    own = {name: torch.tensor(values).view(shape) for name, values in zip(names, (MEAN, STD), strict=True)}
    torch.save({"state_dict": {**prefixed(network.state_dict(), prefix), **own}}, path)
    model = load_model("digits-cnn", weights=path, in_channels=3)
    assert isinstance(model, Normalized)
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(model(x), normalized(network, MEAN, STD)(x))
    lines = "\n".join(notes())
    assert "added its normalization, mean (0.4914, 0.4822, 0.4465) and std (0.2023, 0.1994, 0.201)" in lines
    with pytest.raises(InputError, match=r"has another normalization.*; the model has \(0\.247, 0\.2435, 0\.2616\)"):
        load_model("digits-cnn:normalize=cifar10", weights=path, in_channels=3)


def test_identity_normalization_is_ignored(tmp_path, network, notes):
    own = {"mu": torch.zeros(3), "sigma": torch.ones(3)}
    save_file({**network.state_dict(), **own}, tmp_path / "weights.safetensors")
    assert isinstance(load_model("digits-cnn", weights=tmp_path / "weights.safetensors", in_channels=3), DigitsCNN)
    assert notes() == []


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"mu": torch.rand(3), "sigma": torch.rand(3), "normalize.mean": torch.rand(3) + 2}, "has two normalizations"),
        ({"mu": torch.rand(17), "sigma": torch.rand(17)}, "is not a normalization"),
        ({"mu": torch.zeros(3, dtype=torch.int64), "sigma": torch.rand(3)}, "is not a normalization"),
        ({"mu": torch.rand(3), "sigma": torch.zeros(3)}, "positive standard deviations"),
        ({"mu": torch.full((3,), float("nan")), "sigma": torch.rand(3)}, "normaliz"),
        ({"mu": torch.rand(2), "sigma": torch.rand(3)}, "one number per channel"),
        ({"mu": torch.rand(3)}, "has another normalization, 'mu'"),
    ],
)
def test_invalid_normalizations(tmp_path, network, own, said):
    save_file({**network.state_dict(), **own}, tmp_path / "weights.safetensors")
    with pytest.raises(InputError) as caught:
        load_model("digits-cnn", weights=tmp_path / "weights.safetensors", in_channels=3)
    assert said in str(caught.value)


def test_only_copy_is_not_ignored(tmp_path, network):
    save_file(prefixed(network.state_dict(), "attacker."), tmp_path / "weights.safetensors")
    with pytest.raises(InputError, match="does not fit the model"):
        load_model("digits-cnn", weights=tmp_path / "weights.safetensors", in_channels=3)
