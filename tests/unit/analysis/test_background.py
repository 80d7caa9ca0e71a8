"""Backgrounds: colors, foreground masks of synthetic scenes, and counts on white by hand."""

# N examples, K classes, H height, W width

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import classwise as cw
from classwise.analysis import AnalysisResult, background
from classwise.analysis.background import assignments
from classwise.analysis.foreground import foregrounds
from classwise.core.errors import InputError
from classwise.data.derived import on_colors


def test_white_foreground_on_colored_background() -> None:
    x = torch.tensor([[[[0.0, 1.0], [0.5, 0.0]]]])
    found = on_colors(x, torch.tensor([[0.2, 0.0, 1.0]]))
    assert torch.allclose(found[0, :, 0, 0], torch.tensor([0.2, 0.0, 1.0]))
    assert torch.allclose(found[0, :, 0, 1], torch.ones(3))
    assert torch.allclose(found[0, :, 1, 0], torch.tensor([0.6, 0.5, 1.0]))


@pytest.mark.parametrize("k", [4, 5, 10, 100])
def test_assignments_give_one_color_per_class_and_cross(k: int) -> None:
    ways = assignments(k)
    for way in ways.values():
        assert way.shape == (k,)
        assert set(way) == {0, 1}
    (one, other) = (set(np.flatnonzero(way == 0)) for way in ways.values())
    assert 0 < len(one & other) < min(len(one), len(other))
    assert list(ways["halves"]) == [0] * len(other) + [1] * (k - len(other))


def scenes(shape: str, channels: int, side: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Objects of one color, with noise, near the center of a background of another color."""
    random = np.random.default_rng(0)
    rows, columns = np.mgrid[:side, :side]
    images, masks = [], []
    for _ in range(10):
        row, column, size = *(side / 2 + random.uniform(-3, 3, 2)), side * random.uniform(0.2, 0.3)
        apart = np.abs([rows - row, columns - column])
        mask = apart.max(0) <= size if shape == "square" else np.hypot(*apart) <= size
        ground, thing = random.uniform(0, 0.4, channels), random.uniform(0.6, 1, channels)
        image = np.where(mask, thing[:, None, None], ground[:, None, None]) + random.normal(
            0, 0.05, (channels, side, side)
        )
        images.append(image.clip(0, 1))
        masks.append(mask)
    return np.array(images, dtype=np.float32), np.array(masks)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("shape", ["square", "disc"])
def test_foreground_of_synthetic_scenes(shape: str, channels: int) -> None:
    images, masks = scenes(shape, channels)
    found = foregrounds(images)
    overlap = (found & masks).sum((1, 2)) / (found | masks).sum((1, 2))
    assert overlap.min() > 0.85
    assert np.median(overlap) > 0.95


def test_foreground_of_a_uniform_image() -> None:
    found = foregrounds(np.full((2, 3, 16, 16), 0.5, dtype=np.float32))
    assert found.shape == (2, 16, 16)
    assert foregrounds(np.zeros((1, 1, 3, 3), dtype=np.float32)).shape == (1, 3, 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("background") / "run"
    cw.train("digits/madry", out=out, epochs=4, attack={"steps": 3}, validation_per_class=10)
    cw.evaluate(str(out), "digits", attacks=["pgd:steps=5"], eps=0.2, per_class=20, out=out)
    return out


def test_background_colors_determine_confusion(run: Path) -> None:
    found = background(run)
    summary = found.frames["summary"]
    assert summary["colors"].tolist() == ["even and odd", "even and odd", "halves", "halves"]
    attacked = summary[summary["attack"] == "pgd"]
    # the paper's claim, beyond the intervals
    assert (attacked["within_color_percent_low"] > attacked["without_colors_percent_high"]).all()
    assert summary["by_chance_percent"].tolist() == pytest.approx([100 * 4 / 9] * 4, abs=1e-3)
    wrong = found.frame.query("label != predicted")
    same = {
        "even and odd": wrong["label"] % 2 == wrong["predicted"] % 2,
        "halves": wrong["label"] // 5 == wrong["predicted"] // 5,
    }
    for row in summary.itertuples():
        attacked = wrong["attack"] == row.attack
        own = wrong["colors"] == row.colors
        assert (wrong["same_color"][own] == same[row.colors][own]).all()
        for images, value in ((own, row.within_color_percent), (~own, row.without_colors_percent)):
            inside, every = (wrong["count"][attacked & images & of].sum() for of in (same[row.colors], True))
            assert value == pytest.approx(100 * inside / every, abs=1e-3)
    assert len(found.figures()) == 2
    assert len(found.frame) == 2 * 2 * 100
    assert background(run, experiment="colors") == found
    assert background(run, experiment="colours") == found  # the former name


def counts(found: AnalysisResult) -> list[list[int]]:
    """The predictions by class for each kind of images and attack."""
    return [part["count"].tolist() for _, part in found.frame.groupby(["images", "attack"], sort=False)]


def test_white_background_counts(run: Path, tmp_path: Path) -> None:
    everything = np.ones((20, 8, 8), dtype=bool)
    np.save(tmp_path / "all.npy", everything)
    found = background(run, experiment="white", label=3, masks=tmp_path / "all.npy")
    original, white, attacked, both = counts(found)
    assert original == white  # if everything is foreground, nothing becomes white
    assert attacked == both
    assert "the masks cover 100% of an image and hold 100% of the model's gradient" in found.finding
    verdicts = cw.load_report(run).verdicts
    assert verdicts is not None
    mine = verdicts.label == 3
    assert original == np.bincount(verdicts.natural[mine], minlength=10).tolist()
    np.save(tmp_path / "none.npy", ~everything)
    found = background(run, experiment="white", label=3, masks=tmp_path / "none.npy")
    assert max(counts(found)[1]) == 20  # one white image twenty times
    assert "the masks cover 0% of an image and hold 0% of" in found.finding
    cards = found.figures()[1].plot.cards
    most, least = (
        [float(card.lines[0].split()[-1].rstrip("%")) for card in cards if card.heading.startswith(which)]
        for which in ("most", "least")
    )
    assert most == sorted(most, reverse=True)
    assert least == sorted(least)
    assert least[0] <= most[-1]


def test_second_model_uses_the_same_white_images(run: Path) -> None:
    found = background(run, run, experiment="white")
    assert counts(found)[:4] == counts(found)[4:]
    assert found.about["label"] == cw.load_report(run)["pgd"].worst.label
    assert "the estimated masks cover" in found.finding
    assert len(found.figures()) == 2
    assert len(found.frame) == 8 * 10


def test_bad_input(run: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "few.npy", np.ones((3, 8, 8), dtype=bool))
    with pytest.raises(InputError, match=r"expected \(20, 8, 8\)"):
        background(run, experiment="white", label=3, masks=tmp_path / "few.npy")
    (tmp_path / "no.npy").write_text("nothing")
    with pytest.raises(InputError, match="cannot be read"):
        background(run, experiment="white", label=3, masks=tmp_path / "no.npy")
    with pytest.raises(InputError, match="is not a class"):
        background(run, experiment="white", label="cat")
    with pytest.raises(InputError, match="needs at least one run"):
        background()
