"""How sure the model is of its answers, class by class, untouched and attacked (Tian et al. 2021, Section 5, Fig. 3).

* **CVC**, the class-wise variance of confidence (Def. 5.1): the mean over the images of a class of the variance of
  their K probabilities. It is 0 for even output and (K - 1) / K² where the model is certain. The paper finds it small
  in the weak classes; Spearman's coefficient with the robustness of the class on the same images says whether it is.
* **Calibration**: examples are put into 15 bins of equal width by the probability of the predicted class. The expected
  calibration error is the mean distance between confidence and accuracy of the bins, weighted by their examples.
  Of few examples it is too large, as chance alone parts the two; so beside it stands the **overconfidence**, mean
  confidence minus accuracy, which has no such bias. Classes are true classes.
* **Trajectory** (Fig. 3 b-d): the probabilities of one image on the way of PGD, and of Temperature-PGD: one walk for
  each temperature, from one random start, in steps of 2.5 · eps / the most steps, looked at in between.

Intervals of means are percentiles of a seeded bootstrap over the images; shares have Wilson's.
"""

# N examples, K classes

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from classwise.analysis.bootstrap import ask, redrawn_means
from classwise.analysis.correlation import Correlation, spearman
from classwise.analysis.model_outputs import Look, attack_of, look, look_attacked
from classwise.analysis.result import Answer
from classwise.analysis.run import Subject
from classwise.analysis.several import in_view
from classwise.analysis.wording import decimal, left_out, told
from classwise.config.spec import Numbers, split_list
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.data.batches import ordered
from classwise.metrics.calibration import BINS, bin_of, expected_calibration_error
from classwise.reporting.estimates import ClassEstimate, Estimate, estimate
from classwise.reporting.figures import COLOURS, DASHES, SOFT, Figure, Series, bars, lines, points
from classwise.reporting.part import Part
from classwise.reporting.tables import Table
from classwise.storage.verdicts import NATURAL

Floats = NDArray[np.float64]
Steps = Annotated[tuple[int, ...], BeforeValidator(split_list)]
RIVALS = 2
"""Wrong classes whose probability is drawn beside the label's."""


class Mean(Part):
    """A mean with its interval; null where there are no examples, without an interval where there is one."""

    value: float | None
    low: float | None
    high: float | None
    n: int


class Calibration(Part):
    """How well confidence foretells accuracy, in percent."""

    ece: float | None
    """The expected calibration error."""
    accuracy: Estimate
    confidence: float | None
    """Mean probability of the predicted class."""
    overconfidence: Mean
    """Confidence minus accuracy, in percentage points."""


class Bin(Part):
    """Examples of like confidence."""

    above: float
    up_to: float
    """In percent; the first also holds what lies at its lower edge."""
    confidence: float | None
    accuracy: Estimate


class ClassConfidence(Part):
    """One class."""

    label: int
    name: str = Field(alias="class")
    cvc: Mean
    calibration: Calibration


class Confidences(Part):
    """What the model says of one kind of images."""

    images: str
    """``natural``, or the attack."""
    overall: Calibration
    bins: list[Bin]
    by_class: list[ClassConfidence]
    cvc_with_robustness: Correlation


class Moment(Part):
    """The image after some steps."""

    inv_t: float
    """1/T; at 1 it is plain PGD."""
    steps: int
    probabilities: list[float]
    """(K,)"""


class Trajectory(Part):
    """One image on the way of an attack."""

    index: int
    label: int
    natural: list[float]
    """(K,) probabilities untouched."""
    step_size: float
    moments: list[Moment]
    rivals: list[int]
    """The wrong classes that come to the highest probability, the strongest first."""


