"""How much of the differences between classes class biases explain, and of what a training method gains.

Adding a bias to the logit of each class exchanges accuracy between classes and leaves the features as they are. The
margin matrix gives the robust accuracy of every class under any biases, so three quantities need no further attack:

* how much of the gap (MCD) and of the class variance (CV) biases remove, at a stated loss of the average;
* which part of a method's gain in the worst class the baseline reaches by biases alone, at the method's average;
* which part of the squared difference between the class accuracies of method and baseline biases reproduce:

    1 - sum_c (A_c^method - A_c^shifted)^2 / sum_c (A_c^method - A_c^baseline)^2.

Biases are fitted to one half of the images of each class and judged by counting on the other half, in both directions;
all accuracies are those of the two held-out halves together. A gain is compared at the method's average, or at the
baseline's where that is lower; a method's higher average is reported beside the share and is not part of it.

Intervals come from redraws of the images within each class, the same for all models, without fitting again. A redraw
adds sampling noise a second time, which lowers every minimum and raises MCD and CV; the redrawn values of a quantity
are therefore moved so that their median is the estimate.

Averages are means over classes. CV and MCD of few images a class are too large by their sampling noise. Margins over
classes that were not attacked are upper bounds, see ``storage.margins``.
"""

# N images, K classes, P classes with images, R redraws

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from classwise.analysis.answer import Answer
from classwise.analysis.several import MOST_RUNS, in_view, names_apart, opened
from classwise.analysis.subject import Subject
from classwise.analysis.wording import decimal, left_out
from classwise.errors import InputError
from classwise.metrics import worst_class
from classwise.metrics.counts import Ints
from classwise.repairs.accuracy import ClassAccuracy, Matrix, Vector, tenth_of
from classwise.repairs.fit import assigned
from classwise.repairs.frontier import WEIGHTS, Objective, Weak, frontier
from classwise.reporting.estimates import ClassEstimate, estimate, share
from classwise.reporting.figures import COLOURS, INK, Figure, Series, bars, points
from classwise.reporting.part import Part
from classwise.reporting.tables import Table
from classwise.storage.margins import Margins
from classwise.threat import Threat
from classwise.verdicts import NATURAL

LOSSES = (0.5, 1.0, 2.0)
"""Points of the average that biases may cost."""
SHOWN_LOSS = 1.0
"""The one of them that sentences and figures show."""
LEAST = 4
"""Images of a class, two in each half."""
REDRAWS = 200
_TAIL = 2.5
"""Percent of the redraws beyond either end of an interval."""
_HALVES = 2
_HALVINGS = 12
_FARTHEST = 10.0
"""Largest bias that is tried, in spreads of the margins."""
Bools = NDArray[np.bool_]


class Measured(Part):
    """A number with its 95% interval from redraws of the images; null where it is not defined."""

    value: float | None
    low: float | None
    high: float | None


class Profile(Part):
    """Accuracies of a model as it is, or with class biases, in percent and on held-out images."""

    average: float
    """Robust accuracy, mean over classes."""
    worst: ClassEstimate
    worst_corrected: float
    """Corrected for having been picked as the lowest."""
    tenth: float
    """Mean of the weakest tenth of the classes."""
    mcd: float
    cv: float
    natural: float
    """Natural accuracy, mean over classes."""
    by_class: list[ClassEstimate]


class Shift(Part):
    """Biases of one point of the frontier, and what they remove of the differences between classes."""

    loss: float | None
    """Points of the average that they were allowed to cost on the images of the fit; null for the highest worst class
    whatever it costs."""
    profile: Profile
    mcd_removed: Measured
    """Percent of MCD."""
    cv_removed: Measured
    """Percent of CV."""

    @property
    def name(self) -> str:
        """What a table calls it."""
        return "highest worst class" if self.loss is None else f"loss of at most {self.loss:g}"


class FrontierPoint(Part):
    """One weight of the weak classes; 0 for the model as it is."""

    weight: float
    average: float
    worst: float
    tenth: float


class ModelShare(Part):
    """One model: as it is, with biases, and its frontier."""

    model: str
    profile: Profile
    shifts: list[Shift]
    frontier: list[FrontierPoint]


