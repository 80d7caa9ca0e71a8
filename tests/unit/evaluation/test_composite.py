"""Composite attacks, corruptions, and their costs, in a whole evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import classwise as cw
from classwise.attacks import FGSM, PGD, BallAttack
from classwise.attacks.problem import Problem
from classwise.core.errors import InputError
from classwise.core.progress import Progress
from classwise.core.streams import ExampleNoise
from classwise.data import load_data, to_float
from classwise.storage.verdicts import NATURAL, Verdicts

EPS = 0.1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """A quickly trained digits model."""
    out = tmp_path_factory.mktemp("run") / "standard"
    return cw.train("digits/standard", out=out, epochs=4).load()


@dataclass(frozen=True, kw_only=True)
class Ladder(BallAttack):
    """A weak attack, then a stronger one."""

    def stages(self, num_classes: int) -> Mapping[str, BallAttack]:
        assert num_classes == 10
        return {
            "fgsm": FGSM(eps=self.eps, norm=self.norm, step_size=0.02),
            "pgd": PGD(eps=self.eps, norm=self.norm, steps=5),
        }

    def perturb(self, problem: Problem) -> Tensor:
        raise AssertionError("an evaluation runs the stages itself")


def test_stages_attack_survivors_of_earlier_stages(model: nn.Module) -> None:
    report = cw.evaluate(model, "digits", attacks=[Ladder()], eps=EPS)
    verdicts = report.verdicts
    first, second = verdicts.stages["Ladder/fgsm"], verdicts.stages["Ladder/pgd"]
    assert list(verdicts.stages) == ["Ladder/fgsm", "Ladder/pgd"]
    assert list(report.results) == ["natural", "Ladder", "worst-case"]
    assert np.array_equal(second, verdicts.attacks["Ladder"])
    broken = first != verdicts.label
    assert np.array_equal(second[broken], first[broken])
    natural, left = verdicts.survived(NATURAL), ~broken
    assert natural.sum() > left.sum() > verdicts.survived("Ladder").sum() > 0
    # each stage equals the same attack run by itself on the same examples
    alone = cw.evaluate(model, "digits", attacks=[FGSM(step_size=0.02), PGD(steps=5)], eps=EPS).verdicts
    assert np.array_equal(alone.attacks["fgsm"], first)
    assert np.array_equal(alone.attacks["pgd"][left], second[left])

    assert np.array_equal(verdicts.forwards["Ladder/fgsm"], natural.astype(int))
    assert np.array_equal(verdicts.backwards["Ladder/pgd"], 5 * left)
    info = report.attacks["Ladder"]
    assert [(stage.name, stage.attacked, stage.broke) for stage in info.stages] == [
        ("fgsm", natural.sum(), natural.sum() - left.sum()),
        ("pgd", left.sum(), left.sum() - verdicts.survived("Ladder").sum()),
    ]
    assert info.forwards == info.backwards == natural.sum() + 5 * left.sum()
    for part in info.by_class:
        mine = verdicts.label == part.label
        assert part.attacked == natural[mine].sum()
        assert part.forwards == natural[mine].sum() + 5 * left[mine].sum()


def test_temperature_grid_reports_all_and_the_strongest(model: nn.Module) -> None:
    spec = "temperature-pgd:inv_t=0.01+5+50,steps=3"
    report = cw.evaluate(model, "digits", attacks=[spec, "fgsm"], eps=EPS)
    names = [f"temperature-pgd:inv_t={value}" for value in ("0.01", "5", "50")]
    assert list(report.results) == ["natural", "temperature-pgd", *names, "fgsm", "worst-case"]
    values = {name: report[name].overall.value for name in names}
    strongest = min(names, key=values.get)
    assert len(set(values.values())) > 1
    assert report.attacks["temperature-pgd"].strongest == strongest
    assert report["temperature-pgd"] == report[strongest]
    correct = int(report.verdicts.survived(NATURAL).sum())
    assert report.attacks["temperature-pgd"].forwards == 3 * 3 * correct
    for name, value in zip(names, (0.01, 5, 50), strict=True):
        alone = cw.evaluate(model, "digits", attacks=[f"temperature-pgd:inv_t={value},steps=3"], eps=EPS)
        assert np.array_equal(alone.verdicts.attacks["temperature-pgd"], report.verdicts.attacks[name])


def test_temperature_grid_on_a_batch_returns_the_strongest(model: nn.Module) -> None:
    data = load_data("digits", split="test")
    x, y = to_float(data.images[:100]), torch.from_numpy(data.labels[:100])

    def survivors(inv_t: tuple[float, ...]) -> int:
        attack = cw.attacks.TemperaturePGD(inv_t=inv_t, eps=EPS, steps=3, start="zero")
        return int((model(attack(model, x, y)).argmax(1) == y).sum())

    assert survivors((0.01, 5.0, 50.0)) == min(survivors((value,)) for value in (0.01, 5.0, 50.0))


def test_duplicate_attack_is_refused(model: nn.Module) -> None:
    with pytest.raises(InputError, match="'temperature-pgd:inv_t=5' is given twice"):
        cw.evaluate(model, "digits", attacks=["temperature-pgd:inv_t=5", "temperature-pgd:inv_t=2+5"], eps=EPS)


@pytest.mark.parametrize("stop", [100, 800, 1500, 2200])
def test_resumed_verdicts_equal_uninterrupted_ones(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int, stop_after: Callable[[int], Progress]
) -> None:
    monkeypatch.setattr("classwise.evaluation.batching.SAVE_SECONDS", 0.0)
    settings = {
        "attacks": [Ladder(), "temperature-pgd:inv_t=2+5,steps=2", "corruptions:kind=brightness,severity=1+5"],
        "eps": EPS,
        "batch_size": 50,
    }
    whole = cw.evaluate(model, "digits", **settings)
    for stop in (100, 800, 1500, 2200):
        out = tmp_path / f"cut-{stop}"
        with pytest.raises(KeyboardInterrupt):
            cw.evaluate(model, "digits", out=out, progress=stop_after(stop), **settings)
        partial, _ = Verdicts.load(out / "verdicts.parquet")
        assert not partial.complete, stop
        resumed = cw.evaluate(model, "digits", out=out, resume=True, **settings)
        assert resumed.verdicts == whole.verdicts, stop
        assert cw.load_report(out) == resumed, stop
        assert cw.load_report(out).verdicts == whole.verdicts, stop


def test_corruptions_do_not_count_in_the_worst_case(model: nn.Module) -> None:
    asked = ["fgsm:step_size=0.02", "corruptions:kind=brightness+gaussian-noise+defocus-blur,severity=1+5"]
    report = cw.evaluate(model, "digits", attacks=asked, eps=EPS)
    assert list(report.results) == ["natural", "fgsm", "worst-case"]
    assert report["worst-case"] == report["fgsm"]
    verdicts = report.verdicts
    assert [(part.kind, part.severity) for part in report.corruptions.results] == [
        (kind, severity) for kind in ("brightness", "gaussian-noise", "defocus-blur") for severity in (1, 5)
    ]
    for part in report.corruptions.results:
        right = verdicts.corrupted[f"{part.kind}/{part.severity}"] == verdicts.label
        assert part.overall.value == pytest.approx(100 * right.mean(), abs=1e-3)
        for estimate in part.by_class:
            assert estimate.value == pytest.approx(100 * right[verdicts.label == estimate.label].mean(), abs=1e-3)
    families = {part.family: part.overall.value for part in report.corruptions.families}
    assert list(families) == ["weather", "noise", "blur"]
    for family, value in families.items():
        members = [part.overall.value for part in report.corruptions.results if part.family == family]
        assert value == pytest.approx(np.mean(members), abs=1e-3)


def test_corrupted_verdicts_are_predictions_on_corrupted_images(model: nn.Module) -> None:
    from classwise.corruptions import Corruption

    data = load_data("digits", split="test")
    corruption = Corruption(kind="brightness", severity=3)  # is deterministic
    expected = model(corruption(to_float(data.images), generator=ExampleNoise(0, torch.arange(len(data))))).argmax(1)
    report = cw.evaluate(model, "digits", attacks=[corruption])
    assert np.array_equal(report.verdicts.corrupted["brightness/3"], expected.numpy())
    assert list(report.results) == ["natural"]


def test_class_that_is_not_attacked_is_a_finding(model: nn.Module) -> None:
    report = cw.evaluate(model, "digits", attacks=["pgd:steps=2,target=3", "fgsm"], eps=EPS, per_class=10)
    (finding,) = [one for one in report.sanity.findings if one.code == "left-alone"]
    assert (finding.severity, finding.labels) == ("info", [3])
    assert finding.text.startswith("pgd did not attack class 3:")
    assert report["pgd"].by_class[3] == report["natural"].by_class[3]
    assert report.attacks["pgd"].by_class[3].forwards == 0


def test_verdicts_remain_if_a_probe_fails(model: nn.Module) -> None:
    class Fragile(nn.Module):
        """Raises an error on bright images."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            if bool((x.detach().flatten(1).mean(1) > 0.7).any()):
                raise ValueError("too bright")
            return self.inner(x)

    settings = {"attacks": ["fgsm"], "eps": EPS, "per_class": 5}
    report = cw.evaluate(Fragile(), "digits", **settings)
    assert report.verdicts == cw.evaluate(model, "digits", **settings).verdicts
    (finding,) = [one for one in report.sanity.findings if one.code == "not-probed"]
    assert finding.severity == "warning"
    assert finding.text.endswith("the model fails under the probes: ValueError: too bright")
