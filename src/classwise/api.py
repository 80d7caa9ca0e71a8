"""The public functions: they turn names and specs into objects and hand these to the rooms that do the work."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import nn

from classwise.attacks import Transfer
from classwise.config.plugins import absolute
from classwise.config.recipes import Recipe, load_recipe
from classwise.config.spec import Spec, build
from classwise.core.choices import EngineName
from classwise.core.errors import InputError, one_line, unknown
from classwise.core.model_calls import device_of
from classwise.core.progress import SILENT, Progress
from classwise.data import ImageSet, load_data
from classwise.evaluation.command import command
from classwise.evaluation.evaluate import Question, count_classes, run_evaluation
from classwise.evaluation.margins import MarginSettings, find_margins
from classwise.evaluation.suite import AnyAttack, read_suite
from classwise.models.load import build_model, load_model, run_directory
from classwise.repairs.fit import RULES
from classwise.repairs.images import check_apart, fitting_images, test_split, validation_images
from classwise.repairs.methods import METHODS, Case
from classwise.repairs.run import Original, Repair, TestSetup, parse_floor, repaired_recipe, resolve_threat, run_repair
from classwise.reporting import ClassReport
from classwise.storage.files import digest_json
from classwise.storage.run_directory import RunDirectory, Section, versions
from classwise.training.apart import fit_apart
from classwise.training.loggers import Logger, make_loggers
from classwise.training.loop import Job, Outcome, fit
from classwise.training.plan import make_plan
from classwise.training.team import Team, assembled, device_among
from classwise.training.workers import check_workers


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
    margins: bool = False,
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
    ``out`` the verdicts and the report are kept there, and an interrupted evaluation can be resumed. ``margins`` also
    saves there the margin matrix of the images, and that of the validation images of a run directory: what
    ``classwise repair`` and ``analyze bias-share`` compute from. ``trust`` lets a model that is a program
    (``torchscript:FILE``) run.
    """
    if margins and out is None:
        raise InputError("margins are saved in a directory: give out too")
    images = load_data(data, split=split, classes=None if classes is None else tuple(classes), progress=progress)
    loaded, run = _loaded(model, weights, images, device, trust=trust)
    suite = read_suite(attacks, eps, norm, exhaustive=exhaustive)
    directory = None if out is None else RunDirectory(Path(out).expanduser())
    report = run_evaluation(
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
        trained_on=None if run is None else RunDirectory(run).made().get("data_digest"),
        directory=directory,
        beside=_beside(run) if run and directory and run.resolve() == directory.path.resolve() else None,
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
                "margins": margins,
                "out": out,
                "trust": trust,
            },
        ),
        progress=progress,
    )
    if margins and directory is not None and report.verdicts is not None:
        find = partial(
            find_margins,
            loaded,
            threat=suite.threat,
            settings=MarginSettings(seed=seed),
            batch_size=batch_size,
            engine=checked_engine(engine),
            progress=progress,
        )
        find(images, report.verdicts.index, file=directory.margins)
        if run is not None and (held_out := validation_images(run, progress)) is not None:
            find(*held_out, file=directory.validation_margins)
    return report


def repair(
    model: nn.Module | str | Path,
    data: Any,
    *,
    floor: float | None = None,
    rule: str | None = None,
    method: str = "bias",
    eps: float | str | None = None,
    norm: str | None = None,
    split: str | None = None,
    per_class: int | None = None,
    targets: int | None = None,
    test: Any = None,
    attacks: Any = ("fast", "corruptions:severity=3"),
    test_per_class: int | None = None,
    evaluate: bool = True,
    weights: str | Path | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    engine: str = "auto",
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress = SILENT,
) -> Repair:
    """Raise the robust accuracy of a finished model's worst class, and evaluate the result on test images.

    The default method adds a constant to the logit of each class and trains nothing. It is fitted to the validation
    images of a run directory, or to the named ``split`` of other data; the split ``test`` is refused.

    ``model``, ``data``, ``weights``, ``eps``, ``norm``, ``seed``, ``device`` and ``engine`` are as in ``evaluate``; the
    threat defaults to that of the training. ``floor`` is the minimum robust accuracy of the worst class in percent,
    cross-validated on the fitting images; without it, ``rule`` selects a point of the frontier (rho, worst or tenth;
    see ``classwise.repairs.fit``). ``method`` names one of ``classwise.repairs.methods.METHODS``, with settings as
    ``name:key=value``. ``per_class`` limits the random fitting images of each class, ``targets`` the wrong classes
    attacked per image.

    With ``evaluate``, the original and the repaired model are evaluated with ``attacks`` on the test split of ``data``,
    or on ``test``. With ``out``, the repaired model, ``repair.json``, the page and the evaluations are saved; the
    directory can be used as a model spec, unless the model was a module in memory.

    Returns a ``Repair`` with the repaired ``model``, its ``report`` and the reports of both evaluations. Raises
    ``InputError`` for a floor that no class biases reach, for too few images and for models that return probabilities.
    """
    spec = Spec.parse(method)
    chosen = build("repair method", METHODS, method)
    if rule is not None and rule not in RULES:
        raise unknown("rule", rule, RULES)
    if type(chosen).uses != "validation":
        for option, value in (("floor", floor), ("rule", rule), ("targets", targets)):
            if value is not None:
                raise InputError(f"{option} applies to the method bias only, not to {spec.name}")
    if floor is not None and rule is not None:
        raise InputError("floor and rule exclude each other: pass one of them")
    share = parse_floor(floor)
    found = None if isinstance(model, nn.Module) else run_directory(str(model))
    run = None if found is None else found[0]
    if found is None and not isinstance(model, nn.Module) and ":" not in str(model):
        build_model(str(model))  # a mistyped model is reported before its missing validation images
    fitting = fitting_images(
        data, model=_name_of(model), run=run, split=split, per_class=per_class, seed=seed, progress=progress
    )
    loaded, _ = _loaded(model, weights, fitting.images, device)
    made = {} if run is None else RunDirectory(run).made()
    recipe = {} if run is None else _recipe_of(RunDirectory(run))
    threat = resolve_threat(eps, norm, recipe)
    original = Original(
        model=loaded,
        info=_describe(model, weights),
        spec=_architecture_of(model, made),
        num_classes=count_classes(loaded, fitting.images),
        in_channels=int(fitting.images.images.shape[1]),
        trained=recipe,
        data_digest=made.get("data_digest"),
    )
    judges = None
    if evaluate:
        images = test_split(data, test, fitting, progress)
        suite = read_suite(attacks, threat.text, threat.norm)
        question = Question(
            attacks=_with_substitutes(suite.attacks, images, device_of(loaded)),
            corruptions=suite.corruptions,
            threat=suite.threat,
            per_class=test_per_class,
            batch_size=batch_size,
            seed=seed,
            engine=checked_engine(engine),
            until_worst_ci=None,
        )
        judges = TestSetup(images=images, question=question)
    else:
        check_apart(data, fitting, progress)
    directory = None if out is None else RunDirectory(Path(out).expanduser())
    known = None if run is None else RunDirectory(run).validation_margins
    case = Case(
        model=loaded,
        images=fitting.images,
        index=fitting.index,
        train=fitting.train,
        threat=threat,
        rule=rule or "rho",
        floor=share,
        seed=seed,
        batch_size=batch_size,
        engine=checked_engine(engine),
        targets=targets,
        margins_file=None if directory is None else directory.validation_margins,
        known_margins=known,
        progress=progress,
    )
    return run_repair(
        original,
        fitting,
        case,
        str(spec),
        chosen,
        judges=judges,
        directory=directory,
        resume=resume,
        progress=progress,
    )


