"""The plan of a training: everything a recipe names, built and checked before training starts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from classwise.attacks import ATTACKS
from classwise.config.recipes import Recipe
from classwise.config.spec import Spec, build, convert
from classwise.core.choices import Rule
from classwise.core.errors import InputError
from classwise.core.model_calls import dtype_of
from classwise.core.progress import SILENT, Progress
from classwise.core.threat import Threat
from classwise.core.types import Attack, Objective, Policy, Task
from classwise.data import Batches, ImageSet, MixedBatches
from classwise.evaluation.inputs import count_classes
from classwise.metrics.counts import Ints
from classwise.models.load import build_model, load_model, run_directory
from classwise.models.weights import load_weights
from classwise.objectives import OBJECTIVES
from classwise.policies import POLICIES
from classwise.training.averaging import FAWA, Average, FAWASettings, WeightAverage
from classwise.training.compatibility import conflict
from classwise.training.compiled import CompiledEngine
from classwise.training.data import Phase, load_extra_images, load_phases, phase_at, split_images
from classwise.training.distributed import SINGLE, ProcessGroup
from classwise.training.engine import Engine, Precision, check_precision
from classwise.training.optimizers import OPTIMIZERS, OptimizerSettings
from classwise.training.schedules import SCHEDULES, Schedule
from classwise.training.selection import Guard
from classwise.training.weight_perturbation import WeightPerturbation

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything a training needs, built and validated."""

    name: str
    model: nn.Module
    phases: tuple[Phase, ...]
    """The phases in order; most recipes have one."""
    train: Ints
    validation: Ints
    """Indices of the images to train on and of those held out."""
    task: Task
    objective: Objective
    policy: Policy
    optimizer: OptimizerSettings
    schedule: Schedule
    epochs: int
    flip: bool
    precision: Precision
    engine: Literal["eager", "compiled"]
    select: Rule
    validation_attack: Attack
    """The attack that measures robust accuracy on validation, whatever the objective."""
    seed: int
    device: torch.device
    extra: ImageSet | None = None
    """Further images to train on, labeled by a model."""
    ema: float = 0.0
    fawa: FAWASettings | None = None
    awp: WeightPerturbation | None = None
    clip: float | None = None
    patience: int | None = None
    """Epochs without improvement after which training ends."""
    guard: Guard | None = None
    group: ProcessGroup = SINGLE

    @property
    def num_classes(self) -> int:
        """K."""
        return self.task.num_classes

    @property
    def images(self) -> ImageSet:
        """The images of the first phase."""
        return self.phases[0].images

    @property
    def batch_size(self) -> int:
        """The batch size of the first phase."""
        return self.phases[0].batch_size

    @property
    def min_batch_size(self) -> int:
        """The smallest batch to train on: one image per process, and two for batch norm."""
        return max(2, self.group.size)

    def labeled_batch_size(self, phase: Phase) -> int:
        """Return the number of images per batch that are not extra images."""
        return phase.batch_size if self.extra is None else phase.batch_size - phase.batch_size // 2

    def steps(self, epochs: int) -> int:
        """Return the number of batches in the first ``epochs`` epochs."""
        phases = (self.phases[phase_at(self.phases, epoch)] for epoch in range(epochs))
        sizes = (divmod(len(self.train), self.labeled_batch_size(phase)) for phase in phases)
        return sum(full + (rest >= self.min_batch_size) for full, rest in sizes)


def make_engine(plan: Plan, model: nn.Module) -> Engine:
    """Build the engine of a plan around a model of the plan's architecture."""
    kind = CompiledEngine if plan.engine == "compiled" else Engine
    average: Average | None = None
    if plan.fawa is not None:
        average = FAWA(model, plan.fawa)
    elif plan.ema:
        average = WeightAverage(model, plan.ema)
    return kind(
        model=model,
        objective=plan.objective,
        policy=plan.policy,
        optimizer=plan.optimizer.build(model.parameters()),
        average=average,
        precision=plan.precision,
        clip=plan.clip,
        awp=plan.awp,
        group=plan.group,
    )


