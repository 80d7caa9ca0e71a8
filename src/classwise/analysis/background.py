"""What the background does to a class (Tian et al. 2021, Sec. 6.2: Fig. 5, Fig. 6 and Table 4).

**Colours**, for grey images on a dark ground: every class gets one of two background colours, in two assignments, and
the run's recipe is trained anew on each. If the background decides who is taken for whom, wrong predictions stay among
the classes of one colour. Beside that share stands the one of the same classes under the *other* assignment, which
knows nothing of these colours, and what chance would give.

**White**, for any images: in the images of one class everything behind the thing becomes white, and the model, trained
as it was, is asked again. How many are predicted as what, untouched and attacked, before and after, is Table 4. Further
runs (the paper's has a lower beta for the confound class) are asked of the same white images. Masks come from a file,
else they are estimated; how much of the image they take, and how much of the model's gradient falls into them, is told.

Deviations
* The paper's masks are made by hand.
* Its two sets of colours are not given in numbers. Here the colours are blue and yellow; the first assignment gives one
  to the even classes and the other to the odd ones, the second to the lower and the upper half.
"""

# N examples, K classes, C channels, H height, W width

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from classwise.analysis.confusion import Matrix, matrix_of
from classwise.analysis.foreground import foregrounds
from classwise.analysis.image_folders import kept
from classwise.analysis.model_outputs import BATCH, attack_of
from classwise.analysis.result import Answer
from classwise.analysis.retraining import evaluated_on, one_attack, recipe_of, trained
from classwise.analysis.run import Subject
from classwise.analysis.superclasses import membership
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, frozen, logits_of
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.data import ImageSet, load_data
from classwise.data.batches import ordered, to_float
from classwise.data.derived import on_colors
from classwise.metrics import confusion_matrix
from classwise.reporting.estimates import Estimate, estimate, share
from classwise.reporting.figures import Card, Figure, Picture, Series, bars, gallery, heatmap, off_diagonal, png
from classwise.reporting.part import Part
from classwise.reporting.tables import Table
from classwise.storage.verdicts import NATURAL

COLOURS: dict[str, tuple[float, float, float]] = {"blue": (0.0, 0.2, 0.7), "yellow": (0.7, 0.6, 0.0)}
SHOWN = 6
"""Images at either end of the gallery."""


class Line(Part):
    """One line of Table 4: what the images of the class are predicted as."""

    name: str
    attacked: bool
    counts: list[int]
    correct: Estimate


class Shown(Part):
    """An image of the gallery."""

    index: int
    confidence: float
    """In its label, under attack."""
    before: str
    after: str
    """PNG files in base64: as it is, and on white."""


class White(Part):
    """The class on white."""

    label: int
    name: str
    lines: list[Line]
    covered: float
    """How much of an image the masks take, in percent."""
    gradient: float
    """How much of the model's gradient falls into them, in percent."""
    estimated: bool
    """Whether the masks are the estimate."""
    most_robust: list[Shown]
    least_robust: list[Shown]


class Assignment(Part):
    """One way of giving colours to classes."""

    name: str
    colours: dict[str, list[int]]
    natural: Matrix
    adversarial: Matrix
    """Superclasses are the colours."""
    under_the_other: Estimate
    """The share of wrong predictions within these colours in the model of the other assignment."""