class Explained(Part):
    """A gain of a method over the baseline, in points, and how much of it biases of the baseline reach."""

    gain: Measured
    reached: Measured
    """By the shifted baseline."""
    share: Measured
    """Percent of the gain; null where there is none, without an interval where the gain is not significant."""


class Method(Part):
    """One model against the baseline."""

    model: str
    limit: float
    """The average that the shifted baseline keeps."""
    shifted: Profile
    """The baseline with the highest worst class at that average."""
    worst: Explained
    tenth: Explained
    share_corrected: float | None
    """Percent of the gain, from selection-corrected worst classes."""
    repaired: Profile
    """The method with biases of its own, at the average of the shifted baseline, or at its own if that is lower."""
    matched: Profile
    """The baseline with the biases that bring its class accuracies closest to the method's."""
    biases: list[float | None]
    """(K,) these, with mean zero, fitted to all images; null for a class without images."""
    distance: float
    """Root mean square over classes of the difference between method and baseline, in points."""
    distance_matched: float
    """The same between the method and the matched baseline."""
    noise: float
    """What sampling alone contributes to that."""
    explained: Measured
    """Percent of the squared difference that the biases explain."""


class BiasShare(Answer):
    """What class biases explain."""

    kind: ClassVar[str] = "bias-share"

    dataset: str
    threat: str
    weak: Weak
    """What the frontiers lift."""
    n: int
    """Images, all of them judged under biases fitted without them."""
    classes: list[str]
    models: list[ModelShare]
    methods: list[Method]

    def sentences(self) -> list[str]:
        base = self.models[0]
        found = [self._of_model(one) for one in self.models]
        for one in self.methods:
            own = self._model(one.model).profile
            found.append(self._gain(one, one.worst, "worst class"))
            if self._many:
                found.append(self._gain(one, one.tenth, "weakest tenth"))
            if own.average > one.shifted.average:
                found.append(
                    f"The average of {one.model}, {own.average:.1f}%, is higher than that of {base.model} with biases, "
                    f"{one.shifted.average:.1f}%; the share does not include this difference."
                )
            found += [
                f"The class accuracies of {one.model} and {base.model} differ by {one.distance:.1f} points (root mean "
                f"square). Biases that match {base.model} to {one.model} leave {one.distance_matched:.1f}, where "
                f"sampling alone contributes {one.noise:.1f}: they explain {_told(one.explained)} of the squared "
                "difference."
                if one.explained.value is not None
                else f"The class accuracies of {one.model} and {base.model} do not differ.",
                f"With biases of its own {one.model} has a worst class of {one.repaired.worst.value:.1f}% at an "
                f"average of {one.repaired.average:.1f}%; {base.model} with biases has {one.shifted.worst.value:.1f}% "
                f"at {one.shifted.average:.1f}%.",
            ]
        return found

    def tables(self) -> list[Table]:
        return [
            *(self._shift_table(one) for one in self.models),
            *([self._gain_table()] if self.methods else []),
            *(self._class_table(one) for one in self.methods),
        ]

    def figures(self) -> list[Figure]:
        base = self.models[0]
        found = [
            self._bars(
                f"{base.model} and {one.model} by class",
                {
                    base.model: base.profile,
                    f"{base.model} with biases": one.shifted,
                    one.model: self._model(one.model).profile,
                },
                f"Bars of the robust accuracy of each class: {base.model}, {base.model} with biases at the average of "
                f"{one.model}, and {one.model}. {self._gain(one, one.worst, 'worst class')}",
            )
            for one in self.methods
        ]
        if not self.methods:
            shown = next(shift for shift in base.shifts if shift.loss == SHOWN_LOSS)
            found.append(
                self._bars(
                    f"{base.model} by class, without and with biases",
                    {base.model: base.profile, f"with biases, {shown.name}": shown.profile},
                    f"Bars of the robust accuracy of each class. {self._of_model(base)}",
                )
            )
        found.append(self._frontiers("worst", "worst class"))
        if self._many:
            found.append(self._frontiers("tenth", "weakest tenth"))
        return found

    def rows(self) -> list[dict[str, Any]]:
        found: list[tuple[str, str, Profile, list[float | None] | None]] = []
        for model in self.models:
            found.append((model.model, "as it is", model.profile, None))
            found += [(model.model, shift.name, shift.profile, None) for shift in model.shifts]
        base = self.models[0].model
        for one in self.methods:
            found += [
                (base, f"at the average of {one.model}", one.shifted, None),
                (base, f"matched to {one.model}", one.matched, one.biases),
                (one.model, f"at the average of {base} with biases", one.repaired, None),
            ]
        return [
            {
                "model": name,
                "biases": kind,
                "label": part.label,
                "class": part.name,
                "robust": part.value,
                "n": part.n,
                "bias": None if biases is None else biases[part.label],
                "average": profile.average,
                "worst": profile.worst.value,
                "mcd": profile.mcd,
                "cv": profile.cv,
            }
            for name, kind, profile, biases in found
            for part in profile.by_class
        ]

    @property
    def _many(self) -> bool:
        """Whether the weakest tenth is more than the worst class."""
        present = sum(part.value is not None for part in self.models[0].profile.by_class)
        return tenth_of(present) > 1

    def _model(self, name: str) -> ModelShare:
        return next(one for one in self.models if one.model == name)

    def _of_model(self, one: ModelShare) -> str:
        before = one.profile
        shift = next(shift for shift in one.shifts if shift.loss == SHOWN_LOSS)
        after = shift.profile
        return (
            f"{one.model}: class biases change the worst class from {before.worst.value:.1f}% ({before.worst.name}) to "
            f"{after.worst.value:.1f}% ({after.worst.name}) and the average from {before.average:.1f}% to "
            f"{after.average:.1f}%."
        ) + (
            ""
            if shift.mcd_removed.value is None
            else f" They remove {_told(shift.mcd_removed)} of the gap between classes (MCD) and "
            f"{_told(shift.cv_removed)} of the class variance (CV)."
        )

    def _gain(self, one: Method, part: Explained, what: str) -> str:
        base = self.models[0].model
        if part.gain.value is None or part.gain.value <= 0:
            return f"{one.model} does not raise the {what} over {base}: {_told(part.gain, ' points', sign=True)}."
        weak = "" if part.share.low is not None else " The gain is not significant, so the share is uncertain."
        return (
            f"{one.model} raises the {what} by {_told(part.gain, ' points')} over {base}. Biases alone change that of "
            f"{base} by {_told(part.reached, ' points', sign=True)} at an average of {one.shifted.average:.1f}%: "
            f"{_told(part.share)} of the gain.{weak}"
        )

    def _shift_table(self, one: ModelShare) -> Table:
        def cells(profile: Profile) -> list[str]:
            numbers = [profile.worst_corrected, *([profile.tenth] if self._many else []), profile.mcd, profile.cv]
            return [
                decimal(profile.average, 1),
                f"{share(profile.worst)} ({profile.worst.name})",
                *(decimal(value, 1) for value in numbers),
            ]

        return Table(
            title=f"{one.model} with class biases",
            about=f"Accuracies under {self.threat} in percent, MCD in points, CV in percent², on {self.n} held-out "
            "images [95%]. The loss limits the average on the images of the fit.",
            columns=[
                "biases",
                "average",
                "worst class",
                "corrected",
                *(["weakest tenth"] if self._many else []),
                "MCD",
                "CV",
                "MCD removed, %",
                "CV removed, %",
                NATURAL,
            ],
            rows=[
                ["none", *cells(one.profile), "–", "–", decimal(one.profile.natural, 1)],
                *(
                    [
                        shift.name,
                        *cells(shift.profile),
                        _told(shift.mcd_removed, ""),
                        _told(shift.cv_removed, ""),
                        decimal(shift.profile.natural, 1),
                    ]
                    for shift in one.shifts
                ),
            ],
        )

    def _gain_table(self) -> Table:
        base = self.models[0].model
        lifted = [("worst", "worst class"), *([("tenth", "weakest tenth")] if self._many else [])]
        return Table(
            title=f"Gains over {base}",
            about=f"In points, with 95% intervals: the gain of each method, what biases of {base} reach at no lower an "
            "average, and the share of the gain that this is. Corrected: the share from selection-corrected worst "
            "classes. Profile: the share of the squared difference of the class accuracies.",
            columns=[
                "method",
                *(
                    column
                    for _, name in lifted
                    for column in (f"gain of {name}", f"by biases of {base}", "share of the gain, %")
                ),
                "corrected, %",
                "profile, %",
                f"average of {base} with biases",
            ],
            rows=[
                [
                    one.model,
                    *(
                        cell
                        for name, _ in lifted
                        for part in [getattr(one, name)]
                        for cell in (
                            _told(part.gain, "", sign=True),
                            _told(part.reached, "", sign=True),
                            _told(part.share, "", digits=0),
                        )
                    ),
                    decimal(one.share_corrected, 0),
                    _told(one.explained, "", digits=0),
                    decimal(one.shifted.average, 1),
                ]
                for one in self.methods
            ],
        )

    def _class_table(self, one: Method) -> Table:
        base, own = self.models[0], self._model(one.model)
        view = in_view([part.value for part in base.profile.by_class])
        parts = [profile.by_class for profile in (base.profile, one.shifted, one.matched, own.profile, one.repaired)]
        return Table(
            title=f"Classes of {base.model} and {one.model}",
            about=f"Robust accuracy in percent. Shifted: with biases for the worst class, at the average of "
            f"{one.model}; {one.model} with its own at the same average. Matched: with the biases that bring "
            f"{base.model} closest to {one.model}, which the last column holds.",
            columns=[
                "class",
                base.model,
                f"{base.model}, shifted",
                f"{base.model}, matched",
                one.model,
                f"{one.model}, shifted",
                "bias",
            ],
            rows=[
                [
                    self.classes[label],
                    *(decimal(part[label].value, 1) for part in parts),
                    decimal(one.biases[label], 3),
                ]
                for label in view
            ],
            foot=left_out(len(view), len(self.classes)),
        )

    def _bars(self, title: str, profiles: dict[str, Profile], alt: str) -> Figure:
        first = next(iter(profiles.values()))
        view = in_view([part.value for part in first.by_class])
        some = f", the {len(view)} weakest classes" if len(view) < len(self.classes) else ""
        return bars(
            [self.classes[label] for label in view],
            [
                Series(
                    name=name,
                    y=[part.value for part in parts],
                    low=[part.low for part in parts],
                    high=[part.high for part in parts],
                )
                for name, profile in profiles.items()
                for parts in [[profile.by_class[label] for label in view]]
            ],
            title=f"{title}{some}",
            alt=alt,
            y="robust accuracy, %",
        )

    def _frontiers(self, field: str, what: str) -> Figure:
        def series(name: str, found: list[FrontierPoint], colour: str, text: list[str] | None = None) -> Series:
            return Series(
                name=name,
                x=[point.average for point in found],
                y=[getattr(point, field) for point in found],
                text=text,
                colour=colour,
                symbol="circle" if text is None else "diamond",
            )

        names = [one.model for one in self.models]
        frontiers = [series(one.model, one.frontier, colour) for one, colour in zip(self.models, COLOURS, strict=False)]
        return points(
            [*frontiers, series("without biases", [one.frontier[0] for one in self.models], INK, names)],
            title=f"Average against {what}",
            alt=f"Frontiers of the average against the {what} by class biases, on held-out images. "
            f"{' '.join(self.sentences()[: len(self.models)])}",
            x="average robust accuracy, %",
            y=f"{what}, %",
            joined=names,
        )


