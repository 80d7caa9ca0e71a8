"""The attack ``fast``: its cascade, audit and fallback; memory; adaptive evaluation."""

# N examples

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import classwise as cw
from classwise.accelerate import FoldedCopy
from classwise.attacks import AutoAttack, Fast
from classwise.core.errors import InputError
from classwise.core.progress import Progress
from classwise.data import load_data
from classwise.evaluation import judge, runner
from classwise.evaluation.batching import BatchLoop
from classwise.evaluation.parts import NEAREST_OF_CLASS, AttackParts, at_most, draw_sample, nearest
from classwise.evaluation.stages import Run
from classwise.models import resnet18
from classwise.models.load import load_model
from classwise.storage.verdicts import NATURAL

EPS = 0.12
SHORT = "steps=5,queries=60"
"""Of the ensemble, which is not what is tested."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quickly trained robust digits model."""
    out = tmp_path_factory.mktemp("run") / "trades"
    cw.train("digits/trades", out=out, epochs=5)
    return out


def test_survivors_per_class_match_autoattack(run: Path) -> None:
    report = cw.evaluate(
        run, "digits", attacks=["fast:steps=30,queries=200", "autoattack:steps=30,queries=200"], eps=EPS, per_class=20
    )
    verdicts = report.verdicts
    assert verdicts is not None
    fast, full = verdicts.survived("fast"), verdicts.survived("autoattack")
    assert 0 < full.sum() < verdicts.survived(NATURAL).sum()
    for label in range(10):
        assert fast[verdicts.label == label].sum() <= full[verdicts.label == label].sum() + 1
    assert fast.sum() <= full.sum() + 1


def test_every_stage_reports_its_examples(run: Path) -> None:
    report = cw.evaluate(run, "digits", attacks=[f"fast:{SHORT}"], eps=EPS)
    info, verdicts = report.attacks["fast"], report.verdicts
    assert verdicts is not None
    stages = {stage.name: stage for stage in info.stages}
    assert list(stages) == list(Fast().stages(10))
    natural = int(verdicts.survived(NATURAL).sum())
    after = {name: int(verdicts.survived(f"fast/{name}").sum()) for name in stages}
    assert stages["margin"].attacked == natural
    assert stages["targets"].attacked == after["margin"]
    assert 10 * NEAREST_OF_CLASS <= stages["near-misses"].attacked < after["targets"]
    audit = info.audit
    assert audit is not None
    assert audit.left == after["near-misses"]
    assert audit.nearest == audit.random == 10
    assert stages["audit-apgd-ce"].attacked == 20
    assert audit.broke + audit.broke_random == after["near-misses"] - after["audit-square"]
    assert audit.doubts == []
    assert [stages[name].attacked for name in stages if name.startswith("ensemble")] == [0, 0, 0, 0]
    assert int(verdicts.survived("fast").sum()) == after["audit-square"]
    for name, stage in stages.items():
        assert stage.attacked == int((verdicts.forwards[f"fast/{name}"] > 0).sum())
        assert np.array_equal(np.isfinite(verdicts.margins[f"fast/{name}"]), verdicts.forwards[f"fast/{name}"] > 0)


def test_exhaustive_attacks_all_survivors(run: Path) -> None:
    report = cw.evaluate(run, "digits", attacks=[f"fast:{SHORT}"], eps=EPS, per_class=10, exhaustive=True)
    stages = {stage.name: stage for stage in report.attacks["fast"].stages}
    assert report.attacks["fast"].audit is None
    assert not any(name.startswith("audit") for name in stages)
    left = stages["near-misses"]
    verdicts = report.verdicts
    assert verdicts is not None
    assert stages["ensemble-apgd-ce"].attacked == int(verdicts.survived("fast/near-misses").sum()) > left.attacked / 2
    with pytest.raises(InputError, match="exhaustive applies to the attack fast only"):
        cw.evaluate(run, "digits", attacks=["pgd"], eps=EPS, exhaustive=True)


class Rounded(nn.Module):
    """A model without useful gradients: the image is rounded to a few gray levels, or the logits to steps."""

    def __init__(self, inner: nn.Module, what: str) -> None:
        super().__init__()
        self.inner, self.what = inner, what

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "input":
            return self.inner((4 * x).round() / 4)
        if self.what == "answers":
            return self.inner(x + 0.3 * torch.randn_like(x))
        return (20 * self.inner(x)).round() / 20


