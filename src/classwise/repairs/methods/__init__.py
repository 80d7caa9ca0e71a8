"""Repair methods, one per file. To add one, write its module and register it in ``METHODS``."""

from __future__ import annotations

from classwise.repairs.methods.base import Case, Method, Repaired
from classwise.repairs.methods.bias import Bias
from classwise.repairs.methods.finetune import Finetune
from classwise.repairs.methods.head_sam import HeadSAM
from classwise.repairs.methods.norms import Norms
from classwise.repairs.methods.retrain import Retrain

METHODS: dict[str, type[Method]] = {
    "bias": Bias,
    "norms": Norms,
    "head-sam": HeadSAM,
    "retrain": Retrain,
    "finetune": Finetune,
}

__all__ = ["METHODS", "Case", "Method", "Repaired"]
