"""Evaluation from a model and data to verdicts and a report; resuming; invalid input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import classwise as cw
from classwise.attacks import FGSM, PGD, BallAttack
from classwise.attacks.problem import Problem
from classwise.core.errors import InputError
from classwise.core.progress import Progress
from classwise.data import load_data, to_float
from classwise.evaluation.judge import MAX_IMAGES, compute_logits
from classwise.storage.verdicts import Verdicts

EPS = 0.1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quickly trained digits model."""
    out = tmp_path_factory.mktemp("run") / "standard"
    cw.train("digits/standard", out=out, epochs=6)
    return out


def test_large_batches_are_judged_in_parts() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4)).double()
    sizes: list[int] = []
    model.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    x = torch.rand(2 * MAX_IMAGES + 7, 3, 2, 2)
    found = compute_logits(model, x)
    assert sizes == [MAX_IMAGES, MAX_IMAGES, 7]
    assert torch.allclose(found, model(x.double()), rtol=1e-12)


@pytest.fixture
def model(run: Path) -> nn.Module:
    return cw.models.load.load_model(str(run))


def pixels() -> tuple[Tensor, Tensor]:
    data = load_data("digits", split="test")
    return to_float(data.images), torch.from_numpy(data.labels)


def test_report_equals_a_computation_by_hand(model: nn.Module) -> None:
    x, y = pixels()
    report = cw.evaluate(model, "digits", attacks=["fgsm"], eps=EPS)
    with torch.no_grad():
        natural = model(x).argmax(1)
    attacked = FGSM(eps=EPS)(model, x, y)
    with torch.no_grad():
        predicted = torch.where(natural == y, model(attacked).argmax(1), natural)
    for key, expected in (("natural", natural), ("fgsm", predicted), ("worst-case", predicted)):
        right = (expected == y).numpy()
        assert report[key].overall.value == pytest.approx(100 * right.mean(), abs=1e-3)
        for label in range(10):
            share = right[y.numpy() == label].mean()
            assert report[key].by_class[label].value == pytest.approx(100 * share, abs=1e-3)
            assert report[key].by_class[label].n == int((y == label).sum())
        matrix = np.zeros((10, 10), dtype=int)
        np.add.at(matrix, (y.numpy(), expected.numpy()), 1)
        assert report.confusion[key] == matrix.tolist()
    assert report.worst.value == min(part.value for part in report["fgsm"].by_class)
    assert report["fgsm"].overall.value < report["natural"].overall.value


def test_batch_size_does_not_change_verdicts(model: nn.Module) -> None:
    tables = [
        cw.evaluate(model, "digits", attacks=["pgd:steps=3,restarts=2"], eps=EPS, batch_size=size).verdicts
        for size in (7, 697)
    ]
    assert np.array_equal(tables[0].attacks["pgd"], tables[1].attacks["pgd"])


def test_seed_changes_random_starts(model: nn.Module) -> None:
    tables = [
        cw.evaluate(model, "digits", attacks=["pgd:steps=1,step_size=0.001"], eps=0.3, seed=seed).verdicts
        for seed in (0, 0, 1)
    ]
    assert np.array_equal(tables[0].attacks["pgd"], tables[1].attacks["pgd"])
    assert not np.array_equal(tables[0].attacks["pgd"], tables[2].attacks["pgd"])


@pytest.mark.parametrize("kind", ["pair", "dataset", "loader", "numpy", "spec"])
def test_any_data_gives_the_same_report(model: nn.Module, kind: str) -> None:
    x, y = pixels()
    data = {
        "pair": (x, y),
        "numpy": (x.numpy(), y.numpy()),
        "dataset": TensorDataset(x, y),
        "loader": DataLoader(TensorDataset(x, y), batch_size=50),
        "spec": "digits",
    }[kind]
    report = cw.evaluate(model, data, attacks=["pgd:steps=2"], eps=EPS)
    expected = cw.evaluate(model, "digits", attacks=["pgd:steps=2"], eps=EPS)
    assert np.array_equal(report.verdicts.attacks["pgd"], expected.verdicts.attacks["pgd"])
    assert [part.value for part in report["pgd"].by_class] == [part.value for part in expected["pgd"].by_class]


