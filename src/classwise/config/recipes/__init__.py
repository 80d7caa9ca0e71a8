"""Recipes: training runs as validated TOML files, named by data set and method, as in ``digits/wat``.

An unknown key, a wrong type or an invalid value raises a one-line error with the key, the value and what is accepted.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from classwise.config.plugins import is_attribute_spec
from classwise.config.spec import Number, Spec, first_line
from classwise.core.choices import EngineName, Norm, RepairRule, Rule
from classwise.core.errors import InputError, unknown

SPECS = ("model", "objective", "policy", "validation_attack", "optimizer", "schedule")
"""Keys whose value is a spec: a name, ``name:key=value``, or a table with a name."""

Table = dict[str, Any]


class Augment(BaseModel):
    """Random augmentations of training images."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    crop: int = Field(0, ge=0, description="pixels of zero padding before a random crop to the original size")
    flip: bool = Field(False, description="mirror each image with probability 1/2")
    part: Number | None = Field(
        None, gt=0, le=1, description="instead of crop: random crops of at least this fraction of the image area"
    )
    size: int | None = Field(
        None, ge=1, description="side in pixels that random crops are resized to, and of center crops in validation"
    )


class DataChoice(BaseModel):
    """Training data. Text alone is the name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="data set name or spec")
    per_class: int | None = Field(None, ge=1, description="number of random training images of each class")
    without_class: str | int | None = Field(
        None, description="class to leave out, by name or label; labels do not change"
    )
    extra: str | None = Field(None, description="data spec of additional images, half of every batch")
    labeler: str | None = Field(None, description="model spec; its predictions are the labels of the extra images")


class PhaseChoice(BaseModel):
    """Consecutive epochs with their own settings; unset ones are those of the recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: int = Field(ge=1)
    data: str | None = Field(None, description="the same data set at another size, e.g. imagenet:resize=160,crop=160")
    batch_size: int | None = Field(None, ge=1)
    crop: int | None = Field(None, ge=0, description="as in augment")
    size: int | None = Field(None, ge=1, description="as in augment")