def bias_share(*runs: Subject | str | Path, weak: Weak = "worst", seed: int = 0) -> BiasShare:
    """Judge class biases on runs that were evaluated with their margins; the first is the baseline.

    ``weak``: what the frontiers lift, the worst class or the mean of the weakest tenth. ``seed``: of the halves and the
    redraws.
    """
    subjects = opened(runs, 1, MOST_RUNS)
    classes, tables = subjects[0].classes, _tables(subjects)
    first, threat = tables[0], _threat(tables[0])
    fold = assigned(first.label, _HALVES, seed)
    images = _Images(first.label, classes, seed)
    names = names_apart(subjects)
    fitted = [_Fitted(table, fold, Objective(weak=weak)) for table in tables]
    return BiasShare(
        dataset=subjects[0].report.dataset.name,
        threat=f"{threat.norm} eps = {threat.text}",
        weak=weak,
        n=len(first),
        classes=classes,
        models=[_share_of(name, one, images) for name, one in zip(names, fitted, strict=True)],
        methods=[_against(name, one, fitted[0], images) for name, one in zip(names[1:], fitted[1:], strict=True)],
    )


@dataclass(frozen=True, slots=True)
class _Judged:
    """(N,) whether each image stays correct under attack, and what that comes to."""

    robust: Bools
    values: Vector
    """(P,) robust accuracies in percent."""
    redrawn: Matrix
    """(R, P)."""
    profile: Profile


