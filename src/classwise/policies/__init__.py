"""Policies, the class-wise methods: one paper per file. Each maps class statistics to class controls.

Imports ``core`` and ``config``; never a model, an attack or a loader.
"""

from __future__ import annotations

from collections.abc import Mapping

from classwise.core.types import Policy
from classwise.policies.absld import ABSLD
from classwise.policies.beta_vector import BetaVector
from classwise.policies.cfa import CFA
from classwise.policies.cfol import CFOL
from classwise.policies.chi_square import ChiSquare
from classwise.policies.csl import CSL
from classwise.policies.dafa import DAFA
from classwise.policies.faal import FAAL
from classwise.policies.fair_tat import FairTAT
from classwise.policies.fixed_weights import FixedWeights
from classwise.policies.frl import FRLRemargin, FRLReweight
from classwise.policies.targeted import Targeted
from classwise.policies.uniform import Uniform
from classwise.policies.wat import WAT

POLICIES: Mapping[str, type[Policy]] = {
    "uniform": Uniform,
    "csl": CSL,
    "beta-vector": BetaVector,
    "fixed-weights": FixedWeights,
    "frl-rw": FRLReweight,
    "frl-rwrm": FRLRemargin,
    "wat": WAT,
    "cfa": CFA,
    "dafa": DAFA,
    "cfol": CFOL,
    "faal": FAAL,
    "fair-tat": FairTAT,
    "targeted": Targeted,
    "chi-square": ChiSquare,
    "absld": ABSLD,
}

__all__ = [
    "ABSLD",
    "CFA",
    "CFOL",
    "CSL",
    "DAFA",
    "FAAL",
    "POLICIES",
    "WAT",
    "BetaVector",
    "ChiSquare",
    "FRLRemargin",
    "FRLReweight",
    "FairTAT",
    "FixedWeights",
    "Targeted",
    "Uniform",
]
