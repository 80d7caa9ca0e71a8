"""Confidence and calibration of each class, without and under attack (Tian et al. 2021, Section 5, Fig. 3).

* **CVC**, the class-wise variance of confidence (Def. 5.1): the mean over the images of a class of the variance of
  their K probabilities; 0 for uniform output, (K - 1) / K² for certain output. The paper finds it small for weak
  classes; Spearman's coefficient between CVC and robust accuracy on the same images tests that.
* **Calibration**: the expected calibration error (ECE) is the mean distance between confidence and accuracy over 15
  bins of equal width, weighted by examples. It is biased upwards for few examples; the **overconfidence**, mean
  confidence minus accuracy, has no such bias. Classes are true classes.
* **Trajectory** (Fig. 3 b-d): probabilities of one image along PGD and Temperature-PGD, for each temperature from one
  random start with steps of 2.5 · eps / steps.

Means have bootstrap intervals over images, shares Wilson intervals.
"""

# N examples, K classes

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator

from classwise.analysis.bootstrap import mean_interval
from classwise.analysis.correlation import spearman
from classwise.analysis.model_outputs import Outputs, attack_of, attacked_outputs, exact_logits, natural_outputs
from classwise.analysis.plots import column_series, shown_classes, shown_suffix
from classwise.analysis.result import AnalysisResult, frame_of, interval_columns
from classwise.analysis.run import Run
from classwise.config.spec import Numbers, split_list
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.data.batches import ordered
from classwise.metrics.calibration import BINS, bin_of, expected_calibration_error
from classwise.reporting.estimates import Estimate, estimate, share
from classwise.reporting.figures import DASHES, SERIES_COLORS, SOFT, Figure, Series, bars, lines, points
from classwise.storage.verdicts import NATURAL

Floats = NDArray[np.float64]
Steps = Annotated[tuple[int, ...], BeforeValidator(split_list)]
RIVALS = 2
"""Number of wrong classes drawn in the trajectory."""


def confidence(
    run: Run | str | Path,
    *,
    attack: str = "pgd",
    per_class: int | None = None,
    index: int | None = None,
    steps: Steps = (1, 10, 20),
    inv_t: Numbers = (1, 5),
    seed: int = 0,
    progress: Progress = SILENT,
) -> AnalysisResult:
    """Confidence of a model by class. Runs ``attack`` on all evaluated images, or on ``per_class`` of each class.

    ``index``: position of the image of the trajectory, by default the first correctly classified one of the least
    robust class that has one. ``steps``: numbers of steps at which the trajectory is evaluated.
    """
    run = Run.open(run)
    run.require_classes(2)
    if not steps or min(steps) < 1:
        raise InputError(f"steps = {list(steps)}; expected numbers of at least 1")
    natural = _images(natural_outputs(run, per_class=per_class, progress=progress))
    attacked = _images(attacked_outputs(run, attack=attack, per_class=per_class, progress=progress))
    survived = [(natural["right"] & attacked["right"])[natural["label"] == label] for label in range(run.num_classes)]
    robust = [Estimate(**estimate(int(own.sum()), len(own))) for own in survived]
    index = _weakest_index(run, natural, robust) if index is None else index
    path = trajectory(run, index, sorted(set(steps)), inv_t)
    rows = [*_class_rows(run.classes, NATURAL, natural, robust, np.random.default_rng(seed))]
    random = np.random.default_rng(seed)
    rows += _class_rows(run.classes, attack, attacked, robust, random)
    error, overconfidence = _calibration(attacked, random)
    related = spearman([row["cvc"] for row in rows[len(robust) :]], [part.value for part in robust], seed)
    cvc_part = f"; CVC and robust accuracy have a Spearman coefficient of {related.with_p}"
    finding = (
        f"Under {attack}, mean confidence minus accuracy is {share(overconfidence)} points (expected calibration error "
        f"{error:.1f}%){'' if related.value is None else cvc_part}."
    )
    classes = frame_of(rows)
    reliability = frame_of([*_bin_rows(NATURAL, natural), *_bin_rows(attack, attacked)])
    label = int(run.images.labels[index])
    return AnalysisResult(
        name="confidence",
        finding=finding,
        about={
            "model": run.name,
            "dataset": run.report.dataset.name,
            "attack": attack,
            "seed": seed,
            "trajectory": {"index": index, "label": label},
        },
        frames={
            "classes": classes.sort_values(["robust_accuracy_percent", "label"], kind="stable", ignore_index=True),
            "reliability": reliability,
            "trajectory": path,
        },
        draw=lambda: [*_figures(classes, reliability, run.name, attack, finding), _trajectory_figure(path, label)],
    )