def test_outputs_with_logits_and_tuples(model: nn.Module) -> None:
    @dataclass
    class Output:
        logits: Tensor

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module, wrap: type) -> None:
            super().__init__()
            self.inner, self.wrap = inner, wrap

        def forward(self, x: Tensor) -> object:
            return Output(self.inner(x)) if self.wrap is Output else (self.inner(x), None)

    expected = cw.evaluate(model, "digits", attacks=["pgd:steps=2"], eps=EPS).verdicts
    for wrap in (Output, tuple):
        found = cw.evaluate(Wrapped(model, wrap), "digits", attacks=["pgd:steps=2"], eps=EPS).verdicts
        assert np.array_equal(found.attacks["pgd"], expected.attacks["pgd"])


def test_double_precision_model(model: nn.Module) -> None:
    report = cw.evaluate(model.double(), "digits", attacks=["pgd:steps=2"], eps=EPS)
    assert report["pgd"].overall.value < report["natural"].overall.value
    assert next(model.parameters()).dtype == torch.float64


@dataclass(frozen=True, kw_only=True)
class Cheat(BallAttack):
    """Returns images outside the ball, which the public call projects."""

    def perturb(self, problem: Problem) -> Tensor:
        return 1 - problem.ball.center


class Outside:
    """Not a ball attack at all: returns images far outside the allowed radius."""

    eps = norm = None

    def within(self, threat: object) -> Outside:
        return self

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, **_: object) -> Tensor:
        return torch.where(torch.arange(len(x))[:, None, None, None] % 2 == 0, 1 - x, x * torch.nan)


def test_results_are_projected_into_the_ball(model: nn.Module) -> None:
    x, y = pixels()
    assert (Cheat(eps=EPS)(model, x, y) - x).abs().max() <= EPS + 1e-6


def test_results_outside_the_ball_are_rejected(model: nn.Module) -> None:
    report = cw.evaluate(model, "digits", attacks=[Outside()], eps=EPS)  # type: ignore[list-item]
    assert report["Outside"].overall == report["natural"].overall
    assert report.attacks["Outside"].rejected == report.attacks["Outside"].attacked > 600
    assert any("outside the ball" in finding.text for finding in report.sanity.findings)


def test_interrupted_evaluation_resumes_to_the_same_verdicts(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: Callable[[int], Progress]
) -> None:
    monkeypatch.setattr("classwise.evaluation.batching.SAVE_SECONDS", 0.0)
    settings = {"attacks": ["pgd:steps=2", "pgd:steps=3"], "eps": EPS, "batch_size": 50}
    whole = cw.evaluate(model, "digits", **settings)
    assert list(whole.results) == ["natural", "pgd:steps=2", "pgd:steps=3", "worst-case"]
    for stop in (300, 1000, 1700):
        out = tmp_path / str(stop)
        with pytest.raises(KeyboardInterrupt):
            cw.evaluate(model, "digits", out=out, progress=stop_after(stop), **settings)
        partial, _ = Verdicts.load(out / "verdicts.parquet")
        assert not partial.complete
        assert not (out / "report.json").exists()
        decided = {key: partial.predictions(key) != -1 for key in partial.keys}
        assert sum(int(rows.sum()) for rows in decided.values()) > stop - 300
        resumed = cw.evaluate(model, "digits", out=out, resume=True, **settings)
        for key in whole.verdicts.keys:
            assert np.array_equal(resumed.verdicts.predictions(key), whole.verdicts.predictions(key))
        assert cw.load_report(out) == resumed
        again = cw.evaluate(model, "digits", out=out, resume=True, **settings)
        assert again.attacks == resumed.attacks


