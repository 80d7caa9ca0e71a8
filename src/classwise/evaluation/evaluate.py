"""From a model and images to verdicts and a report.

A break counts only after a check: the final verdict on each example is a plain forward pass of the untouched model
on an input verified to lie in the ball and in [0, 1]. An attack may fail to break an example, but never invents a
break. Examples the model gets wrong untouched are broken already (the clean image is in the ball) and are not
attacked; their prediction stands in every column. In the same way each stage of an attack that has stages works on
what the stages before left, over the whole data set, and an attack with variants runs each of them and keeps the
strongest for the model as a whole.

Randomness comes from one stream per example, so verdicts do not depend on the batch size or on where an
interrupted evaluation was taken up.
"""

# B batch, K classes, N examples

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from classwise.accelerate import FoldedCopy, release_memory, search_model
from classwise.attacks import ATTACKS
from classwise.core.choices import EngineName
from classwise.core.errors import InputError
from classwise.core.model_calls import count_outputs, device_of, has_gradients
from classwise.core.progress import Progress
from classwise.core.threat import Threat
from classwise.core.types import Corruption, MeasuredAttack
from classwise.data import ImageSet, balanced_subset, ordered
from classwise.data.cards import known_superclasses
from classwise.evaluation.rounds import Rounds
from classwise.evaluation.sanity import inspect
from classwise.evaluation.work import Parts, Work, predict
from classwise.metrics.comparison import Bools
from classwise.metrics.counts import Ints
from classwise.models.weights import digest_model
from classwise.reporting import ClassReport
from classwise.reporting.corruptions import CorruptionInfo
from classwise.reporting.report import DatasetInfo, ThreatInfo
from classwise.reporting.sanity import Sanity
from classwise.storage.files import digest_json, write_json
from classwise.storage.run_directory import RunDirectory, Section, hardware, versions
from classwise.storage.verdicts import WORST_CASE, Verdicts

PROBE, PROBE_BATCH = 100, 10
"""Examples looked at to tell models of the same weights apart, so many at a time: no memory is too small for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a model: everything that decides the verdicts."""

    attacks: Mapping[str, tuple[str, MeasuredAttack]]
    """By their key in the report, with their specs."""
    corruptions: Mapping[str, Corruption]
    threat: Threat
    per_class: int | None
    """The first so many examples of each class; None: all."""
    batch_size: int | None
    """None: what fits."""
    seed: int
    engine: EngineName
    until_worst_ci: float | None
    """Attack no more examples of each class than it takes to know the worst class so well."""

    def record(self, images: ImageSet) -> dict[str, Any]:
        """In words, for the record of a run. The batch size is not in it: it decides nothing."""
        return {
            "data": f"{images.name}/{images.split}",
            "attacks": {key: repr(attack) for key, (_, attack) in self.attacks.items()},
            "corruptions": [repr(corruption) for corruption in self.corruptions.values()],
            "threat": f"{self.threat.norm} {self.threat.text}",
            "per_class": self.per_class,
            "seed": self.seed,
            "engine": self.engine,
            "until_worst_ci": self.until_worst_ci,
        }


def run_evaluation(
    model: nn.Module,
    images: ImageSet,
    question: Question,
    *,
    model_info: dict[str, Any],
    trained_on: str | None,
    directory: RunDirectory | None,
    beside: Section | None,
    resume: bool,
    command: str | None = None,
    progress: Progress,
) -> ClassReport:
    """Evaluate under every attack and every corruption.

    ``trained_on`` is the digest of the images the model was trained on, where that is known; ``beside`` allows a
    directory that holds the model's own training.
    """
    evaluation = _Evaluation(model, images, question)
    try:
        if directory is not None:
            named = {name: value for name, value in model_info.items() if name != "trained"}
            evaluation.claim(directory, named, resume=resume, beside=beside)
        evaluation.decide(directory, progress)
        report = evaluation.report(model_info, trained_on, command)
    finally:
        release_memory(evaluation.searched)
    if directory is not None:
        evaluation.keep(report, directory)
    return report