class _Images:
    """The images that all models share, and redraws of them within each class."""

    def __init__(self, label: Ints, classes: list[str], seed: int) -> None:
        self.label, self.classes = label, classes
        random = np.random.default_rng([seed, 1])
        self.counts = np.bincount(label, minlength=len(classes)).astype(np.int64)
        self.present = np.flatnonzero(self.counts)
        self.rows = [np.flatnonzero(label == one) for one in self.present]
        self.drawn = [
            random.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=REDRAWS) / len(rows)
            for rows in self.rows
        ]

    def values(self, kept: NDArray[Any]) -> Vector:
        """(P,) the mean of each class in percent."""
        return 100 * np.array([kept[rows].mean() for rows in self.rows])

    def judged(self, robust: Bools, natural: Bools) -> _Judged:
        """Count what stays correct."""
        values = self.values(robust)
        redrawn = 100 * np.stack(
            [drawn @ robust[rows] for drawn, rows in zip(self.drawn, self.rows, strict=True)], axis=1
        )
        correct = np.bincount(self.label[robust], minlength=len(self.classes)).astype(np.int64)
        by_class = [
            ClassEstimate(label=label, name=name, **estimate(int(correct[label]), int(self.counts[label])))
            for label, name in enumerate(self.classes)
        ]
        lowest = worst_class(correct, self.counts)
        assert lowest is not None
        profile = Profile(
            average=_round(values.mean()),
            worst=by_class[lowest.label],
            worst_corrected=_round(100 * lowest.corrected),
            tenth=_round(_tenth(values)),
            mcd=_round(np.ptp(values)),
            cv=_round(values.var()),
            natural=_round(self.values(natural).mean()),
            by_class=by_class,
        )
        return _Judged(robust, values, redrawn, profile)


