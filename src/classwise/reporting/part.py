"""Base class of all parts of reports."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from classwise.core.errors import InputError
from classwise.storage.files import read_json


class Part(BaseModel):
    """A frozen part of a JSON document; NaN and infinity are written as null."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, ser_json_inf_nan="null")

    @classmethod
    def read(cls, file: Path, what: str) -> Self:
        """Read a JSON file; ``what``: its content, for the error message."""
        try:
            return cls.model_validate(read_json(file))
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise InputError(f"{file} is not {what}: {where}: {error.errors()[0]['msg']}") from None
