"""Repairs end to end: selection of images, written files, loading, and refused input."""

# N examples, K classes

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import classwise as cw
from classwise.core.errors import InputError
from classwise.core.progress import Progress
from classwise.data import load_data, to_float
from classwise.export import export
from classwise.models import DigitsCNN, normalized
from classwise.models.heads import Biased, with_biases
from classwise.models.load import load_model
from classwise.repairs.run import Repair
from classwise.reporting.leaderboard import leaderboard
from classwise.reporting.repair import load_repair
from classwise.storage.margins import Margins
from classwise.storage.run_directory import RunDirectory

EPS = "0.1"
ATTACK = "cw-pgd:steps=10"
QUICK: dict[str, Any] = {"per_class": 10, "targets": 1, "attacks": ["fgsm"], "test_per_class": 4}
"""A repair of a second or two."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(root: Path) -> Path:
    """A digits model trained against small perturbations, with the margins of 150 validation and 150 test images."""
    out = root / "run"
    cw.train("digits/trades", out=out, epochs=5, eps=EPS, attack={"steps": 3}, validation_per_class=15)
    cw.evaluate(out, "digits", attacks=[ATTACK], eps=EPS, per_class=15, margins=True, out=out)
    return out


@pytest.fixture(scope="module")
def repair(run: Path, root: Path) -> Repair:
    """The repaired model, evaluated on the same test images."""
    attacks = [ATTACK, "corruptions:severity=1"]
    return cw.repair(run, "digits", rule="worst", attacks=attacks, test_per_class=15, out=root / "fixed")


@pytest.fixture(scope="module")
def fixed(repair: Repair) -> Path:
    assert repair.directory is not None
    return repair.directory


@pytest.fixture(scope="module")
def hypersphere(root: Path) -> Path:
    """The run of a model whose last layer has no biases."""
    out = root / "hypersphere"
    recipe = {"model": "digits-cnn:head=hypersphere", "validation_per_class": 15}
    cw.train("digits/standard", out=out, epochs=3, eps="0.02", **recipe)
    return out


def pixels(split: str, per_class: int) -> tuple[Tensor, Tensor]:
    data = load_data("digits", split=split)
    rows = np.concatenate([np.flatnonzero(data.labels == label)[:per_class] for label in range(10)])
    return to_float(data.images[rows]), torch.from_numpy(data.labels[rows])


def logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(x)


def complaint(*args: Any, **kwargs: Any) -> str:
    """Return the one-line error of a repair."""
    with pytest.raises(InputError) as caught:
        cw.repair(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- images -----------------------------------------------------------------------------------------------


def test_run_is_repaired_with_its_validation_images(run: Path, repair: Repair) -> None:
    indices = json.loads((run / "validation.json").read_text())["indices"]
    assert repair.margins is not None
    assert repair.margins.index.tolist() == sorted(indices)
    on = repair.report.fitted_on
    assert on is not None
    assert (on.data, on.split, on.n, on.origin) == ("digits", "train", 150, "validation images of the run")
    assert on.per_class == [15] * 10
    assert on.digest == load_data("digits", split="train").digest()
    saved = Margins.load(RunDirectory(repair.directory).validation_margins)
    np.testing.assert_array_equal(saved.index, repair.margins.index)
    assert (repair.report.threat.norm, repair.report.threat.eps_text) == ("Linf", EPS)  # those of the training


def test_per_class_limits_the_fitting_images(run: Path) -> None:
    found = cw.repair(run, "digits", **{**QUICK, "evaluate": False, "seed": 4})
    validation = json.loads((run / "validation.json").read_text())["indices"]
    assert found.margins is not None
    assert set(found.margins.index.tolist()) < set(validation)
    assert np.bincount(found.margins.label).tolist() == [10] * 10
    assert found.report.search["targets"] == 1
    assert found.directory is None
    assert found.report.test is None


class Tasks(Progress):
    """Records the started tasks."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def start(self, task: str, total: int, done: int = 0) -> None:
        self.begun.append(task)


def test_margins_of_an_evaluation_are_reused(run: Path, root: Path) -> None:
    told = Tasks()
    cw.repair(run, "digits", attacks=["fgsm"], test_per_class=2, out=root / "known", progress=told)
    assert told.begun
    assert not any("margins" in task for task in told.begun)
    first, second = RunDirectory(run).validation_margins, RunDirectory(root / "known").validation_margins
    np.testing.assert_array_equal(Margins.load(first).attacked, Margins.load(second).attacked)