class _Fitted:
    """One model: its frontier on each half of the images, judged on the other half."""

    def __init__(self, margins: Margins, fold: Ints, objective: Objective) -> None:
        self.fold, self.num_classes = fold, margins.num_classes
        self.whole = ClassAccuracy.of(margins.attacked, margins.label)
        self.counted = ClassAccuracy.of(margins.attacked, margins.label, bandwidth=0)
        self.natural = ClassAccuracy.of(margins.without_attack, margins.label, bandwidth=0)
        self.sides = [np.flatnonzero(fold == one) for one in range(_HALVES)]
        self.halves = [
            ClassAccuracy.of(margins.attacked[fold != one], margins.label[fold != one]) for one in range(_HALVES)
        ]
        """Fitted for the images of each fold, from the others."""
        zero = np.zeros(self.num_classes)
        self.paths = [np.stack([zero, *frontier(half, WEIGHTS, objective)]) for half in self.halves]

    def kept(self, each: list[Vector]) -> tuple[Bools, Bools]:
        """(N,) what stays correct, attacked and natural, each half under the biases of the other."""
        found = []
        for accuracy in (self.counted, self.natural):
            kept = np.zeros(len(self.fold), dtype=bool)
            for rows, biases in zip(self.sides, each, strict=True):
                kept[rows] = accuracy.take(rows).kept(biases) > 0
            found.append(kept)
        return found[0], found[1]

    def at(self, place: float) -> list[Vector]:
        """The biases at one place of both paths: 0 is the model as it is, 1 the first weight."""
        return [_between(path, place) for path in self.paths]

    def within(self, loss: float) -> list[Vector]:
        """The biases that cost at most so many points of the average of the half they are fitted to."""

        def chosen(half: ClassAccuracy, path: Matrix) -> Vector:
            def average(place: float) -> float:
                return 100 * float(np.nanmean(half.values(_between(path, place))))

            return _between(path, _farthest(average, len(path) - 1, average(0.0) - loss))

        return [chosen(half, path) for half, path in zip(self.halves, self.paths, strict=True)]

    def highest(self) -> list[Vector]:
        """The biases with the highest worst class of the half they are fitted to."""
        return [
            path[int(np.argmax([np.nanmin(half.values(biases)) for biases in path]))]
            for half, path in zip(self.halves, self.paths, strict=True)
        ]

    def keeping(self, average: float, images: _Images) -> list[Vector]:
        """The biases of the largest weight that keeps an average on held-out images."""

        def held_out(place: float) -> float:
            return float(images.values(self.kept(self.at(place))[0]).mean())

        return self.at(_farthest(held_out, len(WEIGHTS), average))


