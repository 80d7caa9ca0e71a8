"""Robust and non-robust images: generation, and training on them."""

# N examples, K classes, D features

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import classwise as cw
from classwise.analysis import Run, features
from classwise.analysis.features import descend, non_robust_images
from classwise.core.errors import InputError
from classwise.data import load_data


def test_descent_matches_features_and_keeps_other_pixels() -> None:
    """The model sees the first two pixels only: they become those of x, the others stay those of the start."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x.flatten(1)[:, :2])

    torch.manual_seed(0)
    model, x, start = Half(), torch.rand(5, 1, 2, 2), torch.rand(5, 1, 2, 2)
    found = descend(model, model.head, x, start, steps=400, step_size=0.005)
    assert torch.allclose(found[:, :, 0], x[:, :, 0], atol=0.01)
    assert torch.equal(found[:, :, 1], start[:, :, 1])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("features")
    for name, recipe in (("robust", "digits/madry"), ("standard", "digits/standard")):
        cw.train(recipe, out=folder / name, epochs=8, validation_per_class=10)
        cw.evaluate(str(folder / name), "digits", attacks=["pgd:steps=5"], eps=0.2, per_class=20, out=folder / name)
    return folder / "robust", folder / "standard"


def test_non_robust_images_reach_their_target_within_the_ball(pair: tuple[Path, Path]) -> None:
    subject = Run.open(pair[1])
    images = load_data("digits", split="train")
    (x, targets), *_ = non_robust_images(subject, images, "pgd", seed=0)
    before = torch.from_numpy(images.images[: len(x)].astype(np.float32))
    before = before / 255 if images.images.dtype == np.uint8 else before
    assert float((x - before).abs().max()) <= 0.2 + 1e-6
    assert (targets != images.labels[: len(x)]).all()
    with torch.no_grad():
        reached, already = (np.mean(subject.model(some).argmax(1).numpy() == targets) for some in (x, before))
    assert reached > already + 0.3


def test_models_trained_on_both_data_sets(pair: tuple[Path, Path]) -> None:
    found = features(*pair, steps=30, per_class=60)
    natural = found.frames["models"].query("attack == 'natural'")
    assert natural["trained_on"].tolist() == ["original", "robust", "non-robust"]
    assert (natural["average_percent"] > 30).all()  # chance is 10
    made = pair[0] / "features" / "non-robust-images"
    assert sum(1 for _ in made.rglob("*.png")) == 600
    before = {file: file.stat().st_mtime_ns for file in made.rglob("*.png")}
    assert features(*pair, steps=30, per_class=60) == found
    assert {file: file.stat().st_mtime_ns for file in made.rglob("*.png")} == before
    assert len(found.frame) == 60
    with pytest.raises(InputError, match="generated with other settings"):
        features(*pair, steps=31, per_class=60)


def test_bad_input(pair: tuple[Path, Path], make_run) -> None:
    with pytest.raises(InputError, match="not the directory of a training"):
        features(pair[0], make_run("run", [[1, 0], [0, 1]]))
    with pytest.raises(InputError, match="have different classes"):
        features(make_run("other", [[1, 0], [0, 1]]), pair[1])