def cvc(probabilities: Floats) -> Floats:
    """Return (N,) the variance of each image's (N, K) probabilities; its mean over a class is the CVC of the class.

    >>> cvc(np.array([[1.0, 0.0], [0.5, 0.5]])).tolist()
    [0.25, 0.0]
    """
    return np.asarray(np.square(probabilities - probabilities.mean(1, keepdims=True)).mean(1))


def trajectory(run: Run, index: int, steps: list[int], inv_t: tuple[float, ...]) -> pd.DataFrame:
    """Return the probabilities of one image after each number of steps, for each temperature, from one start."""
    if not 0 <= index < len(run.images):
        raise InputError(f"index = {index}; {run.report.dataset.name} has the images 0 to {len(run.images) - 1}")
    model = run.model
    x, y, rows = next(ordered(run.images, [index], 1, device_of(model)))
    step_size = 2.5 * run.report.threat.eps / max(steps)
    moments: list[tuple[float | None, int, torch.Tensor]] = [(None, 0, x)]
    for one in inv_t:
        for number in steps:
            walk = attack_of(run, f"temperature-pgd:inv_t={one},steps={number},step_size={step_size}")
            moments.append((one, number, walk(model, x, y, generator=ExampleNoise(0, rows))))
    return frame_of(
        {
            "class": name,
            "label": label,
            "index": index,
            "inverse_temperature": one,
            "steps": number,
            "probability_percent": 100 * float(probability),
        }
        for one, number, image in moments
        for probabilities in [exact_logits(model, image).double().softmax(1)[0]]
        for label, (name, probability) in enumerate(zip(run.classes, probabilities, strict=True))
    )


def _images(seen: Outputs) -> pd.DataFrame:
    """Return one row for each image."""
    probabilities = seen.probabilities
    return pd.DataFrame(
        {
            "index": seen.index,
            "label": seen.label,
            "right": seen.predicted == seen.label,
            "confidence": probabilities.max(1),
            "cvc": cvc(probabilities),
        }
    )


def _weakest_index(run: Run, images: pd.DataFrame, robust: list[Estimate]) -> int:
    """Return the position of the first correctly classified image of the weakest class that has one."""
    right = images[images["right"]]
    if right.empty:
        raise InputError(f"{run.path} classifies no image correctly; pass the index of one")
    accuracy = right["label"].map(lambda label: robust[label].value)
    return int(right.assign(robust=accuracy).sort_values(["robust", "label"], kind="stable")["index"].iloc[0])


def _calibration(images: pd.DataFrame, random: np.random.Generator) -> tuple[float | None, Estimate]:
    """Return the calibration error in percent and the overconfidence in points."""
    top, right = images["confidence"].to_numpy(), images["right"].to_numpy()
    error = round(100 * expected_calibration_error(top, right), 4) if len(images) else None
    return error, mean_interval(100 * (top - right), random, digits=4)


def _class_rows(
    classes: list[str], kind: str, images: pd.DataFrame, robust: list[Estimate], random: np.random.Generator
) -> Iterator[dict[str, Any]]:
    for label, name in enumerate(classes):
        own = images[images["label"] == label]
        spread = mean_interval(own["cvc"].to_numpy(), random, digits=10)
        error, overconfidence = _calibration(own, random)
        yield {
            "class": name,
            "label": label,
            "images": kind,
            **interval_columns("robust_accuracy_percent", robust[label]),
            **interval_columns("cvc", spread),
            "ece_percent": error,
            **interval_columns("overconfidence_points", overconfidence),
            "n": len(own),
            "confidence_percent": round(100 * own["confidence"].mean(), 4),
        }


