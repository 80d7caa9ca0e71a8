"""Attacks: one a file. Each is a frozen dataclass, called as ``attack(model, x, y)``."""

from __future__ import annotations

from collections.abc import Mapping

from classwise.attacks.base import BallAttack
from classwise.attacks.fgsm import FGSM
from classwise.attacks.pgd import PGD
from classwise.attacks.temperature_pgd import TemperaturePGD

ATTACKS: Mapping[str, type[BallAttack]] = {
    "fgsm": FGSM,
    "pgd": PGD,
    "temperature-pgd": TemperaturePGD,
}

__all__ = ["ATTACKS", "FGSM", "PGD", "BallAttack", "TemperaturePGD"]