class Background(Answer):
    """Colours, or white."""

    kind: ClassVar[str] = "background"

    model: str
    attack: str
    classes: list[str]
    white: White | None
    assignments: list[Assignment]

    def sentences(self) -> list[str]:
        found = []
        for one in self.assignments:
            within, other = one.adversarial.within_superclass, one.under_the_other
            if within is not None and within.value is not None and other.value is not None:
                found.append(
                    f"{one.name}: {share(within, '%')} of the wrong predictions "
                    f"under attack stay within one colour; without these colours {other.value:.1f}%, by chance "
                    f"{one.adversarial.within_by_chance:.1f}%."
                )
        if self.white is not None:
            natural, white, attacked, both = (share(line.correct, "%") for line in self.white.lines[:4])
            found += [
                f"On white, {both} of the images of class {self.white.name} withstand {self.attack}, against "
                f"{attacked} as they are; untouched {white} against {natural} are right.",
                f"The masks {'are estimated and ' if self.white.estimated else ''}take {self.white.covered:.0f}% of an "
                f"image and hold {self.white.gradient:.0f}% of the model's gradient.",
            ]
        return found

    def tables(self) -> list[Table]:
        if self.white is None:
            return []
        return [
            Table(
                title=f"predictions for images of class {self.white.name}",
                about="How many are predicted as what.",
                columns=["images", *self.classes],
                rows=[
                    [f"{line.name} ({'attacked' if line.attacked else 'natural'})", *map(str, line.counts)]
                    for line in self.white.lines
                ],
            )
        ]

    def figures(self) -> list[Figure]:
        drawn = []
        for one in self.assignments:
            order = [label for labels in one.colours.values() for label in labels]
            counts = np.array(one.adversarial.counts)[np.ix_(order, order)]
            drawn.append(
                heatmap(
                    off_diagonal(counts),
                    title=f"Wrong predictions under attack, {one.name}",
                    alt=f"Misclassified matrix with the classes ordered by background colour ({one.name})",
                    names=[f"{self.classes[label]} ({_colour_of(one, label)})" for label in order],
                    x="taken for",
                    y="true class",
                    unit="examples",
                    groups=np.cumsum([len(labels) for labels in one.colours.values()])[:-1].tolist(),
                )
            )
        if self.white is not None:
            attacked = [line for line in self.white.lines if line.attacked]
            series = [Series(name=line.name, y=[float(count) for count in line.counts]) for line in attacked]
            ends = (("most robust", self.white.most_robust), ("least robust", self.white.least_robust))
            cards = [
                Card(
                    heading=f"{which}, image {one.index}",
                    pictures=[
                        Picture(png=one.before, alt=f"Image {one.index}", caption="as it is"),
                        Picture(png=one.after, alt=f"Image {one.index} on white", caption="on white"),
                    ],
                    lines=[f"confidence in {self.white.name} under attack {100 * one.confidence:.1f}%"],
                )
                for which, some in ends
                for one in some
            ]
            drawn += [
                bars(
                    self.classes,
                    series,
                    title=f"Predictions for class {self.white.name} under attack",
                    alt=" ".join(self.sentences()),
                    x="predicted class",
                    y="images",
                ),
                gallery(cards, title="Most and least robust images", alt=f"Images of class {self.white.name}"),
            ]
        return drawn

    def rows(self) -> list[dict[str, Any]]:
        if self.white is not None:
            return [
                {"images": line.name, "attacked": line.attacked, "predicted": label, "count": count}
                for line in self.white.lines
                for label, count in enumerate(line.counts)
            ]
        return [
            {"assignment": one.name, "attack": key, "label": i, "predicted": j, "count": count}
            for one in self.assignments
            for key, matrix in ((NATURAL, one.natural), (self.attack, one.adversarial))
            for i, row in enumerate(matrix.counts)
            for j, count in enumerate(row)
        ]


def background(
    *runs: Subject | str | Path,
    experiment: Literal["auto", "colours", "white"] = "auto",
    label: str | int | None = None,
    masks: Path | None = None,
    attack: str | None = None,
    work: Path | None = None,
    progress: Progress = SILENT,
) -> Background:
    """Turn the background of images and see what becomes of a model.

    ``auto`` is ``colours`` for images of one channel and ``white`` for others. ``label`` is the class on white, the
    worst one unless told; ``masks`` a NumPy file of (images of that class, H, W), true where the thing is. Trained
    models and coloured images go into ``work``, else RUN/background.
    """
    if not runs:
        raise InputError("background needs a run")
    subjects = [Subject.open(run) for run in runs]
    first = subjects[0]
    if experiment == "auto":
        experiment = "colours" if first.images.images.shape[1] == 1 else "white"
    if experiment == "colours":
        return _colours(first, attack, first.path / "background" if work is None else work, progress)
    key = one_attack(first, attack)
    return Background(
        model=first.name,
        attack=key,
        classes=first.classes,
        white=_white(subjects, first.label_of(label, key), masks, key, progress),
        assignments=[],
    )