class Confidence(Answer):
    """The confidence of one model."""

    kind: ClassVar[str] = "confidence"

    model: str
    dataset: str
    classes: list[str]
    attack: str
    robust: list[ClassEstimate]
    """Share of the class that is classified correctly both untouched and attacked."""
    natural: Confidences
    adversarial: Confidences
    trajectory: Trajectory

    def sentences(self) -> list[str]:
        found = []
        for one in (self.natural, self.adversarial):
            known = [part for part in one.by_class if part.cvc.value is not None]
            least = min(known, key=lambda part: part.cvc.value or 0.0)
            most = max(known, key=lambda part: part.cvc.value or 0.0)
            said = (
                f"{_title(one)}, the output is smoothest for {least.name} (CVC {_mean(least.cvc)}) and sharpest "
                f"for {most.name} ({_mean(most.cvc)})"
            )
            if one.cvc_with_robustness.value is not None:
                said += f"; CVC and robustness correlate with Spearman {told(one.cvc_with_robustness)}"
            found.append(f"{said}.")
        for one in (self.natural, self.adversarial):
            whole = one.overall
            found.append(
                f"{_title(one)}, confidence is {whole.confidence:.1f}% on average and accuracy "
                f"{whole.accuracy.value:.1f}%: a difference of {_mean(whole.overconfidence, 1)} points; the "
                f"expected calibration error is {whole.ece:.1f} in {BINS} bins."
            )
        path, label = self.trajectory, self.trajectory.label
        found += [
            f"Image {path.index} ({self.classes[label]}), 1/T = {inv_t:g}: from {100 * path.natural[label]:.1f}% to "
            f"{100 * last.probabilities[label]:.1f}% after {last.steps} steps, "
            + (
                "still recognised."
                if int(np.argmax(last.probabilities)) == label
                else f"taken for {self._taken(last)}."
            )
            for inv_t in dict.fromkeys(moment.inv_t for moment in path.moments)
            for last in [[moment for moment in path.moments if moment.inv_t == inv_t][-1]]
        ]
        return found

    def tables(self) -> list[Table]:
        view = in_view([part.value for part in self.robust])
        weakest = sorted(self.robust, key=lambda part: (part.value is None, part.value))
        rows = [
            (robust, [one.by_class[robust.label] for one in (self.natural, self.adversarial)])
            for robust in weakest
            if robust.label in view
        ]
        foot = left_out(len(view), len(self.classes))
        return [
            Table(
                title="variance of confidence",
                about="CVC [95%] beside the accuracy under attack in percent, from the weakest class.",
                columns=["class", "robust", NATURAL, self.attack],
                rows=[
                    [robust.name, decimal(robust.value, 1), *(_mean(part.cvc) for part in both)]
                    for robust, both in rows
                ],
                foot=foot,
            ),
            Table(
                title="calibration",
                about="Expected calibration error in percent, and confidence minus accuracy in percentage points "
                "[95%], from the weakest class.",
                columns=["class", f"error, {NATURAL}", self.attack, f"overconfidence, {NATURAL}", self.attack],
                rows=[
                    [
                        robust.name,
                        *(decimal(part.calibration.ece, 1) for part in both),
                        *(_mean(part.calibration.overconfidence, 1) for part in both),
                    ]
                    for robust, both in rows
                ],
                foot=foot,
            ),
        ]

    def figures(self) -> list[Figure]:
        view = in_view([part.value for part in self.robust])
        names = [self.classes[label] for label in view]
        both = (self.natural, self.adversarial)
        shown = "" if len(view) == len(self.classes) else ", the weakest classes"
        return [
            bars(
                names,
                [
                    Series(
                        name=one.images,
                        y=[part.value for part in means],
                        low=[part.low for part in means],
                        high=[part.high for part in means],
                    )
                    for one in both
                    for means in [[one.by_class[label].cvc for label in view]]
                ],
                title=f"Variance of confidence{shown}",
                alt=f"CVC of each class of {self.model}. {self.sentences()[0]}",
                y="CVC [95%]",
            ),
            points(
                [
                    Series(
                        name=one.images,
                        x=[part.cvc.value for part in one.by_class],
                        y=[part.value for part in self.robust],
                        text=self.classes,
                    )
                    for one in both
                ],
                title="Robustness by variance of confidence",
                alt=f"Robust accuracy of each class of {self.model} over its CVC.",
                x="CVC",
                y=f"accuracy in %, {self.attack}",
            ),
            lines(
                [
                    *(
                        Series(
                            name=one.images,
                            x=[part.confidence for part in filled],
                            y=[part.accuracy.value for part in filled],
                            low=[part.accuracy.low for part in filled],
                            high=[part.accuracy.high for part in filled],
                        )
                        for one in both
                        for filled in [[part for part in one.bins if part.accuracy.n]]
                    ),
                    Series(name="as sure as right", x=[0, 100], y=[0, 100], colour=SOFT, dash="dot"),
                ],
                title="Reliability",
                alt=" ".join(self.sentences()[2:4]),
                x=f"confidence in %, mean of each of {BINS} bins",
                y="accuracy in % [95%]",
                zero=True,
            ),
            bars(
                names,
                [Series(name=one.images, y=[one.by_class[label].calibration.ece for label in view]) for one in both],
                title=f"Calibration error{shown}",
                alt=f"Expected calibration error of each class of {self.model}, {NATURAL} and under {self.attack}.",
                y="expected calibration error in %",
            ),
            self._path(),
        ]

    def rows(self) -> list[dict[str, Any]]:
        def row(images: str, what: str, value: float | None, **more: Any) -> dict[str, Any]:
            empty = dict.fromkeys(("low", "high", "n", "label", "class", "confidence", "inv_t", "steps"))
            return {"images": images, "what": what, "value": value, **empty, **more}

        found = []
        for one in (self.natural, self.adversarial):
            for part in one.by_class:
                who = {"label": part.label, "class": part.name, "n": part.cvc.n}
                over = part.calibration.overconfidence
                found += [
                    row(one.images, "cvc", part.cvc.value, low=part.cvc.low, high=part.cvc.high, **who),
                    row(one.images, "ece", part.calibration.ece, **who),
                    row(one.images, "overconfidence", over.value, low=over.low, high=over.high, **who),
                ]
            found += [
                row(
                    one.images,
                    "accuracy of a bin",
                    part.accuracy.value,
                    low=part.accuracy.low,
                    high=part.accuracy.high,
                    n=part.accuracy.n,
                    confidence=part.confidence,
                )
                for part in one.bins
            ]
        return found + [
            row(f"image {self.trajectory.index}", "probability", value, label=label, **{"class": name}, **moment)
            for moment, values in self._moments()
            for label, (name, value) in enumerate(zip(self.classes, values, strict=True))
        ]

    def _moments(self) -> list[tuple[dict[str, Any], list[float]]]:
        path = self.trajectory
        walked = [({"inv_t": one.inv_t, "steps": one.steps}, one.probabilities) for one in path.moments]
        return [({"inv_t": None, "steps": 0}, path.natural), *walked]

    def _path(self) -> Figure:
        path = self.trajectory
        series = []
        for place, label in enumerate([path.label, *path.rivals]):
            for number, inv_t in enumerate(dict.fromkeys(moment.inv_t for moment in path.moments)):
                walked = [moment for moment in path.moments if moment.inv_t == inv_t]
                series.append(
                    Series(
                        name=f"{self.classes[label]}{' (label)' if place == 0 else ''}, 1/T = {inv_t:g}",
                        x=[0, *(moment.steps for moment in walked)],
                        y=[100 * values[label] for values in (path.natural, *(one.probabilities for one in walked))],
                        colour=COLOURS[place],
                        dash=DASHES[number % len(DASHES)],
                    )
                )
        return lines(
            series,
            title=f"Image {path.index} on the way of the attack",
            alt=" ".join(self.sentences()[4:]),
            x="steps; 0 is the untouched image",
            y="probability in %",
            zero=True,
        )

    def _taken(self, moment: Moment) -> str:
        return self.classes[int(np.argmax(moment.probabilities))]


