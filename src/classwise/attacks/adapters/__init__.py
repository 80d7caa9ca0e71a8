"""Attacks of other libraries, and plain functions, as attacks of this package."""

from classwise.attacks.adapters.foreign import ForeignAttack, as_attack

__all__ = ["ForeignAttack", "as_attack"]