def make_batches(plan: Plan, generator: torch.Generator, phase: int = 0) -> Batches | MixedBatches:
    """Build the training batches of a phase, in random order; with extra images, they are half of every batch."""
    now = plan.phases[phase]
    size = plan.labeled_batch_size(now)
    options: dict[str, Any] = {"device": plan.device, "generator": generator, "crop": now.crop, "flip": plan.flip}
    options |= {"part": now.part, "size": now.size, "share": plan.group.share}
    too_small = 0 < len(plan.train) % size < plan.min_batch_size
    batches = Batches(now.images, plan.train, batch_size=size, drop_last=too_small, **options)
    if plan.extra is None:
        return batches
    return MixedBatches(batches, Batches(plan.extra, None, batch_size=now.batch_size // 2, drop_last=True, **options))


def make_plan(recipe: Recipe, device: torch.device, progress: Progress = SILENT, group: ProcessGroup = SINGLE) -> Plan:
    """Build everything a recipe names; errors in the recipe are raised here, before training starts."""
    engine = _choose_engine(recipe, device, group)
    precision = _choose_precision(recipe, device)
    check_precision(precision, device)
    objective = make_objective(recipe)
    policy = build("policy", POLICIES, recipe.policy)
    optimizer = build("optimizer", OPTIMIZERS, recipe.optimizer)
    schedule = build("schedule", SCHEDULES, recipe.schedule)
    _check_recipe(recipe, objective, policy)
    phases = load_phases(recipe, progress, group.size)
    images = phases[0].images
    num_classes = len(images.classes) if images.classes is not None else int(images.labels.max()) + 1
    classes = images.classes or tuple(str(label) for label in range(num_classes))
    task = Task(classes=classes, beta=objective.beta)
    policy.start(task)  # raises if the policy names a class that does not exist
    train, validation = split_images(recipe, images, task)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        spec = str(Spec.parse(recipe.model))
        model = build_model(spec, num_classes=num_classes, in_channels=images.images.shape[1])
    for phase in phases:
        _check_trainable(model, phase, num_classes)
    if objective.needs_teacher:
        objective = _with_teacher(objective, phases[0], num_classes, device)
    objective.on_epoch(model, 1)  # raises if the objective needs another kind of model
    if recipe.start is not None:
        _warm_start(model, recipe.start)
    return Plan(
        name=recipe.name,
        model=model,
        phases=phases,
        train=train,
        validation=validation,
        extra=load_extra_images(recipe, images, validation, device, progress),
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
        validation_attack=build("attack", ATTACKS, recipe.validation_attack).within(
            Threat.parse(recipe.eps, recipe.norm)
        ),
        seed=recipe.seed,
        device=device,
        group=group,
    )


def make_objective(recipe: Recipe) -> Objective:
    """Build a recipe's objective, with its attack limited to the recipe's threat and attack settings."""
    if "attack" in recipe.objective:
        raise InputError("objective.attack cannot be set: set steps or step_size in the recipe's attack table")
    # Objectives and their attacks are dataclasses, which a protocol cannot express.
    objective: Any = build("objective", OBJECTIVES, recipe.objective)
    if objective.attack is None:
        return cast(Objective, objective)
    threat = Threat.parse(recipe.eps, recipe.norm)
    settings = convert("the recipe's attack", type(objective.attack), recipe.attack)
    attack = replace(objective.attack, **settings).within(threat)
    return cast(Objective, replace(objective, attack=attack))


def _choose_engine(recipe: Recipe, device: torch.device, group: ProcessGroup) -> Literal["eager", "compiled"]:
    """Return ``compiled`` for a single process on a GPU, unless the recipe says ``eager``."""
    if device.type == "cuda" and group.size == 1 and recipe.engine != "eager":
        return "compiled"
    if recipe.engine == "compiled" and group.is_main:
        missing = "a GPU" if device.type != "cuda" else "a single process"
        warnings.warn(f"engine = 'compiled' needs {missing}: training uses the eager engine", stacklevel=3)
    return "eager"


def _choose_precision(recipe: Recipe, device: torch.device) -> Precision:
    """Return the recipe's precision; for ``auto`` bf16 on a GPU, unless the engine is ``eager``."""
    if recipe.precision != "auto":
        return recipe.precision
    return "bf16" if device.type == "cuda" and recipe.engine != "eager" else "fp32"


def _check_recipe(recipe: Recipe, objective: Objective, policy: Policy) -> None:
    """Raise if parts of a recipe are incompatible."""
    needs_validation = {
        f"policy {recipe.policy['name']!r}": any(name.startswith("val.") for name in policy.uses),
        f"select = {recipe.select!r}": recipe.select != "last",
        "patience": recipe.patience is not None,
        "fawa": recipe.fawa is not None,
        "guard": recipe.guard is not None,
        "repair": recipe.repair is not None,
    }
    for name, needed in needs_validation.items():
        if needed and not recipe.validation_per_class:
            raise InputError(f"{name} needs validation images: set validation_per_class to more than 0")
    if (reason := conflict(policy, objective)) is not None:
        both = f"policy {recipe.policy['name']!r} cannot be combined with objective {recipe.objective['name']!r}"
        raise InputError(f"{both}: {reason}; see classwise list methods")
    if recipe.fawa is not None and recipe.ema:
        raise InputError("fawa and ema both average the weights: set only one")
    if policy.fine_tunes and recipe.start is None:
        raise InputError(f"policy {recipe.policy['name']!r} fine-tunes a robust model: set start to its run directory")


def _check_trainable(model: nn.Module, phase: Phase, num_classes: int) -> None:
    """Raise if a model does not fit its data or cannot be trained."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("the model has no trainable parameter")
    if dtype_of(model) != torch.float32:
        raise InputError(f"training requires a float32 model, got {dtype_of(model)}".replace("torch.", ""))
    if (outputs := count_classes(model, phase.images, size=phase.size)) != num_classes:
        raise InputError(f"the model has {outputs} outputs, but {phase.images.name} has {num_classes} classes")


def _with_teacher(objective: Objective, phase: Phase, num_classes: int, device: torch.device) -> Objective:
    """Load the teacher that an objective names in its field ``teacher``."""
    fields: Any = objective
    if fields.teacher is None:
        raise InputError("the objective needs a teacher: set objective.teacher to a robust model")
    teacher = load_model(str(fields.teacher), num_classes=num_classes, in_channels=phase.shape[0])
    if (outputs := count_classes(teacher, phase.images, size=phase.size)) != num_classes:
        raise InputError(f"the teacher has {outputs} outputs, but there are {num_classes} classes")
    return cast(Objective, replace(fields, teacher=teacher.to(device).requires_grad_(False)))


def _warm_start(model: nn.Module, start: str) -> None:
    """Load the best weights of a run directory, or a weights file."""
    found = run_directory(start)
    path = Path(start) if found is None else found[0] / "checkpoints" / f"{found[1] or 'best'}.safetensors"
    if not path.is_file():
        raise InputError(f"start = {start!r} is neither a run directory with a finished epoch nor a weights file")
    load_weights(model, path)


def _settings(name: str, kind: type[T], given: Mapping[str, Any] | None) -> T | None:
    """Convert a table of a recipe to its settings object."""
    return None if given is None else kind(**convert(name, kind, given))
