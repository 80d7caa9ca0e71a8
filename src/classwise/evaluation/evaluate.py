"""From a model and images to verdicts and a report.

A break counts only after a check: the final verdict on each example is a plain forward pass of the untouched model
on an input verified to lie in the ball and in [0, 1]. An attack may fail to break an example, but never invents a
break. Examples the model gets wrong untouched are broken already (the clean image is in the ball) and are not
attacked; their prediction stands in every column.

Randomness comes from one stream per example, so verdicts do not depend on the batch size or on where an
interrupted evaluation was taken up.
"""

# B batch, K classes, N examples

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from classwise.data import ImageSet, balanced_subset, ordered
from classwise.errors import InputError
from classwise.evaluation.sanity import blind_spots, inspect
from classwise.files import digest, digest_json
from classwise.forward import blamed_on_the_model, count_outputs, device_of, dtype_of, exact, frozen, logits_of
from classwise.metrics.counts import Ints
from classwise.models.weights import digest_model
from classwise.noise import ExampleNoise
from classwise.progress import Progress
from classwise.reporting import ClassReport
from classwise.reporting.report import AttackInfo, DatasetInfo, ThreatInfo
from classwise.rundir import RunDirectory, Section, hardware, versions
from classwise.threat import Threat
from classwise.types import Attack
from classwise.verdicts import NATURAL, PENDING, Verdicts

PROBE = 100
"""Examples looked at to tell models of the same weights apart, and for gradients that lead nowhere."""
SAVE_SECONDS = 5.0
"""How much work an evaluation may lose when it is killed."""


def run_evaluation(
    model: nn.Module,
    images: ImageSet,
    *,
    attacks: Mapping[str, tuple[str, Attack]],
    threat: Threat,
    model_info: dict[str, Any],
    trained_on: str | None,
    per_class: int | None,
    batch_size: int | None,
    seed: int,
    directory: RunDirectory | None,
    beside: Section | None,
    resume: bool,
    progress: Progress,
) -> ClassReport:
    """Evaluate under every attack.

    ``attacks`` maps the key in the report to the attack's spec and the attack; ``trained_on`` is the digest of the
    images the model was trained on, where that is known; ``beside`` allows a directory that holds the model's own
    training.
    """
    if batch_size is None:
        batch_size = fitting_batch(images, device_of(model))
    elif batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    num_classes = count_classes(model, images)
    classes = list(images.classes or (str(label) for label in range(num_classes)))
    index = choose_examples(images, per_class, num_classes)
    verdicts = Verdicts.pending(index, np.asarray(images.labels[index]), list(attacks))
    asked = {
        "data": f"{images.name}/{images.split}",
        "attacks": {key: repr(attack) for key, (_, attack) in attacks.items()},
        "threat": f"{threat.norm} {threat.text}",
        "per_class": per_class,
        "seed": seed,
    }
    # The model counts by its weights and by what it says, not by the path or the name it came under.
    answers = predict(model, next(ordered(images, index[:PROBE], PROBE, device_of(model)))[0]).tolist()
    identity = [digest_model(model), answers, versions()["classwise"], versions()["torch"]]
    fingerprint = digest_json([asked, images.digest(), identity])
    if directory is not None:
        details = {"asked": {**asked, "model": model_info}}
        claimed = directory.claim("evaluation", fingerprint, details, resume=resume, beside=beside)
        if claimed and directory.verdicts.exists():
            saved, mark = Verdicts.load(directory.verdicts)
            verdicts = saved if mark == fingerprint else verdicts

    work = _Work(model, images, verdicts, threat, batch_size, seed, directory, fingerprint, progress)
    try:
        work.natural()
        for key, (_, attack) in attacks.items():
            work.attack(key, attack)
    finally:
        work.save()
    attacked = int(verdicts.survived(NATURAL).sum())
    ran = {
        key: AttackInfo(spec=spec, settings=repr(attack), attacked=attacked, **work.effort[key])
        for key, (spec, attack) in attacks.items()
    }
    report = ClassReport.from_verdicts(
        verdicts,
        dataset=DatasetInfo(
            name=images.name, split=images.split, n=len(verdicts), classes=classes, digest=images.digest()
        ),
        model={**model_info, "versions": versions(), "hardware": hardware()},
        threat=ThreatInfo(norm=threat.norm, eps=threat.eps, eps_text=threat.text),
        attacks=ran,
        sanity=inspect(
            verdicts,
            threat,
            rejected={key: info.rejected for key, info in ran.items()},
            blind=blind_spots(model, *work.sample(PROBE)) if attacks and attacked else (0, 0),
            trained_on_these=trained_on is not None and trained_on == images.digest(),
        ),
    )
    if directory is not None:
        report.to_json(directory.report)
        report.to_html(directory.page)
        directory.finish("evaluation")
    return report


def choose_examples(images: ImageSet, per_class: int | None, num_classes: int) -> Ints:
    """All examples, or the first so many of each class."""
    if per_class is None:
        return np.arange(len(images))
    if per_class < 1:
        raise InputError(f"per_class must be at least 1, got {per_class}")
    return balanced_subset(images.labels, per_class, num_classes)


