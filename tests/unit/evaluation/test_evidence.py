"""Evidence in a report: images of the weakest class, and the command that reproduces it."""

# B batch, C channels, H height, W width

from __future__ import annotations

import base64
import io
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import classwise as cw
from classwise.config.options import EvaluateOptions, command_line
from classwise.core.errors import InputError
from classwise.storage.files import read_json, write_json


class Brightness(nn.Module):
    """Predicts class 1 if the mean exceeds one half, so margins and attack directions are known."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(10.0))

    def forward(self, x: Tensor) -> Tensor:
        lead = self.slope * (x.mean((1, 2, 3)) - 0.5)
        return torch.stack([-lead, lead], 1)


def bright_and_dark() -> tuple[Tensor, Tensor]:
    """Five images of class 0, far from the boundary, and five of class 1, of which three are near it."""
    levels = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 0.52, 0.9, 0.53, 0.9, 0.54])
    return levels[:, None, None, None].expand(10, 3, 4, 4).contiguous(), torch.arange(10) // 5


def pixels(png: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))))


def test_report_shows_broken_images_of_the_worst_class(tmp_path: Path) -> None:
    report = cw.evaluate(Brightness(), bright_and_dark(), attacks=["pgd:steps=5"], eps=0.1, out=tmp_path / "run")
    shown = report.examples
    assert shown is not None
    assert (shown.name, shown.broken, [one.index for one in shown.examples]) == ("1", 3, [5, 7, 9])
    for one, level in zip(shown.examples, (0.52, 0.53, 0.54), strict=True):
        assert (one.before.label, one.after.label, one.attack) == (1, 0, "pgd")
        assert one.size == pytest.approx(0.1, abs=1e-5)
        # The only way down is to darken every pixel by the radius; the margin is twice the lead.
        assert one.margin == pytest.approx(20 * (level - 0.1 - 0.5), abs=1e-3)
        assert np.unique(pixels(one.natural_png)) == [round(255 * level)]
        assert np.unique(pixels(one.adversarial_png)) == [round(255 * (level - 0.1))]
        assert np.unique(pixels(one.change_png)) == [0]  # all of the radius, drawn as black
    assert cw.load_report(tmp_path / "run").examples == shown
    assert read_json(tmp_path / "run/examples.json")["schema"] == "classwise/examples/1"


def test_examples_name_the_attack_that_broke_them_first() -> None:
    """Examples may be broken by a stage of a cascade after a weak attack has failed."""
    levels = torch.tensor([0.1, 0.1, 0.52, 0.58, 0.53, 0.57, 0.9])
    x, y = levels[:, None, None, None].expand(7, 3, 4, 4).contiguous(), (levels > 0.5).long()
    weak = "pgd:steps=1,step_size=0.05,start=zero"
    report = cw.evaluate(Brightness(), (x, y), attacks=[weak, "fast"], eps=0.1)
    assert report.examples is not None
    found = {one.index: (one.attack, one.after.label) for one in report.examples.examples}
    assert found == {2: ("pgd", 0), 4: ("pgd", 0), 3: ("fast/margin", 0), 5: ("fast/margin", 0)}
    assert report.examples.broken == 4
    assert all(report.verdicts.broken_by[index] == attack for index, (attack, _) in found.items())


def test_no_examples_if_nothing_is_broken(tmp_path: Path) -> None:
    x, y = bright_and_dark()
    report = cw.evaluate(Brightness(), (x[:5], y[:5]), attacks=["pgd:steps=2"], eps=0.01, classes=["a", "b"])
    assert report.examples is None
    assert cw.evaluate(Brightness(), (x, y), attacks=[], eps=0.1, out=tmp_path / "run").examples is None
    assert not (tmp_path / "run/examples.json").exists()


def test_large_images_are_scaled_down() -> None:
    x = torch.tensor([0.51, 0.1])[:, None, None, None].expand(2, 3, 400, 300).contiguous()
    report = cw.evaluate(Brightness(), (x, torch.tensor([1, 0])), attacks=["fgsm"], eps=0.1)
    assert report.examples is not None
    assert pixels(report.examples.examples[0].natural_png).shape == (160, 120, 3)


def test_damaged_examples_file_is_refused(tmp_path: Path) -> None:
    cw.evaluate(Brightness(), bright_and_dark(), attacks=["fgsm"], eps=0.1, out=tmp_path / "run")
    write_json(tmp_path / "run/examples.json", {"class": 3})
    with pytest.raises(InputError, match=r"examples\.json is not a gallery"):
        cw.load_report(tmp_path / "run")


def test_command_lists_settings_other_than_defaults() -> None:
    options = EvaluateOptions(
        model="resnet18",
        data="cifar10",
        attacks=["pgd:steps=5", "fast:exhaustive=true"],
        eps="8/255",
        weights=Path("a b.pt"),
        seed=3,
        margins=True,
        out="run",
    )
    line = command_line("evaluate", options)
    assert shlex.split(line) == [
        *("classwise", "evaluate", "--model", "resnet18", "--data", "cifar10", "--attack", "pgd:steps=5"),
        *("--attack", "fast:exhaustive=true", "--eps", "8/255", "--weights", "a b.pt", "--seed", "3", "--margins"),
        *("--out", "run"),
    ]


def test_objects_give_a_python_call() -> None:
    report = cw.evaluate(Brightness(), bright_and_dark(), attacks=["fgsm", cw.attacks.PGD(steps=2)], eps=0.1, seed=2)
    assert report.command == "classwise.evaluate(model, data, attacks=['fgsm', attack], eps=0.1, seed=2)"


def test_command_of_a_run_reproduces_its_report(tmp_path: Path) -> None:
    run = cw.train("digits/standard", out=tmp_path / "run", epochs=1, device="cpu")
    first = cw.evaluate(
        str(run.directory), "digits", attacks=["fgsm"], eps="0.1", per_class=5, device="cpu", out=tmp_path / "one"
    )
    assert first.command is not None
    words = shlex.split(first.command.replace(str(tmp_path / "one"), str(tmp_path / "two")))
    assert words[0] == "classwise"
    subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True)
    again = cw.load_report(tmp_path / "two")
    assert again.results == first.results
    assert again.examples == first.examples
    assert again.model["trained"]["name"] == "digits/standard"