# -- what is written --------------------------------------------------------------------------------------


def test_the_directory_loads_as_a_model(run: Path, repair: Repair, fixed: Path) -> None:
    x, _ = pixels("test", 4)
    original, repaired = load_model(str(run)), load_model(str(fixed))
    assert repair.biases is not None
    assert max(repair.biases) > 0.01
    biases = torch.tensor(repair.biases)
    torch.testing.assert_close(logits(repaired, x), logits(original, x) + biases, atol=2e-5, rtol=0)
    torch.testing.assert_close(logits(repair.model, x), logits(repaired, x))
    before = load_file(run / "checkpoints" / "best.safetensors")
    after = load_file(fixed / "checkpoints" / "best.safetensors")
    assert before.keys() == after.keys()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"linear.bias"}
    assert repair.report.layer == "linear"
    assert torch.equal(logits(load_model(f"{fixed}@best", num_classes=10, in_channels=1), x), logits(repaired, x))


def test_report_round_trips_through_its_file(repair: Repair, fixed: Path, tmp_path: Path) -> None:
    for place in (fixed, fixed / "repair.json"):
        assert load_repair(place) == repair.report
    repair.report.to_json(tmp_path / "repair.json")
    assert (tmp_path / "repair.json").read_bytes() == (fixed / "repair.json").read_bytes()
    json.dumps(repair.report.model_dump(mode="json", by_alias=True), allow_nan=False)


def test_original_is_not_changed(run: Path, repair: Repair) -> None:
    assert "repair" not in RunDirectory(run).read()
    assert not (run / "repair.json").exists()


def test_cross_validated_accuracies_follow_from_the_margins(repair: Repair) -> None:
    report, margins = repair.report, repair.margins
    assert margins is not None
    assert report.fitting_before is not None
    for result, matrix in (
        (report.fitting_before.natural, margins.without_attack),
        (report.fitting_before.robust, margins.attacked),
    ):
        right = matrix.min(axis=1) > 0
        assert result.overall.value == pytest.approx(100 * right.mean(), abs=1e-3)
        for label, part in enumerate(result.by_class):
            assert part.value == pytest.approx(100 * right[margins.label == label].mean(), abs=1e-3)
    assert report.cross_validated is not None
    assert report.cross_validated.robust.worst.value > report.fitting_before.robust.worst.value
    assert report.frontier[0].weight == 0
    assert report.weight in [point.weight for point in report.frontier]


def test_test_results_equal_both_evaluations(repair: Repair, fixed: Path) -> None:
    found = repair.report.test
    assert found is not None
    before, after = cw.load_report(fixed / "original"), cw.load_report(fixed)
    assert (found.average_before.value, found.average_after.value) == (
        before["cw-pgd"].overall.value,
        after["cw-pgd"].overall.value,
    )
    assert found.average_change == pytest.approx(after["cw-pgd"].overall.value - before["cw-pgd"].overall.value)
    assert (found.worst_before.value, found.worst_after.value) == (before.worst.value, after.worst.value)
    for part in found.by_class:
        assert part.robust_before.value == before["cw-pgd"].by_class[part.label].value
        assert part.robust_after.value == after["cw-pgd"].by_class[part.label].value
        assert part.natural_after.value == after["natural"].by_class[part.label].value
        assert part.corrupted_before is not None
    # The exchange between classes adds up to the change of the images that are right.
    gained = round(found.average_change / 100 * before.dataset.n)
    assert sum(map(sum, found.errors_removed)) == gained
    # In bins of any width the calibration error is not below that of all images together.
    x, y = pixels("test", 15)
    shares = logits(load_model(str(fixed)), x).double().softmax(1)
    whole = (shares.amax(1) - (shares.argmax(1) == y).double()).mean().abs()
    assert found.ece_after is not None
    assert 100 * float(whole) - 1e-3 <= found.ece_after <= 100


def test_the_settings_are_those_of_the_method(repair: Repair) -> None:
    assert repair.report.settings == {}


def test_the_comparison_of_before_and_after_is_paired(fixed: Path) -> None:
    found = cw.compare(cw.load_report(fixed / "original"), cw.load_report(fixed))
    assert found.paired
    assert found["cw-pgd"][1].change is not None


def test_the_report_of_the_repaired_model_names_its_repair(run: Path, fixed: Path) -> None:
    entries = leaderboard([cw.load_report(run), cw.load_report(fixed)]).entries
    assert {entry.method for entry in entries} == {"trades", "trades + bias repair"}


