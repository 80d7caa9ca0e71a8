"""What the attack does to single images: each untouched, the change, and attacked (as Tian et al. 2021, Fig. 6).

Of the weakest class, or another, the images that are classified correctly are ordered by their **margin** under attack:
the logit of the label minus the largest other, below 0 where the attack succeeds. Shown are those with the smallest and
those with the largest. The change is drawn around grey, made larger by a factor that is said, and cut off at black and
white.
"""

# N examples, K classes

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator

from classwise.analysis.bootstrap import ask
from classwise.analysis.model_outputs import BATCH, attack_of
from classwise.analysis.result import Answer
from classwise.analysis.run import Subject
from classwise.config.spec import Number, split_list
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.data.batches import ordered
from classwise.evaluation.examples import AttackedImage
from classwise.reporting.examples import Example, amplification
from classwise.reporting.figures import Figure, gallery
from classwise.reporting.tables import Table

Indices = Annotated[tuple[int, ...], BeforeValidator(split_list)]


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
                    [str(one.index), one.name, str(one.before), str(one.after), f"{one.margin:.3f}"]
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
            gallery(
                [one.card(self.attack, self.amplify) for one in some],
                title=title,
                alt=f"{title}, untouched and under {self.attack}.",
            )
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
        amplify = amplification(subject.report.threat.norm, subject.report.threat.eps)
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
    found = sorted(_try(subject, rows, attack, progress), key=lambda one: one.margin)
    if of is not None and len(found) > number:
        found = [*found[: (number + 1) // 2], *found[len(found) - number // 2 :]]
    threat = subject.report.threat
    return Examples(
        model=subject.name,
        dataset=subject.report.dataset.name,
        attack=attack,
        threat=f"{threat.norm} {threat.eps_text}",
        amplify=amplify,
        of=of,
        attacked=len(rows),
        examples=[Example(**one.facts(classes, amplify)) for one in found],
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


def _try(subject: Subject, rows: NDArray[np.int64], attack: str, progress: Progress) -> list[AttackedImage]:
    model, norm = subject.model, subject.report.threat.norm
    search = attack_of(subject, attack)
    tried: list[AttackedImage] = []
    progress.start(f"{attack} on {subject.name}", len(rows))
    for x, y, places in ordered(subject.images, rows, BATCH, device_of(model)):
        x_adv = search(model, x, y, generator=ExampleNoise(0, places))
        tried += AttackedImage.each(places, y, x, x_adv, ask(model, x), ask(model, x_adv), norm)
        progress.advance(len(x))
    progress.finish()
    return tried


def _told(one: Example) -> str:
    end = "withstands" if one.after.label == one.label else "does not withstand"
    return (
        f"Image {one.index} ({one.name}) {end}: {one.before} untouched, {one.after} attacked, margin {one.margin:.2f}."
    )
