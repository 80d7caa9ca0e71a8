"""Share of the class differences, and of a method's gain, explained by class biases.

A bias added to the logit of each class exchanges accuracy between classes and leaves the features unchanged. The margin
matrix gives the robust accuracy of every class under any biases, so three quantities need no further attack:

* how much of the maximum class difference (MCD) and of the class variance (CV) biases remove, at a stated loss of the
  average;
* which part of a method's gain in the worst class the baseline reaches by biases alone, at the method's average;
* which part of the squared difference between the class accuracies of method and baseline biases reproduce:

    1 - sum_c (A_c^method - A_c^shifted)^2 / sum_c (A_c^method - A_c^baseline)^2.

All accuracies are on held-out images, see ``bias_fit``. A gain is compared at the method's average, or at the
baseline's if that is lower; a higher average of the method is reported next to the share and is not part of it.

Averages are means over classes. CV and MCD of few images per class are too large because of sampling noise. Margins
over classes that were not attacked are upper bounds, see ``storage.margins``.
"""

# N images, K classes, P classes with images, R resamples

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from classwise.analysis.bias_fit import Fitted, Images, Scores, matching, measured, ratio, removed, rounded
from classwise.analysis.bootstrap import Measured
from classwise.analysis.plots import shown_classes, shown_suffix, weakest_first
from classwise.analysis.result import AnalysisResult, frame_of, interval_columns
from classwise.analysis.run import MOST_RUNS, Run, open_runs, unique_names
from classwise.core.errors import InputError
from classwise.core.threat import Threat
from classwise.repairs.accuracy import Vector, tenth_of
from classwise.repairs.frontier import WEIGHTS, Objective, Weak
from classwise.reporting.estimates import share
from classwise.reporting.figures import INK, SERIES_COLORS, Figure, Series, bars, points
from classwise.storage.margins import Margins

NONE = "none"
LOSSES = {
    "loss of at most 0.5": 0.5,
    "loss of at most 1": 1.0,
    "loss of at most 2": 2.0,
    "highest worst class": None,
}
"""Limits on the loss of the average, in points."""
SHOWN = "loss of at most 1"
"""The biases that the finding and the figures use."""
LEAST = 4
"""Minimum number of images of a class, two in each half."""

Scored = Mapping[tuple[str, str], Scores]
"""Held-out scores by model and biases."""


class Method(NamedTuple):
    """Scores of a model, and of the baseline without biases, with biases at that average, and matched to the model."""

    own: Scores
    before: Scores
    shifted: Scores
    matched: Scores

    def gain(self, quantity: str) -> tuple[Measured, Measured, Measured]:
        """Return the gain of the model, that of the biases, and the share of the latter."""
        end, start, middle = (one.quantities[quantity] for one in self[:3])
        return measured(end - start), measured(middle - start), ratio(middle - start, end - start)


def bias_share(*runs: Run | str | Path, weak: Weak = "worst", seed: int = 0) -> AnalysisResult:
    """Effect of class biases on runs evaluated with ``--margins``; the first run is the baseline.

    ``weak``: what the frontiers maximize, the worst class or the mean of the weakest tenth. ``seed``: for the halves
    and the bootstrap.
    """
    opened = open_runs(runs, 1, MOST_RUNS)
    classes, tables = opened[0].classes, _tables(opened)
    threat, names = _threat(tables[0]), unique_names(opened)
    images = Images(tables[0].label, classes, seed)
    models = {name: Fitted(one, images, Objective(weak=weak)) for name, one in zip(names, tables, strict=True)}
    base = names[0]
    scored: dict[tuple[str, str], Scores] = {}
    for name, model in models.items():
        scored[name, NONE] = model.at(0)
        scored |= {(name, biases): model.within(loss) for biases, loss in LOSSES.items()}
    methods: dict[str, Method] = {}
    matched: dict[str, Vector] = {}
    for name in names[1:]:
        own, before, method = scored[name, NONE], scored[base, NONE], models[name]
        shifted, at = models[base].keeping(min(own.average, before.average)), f"matched to {name}"
        scored[base, f"at the average of {name}"] = shifted
        scored[base, at] = models[base].matched(method)
        scored[name, f"at the average of {base} with biases"] = method.keeping(min(own.average, shifted.average))
        methods[name] = Method(own, before, shifted, scored[base, at])
        matched[at] = np.where(images.counts > 0, matching(models[base].fit.whole, method.fit.whole), np.nan)
    lifted = {"worst": "worst class"}
    if tenth_of(len(images.rows)) > 1:
        lifted["tenth"] = "weakest tenth"
    frames = {"classes": _class_frame(scored, matched), "biases": _bias_frame(scored)}
    if methods:
        frames["gains"] = frame_of(_gain_row(*one, *pair) for one in methods.items() for pair in lifted.items())
    gains = "; ".join(_gain_text(name, one, base) for name, one in methods.items())
    finding = f"{gains}." if methods else _effect_text(base, scored)
    return AnalysisResult(
        name="bias-share",
        finding=finding,
        about={
            "models": names,
            "dataset": opened[0].report.dataset.name,
            "threat": f"{threat.norm} eps = {threat.text}",
            "n": len(images.label),
            "weak": weak,
            "seed": seed,
        },
        frames=frames,
        draw=lambda: [*_bars(base, scored, methods, finding), *_frontiers(models, lifted, finding)],
    )