def test_killed_command_resumes_to_the_same_verdicts(run: Path, tmp_path: Path) -> None:
    base = [sys.executable, "-m", "classwise", "evaluate", "--model", str(run), "--data", "digits", "--eps", "0.1"]
    base += ["--attack", "pgd:steps=200", "--batch-size", "20", "--device", "cpu", "--out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*base, str(tmp_path / "cut")], env=environment, stderr=subprocess.DEVNULL)
    table = tmp_path / "cut" / "verdicts.parquet"
    deadline = time.monotonic() + 120
    while not table.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    cut, _ = Verdicts.load(table)
    if (tmp_path / "cut" / "report.json").exists():
        pytest.skip("the evaluation was over before it could be killed")
    assert not cut.complete
    for name, flags in (("cut", ["--resume"]), ("whole", [])):
        subprocess.run([*base, str(tmp_path / name), *flags], check=True, capture_output=True, env=environment)
    one, two = (Verdicts.load(tmp_path / name / "verdicts.parquet")[0] for name in ("cut", "whole"))
    assert np.array_equal(one.attacks["pgd"], two.attacks["pgd"])


def test_per_class_takes_the_first_examples_of_each_class(model: nn.Module, tmp_path: Path) -> None:
    report = cw.evaluate(model, "digits", attacks=["fgsm"], eps=EPS, per_class=5, out=tmp_path / "out")
    labels = load_data("digits", split="test").labels
    expected = sorted(index for k in range(10) for index in np.flatnonzero(labels == k)[:5])
    table = pq.read_table(tmp_path / "out" / "verdicts.parquet")
    assert table.column("index").to_pylist() == expected
    assert [part.n for part in report["fgsm"].by_class] == [5] * 10


def test_absent_class_is_null(model: nn.Module, tmp_path: Path) -> None:
    x, y = pixels()
    report = cw.evaluate(model, (x[y != 3], y[y != 3]), attacks=["fgsm"], eps=EPS, out=tmp_path / "out")
    written = json.loads((tmp_path / "out" / "report.json").read_text())["results"]["fgsm"]["by_class"][3]
    assert written == {"value": None, "low": None, "high": None, "n": 0, "label": 3, "class": "3"}
    assert report.worst.label != 3


def test_model_keeps_its_mode(model: nn.Module) -> None:
    model.train()
    cw.evaluate(model, "digits", attacks=["fgsm"], eps=EPS, per_class=2)
    assert model.training


def test_eps_is_one_number(model: nn.Module) -> None:
    report = cw.evaluate(model, "digits", attacks=[PGD(eps="8/255", steps=1)], per_class=2)
    assert (report.threat.eps_text, report.threat.eps) == ("8/255", 8 / 255)
    with pytest.raises(InputError, match="different eps"):
        cw.evaluate(model, "digits", attacks=[PGD(eps="8/255"), FGSM(eps="4/255")])
    with pytest.raises(InputError, match=r"'PGD' sets eps = 0\.1, but runs with eps = 0\.2: set eps in one place$"):
        cw.evaluate(model, "digits", attacks=["pgd:eps=0.1"], eps="0.2")
    with pytest.raises(InputError, match="attack 'PGD' sets norm = L2, but runs with norm = Linf"):
        cw.evaluate(model, "digits", attacks=["pgd:norm=L2"], eps="0.2", norm="Linf")
    assert cw.evaluate(model, "digits", attacks=["pgd:norm=L2"], eps="0.2", per_class=1).threat.norm == "L2"
    assert cw.evaluate(model, "digits", attacks="pgd:eps=0.2", norm="L2", per_class=1).threat.norm == "L2"
    flagged = cw.evaluate(model, "digits", attacks=["fgsm"], eps="0.031", per_class=2).sanity.findings
    assert any("is not 8/255" in finding.text for finding in flagged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x * 255, y), "[0, 1]"),
        (lambda x, y: (x - 0.5, y), "[0, 1]"),
        (lambda x, y: (torch.where(x > 0.99, torch.nan, x), y), "NaN"),
        (
            lambda x, y: (x, y + 5),
            "arrays: label 14 is out of range: the model has 10 outputs, so labels must be 0 to 9",
        ),
        (lambda x, y: (x, y - 5), "label"),
        (lambda x, y: (x.expand(-1, 3, -1, -1), y), "the model fails on images of 3x8x8"),
        (lambda x, y: (x[:0], y[:0]), "expected at least one image"),
        (lambda x, y: (x, y[:5]), "labels"),
    ],
)
def test_invalid_data_is_refused(model: nn.Module, change: object, message: str) -> None:
    with pytest.raises(InputError) as caught:
        cw.evaluate(model, change(*pixels()), attacks=["fgsm"], eps=EPS)  # type: ignore[operator]
    assert message.lower() in str(caught.value).lower()
    assert "\n" not in str(caught.value)