def _bin_rows(kind: str, images: pd.DataFrame) -> Iterator[dict[str, Any]]:
    place = bin_of(images["confidence"].to_numpy())
    for number in range(BINS):
        own = images[place == number]
        yield {
            "images": kind,
            "above_percent": round(100 * number / BINS, 4),
            "up_to_percent": round(100 * (number + 1) / BINS, 4),
            "confidence_percent": round(100 * own["confidence"].mean(), 4),
            **interval_columns("accuracy_percent", Estimate(**estimate(int(own["right"].sum()), len(own)))),
            "n": len(own),
        }


def _figures(frame: pd.DataFrame, bins: pd.DataFrame, model: str, attack: str, finding: str) -> list[Figure]:
    kinds = [(kind, rows.reset_index()) for kind, rows in frame.groupby("images", sort=False)]
    robust = column_series(attack, kinds[0][1], "robust_accuracy_percent").y
    view, classes = shown_classes(robust), list(kinds[0][1]["class"])
    names, suffix = [classes[label] for label in view], shown_suffix(view, classes)
    reliability = [
        column_series(kind, rows, "accuracy_percent", x=list(rows["confidence_percent"]))
        for kind, rows in bins[bins["n"] > 0].groupby("images", sort=False)
    ]
    return [
        bars(
            names,
            [column_series(kind, rows.loc[view], "cvc") for kind, rows in kinds],
            title=f"Class-wise variance of confidence (CVC){suffix}",
            alt=f"CVC of each class of {model}. {finding}",
            y="CVC [95%]",
        ),
        points(
            [Series(name=kind, x=list(rows["cvc"]), y=robust, text=classes) for kind, rows in kinds],
            title="Robust accuracy by CVC",
            alt=f"Robust accuracy of each class of {model} over its CVC. {finding}",
            x="CVC",
            y=f"accuracy, %, {attack}",
        ),
        lines(
            [*reliability, Series(name="perfect calibration", x=[0, 100], y=[0, 100], color=SOFT, dash="dot")],
            title="Reliability diagram",
            alt=f"Accuracy over confidence in {BINS} bins. {finding}",
            x=f"mean confidence of each of {BINS} bins, %",
            y="accuracy, % [95%]",
            zero=True,
        ),
        bars(
            names,
            [column_series(kind, rows.loc[view], "ece_percent") for kind, rows in kinds],
            title=f"Calibration error{suffix}",
            alt=f"Expected calibration error of each class of {model}, {NATURAL} and under {attack}.",
            y="expected calibration error, %",
        ),
    ]


def _trajectory_figure(frame: pd.DataFrame, label: int) -> Figure:
    index, one = frame["index"].iloc[0], frame["inverse_temperature"]
    name = frame["class"].iloc[label]
    highest = frame.groupby("label")["probability_percent"].max()
    series = [
        Series(
            name=f"{frame['class'].iloc[shown]}{' (label)' if place == 0 else ''}, 1/T = {inv_t:g}",
            x=list(rows["steps"]),
            y=list(rows["probability_percent"]),
            color=SERIES_COLORS[place],
            dash=DASHES[number % len(DASHES)],
        )
        for place, shown in enumerate([label, *highest.drop(label).nlargest(RIVALS).index])
        for number, inv_t in enumerate(one.dropna().unique())
        for rows in [frame[(frame["label"] == shown) & (one.isna() | (one == inv_t))]]
    ]
    return lines(
        series,
        title=f"Probabilities of image {index} along the attack",
        alt=f"Probability of the label of image {index} ({name}) and its rivals, by step.",
        x="attack step (0: natural image)",
        y="probability, %",
        zero=True,
    )
