"""Attacks: one per file. Each is a frozen dataclass, called as ``attack(model, x, y)``.

Imports ``core``, ``config`` and ``storage``.
"""

from __future__ import annotations

from collections.abc import Mapping

from classwise.attacks.apgd import APGD
from classwise.attacks.autoattack import AutoAttack
from classwise.attacks.base import BallAttack
from classwise.attacks.cosine_pgd import CosinePGD
from classwise.attacks.cw_l2 import CWL2
from classwise.attacks.cw_linf import CWLinf
from classwise.attacks.cw_pgd import CWPGD
from classwise.attacks.fab import FAB
from classwise.attacks.fast import Fast
from classwise.attacks.fgsm import FGSM
from classwise.attacks.nattack import NAttack
from classwise.attacks.nes import NES
from classwise.attacks.pgd import PGD
from classwise.attacks.spsa import SPSA
from classwise.attacks.square import Square
from classwise.attacks.temperature_pgd import TemperaturePGD
from classwise.attacks.transfer import Transfer

ATTACKS: Mapping[str, type[BallAttack]] = {
    "apgd": APGD,
    "autoattack": AutoAttack,
    "cosine-pgd": CosinePGD,
    "cw-l2": CWL2,
    "cw-linf": CWLinf,
    "cw-pgd": CWPGD,
    "fab": FAB,
    "fast": Fast,
    "fgsm": FGSM,
    "nattack": NAttack,
    "nes": NES,
    "pgd": PGD,
    "spsa": SPSA,
    "square": Square,
    "temperature-pgd": TemperaturePGD,
    "transfer": Transfer,
}

__all__ = [
    "APGD",
    "ATTACKS",
    "CWL2",
    "CWPGD",
    "FAB",
    "FGSM",
    "NES",
    "PGD",
    "SPSA",
    "AutoAttack",
    "BallAttack",
    "CWLinf",
    "CosinePGD",
    "Fast",
    "NAttack",
    "Square",
    "TemperaturePGD",
    "Transfer",
]