class RepairChoice(BaseModel):
    """A repair after training, fitted to the validation images."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    floor: float | None = Field(None, ge=1, lt=100, description="minimum robust accuracy of the worst class in percent")
    rule: RepairRule | None = Field(None, description="selection without a floor; default rho")
    method: str = Field("bias", description="repair method spec")


class Recipe(BaseModel):
    """Complete description of one training run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field("unnamed", description="name of the run")
    data: DataChoice = Field(description='data set name, e.g. data = "digits"')
    model: Table = Field(description="architecture name, or FILE.py:FACTORY")
    objective: Table = Field(description="training objective")
    policy: Table = Field({"name": "uniform"}, description="class-wise method")
    norm: Norm = "Linf"
    eps: str = Field("8/255", description="radius of the training attack")
    attack: Table = Field({}, description="settings of the training attack, e.g. steps or step_size")
    validation_attack: Table = Field(
        {"name": "pgd", "steps": 10}, description="attack that measures validation accuracy"
    )
    epochs: int = Field(ge=1, description="number of passes over the training images")
    batch_size: int = Field(128, ge=1)
    phases: list[PhaseChoice] = Field([], description="consecutive epochs with images of different sizes")
    start: str | None = Field(None, description="run directory or weights file of the initial weights")
    optimizer: Table = {"name": "sgd"}
    schedule: Table = {"name": "constant"}
    augment: Augment = Augment()
    validation_per_class: int = Field(ge=0, description="training images per class held out for validation")
    ema: Number = Field(
        0.0, ge=0, lt=1, description="decay of the exponential moving average of the weights, reached gradually; 0: off"
    )
    fawa: Table | None = Field(
        None, description="instead of ema: fairness-aware weight averaging of epochs whose worst class reaches a limit"
    )
    awp: Table | None = Field(None, description="adversarial weight perturbation")
    clip: Number | None = Field(None, gt=0, description="maximum gradient norm")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto: bf16 on a GPU, unless engine is eager"
    )
    engine: EngineName = Field("auto", description="auto: compiled on a GPU, else eager")
    select: Rule = Field("robust+worst", description="rule that selects the best epoch on validation images")
    patience: int | None = Field(None, ge=1, description="stop after this many epochs without improvement")
    guard: Table | None = Field(None, description="response to catastrophic overfitting")
    repair: RepairChoice | None = Field(None, description="repair of the best epoch, saved in the directory repaired")
    seed: int = Field(0, ge=0, lt=2**63)

    @field_validator(*SPECS, mode="before")
    @classmethod
    def _spec(cls, given: Any, info: ValidationInfo) -> Any:
        if info.field_name == "model" and isinstance(given, str) and is_attribute_spec(given):
            return {"name": given}
        return _table(given)

    @field_validator("data", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @field_validator("phases")
    @classmethod
    def _whole(cls, given: list[PhaseChoice], info: ValidationInfo) -> list[PhaseChoice]:
        total, epochs = sum(phase.epochs for phase in given), info.data.get("epochs")  # validated before phases
        if given and epochs is not None and total != epochs:
            raise ValueError(f"the phases have {total} epochs in total, the recipe has {epochs}")
        return given

    @property
    def data_at_the_end(self) -> str:
        """The data spec of the last phase, at the image size of later evaluations."""
        last = self.phases[-1] if self.phases else PhaseChoice(epochs=self.epochs)
        name, size = last.data or self.data.name, last.size or self.augment.size
        if size is None or is_attribute_spec(name):
            return name
        spec = Spec.parse(name)
        return str(Spec(spec.name, {**spec.options, "crop": size})) if "crop" in spec.options else name

    @field_validator("eps", mode="before")
    @classmethod
    def _radius(cls, given: Any, info: ValidationInfo) -> str:
        from classwise.core.threat import Threat  # imports torch, which listing recipes does not need

        return Threat.parse(given, info.data.get("norm", "Linf")).text  # norm is validated before eps


def load_recipe(recipe: str | Path | Recipe, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Load a recipe by name or from a file, or copy one, and override single keys, as ``objective.beta``."""
    if isinstance(recipe, Recipe):
        content, origin = recipe.model_dump(), f"recipe {recipe.name!r}"
    elif not isinstance(recipe, str | Path):
        raise InputError(
            f"recipe has type {type(recipe).__name__}; expected a recipe name, the path of a .toml file or a Recipe"
        )
    else:
        path = _find(recipe)
        content, origin = _read(path), f"recipe {recipe}"
        content.setdefault("name", str(recipe) if not Path(recipe).exists() else path.stem)
    for key, value in (overrides or {}).items():
        _override(content, key, value)
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{origin}: {_explain(error)}") from None


def recipe_names() -> list[str]:
    """Return the names of the recipes of the package."""
    root = Path(str(files(__package__)))
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.toml"))


def recipe_header(name: str) -> str:
    """Return the first comment line of a recipe, its title."""
    return _find(name).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def parse_overrides(items: list[str]) -> dict[str, Any]:
    """Parse overrides of a command line; values are TOML if they parse as such, else text.

    >>> parse_overrides(["seed=3", "policy=wat:eta=0.05", "augment.flip=true"])
    {'seed': 3, 'policy': 'wat:eta=0.05', 'augment.flip': True}
    """
    overrides: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise InputError(f"override {item!r}: expected key=value, e.g. seed=1")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        overrides[key.strip()] = value
    return overrides


def _find(recipe: str | Path) -> Path:
    given = Path(recipe)
    if given.suffix == ".toml":
        if not given.is_file():
            raise InputError(f"no such recipe file: {given}")
        return given
    if str(recipe) not in recipe_names():
        close = difflib.get_close_matches(str(recipe), recipe_names(), n=1, cutoff=0.5)
        hint = f": did you mean {close[0]!r}? See" if close else "; see"
        raise InputError(f"unknown recipe {str(recipe)!r}{hint} classwise list recipes, or pass a .toml file")
    return Path(str(files(__package__))) / f"{recipe}.toml"


def _read(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not readable TOML: {error}") from None


def _table(given: Any) -> Table:
    spec = Spec.parse(given)
    return {"name": spec.name, **spec.options}


def _override(content: Table, key: str, value: Any) -> None:
    first, *rest = key.split(".")
    if not rest:
        content[first] = value
        return
    inner = content.get(first, {})
    if first in SPECS and not inner and not Recipe.model_fields[first].is_required():
        inner = Recipe.model_fields[first].default
    # A spec as text becomes a table before one of its settings is changed.
    inner = _table(inner) if first in SPECS and inner else inner
    inner = {"name": inner} if first == "data" and isinstance(inner, str) else inner
    inner = {} if inner is None else inner
    if not isinstance(inner, Mapping) or len(rest) > 1:
        raise InputError(f"cannot override {key!r}: {first!r} has no setting {'.'.join(rest)!r}")
    content[first] = {**inner, rest[0]: value}


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    tables: dict[str, type[BaseModel]] = {
        "augment": Augment,
        "data": DataChoice,
        "phases": PhaseChoice,
        "repair": RepairChoice,
    }
    known = (Recipe if len(first["loc"]) == 1 else tables.get(str(first["loc"][0]), Recipe)).model_fields
    if first["type"] == "extra_forbidden":
        return str(unknown("key", str(first["loc"][-1]), known))
    if first["type"] == "missing":
        description = known[str(first["loc"][-1])].description
        return f"the key {key!r} is required{f' ({description})' if description else ''}"
    message = first_line(error)
    return message if message.startswith(f"{key} ") else f"{key} = {first['input']!r:.80}: {message}"


def repaired_recipe(trained: Mapping[str, Any], method: str, choice: str | None) -> dict[str, Any]:
    """Return the recipe of a repaired model: that of the original, with the repair."""
    name = {"name": f"{trained['name']} + {method} repair"} if "name" in trained else {}
    return {**trained, **name, "repaired": {"name": method, "choice": choice}}