def _share_of(name: str, fitted: _Fitted, images: _Images) -> ModelShare:
    """One model, with biases at every loss."""
    path = [images.judged(*fitted.kept(fitted.at(place))) for place in range(len(WEIGHTS) + 1)]
    before = path[0]

    def shift(loss: float | None) -> Shift:
        after = images.judged(*fitted.kept(fitted.highest() if loss is None else fitted.within(loss)))

        def removed(quantity: Callable[[Matrix], Any]) -> Measured:
            return _removed(
                float(quantity(before.values)),
                float(quantity(after.values)),
                quantity(before.redrawn),
                quantity(after.redrawn),
            )

        return Shift(loss=loss, profile=after.profile, mcd_removed=removed(_mcd), cv_removed=removed(_cv))

    return ModelShare(
        model=name,
        profile=before.profile,
        shifts=[shift(loss) for loss in (*LOSSES, None)],
        frontier=[
            FrontierPoint(
                weight=weight,
                average=one.profile.average,
                worst=_round(one.values.min()),
                tenth=one.profile.tenth,
            )
            for weight, one in zip((0.0, *WEIGHTS), path, strict=True)
        ],
    )


def _against(name: str, method: _Fitted, base: _Fitted, images: _Images) -> Method:
    """One model against the baseline."""
    zero = [np.zeros(base.num_classes)] * _HALVES
    own, before = (images.judged(*one.kept(zero)) for one in (method, base))
    limit = float(min(own.values.mean(), before.values.mean()))
    shifted = images.judged(*base.kept(base.keeping(limit, images)))
    level = float(min(own.values.mean(), shifted.values.mean()))
    repaired = images.judged(*method.kept(method.keeping(level, images)))
    matched = images.judged(
        *base.kept([_matching(one, other) for one, other in zip(base.halves, method.halves, strict=True)])
    )
    biases = _matching(base.whole, method.whole)
    left, whole = _squared(own.values, matched.values), _squared(own.values, before.values)
    left_redrawn, whole_redrawn = _squared(own.redrawn, matched.redrawn), _squared(own.redrawn, before.redrawn)
    corrected = [one.profile.worst_corrected for one in (own, before, shifted)]
    return Method(
        model=name,
        limit=_round(limit),
        shifted=shifted.profile,
        worst=_explained(_worst, own, before, shifted),
        tenth=_explained(_tenth, own, before, shifted),
        share_corrected=_round(100 * (corrected[2] - corrected[1]) / (corrected[0] - corrected[1]))
        if corrected[0] > corrected[1]
        else None,
        repaired=repaired.profile,
        matched=matched.profile,
        biases=[_round(bias) if count else None for bias, count in zip(biases, images.counts, strict=True)],
        distance=_round(np.sqrt(whole)),
        distance_matched=_round(np.sqrt(left)),
        noise=_round(_noise(own.robust, matched.robust, images)),
        explained=_removed(float(whole), float(left), whole_redrawn, left_redrawn),
    )


