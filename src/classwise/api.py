"""The public functions: they turn names and specs into objects and hand these to the rooms that do the work."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import numpy as np
import torch
from torch import nn

from classwise.attacks import ATTACKS, Transfer
from classwise.data import ImageSet, balanced_split, balanced_subset, load_data
from classwise.engine import EngineName
from classwise.errors import InputError, one_line, unknown
from classwise.evaluation.command import command
from classwise.evaluation.evaluate import Question, count_classes, run_evaluation
from classwise.files import digest, digest_json
from classwise.forward import device_of, dtype_of
from classwise.methods import conflict
from classwise.metrics.counts import Ints
from classwise.models.load import build_model, load_model, run_directory
from classwise.models.weights import load_weights
from classwise.objectives import OBJECTIVES
from classwise.plugins import absolute
from classwise.policies import POLICIES
from classwise.progress import SILENT, Progress
from classwise.recipes import PhaseChoice, Recipe, load_recipe
from classwise.reporting import ClassReport
from classwise.rundir import RunDirectory, versions
from classwise.spec import Spec, build, convert
from classwise.suite import AnyAttack, read_suite
from classwise.threat import Threat
from classwise.training.apart import fit_apart
from classwise.training.averaging import FAWASettings
from classwise.training.engine import Precision, check_precision
from classwise.training.guard import Guard
from classwise.training.loggers import Logger, make_loggers
from classwise.training.loop import Job, Outcome, Plan, fit
from classwise.training.optimizers import OPTIMIZERS
from classwise.training.phases import Phase
from classwise.training.pseudo_labels import pseudo_labelled
from classwise.training.schedules import SCHEDULES
from classwise.training.team import ALONE, Team, assembled, device_among
from classwise.training.weight_perturbation import WeightPerturbation
from classwise.types import Objective, Policy, Task
from classwise.workers import check_workers

T = TypeVar("T")


def evaluate(
    model: nn.Module | str | Path,
    data: Any,
    *,
    attacks: Any = ("pgd",),
    eps: float | str | None = None,
    norm: str | None = None,
    weights: str | Path | None = None,
    split: str = "test",
    classes: Sequence[str] | None = None,
    per_class: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    engine: str = "auto",
    exhaustive: bool = False,
    until_worst_ci: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    trust: bool = False,
    progress: Progress = SILENT,
) -> ClassReport:
    """Attack a model and report its accuracy class by class.

    ``model`` is any module or a model spec, ``data`` any Dataset, DataLoader, ``(x, y)`` pair or data spec; images
    are NCHW in [0, 1]. A module is used where it is; a spec is loaded onto ``device`` (a GPU where there is one).
    ``attacks`` is one or several of: a spec, an attack object of ours, of torchattacks, foolbox, ART or AutoAttack, a
    function ``attack(model, x, y)``, and ``corruptions``. ``engine`` says how attacks search: on a faster twin of the
    model where there is one (auto), or on the model itself (eager); verdicts are always the model's own. ``exhaustive``
    lets the attack ``fast`` run the whole ensemble on all that its cascade left. ``until_worst_ci`` attacks only as
    many examples of each class as it takes to know the accuracy of the worst class to within so many points. With
    ``out`` the verdicts and the report are kept there, and an interrupted evaluation can be resumed. ``trust`` lets a
    model that is a program (``torchscript:FILE``) run.
    """
    images = load_data(data, split=split, classes=None if classes is None else tuple(classes), progress=progress)
    if isinstance(model, nn.Module):
        loaded = model
        if weights is not None:
            raise InputError("weights go with a model spec; a module in memory has its own")
        if device is not None and not _same_device(torch.device(device), device_of(model)):
            raise InputError(f"the model is on {device_of(model)}, not {device}: move it yourself, or pass a spec")
    else:
        known = None if images.classes is None else len(images.classes)
        sizes = {"num_classes": known, "in_channels": images.images.shape[1]}
        loaded = load_model(str(model), weights=weights, trust=trust, **sizes).to(pick_device(device))
    found = None if isinstance(model, nn.Module) else run_directory(str(model))
    run = None if found is None else found[0]
    suite = read_suite(attacks, eps, norm, exhaustive=exhaustive)
    directory = None if out is None else RunDirectory(Path(out).expanduser())
    return run_evaluation(
        loaded,
        images,
        Question(
            attacks=_with_substitutes(suite.attacks, images, device_of(loaded)),
            corruptions=suite.corruptions,
            threat=suite.threat,
            per_class=per_class,
            batch_size=batch_size,
            seed=seed,
            engine=checked_engine(engine),
            until_worst_ci=until_worst_ci,
        ),
        model_info=_describe(model, weights),
        trained_on=None if run is None else RunDirectory(run).read().get("training", {}).get("data_digest"),
        directory=directory,
        beside="training" if run and directory and run.resolve() == directory.path.resolve() else None,
        resume=resume,
        command=command(
            model,
            data,
            attacks,
            {
                "eps": eps,
                "norm": norm,
                "weights": weights,
                "split": split,
                "per_class": per_class,
                "seed": seed,
                "engine": engine,
                "exhaustive": exhaustive,
                "until_worst_ci": until_worst_ci,
                "out": out,
                "trust": trust,
            },
        ),
        progress=progress,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished training."""

    directory: Path
    recipe: Recipe
    outcome: Outcome
    classes: tuple[str, ...]

    def load(self, which: str = "best") -> nn.Module:
        """The trained model: ``best`` on validation, or ``last``."""
        return load_model(f"{self.directory}@{which}")


