"""Studies: several runs and what is asked of them, as one validated TOML file, named as in ``analyses-digits``."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from classwise.errors import InputError, unknown
from classwise.spec import first_line


class Evaluation(BaseModel):
    """How a run is evaluated."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attacks: list[str] = ["pgd"]
    eps: str | float | None = Field(None, description="the recipe's unless told")
    per_class: int | None = Field(None, ge=1)


class StudyRun(BaseModel):
    """A training and its evaluation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: str
    overrides: dict[str, Any] = {}
    evaluate: Evaluation = Evaluation()


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
    runs: dict[str, StudyRun] = Field(min_length=1)
    analyses: list[Asked] = []


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
    for asked in found.analyses:
        for name in asked.runs:
            if name not in found.runs:
                raise unknown(f"run of study {study}, asked for {asked.kind}:", name, found.runs)
    return found
