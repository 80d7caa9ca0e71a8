"""From a recipe to a plan: what it names is built and checked before anything starts."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import nn

from classwise.attacks import ATTACKS
from classwise.config.recipes import PhaseChoice, Recipe
from classwise.config.spec import Spec, build, convert
from classwise.core.errors import InputError
from classwise.core.model_calls import dtype_of
from classwise.core.progress import SILENT, Progress
from classwise.core.threat import Threat
from classwise.core.types import Objective, Policy, Task
from classwise.data import ImageSet, balanced_split, balanced_subset, load_data
from classwise.evaluation.evaluate import count_classes
from classwise.metrics.counts import Ints
from classwise.models.load import build_model, load_model, run_directory
from classwise.models.weights import load_weights
from classwise.objectives import OBJECTIVES
from classwise.policies import POLICIES
from classwise.storage.files import digest
from classwise.storage.run_directory import RunDirectory
from classwise.training.averaging import FAWASettings
from classwise.training.compatibility import conflict
from classwise.training.engine import Precision, check_precision
from classwise.training.guard import Guard
from classwise.training.loop import Plan
from classwise.training.optimizers import OPTIMIZERS
from classwise.training.phases import Phase
from classwise.training.pseudo_labels import pseudo_labelled
from classwise.training.schedules import SCHEDULES
from classwise.training.team import ALONE, Team
from classwise.training.weight_perturbation import WeightPerturbation

T = TypeVar("T")


def make_plan(recipe: Recipe, device: torch.device, progress: Progress = SILENT, team: Team = ALONE) -> Plan:
    """Build everything a recipe names, so that whatever is wrong with it is said before anything starts."""
    engine = _engine(recipe, device, team)
    precision = _precision(recipe, device)
    check_precision(precision, device)
    objective = make_objective(recipe)
    policy = build("policy", POLICIES, recipe.policy)
    optimizer = build("optimizer", OPTIMIZERS, recipe.optimizer)
    schedule = build("schedule", SCHEDULES, recipe.schedule)
    _check_validation(recipe, policy)
    if (reason := conflict(policy, objective)) is not None:
        raise InputError(f"policy {recipe.policy['name']!r} on objective {recipe.objective['name']!r}: {reason}")
    if recipe.fawa is not None and recipe.ema:
        raise InputError("fawa and ema are two averages of the weights: choose one")
    if policy.fine_tunes and recipe.start is None:
        raise InputError(
            f"policy {recipe.policy['name']!r} fine-tunes a robust model: name its run in the recipe's start"
        )
    phases = _phases(recipe, progress, team)
    images = phases[0].images
    num_classes = len(images.classes) if images.classes is not None else int(images.labels.max()) + 1
    classes = images.classes or tuple(str(label) for label in range(num_classes))
    task = Task(classes=classes, beta=objective.beta)
    policy.start(task)  # a class it does not know is said now
    train, validation = _split(recipe, images, num_classes)
    if recipe.data.without_class is not None:
        left_out = images.labels == task.label(recipe.data.without_class)
        train, validation = train[~left_out[train]], validation[~left_out[validation]]
    if recipe.data.per_class is not None:
        train = train[balanced_subset(images.labels[train], recipe.data.per_class, num_classes, recipe.seed)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        asked = str(Spec.parse(recipe.model))
        model = build_model(asked, num_classes=num_classes, in_channels=images.images.shape[1])
    for phase in phases:
        _check_trainable(model, phase, num_classes)
    objective = _taught(objective, phases[0], num_classes, device)
    objective.on_epoch(model, 1)  # a model that does not go with it is said now
    if recipe.start is not None:
        warm_start(model, recipe.start)
    return Plan(
        name=recipe.name,
        model=model,
        phases=phases,
        train=train,
        validation=validation,
        extra=_extra_images(recipe, images, validation, device, progress),
        task=task,
        objective=objective,
        policy=policy,
        optimizer=optimizer,
        schedule=schedule,
        epochs=recipe.epochs,
        flip=recipe.augment.flip,
        ema=recipe.ema,
        fawa=_settings("fawa", FAWASettings, recipe.fawa),
        awp=_settings("awp", WeightPerturbation, recipe.awp),
        clip=recipe.clip,
        precision=precision,
        engine=engine,
        select=recipe.select,
        patience=recipe.patience,
        guard=_settings("guard", Guard, recipe.guard),
        judge=build("attack", ATTACKS, recipe.validation_attack).within(Threat.parse(recipe.eps, recipe.norm)),
        seed=recipe.seed,
        device=device,
        team=team,
    )


def _taught(objective: Objective, phase: Phase, num_classes: int, device: torch.device) -> Objective:
    """The objective with its teacher loaded, where it has one."""
    if not objective.needs_teacher:
        return objective
    if objective.teacher is None:
        raise InputError("the objective needs a teacher: name a robust model in objective.teacher")
    teacher = load_model(str(objective.teacher), num_classes=num_classes, in_channels=phase.shape[0])
    if (outputs := count_classes(teacher, phase.images, size=phase.size)) != num_classes:
        raise InputError(f"the teacher has {outputs} outputs, but there are {num_classes} classes")
    return cast(Objective, replace(cast(Any, objective), teacher=teacher.to(device).requires_grad_(False)))


def warm_start(model: nn.Module, start: str) -> None:
    """Begin with the best weights of a run directory, or with those of a file."""
    found = run_directory(start)
    path = Path(start) if found is None else found[0] / "checkpoints" / f"{found[1] or 'best'}.safetensors"
    if not path.is_file():
        raise InputError(f"start = {start!r} is neither a run directory with a finished epoch nor a weights file")
    load_weights(model, path)


def _check_validation(recipe: Recipe, policy: Policy) -> None:
    """Say before anything starts that something wants a validation split, and there is none."""
    if recipe.validation_per_class:
        return
    wanting = {
        f"policy {recipe.policy['name']!r}": any(name.startswith("val.") for name in policy.uses),
        f"select = {recipe.select!r}": recipe.select != "last",
        "patience": recipe.patience is not None,
        "fawa": recipe.fawa is not None,
        "guard": recipe.guard is not None,
        "repair": recipe.repair is not None,
    }
    for what, wants in wanting.items():
        if wants:
            raise InputError(f"{what} needs validation images: set validation_per_class to more than 0")


def _phases(recipe: Recipe, progress: Progress, team: Team) -> tuple[Phase, ...]:
    """The images of every phase; a recipe that names none is one phase."""
    phases = []
    for wanted in recipe.phases or [PhaseChoice(epochs=recipe.epochs)]:
        spec = recipe.data.name if wanted.data is None else wanted.data
        phase = Phase(
            epochs=wanted.epochs,
            images=load_data(spec, split="train", progress=progress),
            batch_size=recipe.batch_size if wanted.batch_size is None else wanted.batch_size,
            crop=recipe.augment.crop if wanted.crop is None else wanted.crop,
            part=recipe.augment.part,
            size=recipe.augment.size if wanted.size is None else wanted.size,
        )
        phases.append(phase)
        if phase.batch_size // (1 if recipe.data.extra is None else 2) < team.size:
            raise InputError(f"batches of {phase.batch_size} have not an image for each of {team.size} processes")
        first, size = phases[0].images, min(phase.images.images.shape[2:])
        if not np.array_equal(phase.images.labels, first.labels) or phase.images.classes != first.classes:
            raise InputError(f"phase {len(phases)} has other examples ({spec}) than the first")
        if phase.crop >= size:
            raise InputError(f"augment.crop = {phase.crop} would move images of {size} pixels out of sight")
        if phase.crop and phase.part is not None:
            raise InputError("augment.crop and augment.part are two ways to cut images: choose one")
        if phase.size is not None and phase.part is None:
            raise InputError(f"size = {phase.size} is that of random parts: set augment.part")
        if phase.size is not None and phase.size > size:
            raise InputError(f"size = {phase.size}, but the images of {spec} have only {size} pixels")
    if recipe.data.extra is not None and len({phase.shape for phase in phases}) > 1:
        raise InputError("extra images have one size, and so must the images of all phases")
    return tuple(phases)


def _split(recipe: Recipe, images: ImageSet, num_classes: int) -> tuple[Ints, Ints]:
    """Which images are trained on, and which are held out: those that a run on them, as a warm start, held out too.

    Any others it knows by heart.
    """
    train, validation = balanced_split(images.labels, recipe.validation_per_class, recipe.seed, num_classes)
    found = None if recipe.start is None else run_directory(recipe.start)
    if found is None or not len(validation):
        return train, validation
    before = RunDirectory(found[0])
    if before.read().get("training", {}).get("data_digest") != images.digest():
        return train, validation
    held_out = before.held_out(len(images))
    return (np.setdiff1d(np.arange(len(images)), held_out), held_out) if len(held_out) else (train, validation)


def _extra_images(
    recipe: Recipe, images: ImageSet, validation: Ints, device: torch.device, progress: Progress
) -> ImageSet | None:
    """Further images in the shape of the others, labelled by a model where the recipe names one; none held out."""
    if recipe.data.extra is None:
        if recipe.data.labeler is not None:
            raise InputError("data.labeler labels extra images: name them in data.extra")
        return None
    extra = load_data(recipe.data.extra, split="train", progress=progress)
    shapes = [set_.images.shape[1:] for set_ in (images, extra)]
    if shapes[0] != shapes[1]:
        raise InputError(f"extra images are {shapes[1]} (channels, height, width), the others {shapes[0]}")
    if extra.images.dtype != images.images.dtype:
        raise InputError(f"extra images are {extra.images.dtype}, the others {images.images.dtype}")
    extra = _without(extra, {digest(images.images[place].tobytes()) for place in validation})
    if recipe.data.labeler is None:
        return extra
    known = None if images.classes is None else len(images.classes)
    labeler = load_model(recipe.data.labeler, num_classes=known, in_channels=images.images.shape[1]).to(device)
    return pseudo_labelled(labeler, extra, images.classes, progress)


def _without(images: ImageSet, known: Collection[str]) -> ImageSet:
    """The images but for those of these fingerprints."""
    if not known:
        return images
    strange = [digest(image.tobytes()) not in known for _, some in images.chunks() for image in some]
    return images if all(strange) else images.take(np.flatnonzero(strange))


def _settings(name: str, kind: type[T], given: Mapping[str, Any] | None) -> T | None:
    """A table of a recipe as what it stands for."""
    return None if given is None else kind(**convert(name, kind, given))


def _engine(recipe: Recipe, device: torch.device, team: Team) -> Literal["eager", "compiled"]:
    """Compiled on a GPU of one's own, unless asked otherwise."""
    if device.type == "cuda" and team.size == 1 and recipe.engine != "eager":
        return "compiled"
    if recipe.engine == "compiled" and team.leads:
        missing = "a GPU" if device.type != "cuda" else "a single process"
        warnings.warn(f"engine = 'compiled' needs {missing}: training eagerly", stacklevel=3)
    return "eager"


