"""Studies: runs and their analyses, as one validated TOML file such as ``analyses-digits``.

Imports everything below ``cli``.
"""

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
    """Evaluation settings of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attacks: list[str] = ["pgd"]
    eps: str | float | None = Field(None, description="default: that of the recipe")
    per_class: int | None = Field(None, ge=1)
    margins: bool = Field(False, description="also save the margin matrix, for bias-share")


class StudyRun(BaseModel):
    """A training with its evaluation, or one for each seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: str | None = Field(None, description="default: that of [common]")
    overrides: dict[str, Any] = Field({}, description="added to those of [common]")
    evaluate: Evaluation | None = Field(None, description="default: that of [common]")
    seeds: list[int] | None = Field(None, min_length=1, description="one run NAME-SEED for each")


class Training(BaseModel):
    """One run with all defaults resolved."""

    model_config = ConfigDict(frozen=True)

    recipe: str
    overrides: dict[str, Any]
    evaluate: Evaluation


class StudyAnalysis(BaseModel):
    """An analysis and the runs that it takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    runs: list[str] = Field(min_length=1)
    settings: dict[str, Any] = {}


class Study(BaseModel):
    """Runs, analyses, and a description."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: str
    common: StudyRun = Field(StudyRun(), description="defaults of all runs")
    runs: dict[str, StudyRun] = Field(min_length=1)
    analyses: list[StudyAnalysis] = []

    @property
    def trainings(self) -> dict[str, Training]:
        """All runs by name."""
        return {name: one for run in self.runs for name, one in self.trainings_of(run).items()}

    def trainings_of(self, run: str) -> dict[str, Training]:
        """Return the runs of a name: one, or one for each seed."""
        own, common = self.runs[run], self.common
        recipe = own.recipe or common.recipe
        if recipe is None:
            raise InputError(f"run {run!r} of the study has no recipe, and [common] has none")
        overrides = {**common.overrides, **own.overrides}
        how = own.evaluate or common.evaluate or Evaluation()
        seeds = own.seeds or common.seeds
        each = {run: overrides} if seeds is None else {f"{run}-{seed}": {**overrides, "seed": seed} for seed in seeds}
        return {name: Training(recipe=recipe, overrides=these, evaluate=how) for name, these in each.items()}


def study_names() -> list[str]:
    """Return the names of the built-in studies."""
    return sorted(path.stem for path in Path(str(files(__package__))).glob("*.toml"))


def load_study(study: str | Path) -> Study:
    """Return a built-in study, or one from a file."""
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
        raise InputError(f"study {study} is not valid TOML: {error}") from None
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise InputError(f"study {study}: {where}: {first_line(error)}") from None
    names = Counter(name for run in found.runs for name in found.trainings_of(run))
    if (twice := names.most_common(1)[0])[1] > 1:
        raise InputError(f"study {study}: two runs are called {twice[0]!r}")
    for analysis in found.analyses:
        for name in analysis.runs:
            if name not in found.runs:
                raise unknown(f"run of study {study} for {analysis.kind}:", name, found.runs)
    return found