def _loaded(
    model: nn.Module | str | Path,
    weights: str | Path | None,
    images: ImageSet,
    device: str | torch.device | None,
    *,
    trust: bool = False,
) -> tuple[nn.Module, Path | None]:
    """The model, ready for these images, and its run directory if it has one."""
    if isinstance(model, nn.Module):
        if weights is not None:
            raise InputError("weights go with a model spec; a module in memory has its own")
        if device is not None and not _same_device(torch.device(device), device_of(model)):
            raise InputError(f"the model is on {device_of(model)}, not {device}: move it yourself, or pass a spec")
        return model, None
    known = None if images.classes is None else len(images.classes)
    sizes = {"num_classes": known, "in_channels": images.images.shape[1]}
    found = run_directory(str(model))
    loaded = load_model(str(model), weights=weights, trust=trust, **sizes).to(pick_device(device))
    return loaded, None if found is None else found[0]


def _name_of(model: nn.Module | str | Path) -> str:
    """What to call a model in messages."""
    return "the module in memory" if isinstance(model, nn.Module) else repr(str(model))


def _architecture_of(model: nn.Module | str | Path, made: Mapping[str, Any]) -> str | None:
    """The spec that builds the model's architecture; None for a module in memory."""
    if isinstance(model, nn.Module):
        return None
    known = made.get("model", made.get("asked", {}).get("model"))
    return known if isinstance(known, str) else str(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished training."""

    directory: Path
    recipe: Recipe
    outcome: Outcome
    classes: tuple[str, ...]
    repaired: Path | None = None
    """The run directory of the repair that the recipe ends with."""

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
        Run(
            directory=directory.path,
            recipe=recipe,
            outcome=outcome,
            classes=plan.task.classes,
            repaired=_repaired(directory, recipe, team, progress),
        )
        for (directory, recipe), plan, outcome in zip(read.items(), plans, outcomes, strict=True)
    ]


def _repaired(directory: RunDirectory, recipe: Recipe, team: Team, progress: Progress) -> Path | None:
    """The repair that a recipe ends with, fitted to the run's validation images; it is judged by later evaluations."""
    wanted = recipe.repair
    if wanted is None:
        return None
    out = directory.path / "repaired"
    if team.leads:
        settings: dict[str, Any] = {"floor": wanted.floor, "rule": wanted.rule, "method": wanted.method}
        how: dict[str, Any] = {"device": team.device, "seed": recipe.seed, "engine": recipe.engine}
        data = recipe.data_at_the_end
        try:
            repair(directory.path, data, out=out, evaluate=False, resume=True, progress=progress, **settings, **how)
        except InputError as error:  # the training is finished and stays
            warnings.warn(f"{directory.path} was trained but not repaired: {error}", stacklevel=2)
            return None
    return out


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
    trained = {} if found is None else _recipe_of(RunDirectory(found[0]))
    return (
        {"name": name, "spec": str(model)}
        | ({} if weights is None else {"weights": Path(weights).name})
        | ({"trained": trained} if trained else {})
    )


def _recipe_of(directory: RunDirectory) -> Mapping[str, Any]:
    """How the model of a run directory was made: the recipe of its training, with its repair if it had one."""
    contents = directory.read()
    if "training" in contents or "repair" not in contents:
        return dict(contents.get("training", {}).get("asked", {}))
    made = contents["repair"]
    return repaired_recipe(made.get("trained", {}), made["asked"]["method"], made["asked"]["choice"])


def _beside(run: Path) -> Section:
    """The section of a run directory that its evaluation may lie beside."""
    return "training" if "training" in RunDirectory(run).read() else "repair"


def _same_device(wanted: torch.device, actual: torch.device) -> bool:
    return wanted.type == actual.type and wanted.index in (None, actual.index)
