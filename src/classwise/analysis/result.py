"""What an analysis comes to: numbers first, then how they read and look."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import computed_field

from classwise.reporting.figures import Figure
from classwise.reporting.part import Part
from classwise.reporting.tables import Table


class Answer(Part):
    """The answer to one question; its fields are what ``KIND.json`` holds."""

    kind: ClassVar[str]

    @computed_field(alias="schema")  # type: ignore[prop-decorator]
    @property
    def schema_(self) -> str:
        """Which contract the JSON keeps."""
        return f"classwise/analysis-{self.kind}/1"

    def sentences(self) -> list[str]:
        """What was found, in words."""
        raise NotImplementedError

    def tables(self) -> list[Table]:
        """The numbers that are worth reading one by one."""
        return []

    def figures(self) -> list[Figure]:
        """What there is to see."""
        return []

    def rows(self) -> list[dict[str, Any]]:
        """The same numbers as a flat table, for ``KIND.parquet``."""
        return []