def _precision(recipe: Recipe, device: torch.device) -> Precision:
    """What was asked for; else bf16 on a GPU, unless its step is to be the reference."""
    if recipe.precision != "auto":
        return recipe.precision
    return "bf16" if device.type == "cuda" and recipe.engine != "eager" else "fp32"


def _check_trainable(model: nn.Module, phase: Phase, num_classes: int) -> None:
    """Say before anything starts that a model does not fit its data or cannot learn."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("the model has no parameter that could be trained")
    if dtype_of(model) != torch.float32:
        raise InputError(f"training needs a float32 model, this one is {dtype_of(model)}".replace("torch.", ""))
    if (outputs := count_classes(model, phase.images, size=phase.size)) != num_classes:
        raise InputError(f"the model has {outputs} outputs, but {phase.images.name} has {num_classes} classes")


def make_objective(recipe: Recipe) -> Objective:
    """The objective with its attack limited to the recipe's threat and set as the recipe says."""
    if "attack" in recipe.objective:
        raise InputError("an objective brings its own attack: set its steps or step_size in the recipe's attack table")
    # Objectives and their attacks are dataclasses, which a protocol cannot say.
    objective: Any = build("objective", OBJECTIVES, recipe.objective)
    if objective.attack is None:
        return cast(Objective, objective)
    threat = Threat.parse(recipe.eps, recipe.norm)
    settings = convert("the recipe's attack", type(objective.attack), recipe.attack)
    attack = replace(objective.attack, **settings).within(threat)
    return cast(Objective, replace(objective, attack=attack))
