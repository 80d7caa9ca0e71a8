"""Base class of all parts of reports."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from classwise.config.spec import first_line
from classwise.core.errors import InputError
from classwise.storage.files import read_json


class Part(BaseModel):
    """A frozen part of a JSON document; NaN and infinity are written as null."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, ser_json_inf_nan="null")

    @classmethod
    def read(cls, file: Path, what: str, remedy: str = "evaluate the model again") -> Self:
        """Read a JSON file; ``what`` it should contain and the ``remedy`` if it does not are for the error message."""
        try:
            return cls.model_validate(read_json(file))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            problem = f"the key {key!r} is missing" if first["type"] == "missing" else f"{key}: {first_line(error)}"
            raise InputError(f"{file} is not {what}: {problem}; {remedy}") from None
        except InputError as error:
            raise InputError(f"{error}; {remedy}") from None
