"""Studies: several runs and what is asked of them, as one validated TOML file, named as in ``analyses-digits``."""

from __future__ import annotations

import tomllib
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from classwise.config.spec import first_line
from classwise.core.errors import InputError, unknown


class Evaluation(BaseModel):
    """How a run is evaluated."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attacks: list[str] = ["pgd"]
    eps: str | float | None = Field(None, description="the recipe's unless told")
    per_class: int | None = Field(None, ge=1)
    margins: bool = Field(False, description="also save the margin matrix, for bias-share")


class StudyRun(BaseModel):
    """A training and its evaluation, or one of each seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: str | None = Field(None, description="that of [common] unless told")
    overrides: dict[str, Any] = Field({}, description="added to those of [common]")
    evaluate: Evaluation | None = Field(None, description="that of [common] unless told")
    seeds: list[int] | None = Field(None, min_length=1, description="a run of each, called NAME-SEED")


class Training(BaseModel):
    """One run, with nothing left open."""

    model_config = ConfigDict(frozen=True)

    recipe: str
    overrides: dict[str, Any]
    evaluate: Evaluation


class Asked(BaseModel):
    """A question and whom it is asked of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    runs: list[str] = Field(min_length=1)
    settings: dict[str, Any] = {}


class Study(BaseModel):
    """Runs, questions, and a sentence on what it is all for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: str
    common: StudyRun = Field(StudyRun(), description="what runs have in common")
    runs: dict[str, StudyRun] = Field(min_length=1)
    analyses: list[Asked] = []

    @property
    def trainings(self) -> dict[str, Training]:
        """Every run by its name."""
        return {name: one for run in self.runs for name, one in self.trainings_of(run).items()}

    def trainings_of(self, run: str) -> dict[str, Training]:
        """The runs that a name stands for: one, or one of each seed."""
        own, common = self.runs[run], self.common
        recipe = own.recipe or common.recipe
        if recipe is None:
            raise InputError(f"run {run!r} of the study names no recipe, and neither does common")
        overrides = {**common.overrides, **own.overrides}
        how = own.evaluate or common.evaluate or Evaluation()
        seeds = own.seeds or common.seeds
        each = {run: overrides} if seeds is None else {f"{run}-{seed}": {**overrides, "seed": seed} for seed in seeds}
        return {name: Training(recipe=recipe, overrides=these, evaluate=how) for name, these in each.items()}


def study_names() -> list[str]:
    """The studies that come with the package."""
    return sorted(path.stem for path in Path(str(files(__package__))).glob("*.toml"))


def load_study(study: str | Path) -> Study:
    """A study by its name, or from a file."""
    path = Path(study)
    if path.suffix != ".toml":
        if str(study) not in study_names():
            raise unknown("study", str(study), study_names())
        path = Path(str(files(__package__))) / f"{study}.toml"
    try:
        found = Study.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"study {study} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"study {study} is no TOML: {error}") from None
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise InputError(f"study {study}: {where}: {first_line(error)}") from None
    names = Counter(name for run in found.runs for name in found.trainings_of(run))
    if (twice := names.most_common(1)[0])[1] > 1:
        raise InputError(f"study {study}: two runs are called {twice[0]!r}")
    for asked in found.analyses:
        for name in asked.runs:
            if name not in found.runs:
                raise unknown(f"run of study {study}, asked for {asked.kind}:", name, found.runs)
    return found
