"""Early stopping: no improvement, or catastrophic overfitting."""

from __future__ import annotations

import warnings

from classwise.core.types import ClassStats
from classwise.training.overfitting import MAX_STEP_FACTOR, robust_share
from classwise.training.state import TrainingState


def check_stopping(state: TrainingState, val: ClassStats) -> None:
    """Apply patience and the guard after an epoch: set ``state.ended``, or go back to the most robust epoch."""
    plan = state.plan
    assert state.best is not None
    if plan.patience is not None and state.epoch - state.best[0] >= plan.patience:
        state.ended = f"no improvement (patience = {plan.patience})"
    if plan.guard is None:
        return
    robust = robust_share(val)
    if not plan.guard.collapsed(robust, state.best_robust):
        if robust > state.best_robust:
            state.best_robust = robust
            if plan.guard.action == "back":
                state.save_most_robust()
        return
    before = 100 * state.best_robust
    collapse = f"catastrophic overfitting in epoch {state.epoch}: robust accuracy fell from {before:.1f}"
    if plan.guard.action == "stop" or state.step_factor >= MAX_STEP_FACTOR:
        state.ended, reaction = collapse, "training stops"
    else:
        state.restore_most_robust()
        state.increase_attack_steps(2)
        reaction = f"training goes back to the most robust epoch, with {state.step_factor} times the attack steps"
    if plan.group.is_main:
        warnings.warn(f"{collapse} to {100 * robust:.1f}; {reaction}", stacklevel=2)