def test_invalid_models_and_attacks_are_refused(model: nn.Module) -> None:
    class Hollow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :10] * torch.nan

    with pytest.raises(InputError, match="NaN or infinite logits"):
        cw.evaluate(Hollow(), "digits", attacks=["fgsm"], eps=EPS)
    with pytest.raises(InputError, match="the model has 7 outputs, but digits has 10 classes"):
        cw.evaluate(nn.Sequential(nn.Flatten(), nn.Linear(64, 7)), "digits", attacks=["fgsm"], eps=EPS)
    for wrong in (PGD, 3, None):
        with pytest.raises(InputError, match="is not an attack: expected a spec like"):
            cw.evaluate(model, "digits", attacks=[wrong], eps=EPS)  # type: ignore[list-item]
    for wrong, kind in ((model.state_dict(), "OrderedDict"), (None, "NoneType"), (lambda x: x, "function")):
        with pytest.raises(InputError, match=f"^model has type {kind}; expected a torch.nn.Module, a run directory or"):
            cw.evaluate(wrong, "digits")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^model is the class Hollow; pass an instance: Hollow\(\.\.\.\)$"):
        cw.evaluate(Hollow, "digits")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^unknown device 'gpu'; expected cpu, cuda or cuda:N$"):
        cw.evaluate(model, "digits", device="gpu")
    with pytest.raises(InputError, match=r"^device 'meta' is not available: "):
        cw.evaluate(model, "digits", device="meta")
    with pytest.raises(InputError, match="weights apply to a model spec"):
        cw.evaluate(model, "digits", weights="some.pt")
    with pytest.raises(InputError, match="is given twice"):
        cw.evaluate(model, "digits", attacks=["fgsm", "fgsm"], eps=EPS)


