"""Share of class differences, and of a method's gain, that class biases explain.

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

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from classwise.analysis.bias_fit import Fitted, Images, Measured, Scores, matching, measured, ratio, removed, rounded
from classwise.analysis.plots import interval_series, shown_classes, shown_suffix
from classwise.analysis.result import AnalysisResult, Record, frame_of, interval_columns
from classwise.analysis.run import MOST_RUNS, Run, open_runs, unique_names
from classwise.core.errors import InputError
from classwise.core.threat import Threat
from classwise.metrics import worst_class
from classwise.repairs.accuracy import tenth_of
from classwise.repairs.frontier import WEIGHTS, Objective, Weak
from classwise.reporting.estimates import ClassEstimate, estimate, share
from classwise.reporting.figures import INK, SERIES_COLORS, Figure, Series, bars, points
from classwise.storage.margins import Margins

LOSSES = (0.5, 1.0, 2.0)
"""Losses of the average, in points, that biases may cause."""
SHOWN_LOSS = 1.0
"""The loss that the finding and the figures use."""
LEAST = 4
"""Minimum number of images of a class, two in each half."""
LIFTED = {"worst": "worst class", "tenth": "weakest tenth"}


def bias_share(*runs: Run | str | Path, weak: Weak = "worst", seed: int = 0) -> AnalysisResult:
    """Effect of class biases on runs evaluated with ``--margins``; the first run is the baseline.

    ``weak``: what the frontiers maximize, the worst class or the mean of the weakest tenth. ``seed``: for the halves
    and the bootstrap.
    """
    opened = open_runs(runs, 1, MOST_RUNS)
    classes, tables = opened[0].classes, _tables(opened)
    threat, names = _threat(tables[0]), unique_names(opened)
    images = Images(tables[0].label, classes, seed)
    fitted = [Fitted(table, images, Objective(weak=weak)) for table in tables]
    values = Record(
        dataset=opened[0].report.dataset.name,
        threat=f"{threat.norm} eps = {threat.text}",
        weak=weak,
        n=len(images.label),
        classes=classes,
        models=[_share_of(name, one) for name, one in zip(names, fitted, strict=True)],
        methods=[_against(name, one, fitted[0]) for name, one in zip(names[1:], fitted[1:], strict=True)],
    )
    finding = _finding(values)
    frames = {"classes": _class_frame(values), "biases": _bias_frame(values)}
    if values.methods:
        frames["gains"] = _gain_frame(values)
    return AnalysisResult(
        name="bias-share", finding=finding, values=values, frames=frames, draw=lambda: _figures(values, finding)
    )


def _share_of(name: str, fitted: Fitted) -> Record:
    """Return the numbers of one model, with biases at every loss."""
    path = [fitted.at(place) for place in range(len(WEIGHTS) + 1)]
    before = path[0].quantities

    def shift(loss: float | None) -> Record:
        found = fitted.within(loss)
        mcd, cv = (removed(before[name], found.quantities[name]) for name in ("mcd", "cv"))
        return Record(loss=loss, profile=_profile(found), mcd_removed=mcd, cv_removed=cv)

    def point(weight: float, found: Scores) -> Record:
        numbers: dict[str, Any] = {key: rounded(found.quantities[key][0]) for key in ("average", "worst", "tenth")}
        return Record(weight=weight, **numbers)

    return Record(
        model=name,
        profile=_profile(path[0]),
        shifts=[shift(loss) for loss in (*LOSSES, None)],
        frontier=[point(weight, one) for weight, one in zip((0.0, *WEIGHTS), path, strict=True)],
    )


def _against(name: str, method: Fitted, base: Fitted) -> Record:
    """Return the comparison of one model with the baseline."""
    own, before = method.at(0), base.at(0)
    limit = min(own.average, before.average)
    shifted, matched = base.keeping(limit), base.matched(method)
    repaired = method.keeping(min(own.average, shifted.average))
    whole, left = own.squared_distance(before), own.squared_distance(matched)
    end, start, reached = (_profile(one).worst_corrected for one in (own, before, shifted))
    biases = zip(matching(base.fit.whole, method.fit.whole), base.images.counts, strict=True)

    def explained(quantity: str) -> Record:
        end, start, middle = (one.quantities[quantity] for one in (own, before, shifted))
        gain, reached = end - start, middle - start
        return Record(gain=measured(gain), reached=measured(reached), share=ratio(reached, gain))

    return Record(
        model=name,
        limit=rounded(limit),
        shifted=_profile(shifted),
        worst=explained("worst"),
        tenth=explained("tenth"),
        share_corrected=rounded(100 * (reached - start) / (end - start)) if end > start else None,
        repaired=_profile(repaired),
        matched=_profile(matched),
        biases=[rounded(bias) if count else None for bias, count in biases],
        distance=rounded(np.sqrt(whole[0])),
        distance_matched=rounded(np.sqrt(left[0])),
        noise=rounded(own.noise(matched)),
        explained=removed(whole, left),
    )


def _profile(scores: Scores) -> Record:
    """Return held-out accuracies in percent; ``average`` and ``natural`` are means over classes."""
    images, quantities = scores.images, scores.quantities
    numbers: dict[str, Any] = {key: rounded(quantities[key][0]) for key in ("average", "tenth", "mcd", "cv")}
    correct = np.bincount(images.label[scores.robust], minlength=len(images.classes)).astype(np.int64)
    by_class = [
        ClassEstimate(label=label, name=name, **estimate(int(correct[label]), int(images.counts[label])))
        for label, name in enumerate(images.classes)
    ]
    lowest = worst_class(correct, images.counts)
    assert lowest is not None
    return Record(
        worst=by_class[lowest.label],
        worst_corrected=rounded(100 * lowest.corrected),
        natural=rounded(images.values(scores.natural)[0].mean()),
        by_class=by_class,
        **numbers,
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


def _lifted(values: Record) -> dict[str, str]:
    """Return what biases raise: the worst class, and the weakest tenth if that is more than one class."""
    present = sum(part.value is not None for part in values.models[0].profile.by_class)
    return {key: name for key, name in LIFTED.items() if key == "worst" or tenth_of(present) > 1}


def _shift_name(shift: Record) -> str:
    return "highest worst class" if shift.loss is None else f"loss of at most {shift.loss:g}"


def _shown(model: Record) -> Record:
    found: Record = next(shift for shift in model.shifts if shift.loss == SHOWN_LOSS)
    return found


def _profiles(values: Record) -> list[tuple[str, str, Record, Record | None]]:
    """Return the model, the biases, the profile and the shift (if any) of every scored model."""
    found: list[tuple[str, str, Record, Record | None]] = []
    for model in values.models:
        found.append((model.model, "none", model.profile, None))
        found += [(model.model, _shift_name(shift), shift.profile, shift) for shift in model.shifts]
    base = values.models[0].model
    for one in values.methods:
        found += [
            (base, f"at the average of {one.model}", one.shifted, None),
            (base, f"matched to {one.model}", one.matched, None),
            (one.model, f"at the average of {base} with biases", one.repaired, None),
        ]
    return found


def _class_frame(values: Record) -> pd.DataFrame:
    """Return one row for each scored model and class, from the weakest class of the baseline."""
    matched = {f"matched to {one.model}": one.biases for one in values.methods}
    order = sorted(values.models[0].profile.by_class, key=lambda part: (part.value is None, part.value or 0.0))
    rows = [
        {
            "class": part.name,
            "label": part.label,
            "model": model,
            "biases": biases,
            **interval_columns("robust_accuracy_percent", profile.by_class[part.label]),
            "n": part.n,
            "bias": matched[biases][part.label] if biases in matched else None,
        }
        for part in order
        for model, biases, profile, _ in _profiles(values)
    ]
    return frame_of(rows)


def _bias_frame(values: Record) -> pd.DataFrame:
    nothing = Measured(value=None, low=None, high=None)
    return frame_of(
        {
            "model": model,
            "biases": biases,
            **interval_columns("worst_class_percent", profile.worst),
            "worst_class": profile.worst.name,
            "worst_class_corrected_percent": profile.worst_corrected,
            "average_percent": profile.average,
            "weakest_tenth_percent": profile.tenth,
            "natural_percent": profile.natural,
            "max_class_difference_points": profile.mcd,
            "class_variance": profile.cv,
            **interval_columns("max_class_difference_removed_percent", shift.mcd_removed if shift else nothing),
            **interval_columns("class_variance_removed_percent", shift.cv_removed if shift else nothing),
        }
        for model, biases, profile, shift in _profiles(values)
    )


def _gain_frame(values: Record) -> pd.DataFrame:
    return frame_of(
        {
            "method": one.model,
            "quantity": name,
            **interval_columns("gain_points", one[key].gain),
            **interval_columns("reached_by_biases_points", one[key].reached),
            **interval_columns("share_of_gain_percent", one[key].share),
            "share_of_corrected_gain_percent": one.share_corrected if key == "worst" else None,
            **interval_columns("profile_explained_percent", one.explained),
            "profile_difference_points": one.distance,
            "profile_difference_matched_points": one.distance_matched,
            "sampling_noise_points": one.noise,
            "average_of_baseline_with_biases_percent": one.shifted.average,
        }
        for one in values.methods
        for key, name in _lifted(values).items()
    )


def _finding(values: Record) -> str:
    base = values.models[0]
    if values.methods:
        return "; ".join(_gain(one, base.model) for one in values.methods) + "."
    shift, before = _shown(base), base.profile
    return (
        f"{base.model}: class biases change the worst class from {before.worst.value:.1f}% ({before.worst.name}) to "
        f"{shift.profile.worst.value:.1f}% ({shift.profile.worst.name}), the average from {before.average:.1f}% to "
        f"{shift.profile.average:.1f}%, and remove {share(shift.mcd_removed, '%')} of the maximum class difference."
    )


def _gain(one: Record, base: str) -> str:
    gain, part = one.worst.gain, one.worst.share
    if gain.value <= 0:
        return f"{one.model} does not raise the worst class over {base} ({share(gain, ' points')})"
    sentence = f"{one.model} raises the worst class of {base} by {share(gain, ' points')}"
    at = f"at an average of {one.shifted.average:.1f}%"
    if part.low is None:
        return (
            f"{sentence}, which is not significant; class biases alone reach {share(one.worst.reached, ' points')} {at}"
        )
    return f"{sentence}, of which class biases alone reach {share(part, '%')} {at}"


def _figures(values: Record, finding: str) -> list[Figure]:
    base, own = values.models[0], {one.model: one.profile for one in values.models}
    found = [
        _bars(
            f"{base.model} and {one.model} by class",
            {base.model: base.profile, f"{base.model} with biases": one.shifted, one.model: own[one.model]},
            finding,
        )
        for one in values.methods
    ] or [
        _bars(
            f"{base.model} by class, without and with biases",
            {base.model: base.profile, f"with biases, {_shift_name(_shown(base))}": _shown(base).profile},
            finding,
        )
    ]
    return [*found, *(_frontier_figure(values, key, name, finding) for key, name in _lifted(values).items())]


def _bars(title: str, profiles: dict[str, Record], finding: str) -> Figure:
    first = next(iter(profiles.values())).by_class
    view, classes = shown_classes([part.value for part in first]), [part.name for part in first]
    return bars(
        [classes[label] for label in view],
        [interval_series(name, [profile.by_class[label] for label in view]) for name, profile in profiles.items()],
        title=f"{title}{shown_suffix(view, classes)}",
        alt=f"Bars of the robust accuracy of each class: {', '.join(profiles)}. {finding}",
        y="robust accuracy, %",
    )


def _frontier_figure(values: Record, key: str, name: str, finding: str) -> Figure:
    def series(label: str, found: list[Record], **look: Any) -> Series:
        return Series(name=label, x=[point.average for point in found], y=[point[key] for point in found], **look)

    names, start = [one.model for one in values.models], [one.frontier[0] for one in values.models]
    frontiers = [series(one.model, one.frontier, color=SERIES_COLORS[i]) for i, one in enumerate(values.models)]
    return points(
        [*frontiers, series("without biases", start, text=names, color=INK, symbol="diamond")],
        title=f"Average against {name}",
        alt=f"Frontiers of the average against the {name} by class biases, on held-out images. {finding}",
        x="average robust accuracy, %",
        y=f"{name}, %",
        joined=names,
    )
