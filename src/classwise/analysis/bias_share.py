"""How much of the differences between classes class biases explain, and of what a training method gains.

Adding a bias to the logit of each class exchanges accuracy between classes and leaves the features as they are. The
margin matrix gives the robust accuracy of every class under any biases, so three quantities need no further attack:

* how much of the gap (MCD) and of the class variance (CV) biases remove, at a stated loss of the average;
* which part of a method's gain in the worst class the baseline reaches by biases alone, at the method's average;
* which part of the squared difference between the class accuracies of method and baseline biases reproduce:

    1 - sum_c (A_c^method - A_c^shifted)^2 / sum_c (A_c^method - A_c^baseline)^2.

All accuracies are those of held-out images, see ``analysis.bias_fit``. A gain is compared at the method's average, or
at the baseline's where that is lower; a method's higher average is reported beside the share and is not part of it.

Averages are means over classes. CV and MCD of few images a class are too large by their sampling noise. Margins over
classes that were not attacked are upper bounds, see ``storage.margins``.
"""

# N images, K classes, P classes with images, R redraws

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from classwise.analysis.bias_fit import Fitted, Images, Judged, Measured, matching, measured, ratio, removed, rounded
from classwise.analysis.result import Answer
from classwise.analysis.run import Subject
from classwise.analysis.several import MOST_RUNS, in_view, names_apart, opened
from classwise.analysis.wording import decimal, left_out
from classwise.core.errors import InputError
from classwise.core.threat import Threat
from classwise.metrics import worst_class
from classwise.repairs.accuracy import tenth_of
from classwise.repairs.frontier import WEIGHTS, Objective, Weak
from classwise.reporting.estimates import ClassEstimate, estimate, share
from classwise.reporting.figures import COLOURS, INK, Figure, Series, bars, points
from classwise.reporting.part import Part
from classwise.reporting.tables import Table
from classwise.storage.margins import Margins
from classwise.storage.verdicts import NATURAL