def _explained(quantity: Callable[[Matrix], Any], own: _Judged, before: _Judged, shifted: _Judged) -> Explained:
    """The gain in one quantity, and what the shifted baseline reaches of it."""
    start, start_redrawn = float(quantity(before.values)), quantity(before.redrawn)
    gain, gain_redrawn = float(quantity(own.values)) - start, quantity(own.redrawn) - start_redrawn
    reached, reached_redrawn = float(quantity(shifted.values)) - start, quantity(shifted.redrawn) - start_redrawn
    return Explained(
        gain=_measured(gain, gain_redrawn),
        reached=_measured(reached, reached_redrawn),
        share=_ratio(reached, gain, reached_redrawn, gain_redrawn),
    )


def _matching(base: ClassAccuracy, method: ClassAccuracy) -> Vector:
    """(K,) the biases, with mean zero, under which the smooth class accuracies of one model come closest to another's.

    A ridge of the variance of an accuracy, over the spread of the margins squared, keeps biases small where few images
    do not determine them.
    """
    present = np.flatnonzero(base.counts)
    scale = float(np.median(base.spread[present]))
    ridge = 0.5 / np.sqrt(np.median(base.counts[present]))
    target = method.values(np.zeros(method.num_classes))[present]

    def placed(scaled: Vector) -> Vector:
        biases = np.zeros(base.num_classes)
        biases[present] = scale * (scaled - scaled.mean())
        return biases

    def residuals(scaled: Vector) -> Vector:
        return np.concatenate([base.values(placed(scaled))[present] - target, ridge * scaled])

    def slopes(scaled: Vector) -> Matrix:
        by_bias = base.slopes(placed(scaled))[1][np.ix_(present, present)]  # rows sum to zero, so centering is free
        return np.concatenate([scale * by_bias, ridge * np.eye(len(present))])

    found = least_squares(
        residuals, np.zeros(len(present)), jac=slopes, bounds=(-_FARTHEST, _FARTHEST), x_scale=1.0, max_nfev=100
    )
    return placed(found.x)


def _farthest(value: Callable[[float], float], last: int, limit: float) -> float:
    """The last place of a path where a value is at or above its limit, between two points by halving."""
    above = [place for place in range(last + 1) if value(float(place)) >= limit - 1e-9]
    low = float(above[-1]) if above else 0.0
    if low == last:
        return low
    high = low + 1
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) >= limit - 1e-9 else (low, middle)
    return low


def _between(path: Matrix, place: float) -> Vector:
    """A place between two points of a path."""
    low = min(int(place), len(path) - 2)
    return np.asarray(path[low] + (place - low) * (path[low + 1] - path[low]))


def _worst(values: Matrix) -> Any:
    return values.min(axis=-1)


def _tenth(values: Matrix) -> Any:
    return np.sort(values, axis=-1)[..., : tenth_of(values.shape[-1])].mean(axis=-1)


def _mcd(values: Matrix) -> Any:
    return np.ptp(values, axis=-1)


def _cv(values: Matrix) -> Any:
    return values.var(axis=-1)


def _squared(one: Matrix, other: Matrix) -> Any:
    """The mean squared difference of class accuracies."""
    return ((one - other) ** 2).mean(axis=-1)


def _noise(one: Bools, other: Bools, images: _Images) -> float:
    """The root mean square over classes of the standard error of the difference of two models on the same images."""
    difference = one.astype(np.float64) - other
    return 100 * float(np.sqrt(np.mean([difference[rows].var() / (len(rows) - 1) for rows in images.rows])))


def _moved(value: float, redrawn: Vector) -> Vector:
    """Redrawn values whose median is the estimate."""
    return np.asarray(redrawn + (value - np.median(redrawn)))


def _measured(value: float, redrawn: Vector) -> Measured:
    """A number with the middle 95% of its redraws."""
    low, high = np.percentile(_moved(value, redrawn), [_TAIL, 100 - _TAIL])
    return Measured(value=_round(value), low=_round(low), high=_round(high))


