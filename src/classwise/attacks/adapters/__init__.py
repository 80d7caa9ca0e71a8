"""Attacks of other libraries, and plain functions, where an attack is expected."""

from classwise.attacks.adapters.foreign import ForeignAttack, as_attack

__all__ = ["ForeignAttack", "as_attack"]
