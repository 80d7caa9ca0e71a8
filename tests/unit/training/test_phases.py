"""Phases: images and batches, resuming across a boundary, and validation."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import classwise as cw
from classwise.config.recipes import load_recipe
from classwise.core.errors import InputError
from classwise.core.progress import Progress
from classwise.data import load_data
from classwise.data.datasets import imagenet_classes
from classwise.training.checkpoint import load_state
from classwise.training.data import Phase, phase_at
from classwise.training.schedules import Piecewise

CODE = """
import torch
from classwise.data import ImageSet

class Net(torch.nn.Module):
    '''Takes images of any size, and counts those of every size that it is trained on.'''

    def __init__(self, classes=3):
        super().__init__()
        self.layer = torch.nn.Linear(3, classes)
        self.register_buffer("seen", torch.zeros(32, dtype=torch.int64))

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.seen[x.shape[-1]] += len(x)
        return self.layer(x.mean((2, 3)))

def Thousand(): return Net(1000)

def data(side, n=90):
    random = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    x = torch.rand(n, 3, 1, 1, generator=random) * 0.5 + 0.5 * torch.eye(3)[y][:, :, None, None]
    return ImageSet(name="mine", split="train", images=x.expand(-1, -1, side, side).numpy(), labels=y.numpy(),
                    classes=("a", "b", "c"))

def small(): return data(8)
def large(): return data(16)
def fewer(): return data(16, 60)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    """Two phases on images that double their size; 27 images of each class are trained on."""
    file = tmp_path / "mine.py"
    file.write_text(CODE, encoding="utf-8")
    return {
        "data": f"{file}:small",
        "model": f"{file}:Net",
        "eps": "0.05",
        "epochs": 4,
        "batch_size": 27,
        "optimizer": "sgd:lr=0.5",
        "schedule": {"name": "piecewise", "epochs": [0, 1, 4], "factors": [0, 1, 0.1]},
        "attack": {"steps": 1},
        "validation_per_class": 3,
        "phases": [{"epochs": 2}, {"epochs": 2, "data": f"{file}:large", "batch_size": 16}],
    }


def train(recipe: dict[str, Any], out: Path, **more: Any) -> dict[str, Any]:
    cw.train("digits/madry", out=out, **recipe, **more)
    return load_state(out / "checkpoints" / "last.pt")


class Counted(Progress):
    """Counts announced and finished steps."""

    total = done = 0

    def start(self, title: str, total: int, done: int = 0) -> None:
        self.total += total

    def advance(self, amount: int = 1, note: str = "") -> None:
        self.done += amount


def test_every_phase_has_its_images_and_batches(tmp_path: Path, recipe: dict[str, Any]) -> None:
    counted = Counted()
    state = train(recipe, tmp_path / "run", progress=counted)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["phase"] for line in lines] == [1, 1, 2, 2]
    # 81 images are 3 batches of 27, and 5 of 16 with one image left, of which batch norm could make nothing.
    assert [sum(line["train"]["n"]) for line in lines] == [81, 81, 80, 80]
    assert (counted.total, counted.done) == (16, 16)
    seen = state["model"]["seen"]
    assert int(seen[8]) > 0
    assert int(seen[8]) * 80 == int(seen[16]) * 81
    assert int(seen.sum()) == int(seen[8] + seen[16])
    # The rate of the last step of each epoch, on straight lines from 0 by 0.5 to 0.05.
    last = [0 + 2 / 3, 1 + 2 / 3, 2 + 4 / 5, 3 + 4 / 5]
    assert [line["lr"] for line in lines] == pytest.approx(np.interp(last, [0, 1, 4], [0, 0.5, 0.05]).tolist())