def _ratio(part: float, whole: float, part_redrawn: Vector, whole_redrawn: Vector) -> Measured:
    """A part in percent of the whole; without an interval where that of the whole holds zero."""
    if whole <= 0:
        return Measured(value=None, low=None, high=None)
    value, moved = 100 * part / whole, _moved(whole, whole_redrawn)
    if np.percentile(moved, _TAIL) <= 0:
        return Measured(value=_round(value), low=None, high=None)
    present = moved > 0
    low, high = np.percentile(100 * _moved(part, part_redrawn)[present] / moved[present], [_TAIL, 100 - _TAIL])
    return Measured(value=_round(value), low=_round(min(low, value)), high=_round(max(high, value)))


def _removed(before: float, after: float, before_redrawn: Vector, after_redrawn: Vector) -> Measured:
    """By how many percent something not negative became smaller."""
    found = _ratio(before - after, before, before_redrawn - after_redrawn, before_redrawn)
    return found if found.high is None else found.model_copy(update={"high": min(found.high, 100.0)})


def _round(value: Any) -> float:
    return round(float(value), 4)


def _told(part: Measured, unit: str = "%", *, sign: bool = False, digits: int = 1) -> str:
    """A number with its interval where there is one.

    >>> _told(Measured(value=35.04, low=30.0, high=41.26)), _told(Measured(value=None, low=None, high=None))
    ('35.0% [30.0, 41.3]', '–')
    """
    if part.value is None:
        return "–"
    value = f"{part.value:{'+' if sign else ''}.{digits}f}{unit}"
    return value if part.low is None else f"{value} [{part.low:.{digits}f}, {part.high:.{digits}f}]"


def _tables(subjects: list[Subject]) -> list[Margins]:
    """The margin matrix of every run, all of the same images in the same order."""
    found: list[Margins] = []
    for subject in subjects:
        table = subject.margins
        if table.num_classes != subject.num_classes:
            raise InputError(
                f"the margins of {subject.path} are over {table.num_classes} classes, its report has "
                f"{subject.num_classes}"
            )
        if not table.complete:
            raise InputError(
                f"the margins of {subject.path} cover {len(table) - int(table.missing.sum())} of {len(table)} images: "
                "resume the evaluation"
            )
        found.append(table.take(np.argsort(table.index, kind="stable")))
        if subject.classes != subjects[0].classes:
            raise InputError(f"{subject.path} has other classes than {subjects[0].path}")
        _check_same(subject, found[-1], subjects[0], found[0])
    counts = np.bincount(found[0].label, minlength=found[0].num_classes)
    present = np.flatnonzero(counts)
    if len(present) < 2:
        raise InputError(f"{subjects[0].path} has images of {len(present)} class: biases need at least 2 classes")
    short = int(present[counts[present].argmin()])
    if counts[short] < LEAST:
        raise InputError(
            f"class {subjects[0].classes[short]} of {subjects[0].path} has {counts[short]} images: at least {LEAST} of "
            "each class are needed"
        )
    return found


def _check_same(subject: Subject, table: Margins, first: Subject, base: Margins) -> None:
    """Refuse margins of other images, of another threat, or of another search than those of the first run."""
    same = np.array_equal(table.index, base.index) and np.array_equal(table.label, base.label)
    if not same or table.info.get("digest") != base.info.get("digest"):
        raise InputError(f"the margins of {subject.path} are of other images than those of {first.path}")
    one, other = _threat(table), _threat(base)
    if (one.norm, one.eps) != (other.norm, other.eps):
        raise InputError(
            f"the margins of {subject.path} are for {one.norm} eps = {one.text}, those of {first.path} for "
            f"{other.norm} eps = {other.text}"
        )
    for name in ("targets", "steps", "nearest"):
        if table.info.get(name) != base.info.get(name):
            raise InputError(
                f"the margins of {subject.path} were searched with {name} = {table.info.get(name)}, those of "
                f"{first.path} with {base.info.get(name)}"
            )


def _threat(table: Margins) -> Threat:
    return Threat.parse(str(table.info.get("eps")), str(table.info.get("norm")))
