"""What the attack does to single images: each untouched, the change, and attacked (as Tian et al. 2021, Fig. 6).

Of the weakest class, or another, the images that are classified correctly are ordered by their **margin** under attack:
the logit of the label minus the largest other, below 0 where the attack succeeds. Shown are those with the smallest and
those with the largest. The change is drawn around grey, made larger by a factor that is said, and cut off at black and
white.
"""

# N examples, K classes

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field
from torch import Tensor

from classwise.analysis.answer import Answer
from classwise.analysis.asking import ask
from classwise.analysis.look import BATCH, attack_of
from classwise.analysis.subject import Subject
from classwise.data.batches import ordered
from classwise.errors import InputError
from classwise.forward import device_of
from classwise.noise import ExampleNoise
from classwise.progress import SILENT, Progress
from classwise.reporting.figures import Card, Figure, Picture, gallery, png
from classwise.reporting.part import Part
from classwise.reporting.tables import Table
from classwise.spec import Number, split_list

Indices = Annotated[tuple[int, ...], BeforeValidator(split_list)]


class Answered(Part):
    """What the model says of one image."""

    label: int
    """The predicted one."""
    name: str = Field(alias="class")
    confidence: float
    """Its probability, in percent."""
    of_label: float
    """The probability of the true label, in percent."""


class Example(Part):
    """One image and what became of it."""

    index: int
    """Its place in the data set."""
    label: int
    name: str = Field(alias="class")
    before: Answered
    after: Answered
    margin: float
    """Under attack: the logit of the label minus the largest other."""
    size: float
    """Of the change, in the norm of the threat."""
    natural_png: str
    change_png: str
    adversarial_png: str
    """PNG in base 64."""


class Examples(Answer):
    """Images of one model's weakest class, or of others."""

    kind: ClassVar[str] = "examples"

    model: str
    dataset: str
    attack: str
    threat: str
    amplify: float
    of: str | None
    """The class they are of; null where they were chosen one by one."""
    attacked: int
    """Images they were chosen from."""
    examples: list[Example]
    """From the least robust."""

    def sentences(self) -> list[str]:
        broken = sum(one.after.label != one.label for one in self.examples)
        chosen = (
            f"{len(self.examples)} images as asked for"
            if self.of is None
            else f"{len(self.examples)} of {self.attacked} images of {self.of}, the least and the most robust"
        )
        found = f"{chosen}; {self.attack} ({self.threat}) leaves {broken} of them misclassified."
        ends = self.examples[:1] if len(self.examples) == 1 else [self.examples[0], self.examples[-1]]
        return [found, *map(_told, ends)]

    def tables(self) -> list[Table]:
        return [
            Table(
                title="examples",
                about="Predicted classes with their probability in percent, and the margin of the label in logits "
                "under attack.",
                columns=["image", "label", "untouched", self.attack, "margin"],
                rows=[
                    [str(one.index), one.name, _said(one.before), _said(one.after), f"{one.margin:.3f}"]
                    for one in self.examples
                ],
            )
        ]

    def figures(self) -> list[Figure]:
        half = (len(self.examples) + 1) // 2
        parts = (
            {"Images as asked for, from the least robust": self.examples}
            if self.of is None
            else {
                f"Least robust images of {self.of}": self.examples[:half],
                f"Most robust images of {self.of}": self.examples[: half - 1 : -1],
            }
        )
        return [
            gallery([self._card(one) for one in some], title=title, alt=f"{title}, untouched and under {self.attack}.")
            for title, some in parts.items()
            if some
        ]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "index": one.index,
                "label": one.label,
                "class": one.name,
                "before": one.before.label,
                "confidence_before": one.before.confidence,
                "of_label_before": one.before.of_label,
                "after": one.after.label,
                "confidence_after": one.after.confidence,
                "of_label_after": one.after.of_label,
                "margin": one.margin,
                "size": one.size,
            }
            for one in self.examples
        ]

    def _card(self, one: Example) -> Card:
        image = f"image {one.index}"
        return Card(
            heading=f"{image}: {one.name}",
            pictures=[
                Picture(png=one.natural_png, alt=f"{image}, a {one.name}, untouched", caption="untouched"),
                Picture(
                    png=one.change_png,
                    alt=f"the change of {image}, {self.amplify:g} times as large",
                    caption=f"change × {self.amplify:g}",
                ),
                Picture(png=one.adversarial_png, alt=f"{image} after {self.attack}", caption="attacked"),
            ],
            lines=[f"{_said(one.before)} → {_said(one.after)}", f"margin {one.margin:.2f}"],
        )