def fitting_batch(images: ImageSet, device: torch.device) -> int:
    """A batch that keeps the device busy without filling its memory: about 100 CIFAR images on a CPU, 2000 on a GPU."""
    pixels = int(np.prod(images.images.shape[1:]))
    budget = 300_000 if device.type == "cpu" else 6_000_000
    return max(1, min(2000, budget // pixels))


def count_classes(model: nn.Module, images: ImageSet) -> int:
    """How many classes there are, after making sure that the model and the data speak of the same ones."""
    first = np.arange(min(2, len(images)))
    outputs = count_outputs(model, next(ordered(images, first, len(first), device_of(model)))[0])
    if images.classes is not None and outputs != len(images.classes):
        raise InputError(f"the model has {outputs} outputs, but {images.name} has {len(images.classes)} classes")
    if (largest := int(images.labels.max())) >= outputs:
        raise InputError(f"label {largest} is out of range: the model has {outputs} outputs")
    return outputs


def predict(model: nn.Module, x: Tensor) -> Ints:
    """The labels a model gives to images, in plain float32 and evaluation mode."""
    with blamed_on_the_model("on clean or attacked images"), torch.no_grad(), frozen(model), exact(x.device):
        logits = logits_of(model(x.to(dtype_of(model))))
    if not bool(logits.isfinite().all()):
        raise InputError("the model answers with NaN or infinite logits: there is no prediction to judge")
    return np.asarray(logits.argmax(1).cpu())


class _Work:
    """What is left to decide. Verdicts are filled in place and saved as they come."""

    def __init__(
        self,
        model: nn.Module,
        images: ImageSet,
        verdicts: Verdicts,
        threat: Threat,
        batch_size: int,
        seed: int,
        directory: RunDirectory | None,
        fingerprint: str,
        progress: Progress,
    ) -> None:
        self.model, self.images, self.verdicts, self.threat = model, images, verdicts, threat
        self.batch_size, self.seed, self.progress = batch_size, seed, progress
        self.directory, self.fingerprint = directory, fingerprint
        self.device = device_of(model)
        self.saved = time.monotonic()
        earlier = {} if directory is None else directory.read()["evaluation"].get("effort", {})
        self.effort: dict[str, dict[str, Any]] = {
            key: {"rejected": 0, "seconds": 0.0} | earlier.get(key, {}) for key in verdicts.attacks
        }

    def natural(self) -> None:
        """Predictions on the untouched images."""
        rows = np.flatnonzero(self.verdicts.natural == PENDING)
        self.progress.start(NATURAL, len(self.verdicts), len(self.verdicts) - len(rows))
        for batch in self._batches(rows):
            x, _, _ = self._images(batch)
            self.verdicts.natural[batch] = predict(self.model, x)
            self._done(len(batch))
        self.progress.finish()

    def attack(self, key: str, attack: Attack) -> None:
        """Predictions under one attack, of the examples that are classified correctly when untouched."""
        natural, column, effort = self.verdicts.natural, self.verdicts.attacks[key], self.effort[key]
        broken = natural != self.verdicts.label
        column[broken] = natural[broken]
        rows = np.flatnonzero(column == PENDING)
        self.progress.start(key, len(self.verdicts), len(self.verdicts) - len(rows))
        stream = int(digest(str(self.seed), repr(attack))[:15], 16)
        for batch in self._batches(rows):
            began = time.perf_counter()
            x, y, index = self._images(batch)
            with blamed_on_the_model(f"under {key}"):
                x_adv = attack(self.model, x, y, generator=ExampleNoise(stream, index))
            inside = self.threat.ball(x).contains(x_adv)
            column[batch] = predict(self.model, torch.where(inside[:, None, None, None], x_adv, x))
            effort["rejected"] += int((~inside).sum())
            effort["seconds"] = round(effort["seconds"] + time.perf_counter() - began, 3)
            self._done(len(batch))
        self.progress.finish()

    def sample(self, size: int) -> tuple[Tensor, Tensor]:
        """Some of the examples that the attacks had to work on."""
        rows = np.flatnonzero(self.verdicts.survived(NATURAL))
        x, y, _ = self._images(rows[np.linspace(0, len(rows) - 1, min(size, len(rows)), dtype=int)])
        return x, y

    def save(self) -> None:
        """Put what is decided on disk."""
        if self.directory is not None:
            self.directory.note("evaluation", effort=self.effort)
            self.verdicts.save(self.directory.verdicts, self.fingerprint)
            self.saved = time.monotonic()

    def _batches(self, rows: Ints) -> list[Ints]:
        return [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]

    def _images(self, rows: Ints) -> tuple[Tensor, Tensor, Tensor]:
        return next(ordered(self.images, self.verdicts.index[rows], len(rows), self.device))

    def _done(self, amount: int) -> None:
        self.progress.advance(amount)
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save()