def confidence(
    run: Subject | str | Path,
    *,
    attack: str = "pgd",
    per_class: int | None = None,
    index: int | None = None,
    steps: Steps = (1, 10, 20),
    inv_t: Numbers = (1, 5),
    seed: int = 0,
    progress: Progress = SILENT,
) -> Confidence:
    """How sure a model is. ``attack`` is run anew, on all images evaluated or on the first ``per_class`` of each class.

    ``index``: the image whose trajectory is shown, by its place in the data set; else the first that is classified
    correctly, of the least robust class that has one. ``steps``: where on the way it is looked at.
    """
    subject = Subject.open(run)
    classes = subject.classes
    if len(classes) < 2:
        raise InputError(f"{subject.path} has one class: a model cannot but be sure of it")
    if not steps or min(steps) < 1:
        raise InputError(f"steps = {list(steps)}: expected numbers of steps, at least 1 each")
    natural = look(subject, per_class=per_class, progress=progress)
    attacked = look_attacked(subject, attack=attack, per_class=per_class, progress=progress)
    right = natural.predicted == natural.label
    survived = right & (attacked.predicted == attacked.label)
    robust = [
        ClassEstimate(label=label, name=name, **estimate(int(survived[own].sum()), int(own.sum())))
        for label, name in enumerate(classes)
        for own in [natural.label == label]
    ]
    place = _place(subject, natural, right, robust) if index is None else index
    return Confidence(
        model=subject.name,
        dataset=subject.report.dataset.name,
        classes=classes,
        attack=attack,
        robust=robust,
        natural=_confidences(NATURAL, natural, classes, robust, seed),
        adversarial=_confidences(attack, attacked, classes, robust, seed),
        trajectory=trajectory(subject, place, sorted(set(steps)), inv_t),
    )


