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
from typing import Any

import numpy as np
import torch
from torch import nn

from classwise.attacks import ATTACKS
from classwise.data import ImageSet, balanced_subset, ordered
from classwise.data.cards import known_superclasses
from classwise.engine import EngineName, Twin, searcher
from classwise.errors import InputError
from classwise.evaluation.rounds import Rounds
from classwise.evaluation.sanity import inspect
from classwise.evaluation.work import Parts, Work, predict
from classwise.files import digest_json, write_json
from classwise.forward import count_outputs, device_of, has_gradients
from classwise.metrics.comparison import Bools
from classwise.metrics.counts import Ints
from classwise.models.weights import digest_model
from classwise.progress import Progress
from classwise.reporting import ClassReport
from classwise.reporting.corruptions import CorruptionInfo
from classwise.reporting.report import DatasetInfo, ThreatInfo
from classwise.rundir import RunDirectory, Section, hardware, versions
from classwise.threat import Threat
from classwise.types import Corruption, MeasuredAttack
from classwise.verdicts import WORST_CASE, Verdicts

PROBE, PROBE_BATCH = 100, 10
"""Examples looked at to tell models of the same weights apart, so many at a time: no memory is too small for them."""


def run_evaluation(
    model: nn.Module,
    images: ImageSet,
    *,
    attacks: Mapping[str, tuple[str, MeasuredAttack]],
    corruptions: Mapping[str, Corruption],
    threat: Threat,
    model_info: dict[str, Any],
    trained_on: str | None,
    per_class: int | None,
    batch_size: int | None,
    seed: int,
    directory: RunDirectory | None,
    beside: Section | None,
    resume: bool,
    engine: EngineName,
    until_worst_ci: float | None,
    command: str | None = None,
    progress: Progress,
) -> ClassReport:
    """Evaluate under every attack and every corruption.

    ``attacks`` maps the key in the report to the attack's spec and the attack; ``trained_on`` is the digest of the
    images the model was trained on, where that is known; ``beside`` allows a directory that holds the model's own
    training.
    """
    if batch_size is None:
        batch_size = fitting_batch(images, device_of(model))
    elif batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    if until_worst_ci is not None and not attacks:
        raise InputError("until_worst_ci needs an attack: without one there is no worst class to look for")
    num_classes = count_classes(model, images)
    classes = list(images.classes or (str(label) for label in range(num_classes)))
    index = choose_examples(images, per_class, num_classes)
    parts = {key: Parts.of(key, attack, num_classes) for key, (_, attack) in attacks.items()}
    _check_gradients(model, parts)
    verdicts = Verdicts.pending(
        index,
        np.asarray(images.labels[index]),
        attacks=_distinct([column for key in attacks for column in (key, *parts[key].variants)]),
        stages=[column for part in parts.values() for column in part.stages],
        corrupted=corruptions,
    )
    asked = {
        "data": f"{images.name}/{images.split}",
        "attacks": {key: repr(attack) for key, (_, attack) in attacks.items()},
        "corruptions": [repr(corruption) for corruption in corruptions.values()],
        "threat": f"{threat.norm} {threat.text}",
        "per_class": per_class,
        "seed": seed,
        "engine": engine,
        "until_worst_ci": until_worst_ci,
    }
    # The model counts by its weights and by what it says, not by the path or the name it came under.
    first = [x for x, _, _ in ordered(images, index[:PROBE], min(PROBE_BATCH, batch_size), device_of(model))]
    answers = np.concatenate([predict(model, x) for x in first]).tolist()
    identity = [digest_model(model), answers, versions()["classwise"], versions()["torch"]]
    twin = searcher(model, torch.cat(first)[: max(batch_size, PROBE_BATCH)], engine)
    fingerprint = digest_json([asked, images.digest(), identity])
    if directory is not None:
        named = {name: value for name, value in model_info.items() if name != "trained"}
        details = {"asked": {**asked, "model": named}}
        claimed = directory.claim("evaluation", fingerprint, details, resume=resume, beside=beside)
        if claimed and directory.verdicts.exists():
            saved, mark = Verdicts.load(directory.verdicts)
            verdicts = saved if mark == fingerprint else verdicts

    work = Work(model, twin, images, verdicts, threat, batch_size, seed, directory, fingerprint, progress)
    rounds = None if until_worst_ci is None else Rounds(verdicts.label, num_classes, until_worst_ci, seed)

    def decide(open_: Bools) -> Bools:
        work.open = open_
        work.natural()
        for key, (_, attack) in attacks.items():
            work.attack(key, attack, parts[key])
        return verdicts.survived()

    try:
        if rounds is None:
            decide(work.open)
        else:
            rounds.run(decide)
        for key, corruption in corruptions.items():
            work.corrupt(key, corruption)
    finally:
        work.save()
    ran = {key: work.account(key, spec, attack, parts[key], classes) for key, (spec, attack) in attacks.items()}
    overall = None if rounds is None else {key: rounds.overall(verdicts, key) for key in (*verdicts.keys, WORST_CASE)}
    verdicts = verdicts if rounds is None else verdicts.take(rounds.open)
    searched = {unit: one.black_box for part in parts.values() for unit, one in part.units.items()}
    probes = work.probes if attacks else None
    surroundings = {"versions": versions(), "hardware": hardware()}
    report = ClassReport.from_verdicts(
        verdicts,
        dataset=DatasetInfo(
            name=images.name,
            split=images.split,
            n=len(verdicts),
            classes=classes,
            digest=images.digest(),
            superclasses=known_superclasses(images.name, num_classes),
        ),
        model={**model_info, "searched": twin.how if isinstance(twin, Twin) else "as it is", **surroundings},
        threat=ThreatInfo(norm=threat.norm, eps=threat.eps, eps_text=threat.text),
        attacks=ran,
        corruptions=[
            CorruptionInfo(key=key, kind=corruption.kind, family=corruption.family, severity=corruption.severity)
            for key, corruption in corruptions.items()
        ],
        sanity=inspect(
            verdicts,
            threat,
            rejected={key: info.rejected for key, info in ran.items()},
            classes=classes,
            searched=searched,
            probes=None if isinstance(probes, InputError) else probes,
            trouble=str(probes) if isinstance(probes, InputError) else None,
            fitted=work.fitted,
            trained_on_these=trained_on is not None and trained_on == images.digest(),
        ),
        allocation=None if rounds is None else rounds.info(),
        overall=overall,
        command=command,
    )
    weakest = report.worst
    if attacks and weakest is not None:
        with suppress(InputError, torch.OutOfMemoryError):  # verdicts are reached; a page can do without images
            report.keep_examples(work.gallery(weakest.label, parts, classes))
    if directory is not None:
        verdicts.save(directory.verdicts, fingerprint)
        report.to_json(directory.report)
        if report.examples is not None:
            write_json(directory.examples, report.examples.model_dump(mode="json", by_alias=True))
        report.to_html(directory.page)
        directory.finish("evaluation")
    return report


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
