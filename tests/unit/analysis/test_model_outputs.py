"""Model outputs: the last layer, its features, and attacks within the ball."""

# N examples, K classes

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from classwise.analysis.model_outputs import attack_of, attacked_outputs, linear_head, natural_outputs
from classwise.analysis.run import Run
from classwise.core.errors import InputError
from classwise.models import MODELS
from classwise.models.heads import head_of
from classwise.models.normalize import normalized


@pytest.mark.parametrize("name", ["digits-cnn", "resnet18", "wide-resnet"])
@pytest.mark.parametrize("head", ["linear", "hypersphere"])
def test_head_is_found(name: str, head: str) -> None:
    settings = {"depth": 10, "width": 1} if name == "wide-resnet" else {}
    side = 8 if name == "digits-cnn" else 32
    model = MODELS[name](num_classes=7, in_channels=3, head=head, **settings).eval()
    wrapped = nn.Sequential(normalized(model, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)))
    for asked in (model, wrapped):
        found = head_of(asked, torch.rand(2, 3, side, side))
        assert found is not None
        assert found[1] is [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        assert asked.get_submodule(found[0]) is found[1]


class Headless(nn.Module):
    """A model whose last layer is a convolution; its linear layer serves another purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(1, 1), nn.Conv2d(1, 10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x * self.gate(x.mean((1, 2, 3))[:, None])[..., None, None]).mean((2, 3))


def test_model_without_linear_head() -> None:
    assert head_of(Headless(), torch.rand(1, 1, 8, 8)) is None


def test_features_times_weights_are_the_logits(trained: Path) -> None:
    subject = Run.open(trained)
    seen = natural_outputs(subject, per_class=4)
    _, head = linear_head(subject)
    assert seen.features is not None
    again = seen.features @ head.weight.detach().numpy().T + head.bias.detach().numpy()
    assert np.allclose(again, seen.logits, atol=1e-5)
    assert np.bincount(seen.label).tolist() == [4] * 10
    assert np.allclose(seen.probabilities.sum(1), 1)
    assert np.array_equal(seen.predicted, subject.verdicts.natural[np.isin(subject.verdicts.index, seen.index)])


def test_attacked_images_are_in_the_ball_and_independent_of_the_batch(trained: Path) -> None:
    subject = Run.open(trained)
    clean, few, more = natural_outputs(subject, per_class=5), *(attacked_outputs(subject, per_class=n) for n in (2, 5))
    assert float((more.x - clean.x).abs().max()) <= 0.1 + 1e-6
    assert np.mean(more.predicted == more.label) < np.mean(clean.predicted == clean.label)
    assert torch.allclose(more.x[np.isin(more.index, few.index)], few.x, atol=1e-6)


def test_bad_input_of_model_outputs(trained: Path) -> None:
    subject = Run.open(trained)
    with pytest.raises(InputError, match="at least 1"):
        natural_outputs(subject, per_class=0)
    with pytest.raises(InputError, match="searches a ball"):
        attack_of(subject, "corruptions:severity=1")
    with pytest.raises(InputError, match="no last linear layer"):
        linear_head(Run(trained, loaded=Headless()))
