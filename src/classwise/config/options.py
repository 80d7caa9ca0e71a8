"""The options of ``evaluate``, ``train`` and ``repair``, each with its type, default, unit and description.

The options of the command line and their help, the checks and the documentation of the Python functions, and the
recorded command derive from these classes.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path
from textwrap import fill
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from classwise.core.choices import EngineName, Norm, RepairRule
from classwise.core.errors import InputError, unknown

F = TypeVar("F", bound=Callable[..., Any])

GROUPS = ("Recipe", "Model and data", "Repair", "Attack", "Test evaluation", "Computation", "Output")
"""Headings of the help, in their order."""
RECIPE, DATA, REPAIR, ATTACK, TEST, RUN, OUTPUT = GROUPS


@dataclass(frozen=True, slots=True)
class About:
    """Description of an option, the annotation of its field."""

    text: str
    group: str
    unset: str = ""
    """The behavior if the option is not given, where the default value does not show it."""
    python: str = ""
    """Values that only the Python function accepts."""
    flags: tuple[str, ...] | None = None
    """Names on the command line; None: the name of the field; empty: a positional argument."""
    metavar: str = ""
    only: Literal["python", "command"] | None = None
    """The interface that has the option, if not both."""
    required: bool = False
    """Whether the command line requires it although Python does not."""
    hidden: bool = False
    least: int | None = None
    below: int | None = None
    recorded: bool = True
    """Whether the recorded command repeats it; options that do not change results are left out."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of the options classes. Checks types, choices and limits."""

    def __post_init__(self) -> None:
        for one in options_of(type(self)):
            value, kind = getattr(self, one.name), one.types[0]
            if value is None:
                continue
            if one.choices and value not in one.choices:
                raise unknown(one.name, str(value), one.choices)
            if (kind is int and not isinstance(value, Integral)) or (
                one.types == (float,) and not isinstance(value, Real)
            ):
                raise InputError(f"{one.name} must be a {'whole ' * (kind is int)}number, got {value!r}")
            if one.about.least is not None and value < one.about.least:
                raise InputError(f"{one.name} must be at least {one.about.least}, got {value}")
            if one.about.below is not None and value >= one.about.below:
                raise InputError(f"{one.name} must be below {one.about.below}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a class."""

    name: str
    about: About
    types: tuple[Any, ...]
    """Types that it accepts besides None."""
    required: bool
    """Whether it has no default."""
    default: Any

    @property
    def flags(self) -> tuple[str, ...]:
        """Its names on the command line; none for a positional argument."""
        return (f"--{self.name.replace('_', '-')}",) if self.about.flags is None else self.about.flags

    @property
    def metavar(self) -> str:
        """Placeholder of its value in the help."""
        by_type = {(int,): "N", (float,): "N", (str, Path): "PATH"}
        own = self.name.removesuffix("s") if self.several else self.name
        return self.about.metavar or "|".join(self.choices) or by_type.get(self.types, own.upper())

    @property
    def choices(self) -> tuple[str, ...]:
        """The values it accepts, if they are listed."""
        return get_args(self.types[0]) if get_origin(self.types[0]) is Literal else ()

    @property
    def several(self) -> bool:
        """Whether it takes several values."""
        return isinstance(self.default, tuple)

    @property
    def default_text(self) -> str:
        """Its default in words; empty for a switch and for an option that is off by default."""
        if self.about.unset or self.required or isinstance(self.default, bool) or self.default in (None, ()):
            return self.about.unset
        return ", ".join(self.default) if self.several else str(self.default)


def options_of(kind: type[Options]) -> tuple[Option, ...]:
    """The options of a class, in the order of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for part in fields(kind):
        hint, about = get_args(hints[part.name])
        union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        types = tuple(one for one in union if one is not NoneType)
        required = part.default is MISSING
        found.append(Option(name=part.name, about=about, types=types, required=required, default=part.default))
    return tuple(found)


_MODEL = About(
    "Run directory, architecture name (with weights), FILE.py:FACTORY, hf:ORG/NAME, timm:NAME, onnx:FILE, ...",
    DATA,
    python="Also a torch.nn.Module, which stays on its device; images are NCHW in [0, 1].",
)
_DATA = About(
    "Data set name, folder:PATH, or FILE.py:FACTORY.",
    DATA,
    python="Also a Dataset, a DataLoader, an iterable of batches or a pair (x, y).",
)
_OBJECTS = (
    "One or several; also attack objects of classwise, torchattacks, foolbox, ART and AutoAttack, and functions "
    "attack(model, x, y)."
)
_EPS = About("Radius of the ball, e.g. 0.03 or 8/255.", ATTACK, unset="eps in the attack spec, else 8/255")
_NORM = About("Norm of the ball: Linf or L2.", ATTACK, unset="norm in the attack spec, else Linf")
_WEIGHTS = About("Weights file: .safetensors, or .pt loaded without running code.", DATA)
_SEED = About("Random seed.", RUN, least=0, below=2**63)
_ENGINE = About(
    "auto or compiled: attacks search on an optimized copy of the model; eager: on the model itself. Verdicts are "
    "always those of the model itself.",
    RUN,
)
_BATCH_SIZE = About("Images per batch; does not change results.", RUN, unset="as many as fit", least=1, recorded=False)
_DEVICE = About("cpu, cuda, cuda:1, ...", RUN, unset="a GPU if there is one", recorded=False)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(Options):
    """Options of an evaluation."""

    model: Annotated[Any, _MODEL]
    data: Annotated[Any, _DATA]
    attacks: Annotated[
        Any,
        About(
            "Attack as NAME, NAME:key=value,... or FILE.py:NAME, or corruptions; see classwise list attacks.",
            ATTACK,
            python=_OBJECTS,
            flags=("--attack",),
        ),
    ] = ("pgd",)
    eps: Annotated[float | str | None, _EPS] = None
    norm: Annotated[Norm | None, _NORM] = None
    weights: Annotated[str | Path | None, _WEIGHTS] = None
    split: Annotated[str, About("Data split.", DATA)] = "test"
    classes: Annotated[Sequence[str] | None, About("Class names.", DATA, only="python", recorded=False)] = None
    per_class: Annotated[int | None, About("Use the first N images of each class.", DATA, unset="all", least=1)] = None
    seed: Annotated[int, _SEED] = 0
    engine: Annotated[EngineName, _ENGINE] = "auto"
    exhaustive: Annotated[
        bool, About("Deprecated: use the attack fast:exhaustive=true.", ATTACK, hidden=True, recorded=False)
    ] = False
    until_worst_ci: Annotated[
        float | None,
        About(
            "Attack only as many images as needed for a 95% interval of the worst class within ±N percentage points. "
            "Other class accuracies are then biased.",
            ATTACK,
            unset="attack all images",
        ),
    ] = None
    margins: Annotated[
        bool,
        About(
            "Also save margins.parquet (for analyze bias-share) and, for a run directory, validation-margins.parquet "
            "(for repair). Adds a targeted attack on up to 19 wrong classes per image.",
            OUTPUT,
        ),
    ] = False
    out: Annotated[
        str | Path | None, About("Directory for the verdicts, report.json and report.html.", OUTPUT, required=True)
    ] = None
    trust: Annotated[bool, About("Allow executing the program in torchscript:FILE.", DATA)] = False
    batch_size: Annotated[int | None, _BATCH_SIZE] = None
    device: Annotated[Any, _DEVICE] = None
    resume: Annotated[bool, About("Continue an interrupted evaluation.", RUN, recorded=False)] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margins and self.out is None:
            raise InputError("margins need a directory to save them in: pass out")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """Options of a training run."""

    recipe: Annotated[
        Any, About("Recipe name (see classwise list recipes) or TOML file.", RECIPE, python="Also a Recipe.", flags=())
    ]
    overrides: Annotated[
        Any,
        About(
            "Change a key of the recipe, e.g. seed=1 or objective.beta=3.",
            RECIPE,
            flags=("-o", "--override"),
            metavar="KEY=VALUE",
        ),
    ] = ()
    seeds: Annotated[
        str | None,
        About(
            "Train once per random seed, e.g. 0,1,2, into OUT/seed-0, OUT/seed-1, ...",
            RECIPE,
            only="command",
            unset="one run with the recipe's seed",
            metavar="N,N,...",
        ),
    ] = None
    out: Annotated[str | Path, About("Run directory.", OUTPUT)]
    device: Annotated[Any, _DEVICE] = None
    processes: Annotated[
        int,
        About(
            "Split every batch among N processes, each on its own GPU if there are GPUs.", RUN, only="command", least=1
        ),
    ] = 1
    workers: Annotated[
        int,
        About(
            "Number of worker processes for --seeds, each training one run at a time.",
            RUN,
            unset="1: all runs interleaved in one process",
            least=1,
        ),
    ] = 1
    loggers: Annotated[
        Any,
        About(
            "Also log to tensorboard or mlflow.",
            OUTPUT,
            python="Also objects with the methods of Logger.",
            flags=("--log",),
        ),
    ] = ()
    resume: Annotated[bool, About("Continue an interrupted run.", RUN)] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.processes != 1 and self.workers != 1:
            raise InputError(
                "workers and processes are mutually exclusive: workers train several runs at a time, processes split "
                "the batches of one run"
            )


@dataclass(frozen=True, kw_only=True)
class RepairOptions(Options):
    """Options of ``classwise repair``."""

    model: Annotated[Any, replace(_MODEL, flags=())]
    data: Annotated[Any, _DATA]
    floor: Annotated[
        float | None,
        About(
            "Minimum robust accuracy of the worst class in percent, cross-validated on the images that biases are "
            "fitted to; not guaranteed on test images (method bias).",
            REPAIR,
        ),
    ] = None
    rule: Annotated[
        RepairRule | None,
        About(
            "Selection without a floor (method bias): rho (relative gain of the worst class minus relative loss of the "
            "average), worst, or tenth (mean of the weakest tenth of the classes).",
            REPAIR,
            unset="rho",
        ),
    ] = None
    method: Annotated[str, About("Repair method as NAME or NAME:key=value; see classwise list repairs.", REPAIR)] = (
        "bias"
    )
    eps: Annotated[float | str | None, replace(_EPS, unset="eps of the training run, else 8/255")] = None
    norm: Annotated[Norm | None, replace(_NORM, unset="norm of the training run, else Linf")] = None
    split: Annotated[
        str | None,
        About(
            "Data split used for fitting, e.g. train; test is refused.",
            DATA,
            unset="the validation images of a run directory",
        ),
    ] = None
    per_class: Annotated[int | None, About("Fit to N random images of each class.", REPAIR, unset="all", least=1)] = (
        None
    )
    targets: Annotated[
        int | None,
        About(
            "Number of wrong classes attacked per image, the most likely first (method bias).",
            REPAIR,
            unset="all, at most 19",
        ),
    ] = None
    test: Annotated[Any, About("Test images.", TEST, only="python", unset="the test split of data")] = None
    attacks: Annotated[
        Any,
        About(
            "Attack or corruptions for the test evaluation; replaces the defaults.",
            TEST,
            python=_OBJECTS,
            flags=("--attack",),
        ),
    ] = ("fast", "corruptions:severity=3")
    test_per_class: Annotated[
        int | None, About("Use the first N test images of each class.", TEST, unset="all", least=1)
    ] = None
    evaluate: Annotated[
        bool, About("Evaluate the original and the repaired model on test images.", TEST, unset="on")
    ] = True
    weights: Annotated[str | Path | None, _WEIGHTS] = None
    batch_size: Annotated[int | None, _BATCH_SIZE] = None
    seed: Annotated[int, _SEED] = 0
    device: Annotated[Any, _DEVICE] = None
    engine: Annotated[EngineName, _ENGINE] = "auto"
    out: Annotated[
        str | Path | None,
        About("Directory for the repaired model, repair.json, repair.html and the evaluations.", OUTPUT, required=True),
    ] = None
    resume: Annotated[bool, About("Continue an interrupted margin search or test evaluation.", RUN)] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floor is not None and self.rule is not None:
            raise InputError("floor and rule are mutually exclusive: pass one of them")


def documented(kind: type[Options]) -> Callable[[F], F]:
    """Append the descriptions of a function's keywords to its docstring."""

    def sentences(one: Option) -> str:
        default = f"Default: {one.default_text}." if one.default_text else ""
        return " ".join(filter(None, [one.about.text, one.about.python, default]))

    def document(function: F) -> F:
        known = {one.name: one for one in options_of(kind)}
        described = [known[name] for name in inspect.signature(function).parameters if name in known]
        lines = [fill(f"    {one.name}: {sentences(one)}", 110, subsequent_indent=" " * 8) for one in described]
        function.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Args:", *lines])
        return function

    return document


def command_line(command: str, options: Options) -> str:
    """The shell command that repeats a call; a call in Python if an argument has no textual form.

    >>> command_line("evaluate", EvaluateOptions(model="runs/wat", data="cifar10", attacks="fast", eps="8/255"))
    'classwise evaluate --model runs/wat --data cifar10 --attack fast --eps 8/255'
    """
    words, arguments, textual = ["classwise", command], [], True
    for one in options_of(type(options)):
        value = getattr(options, one.name)
        if not one.about.recorded or not (one.required or one.several or value != one.default):
            continue
        values = list(value) if one.several and isinstance(value, list | tuple) else [value]
        textual = textual and all(isinstance(part, str | Path | int | float) for part in values)
        for part in values:
            words += [*one.flags[:1], *([] if part is True else [str(part)])]
        shown = [_shown(one.name.removesuffix("s") if one.several else one.name, part) for part in values]
        text = f"[{', '.join(shown)}]" if one.several else shown[0]
        arguments.append(text if one.required else f"{one.name}={text}")
    return shlex.join(words) if textual else f"classwise.{command}({', '.join(arguments)})"


def _shown(name: str, value: Any) -> str:
    """A value in Python, or the name of a variable that holds it."""
    if isinstance(value, int | float):
        return str(value)
    return repr(str(value)) if isinstance(value, str | Path) else name
