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

from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator

from classwise.analysis.bootstrap import mean_interval
from classwise.analysis.correlation import spearman
from classwise.analysis.model_outputs import Outputs, attack_of, attacked_outputs, exact_logits, natural_outputs
from classwise.analysis.plots import interval_series, shown_classes, shown_suffix
from classwise.analysis.result import AnalysisResult, Record, frame_of, interval_columns
from classwise.analysis.run import Run
from classwise.config.spec import Numbers, split_list
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.data.batches import ordered
from classwise.metrics.calibration import BINS, bin_of, expected_calibration_error
from classwise.reporting.estimates import ClassEstimate, Estimate, estimate, share
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
    classes = run.classes
    if not steps or min(steps) < 1:
        raise InputError(f"steps = {list(steps)}; expected numbers of at least 1")
    natural = natural_outputs(run, per_class=per_class, progress=progress)
    attacked = attacked_outputs(run, attack=attack, per_class=per_class, progress=progress)
    right = natural.predicted == natural.label
    survived = right & (attacked.predicted == attacked.label)
    robust = [
        ClassEstimate(label=label, name=name, **estimate(int(survived[own].sum()), int(own.sum())))
        for label, name in enumerate(classes)
        for own in [natural.label == label]
    ]
    place = _weakest_index(run, natural, right, robust) if index is None else index
    values = Record(
        model=run.name,
        dataset=run.report.dataset.name,
        classes=classes,
        attack=attack,
        robust=robust,
        natural=_confidences(NATURAL, natural, classes, robust, seed),
        adversarial=_confidences(attack, attacked, classes, robust, seed),
        trajectory=trajectory(run, place, sorted(set(steps)), inv_t),
    )
    finding = _finding(values)
    return AnalysisResult(
        name="confidence",
        finding=finding,
        values=values,
        frames={
            "classes": _class_frame(values),
            "reliability": _bin_frame(values),
            "trajectory": _trajectory_frame(values),
        },
        draw=lambda: _figures(values, finding),
    )


def cvc(probabilities: Floats) -> Floats:
    """Return (N,) the variance of each image's (N, K) probabilities; its mean over a class is the CVC of the class.

    >>> cvc(np.array([[1.0, 0.0], [0.5, 0.5]])).tolist()
    [0.25, 0.0]
    """
    return np.asarray(np.square(probabilities - probabilities.mean(1, keepdims=True)).mean(1))


def trajectory(run: Run, index: int, steps: list[int], inv_t: tuple[float, ...]) -> Record:
    """Return the probabilities of one image after each number of steps, for each temperature, from one start."""
    if not 0 <= index < len(run.images):
        raise InputError(f"index = {index}; {run.report.dataset.name} has the images 0 to {len(run.images) - 1}")
    model = run.model
    x, y, rows = next(ordered(run.images, [index], 1, device_of(model)))
    label = int(y)

    def probabilities(image: torch.Tensor) -> list[float]:
        return [float(value) for value in exact_logits(model, image).double().softmax(1)[0]]

    step_size = 2.5 * run.report.threat.eps / max(steps)
    natural = probabilities(x)
    moments = []
    for one in inv_t:
        for number in steps:
            walk = attack_of(run, f"temperature-pgd:inv_t={one},steps={number},step_size={step_size}")
            found = walk(model, x, y, generator=ExampleNoise(0, rows))
            moments.append(Record(inv_t=one, steps=number, probabilities=probabilities(found)))
    highest = np.max([natural, *(moment.probabilities for moment in moments)], axis=0)
    highest[label] = -1
    return Record(
        index=index,
        label=label,
        natural=natural,
        step_size=step_size,
        moments=moments,
        rivals=np.argsort(-highest, kind="stable")[: min(RIVALS, len(highest) - 1)].tolist(),
    )


def _weakest_index(run: Run, seen: Outputs, right: NDArray[np.bool_], robust: list[ClassEstimate]) -> int:
    """Return the position of the first correctly classified image of the weakest class that has one."""
    if not right.any():
        raise InputError(f"{run.path} classifies no image correctly; pass the index of one")
    held = set(seen.label[right].tolist())
    weakest = min((part for part in robust if part.label in held), key=lambda part: part.value or 0.0)
    return int(seen.index[right & (seen.label == weakest.label)][0])


def _confidences(images: str, seen: Outputs, classes: list[str], robust: list[ClassEstimate], seed: int) -> Record:
    probabilities = seen.probabilities
    top, right = probabilities.max(1), seen.predicted == seen.label
    spread, place = cvc(probabilities), bin_of(top)
    random = np.random.default_rng(seed)
    by_class = []
    for label, name in enumerate(classes):
        own = seen.label == label
        by_class.append(
            Record(
                {"label": label, "class": name},
                cvc=mean_interval(spread[own], random, digits=10),
                calibration=_calibration(top[own], right[own], random),
            )
        )
    return Record(
        images=images,
        overall=_calibration(top, right, random),
        bins=[
            Record(
                above=round(100 * number / BINS, 4),
                up_to=round(100 * (number + 1) / BINS, 4),
                confidence=round(100 * float(top[own].mean()), 4) if own.any() else None,
                accuracy=Estimate(**estimate(int(right[own].sum()), int(own.sum()))),
            )
            for number in range(BINS)
            for own in [place == number]
        ],
        by_class=by_class,
        cvc_with_robustness=spearman([part.cvc.value for part in by_class], [part.value for part in robust], seed),
    )