class _Evaluation:
    """One question asked of one model on one set of images."""

    def __init__(self, model: nn.Module, images: ImageSet, question: Question) -> None:
        self.model, self.images, self.question = model, images, question
        if question.batch_size is not None and question.batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {question.batch_size}")
        self.batch_size = question.batch_size or fitting_batch(images, device_of(model))
        if question.until_worst_ci is not None and not question.attacks:
            raise InputError("until_worst_ci needs an attack: without one there is no worst class to look for")
        self.num_classes = count_classes(model, images)
        self.classes = list(images.classes or (str(label) for label in range(self.num_classes)))
        self.parts = {key: Parts.of(key, attack, self.num_classes) for key, (_, attack) in question.attacks.items()}
        _check_gradients(model, self.parts)
        index = choose_examples(images, question.per_class, self.num_classes)
        self.verdicts = Verdicts.pending(
            index,
            np.asarray(images.labels[index]),
            attacks=_distinct([column for key in question.attacks for column in (key, *self.parts[key].variants)]),
            stages=[column for part in self.parts.values() for column in part.stages],
            corrupted=question.corruptions,
        )
        # The model counts by its weights and by what it says, not by the path or the name it came under.
        few = min(PROBE_BATCH, self.batch_size)
        first = [x for x, _, _ in ordered(images, index[:PROBE], few, device_of(model))]
        answers = np.concatenate([predict(model, x) for x in first]).tolist()
        identity = [digest_model(model), answers, versions()["classwise"], versions()["torch"]]
        self.fingerprint = digest_json([question.record(images), images.digest(), identity])
        self.searched = search_model(model, torch.cat(first)[: max(self.batch_size, PROBE_BATCH)], question.engine)

    def claim(
        self, directory: RunDirectory, model_info: dict[str, Any], *, resume: bool, beside: Section | None
    ) -> None:
        """Take a directory, and up what an earlier try left there."""
        details = {"asked": {**self.question.record(self.images), "model": model_info}}
        claimed = directory.claim("evaluation", self.fingerprint, details, resume=resume, beside=beside)
        if claimed and directory.verdicts.exists():
            saved, mark = Verdicts.load(directory.verdicts)
            self.verdicts = saved if mark == self.fingerprint else self.verdicts

    def decide(self, directory: RunDirectory | None, progress: Progress) -> None:
        """Come to a verdict on every example, or on as many as are asked for."""
        question, verdicts = self.question, self.verdicts
        work = self.work = Work(
            self.model,
            self.searched,
            self.images,
            verdicts,
            question.threat,
            self.batch_size,
            question.seed,
            directory,
            self.fingerprint,
            progress,
        )

        def decide(open_: Bools) -> Bools:
            work.open = open_
            work.natural()
            for key, (_, attack) in question.attacks.items():
                work.attack(key, attack, self.parts[key])
            return verdicts.survived()

        self.rounds: Rounds | None = None
        try:
            if question.until_worst_ci is None:
                decide(work.open)
            else:
                self.rounds = Rounds(verdicts.label, self.num_classes, question.until_worst_ci, question.seed)
                self.rounds.run(decide)
            for key, corruption in question.corruptions.items():
                work.corrupt(key, corruption)
        finally:
            work.save()

    def report(self, model_info: dict[str, Any], trained_on: str | None, command: str | None) -> ClassReport:
        """What the verdicts say."""
        question, images, rounds, work = self.question, self.images, self.rounds, self.work
        overall = None
        if rounds is not None:
            overall = {key: rounds.overall(self.verdicts, key) for key in (*self.verdicts.keys, WORST_CASE)}
            self.verdicts = self.verdicts.take(rounds.open)
        ran = {
            key: work.account(key, spec, attack, self.parts[key], self.classes)
            for key, (spec, attack) in question.attacks.items()
        }
        how = self.searched.how if isinstance(self.searched, FoldedCopy) else "as it is"
        report = ClassReport.from_verdicts(
            self.verdicts,
            dataset=DatasetInfo(
                name=images.name,
                split=images.split,
                n=len(self.verdicts),
                classes=self.classes,
                digest=images.digest(),
                superclasses=known_superclasses(images.name, self.num_classes),
            ),
            model={**model_info, "searched": how, "versions": versions(), "hardware": hardware()},
            threat=ThreatInfo(norm=question.threat.norm, eps=question.threat.eps, eps_text=question.threat.text),
            attacks=ran,
            corruptions=[
                CorruptionInfo(key=key, kind=corruption.kind, family=corruption.family, severity=corruption.severity)
                for key, corruption in question.corruptions.items()
            ],
            sanity=self.sanity({key: info.rejected for key, info in ran.items()}, trained_on),
            allocation=None if rounds is None else rounds.info(),
            overall=overall,
            command=command,
        )
        if question.attacks and report.worst is not None:
            with suppress(InputError, torch.OutOfMemoryError):  # verdicts are reached; a page can do without images
                report.keep_examples(work.gallery(report.worst.label, self.parts, self.classes))
        return report

    def sanity(self, rejected: dict[str, int], trained_on: str | None) -> Sanity:
        """How far the verdicts can be trusted."""
        probes = self.work.probes if self.question.attacks else None
        return inspect(
            self.verdicts,
            self.question.threat,
            rejected=rejected,
            classes=self.classes,
            searched={unit: one.black_box for part in self.parts.values() for unit, one in part.units.items()},
            probes=None if isinstance(probes, InputError) else probes,
            trouble=str(probes) if isinstance(probes, InputError) else None,
            fitted=self.work.fitted,
            trained_on_these=trained_on is not None and trained_on == self.images.digest(),
        )

    def keep(self, report: ClassReport, directory: RunDirectory) -> None:
        """Write everything down."""
        self.verdicts.save(directory.verdicts, self.fingerprint)
        report.to_json(directory.report)
        if report.examples is not None:
            write_json(directory.examples, report.examples.model_dump(mode="json", by_alias=True))
        report.to_html(directory.page)
        directory.finish("evaluation")


