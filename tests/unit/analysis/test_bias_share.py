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
from classwise.analysis.bias_share import LOSSES
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


def profile(found, model: str, biases: str = "none") -> dict:
    """The row of a model under biases."""
    (row,) = found.frames["biases"].query("model == @model and biases == @biases").to_dict("records")
    return row


def gain(found, method: str) -> dict:
    """The row of a method's gain in the worst class."""
    (row,) = found.frames["gains"].query("method == @method and quantity == 'worst class'").to_dict("records")
    return row


def by_class(found, model: str, biases: str = "none", column: str = "robust_accuracy_percent") -> list[float]:
    """A column of the classes, in label order."""
    return found.frame.query("model == @model and biases == @biases").sort_values("label")[column].tolist()


def test_method_that_only_shifts_is_explained(save: Save) -> None:
    margins, label = balanced(5, 400)
    uneven = shifted(margins, label, UNEVEN)
    found = bias_share(save("base", uneven, label), save("method", margins, label))
    row = gain(found, "method")
    assert row["gain_points"] > 20
    assert row["share_of_gain_percent"] == pytest.approx(100, abs=6)
    assert row["share_of_gain_percent_low"] < 100 < row["share_of_gain_percent_high"] + 3
    assert row["share_of_corrected_gain_percent"] == pytest.approx(100, abs=6)
    assert row["profile_explained_percent"] > 98
    assert row["profile_difference_points"] == pytest.approx(
        np.sqrt(np.mean(np.subtract(accuracies(uneven, label), accuracies(margins, label)) ** 2)), abs=0.1
    )
    assert row["profile_difference_matched_points"] < 3
    biases = by_class(found, "base", "matched to method", "bias")
    assert biases == pytest.approx(list(UNEVEN.mean() - UNEVEN), abs=0.05)
    # The method is balanced, so biases of its own do not help it further.
    own, repaired = profile(found, "method"), profile(found, "method", "at the average of base with biases")
    assert repaired["worst_class_percent"] == pytest.approx(own["worst_class_percent"], abs=3)
    limit = min(own["average_percent"], profile(found, "base")["average_percent"])
    reached = profile(found, "base", "at the average of method")["average_percent"]
    assert row["average_of_baseline_with_biases_percent"] == reached >= limit
    assert f"{row['share_of_gain_percent']:.1f}% [" in found.finding


@pytest.mark.parametrize("kind", ["larger margins everywhere", "images out of reach"])
def test_gain_that_no_shift_reproduces(save: Save, kind: str) -> None:
    better, label = balanced(5, 400)
    base = better.copy()
    if kind == "larger margins everywhere":
        base -= 0.8
    else:  # half of class 2 lies so far beyond every boundary that a bias for it would cost all other classes
        base[np.flatnonzero(label == 2)[::2]] -= 20
    found = bias_share(save("base", base, label), save("method", better, label))
    row = gain(found, "method")
    assert row["gain_points"] > 15
    assert abs(row["share_of_gain_percent"]) < 15
    assert row["profile_explained_percent"] < 30
    # The method's average is out of reach, so that the baseline keeps its own.
    base, method = (profile(found, name)["average_percent"] for name in ("base", "method"))
    assert base <= row["average_of_baseline_with_biases_percent"] < method


def test_classes_that_differ_only_by_a_bias(save: Save) -> None:
    margins, label = balanced(5, 400)
    uneven = shifted(margins, label, UNEVEN)
    found = bias_share(save("base", uneven, label))
    expected, own = accuracies(uneven, label), profile(found, "base")
    assert by_class(found, "base") == pytest.approx(expected, abs=0.3)  # in half precision
    assert own["max_class_difference_points"] == pytest.approx(max_class_difference(expected), abs=0.3)
    assert own["class_variance"] == pytest.approx(class_variance(expected), rel=0.01)
    assert own["average_percent"] == pytest.approx(np.mean(expected), abs=0.1)
    assert np.isnan(own["max_class_difference_removed_percent"])
    assert found.frames["biases"]["biases"].tolist() == ["none", *LOSSES]
    for biases in LOSSES:
        row = profile(found, "base", biases)
        assert row["max_class_difference_removed_percent"] > 85
        assert row["class_variance_removed_percent"] > 97
        low, value, high = (row[f"max_class_difference_removed_percent{end}"] for end in ("_low", "", "_high"))
        assert low <= value <= high <= 100
        assert row["worst_class_percent"] == pytest.approx(accuracies(margins, label)[0], abs=4)
    assert "gains" not in found.frames
    bars, frontier = found.figures()
    assert [drawn.name for drawn in bars.plot.data] == ["base", "with biases, loss of at most 1"]
    assert [drawn.name for drawn in frontier.plot.data] == ["base", "without biases"]
    path, start = frontier.plot.data
    assert (path.x[0], path.y[0]) == (own["average_percent"], own["worst_class_percent"])
    assert (list(start.x), list(start.y)) == ([path.x[0]], [path.y[0]])


