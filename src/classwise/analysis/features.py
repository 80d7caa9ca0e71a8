"""Which classes live on robust features and which on others (Benz et al. 2020, after Ilyas et al. 2019).

From the training images two data sets are made. In the **robust** one every image is the nearest that gradient descent
finds, from another image, to the original's features in a robust model: only what that model looks at is right about
it. In the **non-robust** one every image is attacked towards another class within the radius and labelled as that
class: only what an attack can change is right about it. A model is trained in the usual way on each, and judged class
by class on the real test images.

Deviations
* Ilyas et al. keep images as numbers; here they are stored as PNG files in class folders, rounded to 256 levels, so
  that they are a data set like any other.
* Their non-robust images are made in the L2 ball; here in the one that the standard model was evaluated in.
"""

# N examples, K classes

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from classwise.analysis.image_folders import kept
from classwise.analysis.model_outputs import BATCH, attack_of, linear_head
from classwise.analysis.result import Answer
from classwise.analysis.retraining import evaluated, one_attack, recipe_of, trained
from classwise.analysis.run import Subject
from classwise.analysis.wording import decimal
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, frozen
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.core.threat import unit
from classwise.data import ImageSet, load_data
from classwise.data.batches import ordered
from classwise.data.splits import balanced_subset
from classwise.reporting import ClassReport
from classwise.reporting.figures import Figure, Series, bars
from classwise.reporting.part import Part
from classwise.reporting.report import Result
from classwise.reporting.tables import Table
from classwise.storage.verdicts import NATURAL

ORIGINAL, ROBUST, NON_ROBUST = "original", "robust", "non-robust"


class TrainedOn(Part):
    """A model trained in the usual way on one of the data sets."""

    name: str
    natural: Result
    adversarial: Result


class Features(Answer):
    """Three models of one kind, trained on different features of the same images."""

    kind: ClassVar[str] = "features"

    robust_model: str
    standard_model: str
    attack: str
    classes: list[str]
    models: list[TrainedOn]

    def sentences(self) -> list[str]:
        found = []
        for one in self.models:
            natural, worst = one.natural, one.natural.worst
            if worst is not None and natural.mcd is not None:
                found.append(
                    f"Trained on {one.name} images: {natural.overall.value:.1f}% right, the worst class "
                    f"{worst.name} at {worst.value:.1f}%, a spread of {natural.mcd:.1f} points; "
                    f"{one.adversarial.overall.value:.1f}% withstand {self.attack}."
                )
        return found

    def tables(self) -> list[Table]:
        return [
            Table(
                title="accuracy on real test images",
                about="Percent, class by class; the model was trained on the images its column names.",
                columns=["class", *(one.name for one in self.models)],
                rows=[
                    [name, *(decimal(one.natural.by_class[label].value, 1) for one in self.models)]
                    for label, name in enumerate(self.classes)
                ],
                foot="CV: " + ", ".join(f"{one.name} {decimal(one.natural.cv, 1)}" for one in self.models),
            )
        ]

    def figures(self) -> list[Figure]:
        return [
            bars(
                self.classes,
                [
                    Series(
                        name=f"{one.name} images",
                        y=[part.value for part in one.natural.by_class],
                        low=[part.low for part in one.natural.by_class],
                        high=[part.high for part in one.natural.by_class],
                    )
                    for one in self.models
                ],
                title="Accuracy on real test images, by what was trained on",
                alt=" ".join(self.sentences()),
                y="accuracy, %",
            )
        ]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"trained_on": one.name, "attack": key, "label": part.label, "class": part.name, "accuracy": part.value}
            for one in self.models
            for key, result in ((NATURAL, one.natural), (self.attack, one.adversarial))
            for part in result.by_class
        ]