def examples(
    run: Subject | str | Path,
    *,
    attack: str = "pgd",
    label: str | int | None = None,
    indices: Indices | None = None,
    number: int = 8,
    amplify: Number | None = None,
    progress: Progress = SILENT,
) -> Examples:
    """Images of the class that is weakest in the report, of the class ``label``, or at some ``indices``.

    ``number``: how many of a class are shown, half of them the least robust, half the most. ``amplify``: how many
    times as large the change is drawn; unless told, a pixel that moved by the whole radius (Linf) is black or white.
    """
    subject = Subject.open(run)
    if number < 1:
        raise InputError(f"number = {number}: expected at least 1")
    if amplify is None:
        threat = subject.report.threat
        amplify = round(0.5 / threat.eps, 2) if threat.norm == "Linf" and threat.eps > 0 else 10.0
    if not amplify > 0:
        raise InputError(f"amplify = {amplify:g}: expected a positive number")
    if label is not None and indices is not None:
        raise InputError("label and indices exclude each other: give one of them")
    classes = subject.classes
    if indices is None:
        meant = subject.label_of(label, subject.report.strongest)
        rows, of = _of_class(subject, meant), classes[meant]
    else:
        rows, of = _checked(subject, indices), None
    trial = _try(subject, rows, attack, progress)
    order = np.argsort(trial.margin.numpy(), kind="stable")
    if of is not None and len(order) > number:
        order = np.concatenate([order[: (number + 1) // 2], order[len(order) - number // 2 :]])
    threat = subject.report.threat
    return Examples(
        model=subject.name,
        dataset=subject.report.dataset.name,
        attack=attack,
        threat=f"{threat.norm} {threat.eps_text}",
        amplify=amplify,
        of=of,
        attacked=len(rows),
        examples=[_example(trial, int(row), classes, amplify) for row in order],
    )


def _of_class(subject: Subject, label: int) -> NDArray[np.int64]:
    """The images of a class that are classified correctly; all of them where none is."""
    verdicts = subject.verdicts
    own = verdicts.label == label
    if not own.any():
        raise InputError(f"{subject.path} was evaluated on no examples of {subject.classes[label]}")
    right = own & (verdicts.natural == label)
    return np.asarray(verdicts.index[right if right.any() else own])


def _checked(subject: Subject, indices: tuple[int, ...]) -> NDArray[np.int64]:
    wrong = [index for index in indices if not 0 <= index < len(subject.images)]
    if wrong or not indices:
        last = len(subject.images) - 1
        raise InputError(f"indices = {list(indices)}: {subject.report.dataset.name} has the images 0 to {last}")
    return np.array(list(dict.fromkeys(indices)), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Images before and after; every field is (N, ...) on the CPU."""

    index: Tensor
    label: Tensor
    x: Tensor
    x_adv: Tensor
    before: Tensor
    after: Tensor
    size: Tensor
    margin: Tensor


def _try(subject: Subject, rows: NDArray[np.int64], attack: str, progress: Progress) -> _Trial:
    model, norm = subject.model, subject.report.threat.norm
    search = attack_of(subject, attack)
    parts = []
    progress.start(f"{attack} on {subject.name}", len(rows))
    for x, y, places in ordered(subject.images, rows, BATCH, device_of(model)):
        x_adv = search(model, x, y, generator=ExampleNoise(0, places))
        parts.append([part.cpu() for part in (places, y, x, x_adv, ask(model, x), ask(model, x_adv))])
        progress.advance(len(x))
    progress.finish()
    index, label, x, x_adv, before, after = (torch.cat(part) for part in zip(*parts, strict=True))
    delta = (x_adv - x).double().flatten(1)
    own = after.gather(1, label[:, None])[:, 0]
    return _Trial(
        index=index,
        label=label,
        x=x,
        x_adv=x_adv,
        before=before,
        after=after,
        size=delta.abs().amax(1) if norm == "Linf" else delta.norm(dim=1),
        margin=own - after.scatter(1, label[:, None], -torch.inf).amax(1),
    )


def _example(trial: _Trial, row: int, classes: list[str], amplify: float) -> Example:
    label = int(trial.label[row])
    x, x_adv = trial.x[row].numpy(), trial.x_adv[row].numpy()
    return Example(
        index=int(trial.index[row]),
        label=label,
        name=classes[label],
        before=_answered(trial.before[row], label, classes),
        after=_answered(trial.after[row], label, classes),
        margin=round(float(trial.margin[row]), 6),
        size=round(float(trial.size[row]), 6),
        natural_png=png(x),
        change_png=png(0.5 + amplify * (x_adv - x)),
        adversarial_png=png(x_adv),
    )


def _answered(logits: Tensor, label: int, classes: list[str]) -> Answered:
    probabilities = logits.double().softmax(0)
    predicted = int(logits.argmax())
    return Answered(
        label=predicted,
        name=classes[predicted],
        confidence=round(100 * float(probabilities[predicted]), 4),
        of_label=round(100 * float(probabilities[label]), 4),
    )


def _said(part: Answered) -> str:
    return f"{part.name} ({part.confidence:.1f}%)"


def _told(one: Example) -> str:
    end = "withstands" if one.after.label == one.label else "does not withstand"
    return (
        f"Image {one.index} ({one.name}) {end}: {_said(one.before)} untouched, {_said(one.after)} attacked, margin "
        f"{one.margin:.2f}."
    )