def test_imagenet_folders_at_two_sizes(tmp_path: Path, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """JPEG files in folders named by WordNet ids, as in ImageNet: two per class, one of them held out."""
    random = np.random.default_rng(0)
    for wnid in imagenet_classes():
        folder = tmp_path / "data" / "ILSVRC2012" / "train" / wnid
        folder.mkdir(parents=True)
        for number, (height, width) in enumerate(random.integers(9, 30, (2, 2))):
            image = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
            image.save(folder / f"{number}.JPEG")
    monkeypatch.setenv("CLASSWISE_DATA", str(tmp_path / "data"))
    recipe |= {"data": "imagenet:resize=10,crop=8", "model": recipe["model"].replace("Net", "Thousand")}
    recipe |= {"epochs": 2, "batch_size": 100, "validation_per_class": 1}
    recipe["phases"] = [{"epochs": 1}, {"epochs": 1, "data": "imagenet:resize=20,crop=16", "batch_size": 250}]
    state = train(recipe, tmp_path / "run")
    seen = state["model"]["seen"]
    assert int(seen[8]) == int(seen[16]) > 0
    assert [sum(line["validation"]["n"]) for line in state["history"]] == [1000, 1000]
    assert [line["phase"] for line in state["history"]] == [1, 2]


def test_equal_phases_equal_one_phase(tmp_path: Path, recipe: dict[str, Any]) -> None:
    one = train({**recipe, "phases": []}, tmp_path / "one")
    cut = train({**recipe, "phases": [{"epochs": 1}, {"epochs": 3}]}, tmp_path / "cut")
    assert all(torch.equal(one["model"][name], cut["model"][name]) for name in one["model"])
    other = train(recipe, tmp_path / "other")
    assert not torch.equal(one["model"]["layer.weight"], other["model"]["layer.weight"])


@pytest.mark.parametrize("steps", [5, 8, 13])
def test_resumed_across_a_boundary_equals_uninterrupted(
    tmp_path: Path, recipe: dict[str, Any], stop_after: Callable[[int], Progress], steps: int
) -> None:
    """Interrupted in the first phase, in the first epoch of the second, and in the second epoch of the second."""
    whole = train(recipe, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "cut", progress=stop_after(steps))
    assert load_state(tmp_path / "cut" / "checkpoints" / "last.pt")["epoch"] == {5: 1, 8: 2, 13: 3}[steps]
    cut = train(recipe, tmp_path / "cut", resume=True)
    for part in ("model", "optimizer"):
        assert str(whole[part]) == str(cut[part])
    assert all(torch.equal(whole["model"][name], cut["model"][name]) for name in whole["model"])
    timeless = [[{**line, "seconds": 0} for line in state["history"]] for state in (whole, cut)]
    assert timeless[0] == timeless[1]


def test_random_parts_have_the_size_of_their_phase(tmp_path: Path, recipe: dict[str, Any]) -> None:
    phases = [{"epochs": 2, "size": 6}, {**recipe["phases"][1], "size": 11}]
    state = train({**recipe, "augment": {"part": 0.35, "flip": True}, "phases": phases}, tmp_path / "run")
    sizes = state["model"]["seen"].nonzero().flatten().tolist()
    assert sizes == [6, 11]


def test_validation_images_are_those_of_the_phase(tmp_path: Path, recipe: dict[str, Any]) -> None:
    """Images that are enlarged copies have the same predictions; the split is the same for all phases."""
    train({**recipe, "optimizer": "sgd:lr=1e-12"}, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {tuple(line["validation"]["n"]) for line in lines} == {(3, 3, 3)}
    naturals = [line["validation"]["loss_adv"] for line in lines]
    assert naturals[0] == pytest.approx(naturals[-1], abs=0.02)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"epochs": 5}, "the phases have 4 epochs in total, the recipe has 5"),
        ({"phases": [{"epochs": 4, "seize": 3}]}, "unknown key 'seize': did you mean 'size'"),
        ({"phases": [{"epochs": 4, "size": 3}]}, "size = 3 applies to random parts: set augment.part"),
        ({"augment": {"part": 0.3, "size": 9}}, "size = 9 is larger than the images of FILE:small (8 pixels)"),
        ({"augment": {"part": 0.3, "crop": 2}}, "augment.crop and augment.part are mutually exclusive"),
        ({"augment": {"part": 1.5}}, "augment.part = 1.5"),
        ({"phases": [{"batch_size": 4}]}, "the key 'phases.0.epochs' is required"),
        ({"phases": [{"epochs": 0}]}, "phases.0.epochs"),
        ({"phases": [{"epochs": 1}, {"epochs": 3, "data": "FILE:fewer"}]}, "phase 2 has different examples"),
        ({"phases": [{"epochs": 1}, {"epochs": 3, "data": "digits"}]}, "phase 2 has different examples"),
        ({"phases": [{"epochs": 1}, {"epochs": 3, "crop": 8}]}, "crop = 8 must be smaller than the image (8 pixels)"),
        ({"data": {"name": "FILE:small", "extra": "FILE:small"}}, "data.extra needs phases of one image size"),
        ({"schedule": "piecewise:epochs=0+1,factors=1"}, "2 epochs and 1 factors"),
        ({"schedule": "piecewise:epochs=1+0,factors=1+0"}, "expected increasing values"),
        ({"schedule": "piecewise:epochs=0+1,factors=1+-1"}, "expected no negative values"),
    ],
)
def test_invalid_phases_start_nothing(
    tmp_path: Path, recipe: dict[str, Any], change: dict[str, Any], complaint: str
) -> None:
    change = json.loads(json.dumps(change).replace("FILE", str(tmp_path / "mine.py")))
    complaint = complaint.replace("FILE", str(tmp_path / "mine.py"))
    with pytest.raises(InputError) as caught:
        train({**recipe, **change}, tmp_path / "run")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_phases_of_the_paper() -> None:
    """Wong et al. 2020: sizes 128, 224, 288, batches of 512, 224, 128, and their rates at every epoch."""
    recipe = load_recipe("imagenet/fgsm-rs")
    assert [(phase.epochs, phase.batch_size) for phase in recipe.phases] == [(6, 512), (6, 224), (3, 128)]
    assert [phase.size for phase in recipe.phases] == [128, 224, 288]
    assert recipe.augment.part == 0.08
    settings = {key: tuple(value) for key, value in recipe.schedule.items() if key != "name"}
    schedule = Piecewise(**settings)
    rates = {0: 0.0, 0.5: 0.2, 1: 0.4, 6: 0.04, 9: 0.022, 12: 0.004, 15: 0.0004, 20: 0.0004}
    for time, rate in rates.items():
        assert recipe.optimizer["lr"] * schedule(time, 15) == pytest.approx(rate)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_phase_of_each_epoch(lengths: list[int]) -> None:
    images = load_data("digits", split="test")
    phases = [Phase(epochs=length, images=images, batch_size=1, crop=0) for length in lengths]
    found = [phase_at(phases, epoch) for epoch in range(sum(lengths))]
    assert found == [number for number, length in enumerate(lengths) for _ in range(length)]
    assert all(after - before in (0, 1) for before, after in pairwise(found))


def test_per_class_limits_training_images(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 1, "validation_per_class": 5, "data": {"name": "digits", "per_class": 7}}
    run = cw.train("digits/standard", out=tmp_path / "few", **settings)
    assert run.outcome.history[0]["train"]["n"] == [7] * 10
    settings["data"]["per_class"] = 0
    with pytest.raises(InputError, match=r"data\.per_class"):
        cw.train("digits/standard", out=tmp_path / "none", **settings)


def test_evaluation_uses_images_of_the_last_phase() -> None:
    assert load_recipe("imagenet/fgsm-rs").data_at_the_end == "imagenet:resize=352,crop=288"
    assert load_recipe("digits/trades").data_at_the_end == "digits"
