"""What a model makes of some images, untouched and attacked: logits, and the features before its last layer.

Verdicts keep predictions, not adversarial images; they are made anew here, from the same radius and random streams.
"""

# N examples, K classes, D features

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from classwise.accelerate import give_back, searcher
from classwise.analysis.subject import Subject
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, frozen, logits_of
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.core.types import MeasuredAttack
from classwise.data.batches import ordered
from classwise.data.splits import balanced_subset
from classwise.evaluation.suite import read_suite
from classwise.models.heads import head_of

Floats = NDArray[np.float32]
BATCH = 256
Change = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Images, labels and places to images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Images and what the model says of them."""

    index: NDArray[np.int64]
    """(N,) where they stand in the data set."""
    label: NDArray[np.int64]
    x: Tensor
    """(N, C, H, W) on the CPU."""
    logits: Floats
    """(N, K)"""
    features: Floats | None
    """(N, D) what the last linear layer is given; None where the model has none."""

    @property
    def predicted(self) -> NDArray[np.int64]:
        """(N,)"""
        return np.asarray(self.logits.argmax(1))

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """(N, K) softmax."""
        return np.asarray(torch.from_numpy(self.logits).double().softmax(1).numpy())


def linear_head(subject: Subject) -> tuple[str, nn.Linear]:
    """The last layer of a model, for analyses that cannot do without one."""
    x, _, _ = next(ordered(subject.images, [0], 1))
    found = head_of(subject.model, x)
    if found is None:
        raise InputError(f"the model of {subject.path} has no last linear layer with an output for every class")
    return found


def look(subject: Subject, *, per_class: int | None = None, progress: Progress = SILENT) -> Look:
    """The model on untouched images of the report: all of them, or the first so many of each class."""
    index = chosen(subject, per_class)
    return _look(subject, index, f"{subject.name} on untouched images", lambda x, *_: x, progress)


def look_attacked(
    subject: Subject, *, attack: str = "pgd", per_class: int | None = None, progress: Progress = SILENT
) -> Look:
    """The same images after an attack within the report's radius. Those that are wrong untouched are attacked too."""
    index = chosen(subject, per_class)
    found = attack_of(subject, attack)
    some, _, _ = next(ordered(subject.images, index[:BATCH], BATCH, _device(subject)))
    searched = searcher(subject.model, some) if found.uses_optimized_copy else subject.model

    def attacked(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        return found(searched, x, y, generator=ExampleNoise(0, rows))

    try:
        return _look(subject, index, f"{attack} on {subject.name}", attacked, progress)
    finally:
        give_back(searched)


def chosen(subject: Subject, per_class: int | None) -> NDArray[np.int64]:
    """Which examples of the data set are looked at: those of the report, or the first so many of each class."""
    index = subject.verdicts.index
    if per_class is None:
        return index
    if per_class < 1:
        raise InputError(f"per_class = {per_class}: expected at least 1")
    return np.asarray(index[balanced_subset(subject.verdicts.label, per_class, subject.num_classes)])


def attack_of(subject: Subject, attack: str) -> MeasuredAttack:
    """An attack within the radius that the report is about."""
    threat = subject.report.threat
    suite = read_suite([attack], threat.eps_text, threat.norm)
    if not suite.attacks:
        raise InputError(f"{attack!r} is no attack that searches a ball")
    ((_, found),) = suite.attacks.values()
    return found


def _device(subject: Subject) -> torch.device:
    return device_of(subject.model)


def _asked(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    with torch.no_grad(), frozen(model), _features(model, x) as features:
        logits = logits_of(model(x))
    return logits.float().cpu(), features[-1].flatten(1).float().cpu() if features else None


@contextmanager
def _features(model: nn.Module, x: Tensor) -> Iterator[list[Tensor]]:
    """Collects what the last linear layer is given."""
    seen: list[Tensor] = []
    found = head_of(model, x)
    hook = None if found is None else found[1].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        yield seen
    finally:
        if hook is not None:
            hook.remove()


def _look(subject: Subject, index: NDArray[np.int64], task: str, changed: Change, progress: Progress) -> Look:
    """What the model says of images after a change."""
    parts = []
    progress.start(task, len(index))
    for x, y, rows in ordered(subject.images, index, BATCH, _device(subject)):
        x_new = changed(x, y, rows)
        parts.append((x_new.cpu(), *_asked(subject.model, x_new)))
        progress.advance(len(x))
    progress.finish()
    features = [one for _, _, one in parts if one is not None]
    return Look(
        index=index,
        label=subject.images.labels[index].astype(np.int64),
        x=torch.cat([x for x, _, _ in parts]),
        logits=torch.cat([logits for _, logits, _ in parts]).numpy(),
        features=torch.cat(features).numpy() if features else None,
    )