def cvc(probabilities: Floats) -> Floats:
    """(N,) the variance of each image's (N, K) probabilities; its mean over a class is the CVC of the class.

    >>> cvc(np.array([[1.0, 0.0], [0.5, 0.5]])).tolist()
    [0.25, 0.0]
    """
    return np.asarray(np.square(probabilities - probabilities.mean(1, keepdims=True)).mean(1))


def trajectory(subject: Subject, index: int, steps: list[int], inv_t: tuple[float, ...]) -> Trajectory:
    """One image of the data set after each of some numbers of steps, for each temperature, all from one start."""
    if not 0 <= index < len(subject.images):
        raise InputError(
            f"index = {index}: {subject.report.dataset.name} has the images 0 to {len(subject.images) - 1}"
        )
    model = subject.model
    x, y, rows = next(ordered(subject.images, [index], 1, device_of(model)))
    label = int(y)

    def probabilities(image: torch.Tensor) -> list[float]:
        return [float(value) for value in ask(model, image).double().softmax(1)[0]]

    step_size = 2.5 * subject.report.threat.eps / max(steps)
    natural = probabilities(x)
    moments = []
    for one in inv_t:
        for number in steps:
            walk = attack_of(subject, f"temperature-pgd:inv_t={one},steps={number},step_size={step_size}")
            found = walk(model, x, y, generator=ExampleNoise(0, rows))
            moments.append(Moment(inv_t=one, steps=number, probabilities=probabilities(found)))
    highest = np.max([natural, *(moment.probabilities for moment in moments)], axis=0)
    highest[label] = -1
    return Trajectory(
        index=index,
        label=label,
        natural=natural,
        step_size=step_size,
        moments=moments,
        rivals=np.argsort(-highest, kind="stable")[: min(RIVALS, len(highest) - 1)].tolist(),
    )


def _place(subject: Subject, seen: Look, right: NDArray[np.bool_], robust: list[ClassEstimate]) -> int:
    """The first image that is classified correctly, of the weakest class that has one."""
    if not right.any():
        raise InputError(f"{subject.path} classifies no image correctly: name one by its index")
    held = set(seen.label[right].tolist())
    weakest = min((part for part in robust if part.label in held), key=lambda part: part.value or 0.0)
    return int(seen.index[right & (seen.label == weakest.label)][0])


def _confidences(images: str, seen: Look, classes: list[str], robust: list[ClassEstimate], seed: int) -> Confidences:
    probabilities = seen.probabilities
    top, right = probabilities.max(1), seen.predicted == seen.label
    spread, place = cvc(probabilities), bin_of(top)
    random = np.random.default_rng(seed)
    by_class = []
    for label, name in enumerate(classes):
        own = seen.label == label
        by_class.append(
            ClassConfidence(
                label=label,
                name=name,
                cvc=_redrawn(spread[own], random, digits=10),
                calibration=_calibration(top[own], right[own], random),
            )
        )
    return Confidences(
        images=images,
        overall=_calibration(top, right, random),
        bins=[
            Bin(
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


def _calibration(top: Floats, right: NDArray[np.bool_], random: np.random.Generator) -> Calibration:
    return Calibration(
        ece=round(100 * expected_calibration_error(top, right), 4) if len(top) else None,
        accuracy=Estimate(**estimate(int(right.sum()), len(right))),
        confidence=round(100 * float(top.mean()), 4) if len(top) else None,
        overconfidence=_redrawn(100 * (top - right), random, digits=4),
    )


def _redrawn(values: Floats, random: np.random.Generator, digits: int) -> Mean:
    if not len(values):
        return Mean(value=None, low=None, high=None, n=0)
    value = round(float(values.mean()), digits)
    if len(values) == 1:
        return Mean(value=value, low=None, high=None, n=1)
    low, high = np.quantile(redrawn_means(values, random), [0.025, 0.975])
    return Mean(value=value, low=round(float(low), digits), high=round(float(high), digits), n=len(values))


def _title(one: Confidences) -> str:
    return "Untouched" if one.images == NATURAL else f"Under {one.images}"


def _mean(part: Mean, digits: int | None = None) -> str:
    """With so many digits, or to three that count."""
    value, low, high = (
        "–" if one is None else f"{one:.3g}" if digits is None else decimal(one, digits)
        for one in (part.value, part.low, part.high)
    )
    return value if part.low is None else f"{value} [{low}, {high}]"