def train(
    recipe: str | Path | Recipe,
    *,
    out: str | Path,
    resume: bool = False,
    device: str | torch.device | None = None,
    loggers: Sequence[str | Logger] = (),
    progress: Progress = SILENT,
    **overrides: Any,
) -> Run:
    """Train by a recipe (its name, a path or an object) into a run directory; keywords override its keys.

    ``loggers``: tensorboard, mlflow, or objects with the methods of ``Logger``; they change nothing of what is trained.
    """
    recipe = load_recipe(recipe, overrides)
    return train_together({out: recipe}, resume=resume, device=device, loggers=loggers, progress=progress)[0]


def train_together(
    recipes: Mapping[str | Path, str | Path | Recipe],
    *,
    resume: bool = False,
    device: str | torch.device | None = None,
    workers: int = 1,
    loggers: Sequence[str | Logger] = (),
    progress: Progress = SILENT,
) -> list[Run]:
    """Train several recipes side by side, each into the run directory it stands under.

    They take turns in this process, or with ``workers`` so many at a time have processes of their own, which share the
    cores and the GPU. What comes out is what each would have come to alone, on a CPU to the rounding of fewer threads.
    """
    if not recipes:
        raise InputError("there is no recipe to train by")
    check_workers(workers)
    read = {RunDirectory(Path(out).expanduser()): load_recipe(recipe) for out, recipe in recipes.items()}
    with assembled(pick_device(device)) as team:
        if not team.leads:
            loggers, progress = (), SILENT
        if workers > 1 and team.size > 1:
            raise InputError("workers have whole runs, processes share the batches of one: choose either")
        return _train(read, team, resume, workers, make_loggers(loggers), progress)


def _train(
    read: Mapping[RunDirectory, Recipe],
    team: Team,
    resume: bool,
    workers: int,
    loggers: Sequence[Logger],
    progress: Progress,
) -> list[Run]:
    plans = team.first(lambda: [make_plan(recipe, team.device, progress, team) for recipe in read.values()])
    jobs = []
    for (directory, recipe), plan in zip(read.items(), plans, strict=True):
        asked = recipe.model_dump()
        digests = [phase.images.digest() for phase in plan.phases]
        fingerprint = digest_json([asked, digests, versions()["classwise"], versions()["torch"]])
        details = {
            "asked": {**asked, "model": absolute(str(Spec.parse(recipe.model)))},
            "num_classes": plan.num_classes,
            "in_channels": plan.images.images.shape[1],
            "data_digest": plan.images.digest(),
        }
        claimed = partial(directory.claim, "training", fingerprint, details, resume=resume)
        jobs.append(Job(plan, directory, team.leaders(claimed)))
    if workers == 1:
        outcomes = fit(jobs, progress, loggers)
    else:
        anew = [partial(make_plan, recipe, team.device) for recipe in read.values()]
        outcomes = fit_apart(jobs, anew, workers, progress, loggers)
    for job, outcome in zip(jobs, outcomes, strict=True):
        best = {"best_epoch": outcome.best_epoch, "best_score": outcome.best_score, "rule": job.plan.select}
        if team.leads:
            job.directory.finish("training", **best)
    return [
        Run(directory=directory.path, recipe=recipe, outcome=outcome, classes=plan.task.classes)
        for (directory, recipe), plan, outcome in zip(read.items(), plans, outcomes, strict=True)
    ]


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
    task = Task(classes=classes, beta=float(getattr(objective, "beta", 1.0)))
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
    found: Any = objective
    if not hasattr(found, "teacher"):
        return objective
    if found.teacher is None:
        raise InputError("the objective needs a teacher: name a robust model in objective.teacher")
    teacher = load_model(str(found.teacher), num_classes=num_classes, in_channels=phase.shape[0])
    if (outputs := count_classes(teacher, phase.images, size=phase.size)) != num_classes:
        raise InputError(f"the teacher has {outputs} outputs, but there are {num_classes} classes")
    return cast(Objective, replace(found, teacher=teacher.to(device).requires_grad_(False)))


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
    return np.setdiff1d(np.arange(len(images)), held_out), held_out


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


def checked_engine(engine: str) -> EngineName:
    """An engine by its name."""
    if engine not in get_args(EngineName):
        raise unknown("engine", engine, get_args(EngineName))
    return cast(EngineName, engine)


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device asked for; else a GPU where there is one."""
    if device is None:
        return device_among(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        chosen = device_among(torch.device(device))
        torch.empty(1, device=chosen).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"cannot use device {device!s}: {one_line(error, 120)}") from None
    return chosen


def _with_substitutes(
    attacks: Mapping[str, tuple[str, AnyAttack]], images: ImageSet, device: torch.device
) -> dict[str, tuple[str, AnyAttack]]:
    """The attacks, with the substitutes of transfers loaded beside the model."""

    def load(spec: str, weights: str | Path | None) -> nn.Module:
        known = None if images.classes is None else len(images.classes)
        return load_model(spec, weights=weights, num_classes=known, in_channels=images.images.shape[1]).to(device)

    return {
        key: (spec, attack.resolved(load) if isinstance(attack, Transfer) else attack)
        for key, (spec, attack) in attacks.items()
    }


def _describe(model: nn.Module | str | Path, weights: str | Path | None) -> dict[str, Any]:
    """What a report says of the model: a short name, and what it was asked for by."""
    if isinstance(model, nn.Module):
        return {"name": type(model).__name__}
    found = run_directory(str(model))
    name = str(model) if found is None else "@".join([found[0].resolve().name, *filter(None, found[1:])])
    trained = {} if found is None else RunDirectory(found[0]).read().get("training", {}).get("asked", {})
    return (
        {"name": name, "spec": str(model)}
        | ({} if weights is None else {"weights": Path(weights).name})
        | ({"trained": trained} if trained else {})
    )


def _same_device(wanted: torch.device, actual: torch.device) -> bool:
    return wanted.type == actual.type and wanted.index in (None, actual.index)