def assignments(num_classes: int) -> dict[str, dict[str, list[int]]]:
    """Two ways of giving two colours to classes.

    >>> assignments(4)["halves"]
    {'blue': [0, 1], 'yellow': [2, 3]}
    """
    labels, half = range(num_classes), (num_classes + 1) // 2
    ways = {"even and odd": [label % 2 for label in labels], "halves": [int(label >= half) for label in labels]}
    return {
        name: {colour: [label for label in labels if which[label] == place] for place, colour in enumerate(COLOURS)}
        for name, which in ways.items()
    }


def _colours(subject: Subject, attack: str | None, folder: Path, progress: Progress) -> Background:
    recipe, key = recipe_of(subject), one_attack(subject, attack)
    if subject.images.images.shape[1] != 1:
        raise InputError(f"{subject.path} is about colour images: a ground is coloured behind grey ones")
    if subject.num_classes < 4:
        raise InputError(f"{subject.path} has {subject.num_classes} classes: two colours need two classes each")
    ways = assignments(subject.num_classes)
    places = {name: folder / name.replace(" ", "-") for name in ways}
    specs = {}
    for name, way in ways.items():
        sets = {split: load_data(recipe.data.name, split=split) for split in ("train", "test")}
        how = {"colours": {colour: COLOURS[colour] for colour in way}, "classes": way} | {
            split: images.digest() for split, images in sets.items()
        }
        parts = {split: _on_colours(images, way) for split, images in sets.items()}
        place = places[name].with_name(f"{places[name].name}-images")
        specs[name] = kept(place, _plain(how), parts, total=sum(map(len, sets.values())), progress=progress)
    trained(subject, {places[name]: {"data": spec} for name, spec in specs.items()}, progress=progress)
    found = {
        name: evaluated_on(subject, places[name], spec, attack=key, progress=progress).verdicts
        for name, spec in specs.items()
    }
    answers = []
    for name, way in ways.items():
        (other,) = (verdicts for theirs, verdicts in found.items() if theirs != name)
        matrices = [
            matrix_of(
                confusion_matrix(found[name].label, found[name].predictions(k), subject.num_classes),
                subject.classes,
                way,
            )
            for k in (NATURAL, key)
        ]
        member = membership(way, subject.num_classes)
        wrong = other.predictions(key) != other.label
        inside = int((member[other.predictions(key)] == member[other.label])[wrong].sum())
        answers.append(
            Assignment(
                name=name,
                colours=way,
                natural=matrices[0],
                adversarial=matrices[1],
                under_the_other=Estimate(**estimate(inside, int(wrong.sum()))),
            )
        )
    return Background(model=subject.name, attack=key, classes=subject.classes, white=None, assignments=answers)


def _on_colours(images: ImageSet, way: dict[str, list[int]]) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
    of_class = torch.zeros(sum(map(len, way.values())), 3)
    for colour, labels in way.items():
        of_class[labels] = torch.tensor(COLOURS[colour])
    for x, y, _ in ordered(images, None, BATCH):
        yield on_colors(x, of_class[y]), y.numpy().astype(np.int64)


