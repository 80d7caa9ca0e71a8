"""Class-wise adversarial robustness of PyTorch image classifiers: measure it, explain it, train for it.

>>> import classwise as cw
>>> sorted(cw.__all__)[:4]
['ClassReport', 'Comparison', 'InputError', 'analysis']

Names are loaded when first used, so reading a report does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from classwise import analysis, attacks, data, metrics, models, objectives, policies, reporting
    from classwise.api.evaluate import evaluate
    from classwise.api.repair import repair
    from classwise.api.train import train, train_together
    from classwise.config import recipes
    from classwise.core.errors import InputError
    from classwise.reporting import ClassReport, Comparison, compare, load_report

__version__ = "0.1.0"

_HOMES = {
    "evaluate": "classwise.api.evaluate",
    "repair": "classwise.api.repair",
    "train": "classwise.api.train",
    "train_together": "classwise.api.train",
    "compare": "classwise.reporting",
    "load_report": "classwise.reporting",
    "ClassReport": "classwise.reporting",
    "Comparison": "classwise.reporting",
    "InputError": "classwise.core.errors",
}
_PACKAGES = {"recipes": "classwise.config.recipes"}

__all__ = [
    "ClassReport",
    "Comparison",
    "InputError",
    "analysis",
    "attacks",
    "compare",
    "data",
    "evaluate",
    "load_report",
    "metrics",
    "models",
    "objectives",
    "policies",
    "recipes",
    "repair",
    "reporting",
    "train",
    "train_together",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return import_module(_PACKAGES.get(name, f"classwise.{name}"))
    raise AttributeError(f"module 'classwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