def _tables(runs: list[Run]) -> list[Margins]:
    """Return the margin matrix of every run, checked to be of the same images, and sorted."""
    found: list[Margins] = []
    first = runs[0]
    for run in runs:
        table, name = run.margins, f"the margins of {run.path}"
        if table.num_classes != run.num_classes:
            raise InputError(f"{name} are over {table.num_classes} classes, its report has {run.num_classes}")
        if not table.complete:
            done = len(table) - int(table.missing.sum())
            raise InputError(f"{name} cover {done} of {len(table)} images; resume the evaluation")
        if run.classes != first.classes:
            raise InputError(f"{run.path} has other classes than {first.path}")
        found.append(table.take(np.argsort(table.index, kind="stable")))
        _check_same(name, found[-1], first, found[0])
    counts = np.bincount(found[0].label, minlength=found[0].num_classes)
    present = np.flatnonzero(counts)
    if len(present) < 2:
        raise InputError(f"{first.path} has images of {len(present)} class; biases need at least 2 classes")
    short = int(present[counts[present].argmin()])
    if counts[short] < LEAST:
        name = f"class {first.classes[short]} of {first.path}"
        raise InputError(f"{name} has {counts[short]} images; at least {LEAST} of each class are needed")
    return found


def _check_same(name: str, table: Margins, first: Run, base: Margins) -> None:
    """Require the images, the threat and the search settings of the first run."""
    same = np.array_equal(table.index, base.index) and np.array_equal(table.label, base.label)
    if not same or table.info.get("digest") != base.info.get("digest"):
        raise InputError(f"{name} are of other images than those of {first.path}")
    one, other = _threat(table), _threat(base)
    if (one.norm, one.eps) != (other.norm, other.eps):
        found, expected = (f"{some.norm} eps = {some.text}" for some in (one, other))
        raise InputError(f"{name} are for {found}, those of {first.path} for {expected}")
    for key in ("targets", "steps", "searches", "nearest"):
        if table.info.get(key) != (wanted := base.info.get(key)):
            found = f"were searched with {key} = {table.info.get(key)}"
            raise InputError(f"{name} {found}, those of {first.path} with {wanted}")


def _threat(table: Margins) -> Threat:
    return Threat.parse(str(table.info.get("eps")), str(table.info.get("norm")))


def _class_frame(scored: Scored, matched: Mapping[str, Vector]) -> pd.DataFrame:
    """Return one row for each scored model and class, from the weakest class of the baseline."""
    first = next(iter(scored.values())).by_class
    return frame_of(
        {
            "class": first[label].name,
            "label": label,
            "model": model,
            "biases": biases,
            **interval_columns("robust_accuracy_percent", scores.by_class[label]),
            "n": first[label].n,
            "bias": rounded(matched[biases][label]) if biases in matched else None,
        }
        for label in weakest_first([part.value for part in first])
        for (model, biases), scores in scored.items()
    )


def _bias_frame(scored: Scored) -> pd.DataFrame:
    def row(model: str, biases: str, scores: Scores) -> dict[str, object]:
        worst, corrected = scores.worst
        mcd, cv = (_removed(scored, model, biases, quantity) for quantity in ("mcd", "cv"))
        return {
            "model": model,
            "biases": biases,
            **interval_columns("worst_class_percent", worst),
            "worst_class": worst.name,
            "worst_class_corrected_percent": corrected,
            "average_percent": scores.number("average"),
            "weakest_tenth_percent": scores.number("tenth"),
            "natural_percent": rounded(scores.images.values(scores.natural)[0].mean()),
            "max_class_difference_points": scores.number("mcd"),
            "class_variance": scores.number("cv"),
            **interval_columns("max_class_difference_removed_percent", mcd),
            **interval_columns("class_variance_removed_percent", cv),
        }

    return frame_of(row(*key, scores) for key, scores in scored.items())