def test_repaired_directory_can_be_evaluated(run: Path, repair: Repair, fixed: Path, root: Path) -> None:
    x, y = pixels("test", 15)
    report = cw.evaluate(fixed, "digits", attacks=[ATTACK], eps=EPS, per_class=15, out=root / "again")
    assert report.model["name"] == "fixed"
    assert repair.report_after is not None
    assert report["cw-pgd"] == repair.report_after["cw-pgd"]
    assert report["natural"].overall.value == pytest.approx(
        100 * float((logits(repair.model, x).argmax(1) == y).float().mean()), abs=1e-3
    )
    # Without a test evaluation of its own, the directory of a repair holds its later evaluation.
    cw.repair(run, "digits", evaluate=False, out=root / "unjudged")
    report = cw.evaluate(root / "unjudged", "digits", attacks=["fgsm"], eps=EPS, per_class=5, out=root / "unjudged")
    assert cw.load_report(root / "unjudged")["fgsm"] == report["fgsm"]
    assert load_repair(root / "unjudged").test is None


def test_the_page_and_the_sentences(repair: Repair, fixed: Path) -> None:
    page = (fixed / "repair.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "Expected and measured accuracy" in page
    sentences = " ".join(repair.report.sentences())
    assert sentences.startswith("Fitted on 150 images of digits/train (validation images of the run), rule worst.")
    assert "On digits/test under cw-pgd the worst class changes from" in sentences
    assert repair.report.test is not None
    assert f"{repair.report.test.worst_after.value:.1f}%" in sentences


def test_the_export_loads_without_this_package(fixed: Path, tmp_path: Path) -> None:
    folder = export(fixed, tmp_path / "exported")
    x, _ = pixels("test", 2)
    expected = logits(load_model(str(fixed)), x)
    assert torch.equal(logits(load_model(f"hf:{folder}"), x), expected)
    (snippet,) = (block.partition("```")[0] for block in (folder / "README.md").read_text().split("```python\n")[1:])
    save_file({"x": x}, tmp_path / "x.safetensors")
    code = (
        f"import sys\nsys.modules['classwise'] = None\n{snippet}\nimport torch\n"
        "from safetensors.torch import load_file, save_file\n"
        "with torch.no_grad():\n"
        "    save_file({'logits': model(load_file('../x.safetensors')['x'])}, '../logits.safetensors')\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=folder, env=environment, check=True, timeout=60)
    assert torch.equal(load_file(tmp_path / "logits.safetensors")["logits"], expected)
    assert "repair" in (folder / "README.md").read_text()


# -- what was predicted, measured -------------------------------------------------------------------------


def agree(margins: Margins, biases: np.ndarray, report: cw.ClassReport, key: str) -> None:
    """The accuracies that margins predict for these biases and those that an attack measured, on the same images."""
    shift = biases[margins.label][:, None] - biases[None]
    robust, natural = ((matrix + shift).min(axis=1) > 0 for matrix in (margins.attacked, margins.without_attack))
    assert report.verdicts is not None
    np.testing.assert_array_equal(report.verdicts.index, margins.index)
    measured = report.verdicts.survived(key)
    assert abs(robust.mean() - measured.mean()) <= 0.01
    assert np.abs(np.bincount(margins.label, robust.astype(int) - measured.astype(int), 10)).max() <= 3
    # Logits have half precision in the file.
    assert abs(int(natural.sum()) - int(report.verdicts.survived("natural").sum())) <= 1


def test_the_margins_predict_a_fresh_attack_on_the_repaired_model(run: Path, repair: Repair, fixed: Path) -> None:
    """On test images: the margins of the original and the biases, against `fast` on the repaired model."""
    report = cw.evaluate(fixed, "digits", attacks="fast", eps=EPS, per_class=15)
    agree(Margins.load(RunDirectory(run).margins), np.asarray(repair.biases), report, "fast")


def test_the_margins_predict_an_attack_under_biases_of_any_size(run: Path) -> None:
    margins, model = Margins.load(RunDirectory(run).margins), load_model(str(run))
    biases = np.random.default_rng(0).normal(0, 0.5, 10).astype(np.float32)
    changed, _ = with_biases(model, torch.from_numpy(biases), pixels("test", 1)[0])
    attack = "cosine-pgd:steps=30,target=all,num_targets=4"
    report = cw.evaluate(changed, "digits", attacks=[attack], eps=EPS, per_class=15)
    agree(margins, biases, report, "cosine-pgd")
    with pytest.raises(AssertionError):
        agree(margins, np.zeros(10), report, "cosine-pgd")  # the biases are not small


# -- other models -----------------------------------------------------------------------------------------


def test_module_and_images_in_memory(run: Path, root: Path) -> None:
    model = load_model(str(run))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    out = root / "memory"
    settings = {**QUICK, "per_class": None, "test_per_class": None}
    found = cw.repair(model, pixels("train", 10), test=pixels("test", 5), eps=EPS, rule="worst", out=out, **settings)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert found.model is not model
    x, _ = pixels("test", 3)
    expected = logits(model, x) + torch.tensor(found.biases)
    torch.testing.assert_close(logits(found.model, x), expected, atol=2e-5, rtol=0)
    assert found.report.fitted_on is not None
    assert (found.report.fitted_on.n, found.report.fitted_on.origin) == (100, "data passed by the caller")
    assert found.report_after is not None
    assert found.report_after.dataset.n == 50
    assert load_repair(out) == found.report
    with pytest.raises(InputError, match=r"names no architecture") as caught:
        load_model(str(out))  # the record names no architecture
    assert "\n" not in str(caught.value)
    again, _ = with_biases(DigitsCNN(), torch.zeros(10), x)
    again.load_state_dict(load_file(out / "checkpoints" / "best.safetensors"))
    torch.testing.assert_close(logits(again, x), expected, atol=2e-5, rtol=0)


def test_an_architecture_with_weights(run: Path, root: Path) -> None:
    """The normalization of the weights file is kept by the repaired model."""
    model = normalized(load_model(str(run)), [0.1], [0.8])
    save_file(model.state_dict(), root / "weights.safetensors")
    settings = {**QUICK, "evaluate": False, "weights": root / "weights.safetensors", "eps": EPS}
    found = cw.repair("digits-cnn", "digits", split="train", out=root / "weights", **settings)
    x, _ = pixels("test", 3)
    expected = logits(model, x) + torch.tensor(found.biases)
    torch.testing.assert_close(logits(load_model(str(root / "weights")), x), expected, atol=2e-5, rtol=0)
    assert "too high" in " ".join(found.report.notes)


def test_a_wrapped_model_is_saved_and_loads_back(hypersphere: Path, root: Path) -> None:
    out = root / "wrapped"
    found = cw.repair(hypersphere, "digits", rule="worst", out=out, **QUICK)
    assert found.report.layer is None
    assert isinstance(found.model, Biased)
    loaded = load_model(str(out))
    assert isinstance(loaded, Biased)
    x, _ = pixels("test", 3)
    torch.testing.assert_close(logits(loaded, x), logits(load_model(str(hypersphere)), x) + torch.tensor(found.biases))
    report = cw.evaluate(out, "digits", attacks=["fgsm"], eps="0.02", per_class=4)
    assert found.report_after is not None
    assert report["fgsm"] == found.report_after["fgsm"]
    with pytest.raises(InputError, match="which cannot be exported"):
        export(out, root / "wrapped-export")
    # A second repair of the repaired model.
    twice = cw.repair(out, "digits", split="train", out=root / "twice", evaluate=False, **QUICK)
    second = load_model(str(root / "twice"))
    torch.testing.assert_close(logits(second, x), logits(loaded, x) + torch.tensor(twice.biases))


def test_a_repaired_model_is_repaired_again(fixed: Path, root: Path) -> None:
    assert ", so it has no validation images here: pass the split" in complaint(fixed, "digits", **QUICK)
    found = cw.repair(fixed, "digits", split="train", out=root / "fixed-twice", evaluate=False, **QUICK)
    x, _ = pixels("test", 3)
    expected = logits(load_model(str(fixed)), x) + torch.tensor(found.biases)
    torch.testing.assert_close(logits(load_model(str(root / "fixed-twice")), x), expected, atol=2e-5, rtol=0)
    assert found.report.threat.eps_text == EPS


def test_a_model_in_double_precision(run: Path) -> None:
    model = load_model(str(run)).double()
    settings = {**QUICK, "per_class": None, "evaluate": False}
    found = cw.repair(model, pixels("train", 10), eps=EPS, rule="worst", **settings)
    x = pixels("test", 3)[0].double()
    torch.testing.assert_close(logits(found.model, x), logits(model, x) + torch.tensor(found.biases), atol=2e-5, rtol=0)


class Small(nn.Module):
    """A model for which memory holds 20 images only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 20:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return self.model(x)


def test_repair_with_little_memory(run: Path) -> None:
    """Every part of a repair uses batches that fit into memory."""
    model = load_model(str(run))
    how: dict[str, Any] = {**QUICK, "per_class": None, "test_per_class": None, "eps": EPS, "rule": "worst"}
    train, test = pixels("train", 10), pixels("test", 4)
    expected = cw.repair(model, train, test=test, **how)
    found = cw.repair(Small(model), train, test=test, batch_size=90, **how)
    assert found.report.test is not None
    assert found.report.test.ece_after == pytest.approx(expected.report.test.ece_after, abs=0.01)
    assert found.biases == pytest.approx(expected.biases, abs=0.01)


def test_a_recipe_that_ends_with_a_repair(run: Path, root: Path) -> None:
    """The result equals that of the command on the finished training."""
    recipe = {"epochs": 1, "eps": "0.02", "validation_per_class": 10, "repair": {"rule": "worst"}}
    made = cw.train("digits/standard", out=root / "recipe", **recipe)
    assert made.repaired == root / "recipe" / "repaired"
    directories = RunDirectory(made.repaired), RunDirectory(root / "recipe")
    shutil.copy(*(directory.validation_margins for directory in directories))  # to save the search
    by_hand = cw.repair(root / "recipe", "digits", rule="worst", evaluate=False, out=root / "by-hand")
    found = load_repair(made.repaired)
    assert found.biases == by_hand.biases
    assert found.test is None
    x, _ = pixels("test", 3)
    torch.testing.assert_close(logits(load_model(str(made.repaired)), x), logits(by_hand.model, x))


# -- interruption -----------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "repair.json").read_text())
    return {name: value for name, value in found.items() if name != "seconds"}


@pytest.fixture(scope="module")
def straight(run: Path, root: Path) -> Path:
    """A quick repair without interruption. Of 100 images to fit and 40 test images, in batches of 40."""
    cw.repair(run, "digits", rule="worst", batch_size=40, out=root / "straight", **QUICK)
    return root / "straight"


@pytest.mark.parametrize(
    ("amount", "left"),
    [(40, []), (110, []), (360, ["checkpoints", "original/report.json", "repair.json"])],
    ids=["margins", "audit", "verdict"],
)
def test_an_interrupted_repair_continues(
    run: Path, straight: Path, tmp_path: Path, amount: int, left: list[str], stop_after: Callable[[int], Progress]
) -> None:
    out = tmp_path / "straight"
    how: dict[str, Any] = {"rule": "worst", "batch_size": 40, "out": out, **QUICK}
    with pytest.raises(KeyboardInterrupt):
        cw.repair(run, "digits", progress=stop_after(amount), **how)
    for name in left:
        assert (out / name).exists()
    assert not (out / "repair.html").exists()
    assert "already holds this repair: add --resume" in complaint(run, "digits", **how)
    cw.repair(run, "digits", resume=True, **how)
    found, expected = contents(out), contents(straight)
    assert json.dumps(found) == json.dumps(expected)
    best = Path("checkpoints") / "best.safetensors"
    assert (out / best).read_bytes() == (straight / best).read_bytes()
    assert (out / "repair.html").exists()
    np.testing.assert_array_equal(
        Margins.load(RunDirectory(out).validation_margins).attacked,
        Margins.load(RunDirectory(straight).validation_margins).attacked,
    )


def test_finished_repair_is_not_overwritten(run: Path, straight: Path) -> None:
    how: dict[str, Any] = {"batch_size": 40, "out": straight, **QUICK}
    before = contents(straight)
    assert "already holds this repair: add --resume" in complaint(run, "digits", rule="worst", **how)
    assert "choice: rule worst there, rule tenth requested" in complaint(run, "digits", rule="tenth", **how)
    cw.repair(run, "digits", rule="worst", resume=True, **how)
    assert contents(straight) == before


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"split": "test"}, "split 'test' is reserved for the test evaluation"),
        ({"rule": "wurst"}, "did you mean 'worst'"),
        ({"method": "biases"}, "did you mean 'bias'"),
        ({"method": "bias:width=3"}, "repair method 'bias' has no settings, got 'width'"),
        ({"floor": 0}, "the floor is a percentage from 1 to below 100, got 0"),
        ({"floor": 100}, "the floor is a percentage from 1 to below 100, got 100"),
        ({"floor": -5}, "from 1 to below 100, got -5"),
        ({"floor": 99.9}, "a floor of 99.9% is not reachable by class biases: the highest worst class is"),
        ({"per_class": 0}, "per_class must be at least 1, got 0"),
        ({"per_class": 5}, "got per_class = 5; increase per_class or omit it"),
        ({"targets": 10}, "targets must be between 1 and 9, got 10"),
        ({"eps": 8}, "did you mean 8/255"),
        ({"norm": "L1"}, "norm"),
        ({"engine": "fast"}, "engine"),
        ({"attacks": ["pgdd"], "evaluate": True}, "did you mean 'pgd'"),
    ],
)
def test_invalid_input_is_refused(run: Path, more: dict[str, Any], said: str) -> None:
    assert said in complaint(run, "digits", **{"evaluate": False, **more})


def test_models_of_other_types_are_refused() -> None:
    assert complaint(None, "digits") == (
        "model has type NoneType; expected a torch.nn.Module, a run directory or a model spec such as 'resnet18'"
    )


def test_an_unreachable_floor_leaves_the_directory_to_another_repair(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "pass a lower floor" in complaint(run, "digits", floor=99.9, evaluate=False, out=out)
    with pytest.raises(InputError, match="holds no model"):
        load_model(str(out))
    margins = (out / "validation-margins.parquet").stat().st_mtime_ns
    found = cw.repair(run, "digits", rule="worst", evaluate=False, out=out)
    assert (out / "validation-margins.parquet").stat().st_mtime_ns == margins  # searched once
    assert load_model(str(out)) is not None
    assert found.report.choice == "rule worst"


def test_test_images_must_not_be_fitting_images(run: Path) -> None:
    model, data = load_model(str(run)), pixels("train", 10)
    assert "are also fitting images" in complaint(model, data, test=data)
    x, y = data
    half = (torch.cat([x[:30], pixels("test", 5)[0]]), torch.cat([y[:30], pixels("test", 5)[1]]))
    assert "30 of 80 test images are also fitting images" in complaint(model, data, test=half)
    assert "no test images: pass test=(x, y), or evaluate=False" in complaint(model, data)


def test_a_model_of_unknown_training_needs_a_split(run: Path, tmp_path: Path) -> None:
    weights = run / "checkpoints" / "best.safetensors"
    said = complaint("digits-cnn", "digits", weights=weights, evaluate=False)
    assert said == (
        "'digits-cnn' is not a run directory, so it has no validation images here: pass the split to fit to "
        "(--split train); accuracies on training images are too high"
    )
    assert "architecture without weights" in complaint("digits-cnn", "digits", evaluate=False)
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (other / "validation.json").unlink()
    assert "has no validation.json, so it has no validation images here" in complaint(other, "digits", evaluate=False)
    assert f"{str(run)!r} was not trained on this data, so" in complaint(run, "digits:only=1+2", evaluate=False)


def test_run_without_validation_images_is_refused(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (other / "validation.json").write_text(json.dumps({"indices": []}))
    assert "has no validation images (validation_per_class = 0)" in complaint(other, "digits", evaluate=False)


def test_directory_of_another_run_is_refused(run: Path, tmp_path: Path) -> None:
    said = complaint(run, "digits", out=run, **{**QUICK, "evaluate": False})
    assert "holds the training of another run" in said
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty and holds no run" in complaint(run, "digits", out=tmp_path, **QUICK)


def test_unreachable_floor_writes_no_report(run: Path, tmp_path: Path) -> None:
    complaint(run, "digits", floor=99, evaluate=False, out=tmp_path / "out")
    assert not (tmp_path / "out" / "repair.json").exists()
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema": "classwise/repair/9"}', '{"method": 3}'])
def test_invalid_repair_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "repair.json").write_text(text)
    with pytest.raises(InputError) as caught:
        load_repair(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "repair.json") in str(caught.value)


def test_missing_repair_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no repair\.json"):
        load_repair(tmp_path)


# -- run.json of a repaired model -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": None}, "names no architecture"),
        ({"model": "digits-cm"}, "did you mean 'digits-cnn'"),
        ({"wrapped": True}, "does not fit the model"),
        ({"normalization": {"mean": [0.1]}}, "normalization"),
        ({"normalization": {"mean": "x", "std": [1.0]}}, "normalization"),
        ({"normalization": [1, 2]}, "normalization"),
        ({"normalization": "imagenet"}, "normalization"),
    ],
)
def test_damaged_record_is_a_one_line_error(fixed: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(fixed / "checkpoints" / "best.safetensors", tmp_path / "checkpoints")
    record = json.loads((fixed / "run.json").read_text())
    record["repair"] |= change
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(InputError) as caught:
        load_model(str(tmp_path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