def _check_gradients(model: nn.Module, parts: Mapping[str, Parts]) -> None:
    """Refuse attacks that ask for gradients where there are none."""
    units = [unit for part in parts.values() for unit, attack in part.units.items() if not attack.black_box]
    if units and not has_gradients(model):
        black_boxes = ", ".join(name for name, attack in ATTACKS.items() if attack.black_box)
        raise InputError(f"the model has no gradients, which {units[0]} needs: use {black_boxes}")


def _distinct(keys: list[str]) -> list[str]:
    for key in keys:
        if keys.count(key) > 1:
            raise InputError(f"the attack {key!r} is given twice")
    return keys


def choose_examples(images: ImageSet, per_class: int | None, num_classes: int) -> Ints:
    """All examples, or the first so many of each class."""
    if per_class is None:
        return np.arange(len(images))
    if per_class < 1:
        raise InputError(f"per_class must be at least 1, got {per_class}")
    return balanced_subset(images.labels, per_class, num_classes)


def fitting_batch(images: ImageSet, device: torch.device) -> int:
    """A batch that keeps the device busy without filling its memory: about 100 CIFAR images on a CPU, 1500 on a GPU."""
    pixels = int(np.prod(images.images.shape[1:]))
    budget = 300_000 if device.type == "cpu" else 4_600_000
    return max(1, min(2000, budget // pixels))


def count_classes(model: nn.Module, images: ImageSet, size: int | None = None) -> int:
    """How many classes there are, after making sure that the model and the data speak of the same ones.

    With ``size`` the model is shown the middle of images, so many pixels high and wide.
    """
    first = np.arange(min(2, len(images)))
    outputs = count_outputs(model, next(ordered(images, first, len(first), device_of(model), size=size))[0])
    if outputs < 2:
        raise InputError("the model has one output: expected a logit for each class, of two classes or more")
    if images.classes is not None and outputs != len(images.classes):
        raise InputError(f"the model has {outputs} outputs, but {images.name} has {len(images.classes)} classes")
    if (largest := int(images.labels.max())) >= outputs:
        raise InputError(f"label {largest} is out of range: the model has {outputs} outputs")
    return outputs