def _removed(scored: Scored, model: str, biases: str, quantity: str) -> Measured:
    """Return what biases with a limited loss remove of a quantity, in percent; null for others."""
    if biases not in LOSSES:
        return Measured()
    return removed(*(scored[model, one].quantities[quantity] for one in (NONE, biases)))


def _gain_row(method: str, one: Method, quantity: str, name: str) -> dict[str, object]:
    gain, reached, part = one.gain(quantity)
    whole, left = one.own.squared_distance(one.before), one.own.squared_distance(one.matched)
    start, middle, end = (scores.worst[1] for scores in (one.before, one.shifted, one.own))
    corrected = rounded(100 * (middle - start) / (end - start)) if quantity == "worst" and end > start else None
    return {
        "method": method,
        "quantity": name,
        **interval_columns("gain_points", gain),
        **interval_columns("reached_by_biases_points", reached),
        **interval_columns("share_of_gain_percent", part),
        "share_of_corrected_gain_percent": corrected,
        **interval_columns("profile_explained_percent", removed(whole, left)),
        "profile_difference_points": rounded(np.sqrt(whole[0])),
        "profile_difference_matched_points": rounded(np.sqrt(left[0])),
        "sampling_noise_points": rounded(one.own.noise(one.matched)),
        "average_of_baseline_with_biases_percent": one.shifted.number("average"),
    }


def _effect_text(base: str, scored: Scored) -> str:
    before, after = scored[base, NONE], scored[base, SHOWN]
    (worst, _), (raised, _) = before.worst, after.worst
    return (
        f"{base}: class biases change the worst class from {worst.value:.1f}% ({worst.name}) to "
        f"{raised.value:.1f}% ({raised.name}), the average from {before.number('average'):.1f}% to "
        f"{after.number('average'):.1f}%, and the maximum class difference (MCD) from {before.number('mcd'):.1f} to "
        f"{after.number('mcd'):.1f} points (reduction: {share(_removed(scored, base, SHOWN, 'mcd'), '%')})."
    )


def _gain_text(name: str, one: Method, base: str) -> str:
    gain, reached, part = one.gain("worst")
    if gain.value is None or gain.value <= 0:
        return f"{name} does not raise the worst class over {base} ({share(gain, ' points')})"
    sentence = f"{name} raises the worst class of {base} by {share(gain, ' points')}"
    at = f"at an average of {one.shifted.number('average'):.1f}%"
    if part.low is None:
        return f"{sentence}, which is not significant; class biases alone reach {share(reached, ' points')} {at}"
    return f"{sentence}, of which class biases alone reach {share(part, '%')} {at}"


def _bars(base: str, scored: Scored, methods: Mapping[str, Method], finding: str) -> list[Figure]:
    drawn = {
        f"{base} and {name} by class": {base: one.before, f"{base} with biases": one.shifted, name: one.own}
        for name, one in methods.items()
    } or {
        f"{base} by class, without and with biases": {
            base: scored[base, NONE],
            f"with biases, {SHOWN}": scored[base, SHOWN],
        }
    }
    first = scored[base, NONE]
    classes, view = first.images.classes, shown_classes([part.value for part in first.by_class])
    return [
        bars(
            [classes[label] for label in view],
            [Series.of(name, [scores.by_class[label] for label in view]) for name, scores in series.items()],
            title=f"{title}{shown_suffix(view, classes)}",
            alt=f"Bars of the robust accuracy of each class: {', '.join(series)}. {finding}",
            y="robust accuracy, %",
        )
        for title, series in drawn.items()
    ]


def _frontiers(models: Mapping[str, Fitted], lifted: Mapping[str, str], finding: str) -> list[Figure]:
    def series(label: str, found: Sequence[Scores], quantity: str, **look: Any) -> Series:
        x, y = ([scores.number(one) for scores in found] for one in ("average", quantity))
        return Series(name=label, x=x, y=y, **look)

    names = list(models)
    paths = {name: [model.at(place) for place in range(len(WEIGHTS) + 1)] for name, model in models.items()}
    starts = [path[0] for path in paths.values()]
    return [
        points(
            [
                *(series(*pair, key, color=color) for pair, color in zip(paths.items(), SERIES_COLORS, strict=False)),
                series("without biases", starts, key, text=names, color=INK, symbol="diamond"),
            ],
            title=f"Average against {name}",
            alt=f"Frontiers of the average against the {name} by class biases, on held-out images. {finding}",
            x="average robust accuracy, %",
            y=f"{name}, %",
            joined=names,
        )
        for key, name in lifted.items()
    ]
