"""Base class of all parts of reports."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """A frozen part of a JSON document; NaN and infinity are written as null."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, ser_json_inf_nan="null")