def test_errors_of_models_and_attacks_are_distinguished(model: nn.Module) -> None:
    class Fails(nn.Module):
        """Fails on images that an attack has changed."""

        def forward(self, x: Tensor) -> Tensor:
            if ((255 * x).frac() > 0.01).any():
                raise ValueError("too gray")
            return x.flatten(1)[:, :10]

    class Detached(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :10].detach()

    def divide(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return x + 1 // 0

    def call(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        model(x + 0.1 / 255)
        return x

    with pytest.raises(InputError, match=r"^attack 'divide' failed: ZeroDivisionError: .* by zero$"):
        cw.evaluate(model, "digits", attacks=[divide], eps=EPS, per_class=2)
    with pytest.raises(InputError, match=r"^the model fails under call: ValueError: too gray$"):
        cw.evaluate(Fails(), "digits", attacks=[call], eps=EPS, per_class=2)
    with pytest.raises(InputError, match=r"^the model returns logits without a gradient: remove detach\(\)"):
        cw.evaluate(Detached(), "digits", attacks=["pgd"], eps=EPS, per_class=2)
    black_box = Detached()
    black_box.has_gradients = False
    report = cw.evaluate(black_box, "digits", attacks=["square:queries=2"], eps=EPS, per_class=2)
    assert report["square"].overall.n == 20
    with pytest.raises(
        InputError, match=r"^attack 'm.py': expected a function or an object in the file, as in m.py:my"
    ):
        cw.evaluate(model, "digits", attacks=["m.py"])


def test_model_with_one_output_is_refused() -> None:
    """A binary classifier with a sigmoid: there is no second logit to raise."""
    one, y = nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), torch.zeros(6, dtype=torch.int64)
    with pytest.raises(InputError, match="the model has one output"):
        cw.evaluate(one, (torch.rand(6, 1, 8, 8), y), attacks=["fgsm"], eps=EPS)


def test_directory_of_another_run_is_not_overwritten(model: nn.Module, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cw.evaluate(model, "digits", attacks=["fgsm"], eps=EPS, per_class=2, out=out)
    before = (out / "report.json").read_bytes()
    with pytest.raises(InputError, match=r"already holds this evaluation: add --resume"):
        cw.evaluate(model, "digits", attacks=["fgsm"], eps=EPS, per_class=2, out=out)
    with pytest.raises(InputError, match=r"holds another evaluation \(differs in per_class: 2 there, 3 requested\)"):
        cw.evaluate(model, "digits", attacks=["fgsm"], eps=EPS, per_class=3, out=out, resume=True)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(InputError, match=r"holds another evaluation \(differs in its inputs\)"):
        cw.evaluate(model, "digits", attacks=["fgsm"], eps=EPS, per_class=2, out=out, resume=True)
    assert (out / "report.json").read_bytes() == before


def test_training_images_are_an_error_finding(run: Path) -> None:
    settings = {"attacks": ["fgsm"], "eps": EPS, "per_class": 2}
    found = cw.evaluate(str(run), "digits", split="train", **settings).sanity.findings
    assert [finding.severity for finding in found] == ["error"]
    assert "trained on these images" in found[0].text
    assert not cw.evaluate(str(run), "digits", **settings).sanity.findings


def test_interrupted_evaluation_saves_verdicts(
    model: nn.Module, tmp_path: Path, stop_after: Callable[[int], Progress]
) -> None:
    """An interruption saves verdicts between the regular saves, too."""
    with pytest.raises(KeyboardInterrupt):
        cw.evaluate(model, "digits", attacks=["fgsm"], eps=EPS, batch_size=50, out=tmp_path, progress=stop_after(900))
    partial, _ = Verdicts.load(tmp_path / "verdicts.parquet")
    assert (partial.natural != -1).all()
    assert 100 < (partial.attacks["fgsm"] != -1).sum() < 500


def test_default_batch_size_depends_on_image_size(model: nn.Module) -> None:
    from classwise.evaluation.inputs import default_batch_size

    small = load_data("digits", split="test")
    assert default_batch_size(small, torch.device("cpu")) == 2000
    large = load_data((np.zeros((1, 3, 32, 32), dtype=np.uint8), np.zeros(1, dtype=np.int64)))
    assert default_batch_size(large, torch.device("cpu")) == 97
    assert default_batch_size(large, torch.device("cuda")) == 1497


def test_verdicts_use_float32_without_autocast(model: nn.Module) -> None:
    """Verdicts do not depend on the caller's autocast, which is restored."""
    seen = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
            return self.inner(x)

    with torch.autocast("cpu", torch.float16, enabled=True):
        report = cw.evaluate(Watched(), "digits", attacks=["fgsm"], eps=EPS, per_class=2, engine="eager")
        assert torch.is_autocast_enabled("cpu")
    _, _, _, natural, *_, attack, verdict = seen  # three checks of the model, then probes, and no example is left
    assert natural == verdict == (False, False)
    assert attack[1]
    assert np.array_equal(
        report.verdicts.natural, cw.evaluate(model, "digits", attacks=["fgsm"], eps=EPS, per_class=2).verdicts.natural
    )


def test_a_directory_holds_one_model(run: Path, model: nn.Module, tmp_path: Path) -> None:
    """A training directory accepts an evaluation of its own model only, and an evaluation directory accepts no
    training.
    """
    settings = {"attacks": ["fgsm"], "eps": EPS, "per_class": 1}
    with pytest.raises(InputError, match="holds the training of another run"):
        cw.evaluate(model, "digits", out=run, **settings)
    cw.evaluate(f"{run}@last", "digits", out=run, **settings)
    assert cw.load_report(run).model["name"] == "standard@last"
    cw.evaluate(model, "digits", out=tmp_path, **settings)
    with pytest.raises(InputError, match="holds the evaluation of another run"):
        cw.train("digits/standard", out=tmp_path, epochs=1)
    assert not (tmp_path / "checkpoints").exists()


def test_tf32_is_disabled_and_restored() -> None:
    from classwise.core.model_calls import _tf32_switches, exact

    def settings() -> list[object]:
        return [getattr(place, name) for place, name, _ in _tf32_switches()]

    before = settings()
    with exact(torch.device("cuda")):
        assert settings() == [strict for _, _, strict in _tf32_switches()]
    assert settings() == before
    torch.get_float32_matmul_precision()  # raises where older and newer flags were mixed


def test_models_of_equal_weights_have_different_fingerprints(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.factor = nn.Linear(64, 10), factor

        def forward(self, x: Tensor) -> Tensor:
            return self.factor * self.layer(x.flatten(1))

    settings = {"attacks": ["fgsm"], "eps": 0.05, "per_class": 5, "out": tmp_path}
    cw.evaluate(Scaled(1.0), "digits", **settings)
    with pytest.raises(InputError, match="holds another evaluation"):
        cw.evaluate(Scaled(-1.0), "digits", resume=True, **settings)


def test_images_that_differ_are_not_paired(model: nn.Module) -> None:
    x, y = pixels()
    one, same, other = (cw.evaluate(model, (images, y), attacks=["fgsm"], eps=EPS) for images in (x, x, 1 - x))
    assert cw.compare(one, same).paired
    assert not cw.compare(one, other).paired


def test_masked_gradients_are_a_warning(model: nn.Module) -> None:
    class Masked(nn.Module):
        """Correct predictions with a gradient that is NaN everywhere."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 0 * (x - x.detach()).abs().sqrt().flatten(1).sum(1, keepdim=True)

    report = cw.evaluate(Masked(), "digits", attacks=["pgd:steps=2"], eps=EPS)
    assert {finding.severity for finding in report.sanity.findings} == {"warning"}
    assert report.sanity.findings[0].text.startswith("On 40 of 40 natural images the gradient is zero or not finite")
    assert not cw.evaluate(model, "digits", attacks=["pgd:steps=2"], eps=EPS).sanity.findings

    class Rounded(Masked):
        """Correct predictions with a gradient that is zero everywhere."""

        def forward(self, x: Tensor) -> Tensor:
            return self.inner((x * 255).round() / 255)

    assert cw.evaluate(Rounded(), "digits", attacks=["fgsm"], eps=EPS).sanity.findings[0].severity == "warning"


@pytest.mark.parametrize(
    "fault", [KeyError("layer7"), IndexError("3"), AssertionError(), ValueError(), RuntimeError("a\nb")], ids=repr
)
def test_any_exception_of_a_model_is_a_one_line_error(fault: Exception) -> None:
    class Faulty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise fault

    with pytest.raises(InputError, match="the model fails on images of 1x8x8") as caught:
        cw.evaluate(Faulty(), "digits", attacks=["fgsm"], eps=EPS)
    assert "\n" not in str(caught.value)


def test_buffers_are_restored(model: nn.Module) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            self.calls += 1
            return {"logits": self.inner(x)}

    counting = Counting()
    cw.evaluate(counting, "digits", attacks=["pgd:steps=2"], eps=EPS, per_class=2)
    assert counting.calls == 0


def test_model_without_correct_predictions(model: nn.Module) -> None:
    """No example is attacked, and the evaluation succeeds."""
    x, _ = pixels()
    with torch.no_grad():
        wrong = (model(x).argmax(1) + 1) % 10
    report = cw.evaluate(model, (x, wrong), attacks=["pgd:steps=2"], eps=EPS)
    assert report["natural"].overall.value == report["pgd"].overall.value == 0
    assert report.attacks["pgd"].attacked == 0
