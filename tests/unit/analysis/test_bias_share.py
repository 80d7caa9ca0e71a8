"""Bias shares of synthetic margin matrices: pure shifts, gains that no shift reproduces, bad input."""

# N images, K classes

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from classwise.analysis import Run, analyze, bias_share
from classwise.analysis.result import table_of
from classwise.core.errors import InputError
from classwise.core.threat import Threat
from classwise.evaluation.margins import MarginSettings, find_margins
from classwise.metrics import class_variance, max_class_difference
from classwise.storage.margins import SCHEMA, Margins
from classwise.storage.run_directory import RunDirectory

INFO = {"schema": SCHEMA, "digest": "planted", "norm": "Linf", "eps": "0.1", "targets": 4, "steps": [20, 60]}
UNEVEN = np.array([0.9, 0.3, 0.0, -0.4, -0.8])
Save = Callable[..., Path]


def balanced(num_classes: int, n: int, *, level: float = 0.6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(N, K) margins and (N,) labels: the same draws for every class, so that all accuracies are equal."""
    random = np.random.default_rng(seed)
    draws = random.normal(level, 1, (n, 1)) + random.exponential(0.5, (n, num_classes))
    label = np.repeat(np.arange(num_classes), n)
    other = (np.arange(num_classes) - label[:, None]) % num_classes
    margins = np.tile(draws, (num_classes, 1))[np.arange(len(label))[:, None], other]
    margins[np.arange(len(label)), label] = np.inf
    return margins, label


def shifted(margins: np.ndarray, label: np.ndarray, biases: np.ndarray) -> np.ndarray:
    return margins + biases[label][:, None] - biases


def accuracies(margins: np.ndarray, label: np.ndarray) -> list[float]:
    """Accuracies in percent, computed from the definition."""
    kept = margins.min(axis=1) > 0
    return [100 * float(kept[label == one].mean()) for one in np.unique(label)]


@pytest.fixture
def save(make_run) -> Save:
    """``save(name, margins, label)``: an evaluated run with this margin matrix; natural margins are larger by 2."""

    def saved(name: str, margins: np.ndarray, label: np.ndarray, index: np.ndarray | None = None, **info) -> Path:
        num_classes = margins.shape[1]
        run = make_run(name, np.diag(np.bincount(label, minlength=num_classes)).tolist())
        logits = -(margins + 2)
        logits[np.arange(len(label)), label] = 0
        Margins(
            index=np.arange(len(label)) if index is None else index,
            label=label,
            natural=logits.astype(np.float32),
            attacked=margins.astype(np.float32),
            info={**INFO, **info},
        ).save(RunDirectory(run).margins)
        return run

    return saved


def test_method_that_only_shifts_is_explained(save: Save) -> None:
    margins, label = balanced(5, 400)
    uneven = shifted(margins, label, UNEVEN)
    found = bias_share(save("base", uneven, label), save("method", margins, label))
    (method,) = found.methods
    assert method.worst.gain.value > 20
    assert method.worst.share.value == pytest.approx(100, abs=6)
    assert method.worst.share.low < 100 < method.worst.share.high + 3
    assert method.share_corrected == pytest.approx(100, abs=6)
    assert method.explained.value > 98
    assert method.distance == pytest.approx(
        np.sqrt(np.mean(np.subtract(accuracies(uneven, label), accuracies(margins, label)) ** 2)), abs=0.1
    )
    assert method.distance_matched < 3
    assert method.biases == pytest.approx(list(UNEVEN.mean() - UNEVEN), abs=0.05)
    # The method is balanced, so biases of its own do not help it further.
    assert method.repaired.worst.value == pytest.approx(found.models[1].profile.worst.value, abs=3)
    assert method.shifted.average >= method.limit
    assert f"{method.worst.share.value:.1f}% [" in found.finding


@pytest.mark.parametrize("kind", ["larger margins everywhere", "images out of reach"])
def test_gain_that_no_shift_reproduces(save: Save, kind: str) -> None:
    better, label = balanced(5, 400)
    base = better.copy()
    if kind == "larger margins everywhere":
        base -= 0.8
    else:  # half of class 2 lies so far beyond every boundary that a bias for it would cost all other classes
        base[np.flatnonzero(label == 2)[::2]] -= 20
    found = bias_share(save("base", base, label), save("method", better, label))
    (method,) = found.methods
    assert method.worst.gain.value > 15
    assert abs(method.worst.share.value) < 15
    assert method.explained.value < 30
    # The method's average is out of reach, so that the baseline keeps its own.
    assert method.limit == found.models[0].profile.average < found.models[1].profile.average


def test_classes_that_differ_only_by_a_bias(save: Save) -> None:
    margins, label = balanced(5, 400)
    uneven = shifted(margins, label, UNEVEN)
    found = bias_share(save("base", uneven, label))
    (model,), by_class = found.models, accuracies(uneven, label)
    assert [part.value for part in model.profile.by_class] == pytest.approx(by_class, abs=0.3)  # in half precision
    assert model.profile.mcd == pytest.approx(max_class_difference(by_class), abs=0.3)
    assert model.profile.cv == pytest.approx(class_variance(by_class), rel=0.01)
    assert model.profile.average == pytest.approx(np.mean(by_class), abs=0.1)
    assert [shift.loss for shift in model.shifts] == [0.5, 1.0, 2.0, None]
    for shift in model.shifts:
        assert shift.mcd_removed.value > 85
        assert shift.cv_removed.value > 97
        assert shift.mcd_removed.low <= shift.mcd_removed.value <= shift.mcd_removed.high <= 100
        assert shift.profile.worst.value == pytest.approx(accuracies(margins, label)[0], abs=4)
    assert found.methods == []
    assert model.frontier[0].weight == 0
    assert model.frontier[0].worst == model.profile.worst.value
    bars, frontier = found.figures()
    assert [drawn.name for drawn in bars.plot.data] == ["base", "with biases, loss of at most 1"]
    assert [drawn.name for drawn in frontier.plot.data] == ["base", "without biases"]


def test_loss_limit_holds(save: Save) -> None:
    """A class with low margins over all classes: raising it costs others more than it gains."""
    margins, label = balanced(5, 1000)
    margins[label == 3] -= 1.5
    (model,) = bias_share(save("base", margins, label)).models
    losses = [model.profile.average - shift.profile.average for shift in model.shifts]
    assert losses[0] <= losses[1] + 0.3 <= losses[2] + 0.6 <= losses[3] + 0.9
    for loss, shift in zip(losses, model.shifts, strict=True):
        assert shift.loss is None or loss < shift.loss + 1  # the limit holds on the other half
    worst = [shift.profile.worst.value for shift in model.shifts]
    assert model.profile.worst.value < worst[0] < worst[2] <= worst[3] + 1


def test_result_is_independent_of_image_order(save: Save) -> None:
    margins, label = balanced(4, 60)
    base = save("base", shifted(margins, label, UNEVEN[:4]), label)
    order = np.random.default_rng(1).permutation(len(label))
    first = bias_share(base, save("method", margins, label))
    again = bias_share(base, save("shuffled", margins[order], label[order], order))
    assert {**again.methods[0], "model": None} == {**first.methods[0], "model": None}
    assert bias_share(base, base.parent / "method") == first
    other = analyze("bias-share", [Run.open(base)], {"seed": "1", "weak": "tenth"})
    assert other.models[0].shifts != first.models[0].shifts
    assert other.models[0].profile == first.models[0].profile


def test_no_gain_and_insignificant_gain(save: Save) -> None:
    margins, label = balanced(4, 80)
    base = save("base", margins, label)
    found = bias_share(base, save("worse", shifted(margins, label, UNEVEN[:4]), label), save("same", margins, label))
    worse, same = found.methods
    assert worse.worst.gain.value < 0
    assert worse.worst.share.value is None
    assert "worse does not raise the worst class over base (-" in found.finding
    assert (same.distance, same.explained.value, same.worst.gain.value) == (0.0, None, 0.0)
    slightly = margins.copy()
    slightly[np.arange(0, len(label), 40)] += 20  # two images of each class
    uncertain = bias_share(base, save("slightly", slightly, label))
    share = uncertain.methods[0].worst.share
    assert share.value is not None
    assert (share.low, share.high) == (None, None)
    assert "which is not significant" in uncertain.finding


def test_many_classes_of_few_images(save: Save) -> None:
    margins, label = balanced(43, 6)
    margins += np.random.default_rng(2).normal(0, 0.5, (43, 1))[label]
    absent = label != 7
    runs = [save("base", margins[absent], label[absent]), save("method", margins[absent] + 0.3, label[absent])]
    found = bias_share(*runs, weak="tenth")
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.methods[0].biases[7] is None
    assert found.models[0].profile.by_class[7].value is None
    lowest = np.sort([part.value for part in found.models[0].profile.by_class if part.value is not None])
    assert found.models[0].profile.tenth == pytest.approx(lowest[:5].mean(), abs=1e-3)
    assert found.frames["gains"]["quantity"].tolist() == ["worst class", "weakest tenth"]
    bars, worst, tenth = found.figures()
    assert len(bars.plot.names) == 20
    assert "the 20 weakest classes" in bars.title
    assert (worst.title, tenth.title) == ("Average against worst class", "Average against weakest tenth")
    assert len(table_of("classes", found.frame).rows) == 20
    assert len(found.frame) == 43 * (2 * 5 + 3)


def test_margins_of_a_model(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    subject = Run.open(run)
    threat = Threat.parse(subject.report.threat.eps_text, subject.report.threat.norm)
    settings = MarginSettings(steps=5, more_steps=5)
    find_margins(
        subject.model.eval(),
        subject.images,
        subject.verdicts.index,
        threat,
        settings=settings,
        file=RunDirectory(run).margins,
    )
    found = bias_share(run)
    natural = [part.value for part in subject.report["natural"].by_class]
    assert found.models[0].profile.natural == pytest.approx(np.mean(natural), abs=0.01)
    assert found.models[0].profile.average <= found.models[0].profile.natural
    assert (found.n, found.threat) == (100, "Linf eps = 0.1")


def test_bad_input(save: Save, make_run) -> None:
    margins, label = balanced(3, 20)
    run = save("run", margins, label)
    with pytest.raises(InputError, match=r"bare has no margins\.parquet; run classwise evaluate --margins --out"):
        bias_share(run, make_run("bare", np.diag([20, 20, 20]).tolist()))
    with pytest.raises(InputError, match="has images of 1 class; biases need at least 2 classes"):
        bias_share(save("one", margins[label == 0], label[label == 0]))
    with pytest.raises(InputError, match=r"class 2 of .*short has 3 images; at least 4 of each class"):
        bias_share(save("short", margins[:43], label[:43]))
    for name, rows, info in (("fewer", slice(1, None), {}), ("digest", slice(None), {"digest": "others"})):
        with pytest.raises(InputError, match=f"margins of .*{name} are of other images than those of .*run"):
            bias_share(run, save(name, margins[rows], label[rows], **info))
    with pytest.raises(InputError, match=r"threat are for Linf eps = 0\.2, those of .*run for Linf eps = 0\.1"):
        bias_share(run, save("threat", margins, label, eps="0.2"))
    bias_share(run, save("written", margins, label, eps="1/10"))
    with pytest.raises(InputError, match=r"weaker were searched with steps = \[5, 5\], those of .*run with \[20, 60\]"):
        bias_share(run, save("weaker", margins, label, steps=[5, 5]))
    with pytest.raises(InputError, match="other classes than"):
        bias_share(run, save("more", *balanced(4, 20)))
    half = margins.copy()
    half[30:] = np.nan
    with pytest.raises(InputError, match="half cover 30 of 60 images; resume the evaluation"):
        bias_share(save("half", half, label))
    with pytest.raises(InputError, match="got 7 runs; expected 1 to 6"):
        bias_share(*[run] * 7)
    with pytest.raises(InputError, match="weak = 'mean'"):
        analyze("bias-share", [Run.open(run)], {"weak": "mean"})
    (run / "margins.parquet").write_bytes(b"no table")
    with pytest.raises(InputError) as caught:
        bias_share(run)
    assert "is not a margin matrix" in str(caught.value)
    assert "\n" not in str(caught.value)