def _white(subjects: Sequence[Subject], label: int, masks: Path | None, key: str, progress: Progress) -> White:
    first = subjects[0]
    index = first.verdicts.index[first.verdicts.label == label]
    if not len(index):
        raise InputError(f"{first.path} holds no examples of class {first.classes[label]}")
    x = to_float(first.images.images[index])
    found = foregrounds(x.numpy()) if masks is None else _read_masks(masks, x)
    on_white = torch.where(torch.from_numpy(found)[:, None], x, 1.0)
    lines: list[Line] = []
    confidences = np.zeros(len(x))
    for place, subject in enumerate(subjects):
        spec = first.report.attacks[key].spec
        name = "" if place == 0 else f", {subject.name}"
        sets = {f"original{name}": x, f"white background{name}": on_white}
        asked = {what: _ask(subject, some, label, index, spec, progress) for what, some in sets.items()}
        for attacked in (False, True):
            for what, (natural, adversarial) in asked.items():
                predicted = (adversarial if attacked else natural).argmax(1)
                counts = np.bincount(predicted, minlength=first.num_classes)
                correct = Estimate(**estimate(int(counts[label]), len(x)))
                lines.append(Line(name=what, attacked=attacked, counts=counts.tolist(), correct=correct))
        if place == 0:
            confidences = asked["original"][1][:, label]
    order = np.argsort(-confidences, kind="stable")

    def shown(rows: NDArray[np.int64]) -> list[Shown]:
        return [
            Shown(
                index=int(index[row]),
                confidence=float(confidences[row]),
                before=png(x[row].numpy()),
                after=png(on_white[row].numpy()),
            )
            for row in rows
        ]

    return White(
        label=label,
        name=first.classes[label],
        lines=lines,
        covered=round(100 * float(found.mean()), 2),
        gradient=round(100 * _inside(first, x, label, found), 2),
        estimated=masks is None,
        most_robust=shown(order[:SHOWN]),
        least_robust=shown(order[::-1][:SHOWN]),
    )


def _ask(
    subject: Subject, x: Tensor, label: int, index: NDArray[np.int64], spec: str, progress: Progress
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(N, K) probabilities, untouched and attacked."""
    model, attack = subject.model, attack_of(subject, spec)
    found: list[tuple[Tensor, Tensor]] = []
    progress.start(f"{spec} on {subject.name}", len(x))
    for start in range(0, len(x), BATCH):
        some = x[start : start + BATCH].to(device_of(model))
        y = torch.full((len(some),), label, device=some.device)
        rows = torch.from_numpy(index[start : start + BATCH])
        attacked = attack(model, some, y, generator=ExampleNoise(0, rows))
        with torch.no_grad(), frozen(model):
            pair = [logits_of(model(images)).double().softmax(1).cpu() for images in (some, attacked)]
        found.append((pair[0], pair[1]))
        progress.advance(len(some))
    progress.finish()
    natural, adversarial = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
    return natural, adversarial


def _inside(subject: Subject, x: Tensor, label: int, masks: NDArray[np.bool_]) -> float:
    """The share of the gradient's absolute values that falls into the masks."""
    model = subject.model
    shares = []
    for start in range(0, len(x), BATCH):
        some = x[start : start + BATCH].to(device_of(model)).requires_grad_()
        with frozen(model):
            loss = -logits_of(model(some)).log_softmax(1)[:, label].sum()
        (gradient,) = torch.autograd.grad(loss, some)
        size = gradient.abs().sum(1).cpu().numpy()
        total = size.sum((1, 2))
        inside = (size * masks[start : start + BATCH]).sum((1, 2))
        shares.append(inside[total > 0] / total[total > 0])
    every = np.concatenate(shares)
    return float(every.mean()) if len(every) else 0.0


def _read_masks(path: Path, x: Tensor) -> NDArray[np.bool_]:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"masks {path} cannot be read: {error}") from None
    wanted = (len(x), *x.shape[2:])
    if found.shape != wanted:
        raise InputError(
            f"masks {path} have the shape {found.shape}: expected {wanted}, one for each image of the class"
        )
    return np.asarray(found, dtype=bool)


def _plain(value: Any) -> Any:
    """As JSON reads it back: tuples are lists there."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _colour_of(one: Assignment, label: int) -> str:
    return next(colour for colour, labels in one.colours.items() if label in labels)