@pytest.mark.parametrize("what", ["input", "output"])
def test_masked_gradients_trigger_the_fallback(run: Path, what: str) -> None:
    masked = Rounded(load_model(str(run)), what).eval()
    report = cw.evaluate(masked, "digits", attacks=[f"fast:{SHORT}", f"autoattack:{SHORT}"], eps=EPS, per_class=8)
    audit, verdicts = report.attacks["fast"].audit, report.verdicts
    assert audit is not None
    assert verdicts is not None
    assert "zero-gradient" in audit.doubts
    stages = {stage.name: stage for stage in report.attacks["fast"].stages}
    assert stages["ensemble-apgd-ce"].attacked == int(verdicts.survived("fast/audit-square").sum()) > 0
    fast, full = verdicts.survived("fast"), verdicts.survived("autoattack")
    assert not (fast & ~full).any()
    assert fast.sum() >= full.sum() - 2  # the cascade may break one or two that the ensemble does not
    assert stages["ensemble-square"].broke + stages["audit-square"].broke > 0


def test_random_outputs_trigger_the_fallback(run: Path) -> None:
    torch.manual_seed(0)
    model = Rounded(load_model(str(run)), "answers").eval()
    report = cw.evaluate(model, "digits", attacks=["fast:steps=5,queries=20"], eps=EPS, per_class=4)
    audit = report.attacks["fast"].audit
    assert audit is not None
    assert "random-answers" in audit.doubts
    assert report.model["searched"] == "as it is"


# The same verdicts whatever the batches, the engine and the interruptions.


@pytest.fixture(scope="module")
def whole(run: Path) -> cw.ClassReport:
    return cw.evaluate(
        run, "digits", attacks=[f"fast:{SHORT}", "pgd:restarts=2"], eps=EPS, per_class=12, engine="eager"
    )


@pytest.mark.parametrize("batch_size", [9, 64])
@pytest.mark.parametrize("engine", ["eager", "auto"])
def test_batch_size_and_engine_change_no_verdict(
    run: Path, whole: cw.ClassReport, batch_size: int, engine: str
) -> None:
    again = cw.evaluate(
        run,
        "digits",
        attacks=[f"fast:{SHORT}", "pgd:restarts=2"],
        eps=EPS,
        per_class=12,
        engine=engine,
        batch_size=batch_size,
    )
    mine, theirs = again.verdicts, whole.verdicts
    assert mine is not None
    assert theirs is not None
    for key in ("fast", "pgd"):
        assert np.array_equal(mine.survived(key), theirs.survived(key))
    for key, column in theirs.stages.items():
        assert np.array_equal(mine.stages[key] == mine.label, column == theirs.label), key
    assert (again.model["searched"] == "as it is") == (engine == "eager")


@pytest.mark.parametrize("after", [150, 420])
def test_interrupted_cascade_resumes(
    run: Path, whole: cw.ClassReport, tmp_path: Path, after: int, stop_after: Callable[[int], Progress]
) -> None:
    settings: dict[str, Any] = {"attacks": [f"fast:{SHORT}", "pgd:restarts=2"], "eps": EPS, "per_class": 12}
    settings |= {"engine": "eager", "out": tmp_path / "out", "batch_size": 10}
    with pytest.raises(KeyboardInterrupt):
        cw.evaluate(run, "digits", **settings, progress=stop_after(after))
    report = cw.evaluate(run, "digits", **settings, resume=True)
    assert report.verdicts is not None
    assert whole.verdicts is not None
    assert np.array_equal(report.verdicts.attacks["fast"], whole.verdicts.attacks["fast"])
    assert report.attacks["fast"].audit == whole.attacks["fast"].audit
    assert [stage.attacked for stage in report.attacks["fast"].stages] == [
        stage.attacked for stage in whole.attacks["fast"].stages
    ]
    assert cw.evaluate(run, "digits", **settings, resume=True).attacks["fast"].audit == whole.attacks["fast"].audit