def test_loss_limit_holds(save: Save) -> None:
    """A class with low margins over all classes: raising it costs others more than it gains."""
    margins, label = balanced(5, 1000)
    margins[label == 3] -= 1.5
    found = bias_share(save("base", margins, label))
    own, rows = profile(found, "base"), [profile(found, "base", biases) for biases in LOSSES]
    losses = [own["average_percent"] - row["average_percent"] for row in rows]
    assert losses[0] <= losses[1] + 0.3 <= losses[2] + 0.6 <= losses[3] + 0.9
    for loss, limit in zip(losses, LOSSES.values(), strict=True):
        assert limit is None or loss < limit + 1  # the limit holds on the other half
    worst = [row["worst_class_percent"] for row in rows]
    assert own["worst_class_percent"] < worst[0] < worst[2] <= worst[3] + 1


def test_result_is_independent_of_image_order(save: Save) -> None:
    margins, label = balanced(4, 60)
    base = save("base", shifted(margins, label, UNEVEN[:4]), label)
    order = np.random.default_rng(1).permutation(len(label))
    first = bias_share(base, save("method", margins, label))
    again = bias_share(base, save("shuffled", margins[order], label[order], order))
    for title, frame in first.frames.items():
        assert again.frames[title].replace("shuffled", "method", regex=True).equals(frame)
    assert bias_share(base, base.parent / "method") == first
    other = analyze("bias-share", [Run.open(base)], {"seed": "1", "weak": "tenth"})
    assert profile(other, "base") == pytest.approx(profile(first, "base"), nan_ok=True)
    assert profile(other, "base", "highest worst class") != profile(first, "base", "highest worst class")


def test_no_gain_and_insignificant_gain(save: Save) -> None:
    margins, label = balanced(4, 80)
    base = save("base", margins, label)
    found = bias_share(base, save("worse", shifted(margins, label, UNEVEN[:4]), label), save("same", margins, label))
    worse, same = gain(found, "worse"), gain(found, "same")
    assert worse["gain_points"] < 0
    assert np.isnan(worse["share_of_gain_percent"])
    assert "worse does not raise the worst class over base (-" in found.finding
    assert (same["profile_difference_points"], same["gain_points"]) == (0.0, 0.0)
    assert np.isnan(same["profile_explained_percent"])
    slightly = margins.copy()
    slightly[np.arange(0, len(label), 40)] += 20  # two images of each class
    uncertain = bias_share(base, save("slightly", slightly, label))
    shares = [gain(uncertain, "slightly")[f"share_of_gain_percent{end}"] for end in ("", "_low", "_high")]
    assert np.isnan(shares).tolist() == [False, True, True]
    assert "which is not significant" in uncertain.finding


def test_many_classes_of_few_images(save: Save) -> None:
    margins, label = balanced(43, 6)
    margins += np.random.default_rng(2).normal(0, 0.5, (43, 1))[label]
    absent = label != 7
    runs = [save("base", margins[absent], label[absent]), save("method", margins[absent] + 0.3, label[absent])]
    found = bias_share(*runs, weak="tenth")
    json.dumps(found.to_dict(), allow_nan=False)
    assert np.flatnonzero(np.isnan(by_class(found, "base", "matched to method", "bias"))).tolist() == [7]
    assert np.flatnonzero(np.isnan(shares := by_class(found, "base"))).tolist() == [7]
    assert profile(found, "base")["weakest_tenth_percent"] == pytest.approx(np.sort(shares)[:5].mean(), abs=1e-3)
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
    row = profile(found, found.about["models"][0])
    assert row["natural_percent"] == pytest.approx(np.mean(natural), abs=0.01)
    assert row["average_percent"] <= row["natural_percent"]
    assert (found.about["n"], found.about["threat"]) == (100, "Linf eps = 0.1")


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