def _calibration(top: Floats, right: NDArray[np.bool_], random: np.random.Generator) -> Record:
    return Record(
        ece=round(100 * expected_calibration_error(top, right), 4) if len(top) else None,
        accuracy=Estimate(**estimate(int(right.sum()), len(right))),
        confidence=round(100 * float(top.mean()), 4) if len(top) else None,
        overconfidence=mean_interval(100 * (top - right), random, digits=4),
    )


def _class_frame(values: Record) -> pd.DataFrame:
    """Return one row for each class and kind of images, from the weakest class."""
    rows = [
        {
            "class": robust.name,
            "label": robust.label,
            "images": one.images,
            **interval_columns("robust_accuracy_percent", robust),
            **interval_columns("cvc", part.cvc),
            "ece_percent": part.calibration.ece,
            **interval_columns("overconfidence_points", part.calibration.overconfidence),
            "n": part.cvc.n,
        }
        for robust in sorted(values.robust, key=lambda part: (part.value is None, part.value))
        for one in (values.natural, values.adversarial)
        for part in [one.by_class[robust.label]]
    ]
    return frame_of(rows)


def _bin_frame(values: Record) -> pd.DataFrame:
    return frame_of(
        {
            "images": one.images,
            "above_percent": part.above,
            "up_to_percent": part.up_to,
            "confidence_percent": part.confidence,
            **interval_columns("accuracy_percent", part.accuracy),
            "n": part.accuracy.n,
        }
        for one in (values.natural, values.adversarial)
        for part in one.bins
    )


def _trajectory_frame(values: Record) -> pd.DataFrame:
    path = values.trajectory
    moments = [(None, 0, path.natural), *((one.inv_t, one.steps, one.probabilities) for one in path.moments)]
    rows = [
        {
            "class": name,
            "label": label,
            "index": path.index,
            "inverse_temperature": inv_t,
            "steps": steps,
            "probability_percent": 100 * probabilities[label],
        }
        for inv_t, steps, probabilities in moments
        for label, name in enumerate(values.classes)
    ]
    return frame_of(rows)


def _finding(values: Record) -> str:
    whole, related = values.adversarial.overall, values.adversarial.cvc_with_robustness
    cvc_part = (
        "" if related.value is None else f"; CVC and robust accuracy have a Spearman coefficient of {related.with_p}"
    )
    return (
        f"Under {values.attack}, mean confidence minus accuracy is {share(whole.overconfidence)} points (expected "
        f"calibration error {whole.ece:.1f}%){cvc_part}."
    )


def _figures(values: Record, finding: str) -> list[Figure]:
    view = shown_classes([part.value for part in values.robust])
    names, suffix = [values.classes[label] for label in view], shown_suffix(view, values.classes)
    both = (values.natural, values.adversarial)
    reliability = []
    for one in both:
        filled = [part for part in one.bins if part.accuracy.n]
        x = [part.confidence for part in filled]
        reliability.append(interval_series(one.images, [part.accuracy for part in filled], x=x))
    robust = [part.value for part in values.robust]
    cvc_points = [
        Series(name=one.images, x=[part.cvc.value for part in one.by_class], y=robust, text=values.classes)
        for one in both
    ]
    return [
        bars(
            names,
            [interval_series(one.images, [one.by_class[label].cvc for label in view]) for one in both],
            title=f"Class-wise variance of confidence (CVC){suffix}",
            alt=f"CVC of each class of {values.model}. {finding}",
            y="CVC [95%]",
        ),
        points(
            cvc_points,
            title="Robust accuracy by CVC",
            alt=f"Robust accuracy of each class of {values.model} over its CVC. {finding}",
            x="CVC",
            y=f"accuracy, %, {values.attack}",
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
            [Series(name=one.images, y=[one.by_class[label].calibration.ece for label in view]) for one in both],
            title=f"Calibration error{suffix}",
            alt=f"Expected calibration error of each class of {values.model}, {NATURAL} and under {values.attack}.",
            y="expected calibration error, %",
        ),
        _trajectory_figure(values),
    ]


def _trajectory_figure(values: Record) -> Figure:
    path, series = values.trajectory, []
    for place, label in enumerate([path.label, *path.rivals]):
        for number, inv_t in enumerate(dict.fromkeys(moment.inv_t for moment in path.moments)):
            moments = [moment for moment in path.moments if moment.inv_t == inv_t]
            series.append(
                Series(
                    name=f"{values.classes[label]}{' (label)' if place == 0 else ''}, 1/T = {inv_t:g}",
                    x=[0, *(moment.steps for moment in moments)],
                    y=[100 * shares[label] for shares in (path.natural, *(one.probabilities for one in moments))],
                    color=SERIES_COLORS[place],
                    dash=DASHES[number % len(DASHES)],
                )
            )
    return lines(
        series,
        title=f"Probabilities of image {path.index} along the attack",
        alt=f"Probability of the label of image {path.index} ({values.classes[path.label]}) and its rivals, by step.",
        x="attack step (0: natural image)",
        y="probability, %",
        zero=True,
    )