def test_wrong_optimized_copy_gives_no_false_adversarial_example(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts are predictions of the model itself on the images, checked here again."""
    model = load_model(str(run))

    class Liar(nn.Module):
        slack = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return model(x).roll(1, 1)

    seen = []

    def recorded(one: nn.Module, x: Tensor) -> Tensor:
        logits = compute_logits(one, x)
        seen.append((x, logits))
        return logits

    compute_logits = judge.compute_logits
    monkeypatch.setattr(judge, "compute_logits", recorded)
    monkeypatch.setattr(runner, "search_model", lambda *_: Liar())
    report = cw.evaluate(model, "digits", attacks=["pgd:steps=3"], eps=EPS, per_class=6)
    verdicts = report.verdicts
    assert verdicts is not None
    x, logits = seen[-1]
    with torch.no_grad():
        assert torch.equal(model(x), logits)
    rows = verdicts.survived(NATURAL)
    assert np.array_equal(verdicts.attacks["pgd"][rows], logits.argmax(1).numpy())
    images = load_data("digits", split="test")
    clean = torch.from_numpy(np.array(images.images[verdicts.index[rows]])).float()
    clean = clean / 255 if images.images.dtype == np.uint8 else clean
    assert (x - clean).abs().max() <= EPS + 1e-6


# Which examples.


def test_near_misses_have_the_largest_margins() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 100)
    margins = rng.normal(size=400).astype(np.float32) - 5
    margins[labels == 3] -= 10  # classes far from the boundary are sampled, too
    left = rng.random(400) < 0.8
    chosen = nearest(left, labels, margins)
    assert not chosen[~left].any()
    for label in range(4):
        rows = np.flatnonzero(left & (labels == label))
        best = rows[np.argsort(-margins[rows])]
        taken = int(chosen[rows].sum())
        assert taken >= NEAREST_OF_CLASS
        assert set(np.flatnonzero(chosen & (labels == label))) == set(best[:taken])


def test_audit_sample_is_balanced_and_seeded() -> None:
    labels = np.repeat(np.arange(10), 600)
    margins = np.linspace(-3, -1, 6000).astype(np.float32)
    left = np.ones(6000, dtype=bool)
    left[labels == 2] = False
    left[np.flatnonzero(labels == 5)[3:]] = False  # three are left of this class
    near, at_random = draw_sample(left, labels, margins, np.arange(6000), seed=0)
    assert not (near & at_random).any()
    assert not ((near | at_random) & ~left).any()
    counts = np.bincount(labels[near], minlength=10), np.bincount(labels[at_random], minlength=10)
    assert counts[0].tolist() == [5, 5, 0, 5, 5, 3, 5, 5, 5, 5]
    assert counts[1].tolist() == [5, 5, 0, 5, 5, 0, 5, 5, 5, 5]
    assert set(np.flatnonzero(near & (labels == 0))) == set(range(595, 600))
    again = draw_sample(left, labels, margins, np.arange(6000), seed=0)
    other = draw_sample(left, labels, margins, np.arange(6000), seed=1)
    assert np.array_equal(at_random, again[1])
    assert not np.array_equal(at_random, other[1])
    assert np.array_equal(near, other[0])
    few = left & (np.arange(6000) % 20 == 0)
    near, at_random = draw_sample(few, labels, margins, np.arange(6000), seed=0)
    assert np.bincount(labels[near], minlength=10).tolist() == [1, 1, 0, 1, 1, 1, 1, 1, 1, 1]
    assert at_random.sum() == 8


def test_upper_bound_of_the_audit() -> None:
    n = 50
    bound = at_most(0, n)
    assert bound is not None
    assert (1 - bound / 100) ** n == pytest.approx(0.05)
    assert at_most(n, n) == 100
    assert at_most(0, 0) is None


def test_fallback_is_autoattack() -> None:
    fast, whole = Fast(eps=EPS, norm="Linf"), AutoAttack(eps=EPS, norm="Linf")
    stages = fast.stages(10)
    for prefix in ("audit-", "ensemble-"):
        assert {name.removeprefix(prefix): one for name, one in stages.items() if name.startswith(prefix)} == (
            whole.stages(10)
        )


# Memory.


def test_batch_size_shrinks_to_fit_memory(run: Path) -> None:
    inner = load_model(str(run))

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 16:
                raise torch.OutOfMemoryError("no memory for this")
            return self.inner(x)

    settings: dict[str, Any] = {"attacks": ["pgd:steps=3"], "eps": EPS, "per_class": 10, "engine": "eager"}
    with pytest.raises(torch.OutOfMemoryError):
        Small()(torch.rand(20, 1, 8, 8))
    report = cw.evaluate(Small(), "digits", batch_size=40, **settings)
    told = [finding.text for finding in report.sanity.findings if finding.code == "out-of-memory"]
    assert told == ["Out of memory: the evaluation continued with batches of 8."]
    plain = cw.evaluate(inner, "digits", batch_size=100, **settings)
    assert report.verdicts is not None
    assert plain.verdicts is not None
    assert np.array_equal(report.verdicts.attacks["pgd"], plain.verdicts.attacks["pgd"])
    assert not any(finding.code == "out-of-memory" for finding in plain.sanity.findings)


def test_probes_shrink_to_fit_memory(run: Path) -> None:
    """A model for which memory suffices for forward passes but not for gradients."""
    inner = load_model(str(run))

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 6 and torch.is_grad_enabled():
                raise torch.OutOfMemoryError("no memory for this")
            return self.inner(x)

    report = cw.evaluate(Small(), "digits", attacks=["fgsm"], eps=EPS, per_class=3, engine="eager")
    assert report.sanity.probes is not None
    assert "not-probed" not in [finding.code for finding in report.sanity.findings]


def with_much_and_with_little(engine: str) -> tuple[cw.ClassReport, cw.ClassReport]:
    """Evaluate a model with the whole GPU memory, and with half a GiB."""
    torch.manual_seed(0)
    model, x = resnet18().eval().cuda(), torch.rand(600, 3, 32, 32)
    with torch.no_grad():
        y = torch.cat([model(part.cuda()).argmax(1).cpu() for part in x.split(100)])
    settings: dict[str, Any] = {"attacks": ["pgd:steps=3"], "eps": "1/255", "batch_size": 600, "engine": engine}
    much = cw.evaluate(model, (x.numpy(), y.numpy()), **settings)
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**29) / whole)
    return much, cw.evaluate(model, (x.numpy(), y.numpy()), **settings)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, whose allocator can be kept short")
@pytest.mark.parametrize("engine", ["eager", "auto"])
def test_batch_size_shrinks_to_fit_gpu_memory(engine: str) -> None:
    """The allocator has no more memory. In a separate process, because memory cached by other tests could be reused."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        plain, report = alone.submit(with_much_and_with_little, engine).result()
    assert any(finding.code == "out-of-memory" for finding in report.sanity.findings)
    assert not any(finding.code == "out-of-memory" for finding in plain.sanity.findings)
    assert report.verdicts is not None
    assert plain.verdicts is not None
    assert np.array_equal(report.verdicts.natural, plain.verdicts.natural)
    assert (report.verdicts.attacks["pgd"] != -1).all()
    same = report.verdicts.attacks["pgd"] == plain.verdicts.attacks["pgd"]
    assert same.mean() > 0.98  # different batches use different kernels and rounding


def test_evaluation_releases_its_objects(run: Path) -> None:
    """Before garbage collection: an optimized copy may hold a gigabyte of GPU memory."""
    model = load_model(str(run))
    gc.collect()
    gc.disable()
    try:
        cw.evaluate(model, "digits", attacks=[f"fast:{SHORT}"], eps=EPS, per_class=3)
        left = [thing for thing in gc.get_objects() if type(thing) in (FoldedCopy, Run, BatchLoop, AttackParts)]
    finally:
        gc.enable()
    assert not left


def test_out_of_memory_at_batch_size_one_is_refused() -> None:
    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.asked = 0

        def forward(self, x: Tensor) -> Tensor:
            self.asked += 1
            if self.asked > 3:
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")
            return x.flatten(1)[:, :10]

    with pytest.raises(InputError, match="natural: out of memory at batch size 1"):
        cw.evaluate(Huge(), "digits", attacks=["pgd:steps=3"], eps=EPS, per_class=2, engine="eager")


# Only until the worst class is known.


def test_adaptive_evaluation_attacks_contenders(run: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"attacks": ["pgd:steps=5"], "eps": EPS}
    report = cw.evaluate(run, "digits", **settings, until_worst_ci=13, out=tmp_path / "out")
    whole = cw.evaluate(run, "digits", **settings)
    found, verdicts, every = report.allocation, report.verdicts, whole.verdicts
    assert found is not None
    assert verdicts is not None
    assert every is not None
    assert found.asked == 13
    assert found.reached == (found.high - found.low <= 26)
    assert sum(found.attacked) == len(verdicts) < len(every)
    assert np.bincount(verdicts.label).tolist() == found.attacked
    assert found.label in found.contenders
    # the verdicts are those of the whole evaluation
    place = {int(one): row for row, one in enumerate(every.index)}
    rows = [place[int(one)] for one in verdicts.index]
    assert np.array_equal(verdicts.attacks["pgd"], every.attacks["pgd"][rows])
    worst = report.worst
    assert worst is not None
    assert (worst.label, worst.low, worst.high) == (found.label, found.low, found.high)
    assert report["pgd"].overall.n == 10 * 50
    saved = cw.load_report(tmp_path / "out")
    assert saved == report
    assert saved.verdicts == verdicts
    resumed = cw.evaluate(run, "digits", **settings, until_worst_ci=13, out=tmp_path / "out", resume=True)
    assert resumed.allocation == found
    assert resumed.results == report.results
    assert resumed.verdicts == verdicts


def test_unreachable_goal_uses_all_examples_of_contenders(run: Path) -> None:
    report = cw.evaluate(run, "digits", attacks=["pgd:steps=2"], eps=EPS, until_worst_ci=0.5)
    found = report.allocation
    assert found is not None
    assert not found.reached
    assert any(found.attacked[label] == found.available[label] for label in found.contenders)


@pytest.mark.parametrize("points", [0, -1, 50])
def test_invalid_goal_is_refused(run: Path, points: float) -> None:
    with pytest.raises(InputError, match="until_worst_ci must be above 0 and below 50 percentage points"):
        cw.evaluate(run, "digits", attacks=["pgd"], eps=EPS, until_worst_ci=points)
