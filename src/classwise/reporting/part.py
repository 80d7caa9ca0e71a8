"""What all parts of a report have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """Frozen, written under the names of the JSON contract, with null for what is not a number."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, ser_json_inf_nan="null")