def features(
    robust: Subject | str | Path,
    standard: Subject | str | Path,
    *,
    attack: str | None = None,
    steps: int = 100,
    step_size: float = 0.1,
    per_class: int | None = None,
    seed: int = 0,
    work: Path | None = None,
    progress: Progress = SILENT,
) -> Features:
    """Make both data sets, train the standard run's recipe on each, and judge it by class.

    ``steps`` and ``step_size`` (in the L2 norm) are those of the descent on features. ``per_class`` limits the training
    images. Everything goes into ``work``, else ROBUST/features, and is kept for the next time.
    """
    looked_at, plain = Subject.open(robust), Subject.open(standard)
    recipe, key = recipe_of(plain), one_attack(plain, attack)
    if looked_at.classes != plain.classes:
        raise InputError(f"{looked_at.path} and {plain.path} are about different classes")
    linear_head(looked_at)  # without one there are no features
    folder = looked_at.path / "features" if work is None else work
    images = load_data(recipe.data.name, split="train")
    if per_class is not None:
        images = _first(images, per_class)
    asked = {"steps": steps, "step_size": step_size, "per_class": per_class, "seed": seed, "attack": key}
    asked |= {"digest": images.digest(), "robust": str(looked_at.path.resolve())}
    made = {
        ROBUST: robust_images(looked_at, images, steps, step_size, seed),
        NON_ROBUST: non_robust_images(plain, images, plain.report.attacks[key].spec, seed),
    }
    places = {
        folder / name: {
            "data": kept(folder / f"{name}-images", asked, {"train": parts}, total=len(images), progress=progress)
        }
        for name, parts in made.items()
    }
    trained(plain, places, progress=progress)
    reports = {ORIGINAL: plain.report} | {
        name: evaluated(plain, folder / name, attack=key, progress=progress).report for name in made
    }
    return Features(
        robust_model=looked_at.name,
        standard_model=plain.name,
        attack=key,
        classes=plain.classes,
        models=[_trained_on(name, report, key) for name, report in reports.items()],
    )


def robust_images(
    subject: Subject, images: ImageSet, steps: int, step_size: float, seed: int
) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
    """Each image's features, put on another image by normalised gradient descent; with the image's own label."""
    model = subject.model
    _, head = linear_head(subject)
    others = np.random.default_rng(seed).permutation(len(images))
    for x, y, rows in ordered(images, None, BATCH, device_of(model)):
        starts, _, _ = next(ordered(images, others[rows.cpu().numpy()], len(x), device_of(model)))
        yield descend(model, head, x, starts, steps, step_size).cpu(), y.cpu().numpy()


def descend(model: nn.Module, head: nn.Module, x: Tensor, start: Tensor, steps: int, step_size: float) -> Tensor:
    """From ``start`` towards images whose features are those of ``x``: steps of one length, within [0, 1]."""
    seen: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten(1)))
    try:
        with frozen(model):
            with torch.no_grad():
                model(x)
            goal, found = seen.pop(), start
            for _ in range(steps):
                moving = found.detach().requires_grad_()
                model(moving)
                (gradient,) = torch.autograd.grad((seen.pop() - goal).square().sum(), moving)
                found = (found - step_size * unit(gradient)).clamp(0, 1)
    finally:
        hook.remove()
    return found.detach()


def non_robust_images(
    subject: Subject, images: ImageSet, attack: str, seed: int
) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
    """Each image attacked towards another class, drawn at random, and labelled as that class."""
    found, k = attack_of(subject, attack), subject.num_classes
    random = np.random.default_rng(seed)
    for x, y, rows in ordered(images, None, BATCH, device_of(subject.model)):
        labels = y.cpu().numpy().astype(np.int64)
        targets = (labels + random.integers(1, k, len(labels))) % k
        aims = torch.from_numpy(targets).to(y.device)
        yield found(subject.model, x, y, targets=aims, generator=ExampleNoise(seed, rows)).cpu(), targets


def _first(images: ImageSet, per_class: int) -> ImageSet:
    rows = balanced_subset(images.labels, per_class, int(images.labels.max()) + 1)
    return replace(images, images=images.images[rows], labels=images.labels[rows])


def _trained_on(name: str, report: ClassReport, attack: str) -> TrainedOn:
    return TrainedOn(name=name, natural=report[NATURAL], adversarial=report[attack])