LOSSES = (0.5, 1.0, 2.0)
"""Points of the average that biases may cost."""
SHOWN_LOSS = 1.0
"""The one of them that sentences and figures show."""
LEAST = 4
"""Images of a class, two in each half."""


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

    @property
    def shown(self) -> Shift:
        """The shift that sentences and figures show."""
        return next(shift for shift in self.shifts if shift.loss == SHOWN_LOSS)


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
        return [*map(_of_model, self.models), *(text for one in self.methods for text in self._of_method(one))]

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
                {base.model: base.profile, f"{base.model} with biases": one.shifted, one.model: self._own(one)},
                f"Bars of the robust accuracy of each class: {base.model}, {base.model} with biases at the average of "
                f"{one.model}, and {one.model}. {self._of_method(one)[0]}",
            )
            for one in self.methods
        ] or [
            self._bars(
                f"{base.model} by class, without and with biases",
                {base.model: base.profile, f"with biases, {base.shown.name}": base.shown.profile},
                f"Bars of the robust accuracy of each class. {_of_model(base)}",
            )
        ]
        return [*found, *(self._frontiers(field, name) for field, name in self._lifted)]

    def rows(self) -> list[dict[str, Any]]:
        found: list[tuple[str, str, Profile]] = []
        for model in self.models:
            found.append((model.model, "as it is", model.profile))
            found += [(model.model, shift.name, shift.profile) for shift in model.shifts]
        base, biases = self.models[0].model, {}
        for one in self.methods:
            biases[matched := f"matched to {one.model}"] = one.biases
            found += [
                (base, f"at the average of {one.model}", one.shifted),
                (base, matched, one.matched),
                (one.model, f"at the average of {base} with biases", one.repaired),
            ]
        return [
            {
                "model": name,
                "biases": kind,
                "label": part.label,
                "class": part.name,
                "robust": part.value,
                "n": part.n,
                "bias": biases[kind][part.label] if kind in biases else None,
            }
            for name, kind, profile in found
            for part in profile.by_class
        ]

    @property
    def _lifted(self) -> list[tuple[str, str]]:
        """Field and name of what biases lift: the worst class, and the weakest tenth where that is more."""
        present = sum(part.value is not None for part in self.models[0].profile.by_class)
        return [("worst", "worst class"), *([("tenth", "weakest tenth")] if tenth_of(present) > 1 else [])]

    def _own(self, method: Method) -> Profile:
        return next(one.profile for one in self.models if one.model == method.model)

    def _of_method(self, one: Method) -> list[str]:
        base, own, after = self.models[0].model, self._own(one), one.shifted
        higher = (
            f"The average of {one.model}, {own.average:.1f}%, is higher than that of {base} with biases, "
            f"{after.average:.1f}%; the share does not include this difference."
        )
        return [
            *(self._gain(one, getattr(one, field), name) for field, name in self._lifted),
            *([higher] if own.average > after.average else []),
            f"The class accuracies of {one.model} and {base} differ by {one.distance:.1f} points (root mean square). "
            f"Biases that match {base} to {one.model} leave {one.distance_matched:.1f}, where sampling alone "
            f"contributes {one.noise:.1f}: they explain {share(one.explained, '%')} of the squared difference."
            if one.explained.value is not None
            else f"The class accuracies of {one.model} and {base} do not differ.",
            f"With biases of its own {one.model} has a worst class of {one.repaired.worst.value:.1f}% at an average of "
            f"{one.repaired.average:.1f}%; {base} with biases has {after.worst.value:.1f}% at {after.average:.1f}%.",
        ]

    def _gain(self, one: Method, part: Explained, what: str) -> str:
        base = self.models[0].model
        if part.gain.value is None or part.gain.value <= 0:
            return f"{one.model} does not raise the {what} over {base}: {share(part.gain, ' points')}."
        weak = "" if part.share.low is not None else " The gain is not significant, so the share is uncertain."
        return (
            f"{one.model} raises the {what} by {share(part.gain, ' points')} over {base}. Biases alone change that of "
            f"{base} by {share(part.reached, ' points')} at an average of {one.shifted.average:.1f}%: "
            f"{share(part.share, '%')} of the gain.{weak}"
        )

    def _shift_table(self, one: ModelShare) -> Table:
        columns = {"average": "average", "worst_corrected": "corrected", **dict(self._lifted[1:])}
        columns |= {"mcd": "MCD", "cv": "CV", "natural": NATURAL}

        def row(name: str, profile: Profile, *removed: str) -> list[str]:
            numbers = [decimal(getattr(profile, field), 1) for field in columns]
            return [name, f"{share(profile.worst)} ({profile.worst.name})", *numbers, *removed]

        return Table(
            title=f"{one.model} with class biases",
            about=f"Accuracies under {self.threat} in percent, MCD in points, CV in percent², on {self.n} held-out "
            "images [95%]. The loss limits the average on the images of the fit.",
            columns=["biases", "worst class", *columns.values(), "MCD removed, %", "CV removed, %"],
            rows=[
                row("none", one.profile, "–", "–"),
                *(row(each.name, each.profile, share(each.mcd_removed), share(each.cv_removed)) for each in one.shifts),
            ],
        )

    def _gain_table(self) -> Table:
        base = self.models[0].model
        rows = [
            {
                "method": one.model,
                "quantity": name,
                "gain": share(part.gain),
                f"by biases of {base}": share(part.reached),
                "share of the gain, %": share(part.share),
                "corrected, %": decimal(one.share_corrected if field == "worst" else None, 1),
                "profile, %": share(one.explained),
                f"average of {base} with biases": decimal(one.shifted.average, 1),
            }
            for one in self.methods
            for field, name in self._lifted
            for part in [getattr(one, field)]
        ]
        return Table(
            title=f"Gains over {base}",
            about=f"In points, with 95% intervals: the gain of each method, what biases of {base} reach at no lower an "
            "average, and the share of the gain that this is. Corrected: the share from selection-corrected worst "
            "classes. Profile: the share of the squared difference of the class accuracies.",
            columns=list(rows[0]),
            rows=[list(row.values()) for row in rows],
        )

    def _class_table(self, one: Method) -> Table:
        base, profile = self.models[0].model, self.models[0].profile
        view = in_view([part.value for part in profile.by_class])
        parts = [some.by_class for some in (profile, one.shifted, one.matched, self._own(one), one.repaired)]
        names = [base, f"{base}, shifted", f"{base}, matched", one.model, f"{one.model}, shifted"]
        return Table(
            title=f"Classes of {base} and {one.model}",
            about=f"Robust accuracy in percent. Shifted: with biases for the worst class, at the average of "
            f"{one.model}; {one.model} with its own at the same average. Matched: with the biases that bring {base} "
            f"closest to {one.model}, which the last column holds.",
            columns=["class", *names, "bias"],
            rows=[
                [self.classes[i], *(decimal(part[i].value, 1) for part in parts), decimal(one.biases[i], 3)]
                for i in view
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
                    y=[profile.by_class[label].value for label in view],
                    low=[profile.by_class[label].low for label in view],
                    high=[profile.by_class[label].high for label in view],
                )
                for name, profile in profiles.items()
            ],
            title=f"{title}{some}",
            alt=alt,
            y="robust accuracy, %",
        )

    def _frontiers(self, field: str, what: str) -> Figure:
        def series(name: str, found: list[FrontierPoint], **look: Any) -> Series:
            x, y = [point.average for point in found], [getattr(point, field) for point in found]
            return Series(name=name, x=x, y=y, **look)

        names, start = [one.model for one in self.models], [one.frontier[0] for one in self.models]
        frontiers = [series(one.model, one.frontier, colour=COLOURS[i]) for i, one in enumerate(self.models)]
        about = " ".join(_of_model(one) for one in self.models)
        return points(
            [*frontiers, series("without biases", start, text=names, colour=INK, symbol="diamond")],
            title=f"Average against {what}",
            alt=f"Frontiers of the average against the {what} by class biases, on held-out images. {about}",
            x="average robust accuracy, %",
            y=f"{what}, %",
            joined=names,
        )


def _of_model(one: ModelShare) -> str:
    """What the shown shift changes."""
    shift, before, after = one.shown, one.profile, one.shown.profile
    found = (
        f"{one.model}: class biases change the worst class from {before.worst.value:.1f}% ({before.worst.name}) to "
        f"{after.worst.value:.1f}% ({after.worst.name}) and the average from {before.average:.1f}% to "
        f"{after.average:.1f}%."
    )
    if shift.mcd_removed.value is None:
        return found
    return (
        f"{found} They remove {share(shift.mcd_removed, '%')} of the gap between classes (MCD) and "
        f"{share(shift.cv_removed, '%')} of the class variance (CV)."
    )


def bias_share(*runs: Subject | str | Path, weak: Weak = "worst", seed: int = 0) -> BiasShare:
    """Judge class biases on runs that were evaluated with their margins; the first is the baseline.

    ``weak``: what the frontiers lift, the worst class or the mean of the weakest tenth. ``seed``: of the halves and the
    redraws.
    """
    subjects = opened(runs, 1, MOST_RUNS)
    classes, tables = subjects[0].classes, _tables(subjects)
    threat, names = _threat(tables[0]), names_apart(subjects)
    images = Images(tables[0].label, classes, seed)
    fitted = [Fitted(table, images, Objective(weak=weak)) for table in tables]
    return BiasShare(
        dataset=subjects[0].report.dataset.name,
        threat=f"{threat.norm} eps = {threat.text}",
        weak=weak,
        n=len(images.label),
        classes=classes,
        models=[_share_of(name, one) for name, one in zip(names, fitted, strict=True)],
        methods=[_against(name, one, fitted[0]) for name, one in zip(names[1:], fitted[1:], strict=True)],
    )


def _share_of(name: str, fitted: Fitted) -> ModelShare:
    """One model, with biases at every loss."""
    path = [fitted.at(place) for place in range(len(WEIGHTS) + 1)]
    before = path[0].quantities

    def shift(loss: float | None) -> Shift:
        found = fitted.within(loss)
        mcd, cv = (removed(before[name], found.quantities[name]) for name in ("mcd", "cv"))
        return Shift(loss=loss, profile=_profile(found), mcd_removed=mcd, cv_removed=cv)

    def point(weight: float, found: Judged) -> FrontierPoint:
        numbers: dict[str, Any] = {key: rounded(found.quantities[key][0]) for key in ("average", "worst", "tenth")}
        return FrontierPoint(weight=weight, **numbers)

    return ModelShare(
        model=name,
        profile=_profile(path[0]),
        shifts=[shift(loss) for loss in (*LOSSES, None)],
        frontier=[point(weight, one) for weight, one in zip((0.0, *WEIGHTS), path, strict=True)],
    )


def _against(name: str, method: Fitted, base: Fitted) -> Method:
    """One model against the baseline."""
    own, before = method.at(0), base.at(0)
    limit = min(own.average, before.average)
    shifted, matched = base.keeping(limit), base.matched(method)
    repaired = method.keeping(min(own.average, shifted.average))
    whole, left = own.squared(before), own.squared(matched)
    end, start, reached = (_profile(one).worst_corrected for one in (own, before, shifted))
    biases = zip(matching(base.whole, method.whole), base.images.counts, strict=True)

    def explained(quantity: str) -> Explained:
        end, start, middle = (one.quantities[quantity] for one in (own, before, shifted))
        gain, reached = end - start, middle - start
        return Explained(gain=measured(gain), reached=measured(reached), share=ratio(reached, gain))

    return Method(
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


def _profile(judged: Judged) -> Profile:
    images, quantities = judged.images, judged.quantities
    numbers: dict[str, Any] = {key: rounded(quantities[key][0]) for key in ("average", "tenth", "mcd", "cv")}
    correct = np.bincount(images.label[judged.robust], minlength=len(images.classes)).astype(np.int64)
    by_class = [
        ClassEstimate(label=label, name=name, **estimate(int(correct[label]), int(images.counts[label])))
        for label, name in enumerate(images.classes)
    ]
    lowest = worst_class(correct, images.counts)
    assert lowest is not None
    return Profile(
        worst=by_class[lowest.label],
        worst_corrected=rounded(100 * lowest.corrected),
        natural=rounded(images.values(judged.natural)[0].mean()),
        by_class=by_class,
        **numbers,
    )


def _tables(subjects: list[Subject]) -> list[Margins]:
    """The margin matrix of every run, all of the same images in the same order."""
    found: list[Margins] = []
    first = subjects[0]
    for subject in subjects:
        table, name = subject.margins, f"the margins of {subject.path}"
        if table.num_classes != subject.num_classes:
            raise InputError(f"{name} are over {table.num_classes} classes, its report has {subject.num_classes}")
        if not table.complete:
            done = len(table) - int(table.missing.sum())
            raise InputError(f"{name} cover {done} of {len(table)} images: resume the evaluation")
        if subject.classes != first.classes:
            raise InputError(f"{subject.path} has other classes than {first.path}")
        found.append(table.take(np.argsort(table.index, kind="stable")))
        _check_same(name, found[-1], first, found[0])
    counts = np.bincount(found[0].label, minlength=found[0].num_classes)
    present = np.flatnonzero(counts)
    if len(present) < 2:
        raise InputError(f"{first.path} has images of {len(present)} class: biases need at least 2 classes")
    short = int(present[counts[present].argmin()])
    if counts[short] < LEAST:
        name = f"class {first.classes[short]} of {first.path}"
        raise InputError(f"{name} has {counts[short]} images: at least {LEAST} of each class are needed")
    return found


def _check_same(name: str, table: Margins, first: Subject, base: Margins) -> None:
    """Require the images, the threat and the search of the first run."""
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
