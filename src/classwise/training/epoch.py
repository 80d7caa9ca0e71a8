"""One epoch: training steps, validation, class controls for the next epoch, selection, checkpoint."""

# B batch, K classes

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Iterator
from dataclasses import replace

import torch
from torch import nn

from classwise.core.errors import Diverged
from classwise.core.model_calls import frozen, logits_of
from classwise.core.streams import ExampleNoise, PartNoise, Randomness
from classwise.core.types import ClassControls, ClassStats
from classwise.data import ordered, share_of
from classwise.training.history import controls_record, stats_record
from classwise.training.selection import MAX_STEP_FACTOR, score
from classwise.training.state import TrainingState

CHECK_EVERY = 50
"""Steps between checks of the loss; each check waits for the device."""
DIVERGED = 10.0
"""Training has diverged if the loss is larger than this multiple of the first epoch's."""


def run_epoch(state: TrainingState) -> Iterator[None]:
    """Run one epoch; yields after every training step."""
    plan, engine = state.plan, state.engine
    began, warmup_before = time.perf_counter(), engine.warmup
    state.enter_epoch()
    controls = state.controls
    train, loss, rate = yield from train_epoch(state)
    state.epoch += 1
    if engine.average is not None:
        # Only a gated average needs validation statistics of the trained model itself.
        engine.average.on_epoch(engine.model, validate(state, engine.model) if engine.average.gated else train)
    val = validate(state, engine.result)
    following = plan.policy.on_epoch_end(train, val, state.epoch)
    if following is not None:
        state.controls = following.to(plan.device)
    value = score(plan.select, val)
    best = state.best is None or value > state.best[1] or plan.select == "last"
    warmup = engine.warmup - warmup_before
    state.history.append(
        {
            "epoch": state.epoch,
            "phase": state.phase + 1,
            "lr": rate,
            "loss": loss,
            "train": stats_record(train),
            "validation": stats_record(val),
            "controls": controls_record(controls),
            "score": value,
            "best": best,
            "seconds": round(time.perf_counter() - began - warmup, 3),
            "warmup": round(warmup, 3),
        }
    )
    if best:
        state.best = (state.epoch, value)
        state.save_weights("best")
    check_stopping(state, val)
    state.save()


def train_epoch(state: TrainingState) -> Generator[None, None, tuple[ClassStats, float, float]]:
    """Train on all batches; returns statistics in training mode, mean loss and last learning rate."""
    plan, engine = state.plan, state.engine
    stats = ClassStats.zeros(plan.num_classes, plan.device)
    total = torch.zeros((), dtype=torch.float64, device=plan.device)
    rate = 0.0
    for number, (x, y, _) in enumerate(state.batches):
        rate = plan.optimizer.lr * plan.schedule(state.epoch + number / len(state.batches), plan.epochs)
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        batch, loss = engine.step(x, y, state.controls, _attack_noise(state, number, len(y)))
        stats += batch
        total += loss
        if number % CHECK_EVERY == 0:
            _check_loss(state, float(loss))
        yield
    mean = float(total) / len(state.batches)
    _check_loss(state, mean)
    return plan.group.sum_stats(stats), mean, rate


def _attack_noise(state: TrainingState, number: int, count: int) -> Randomness:
    """Return the noise of a batch. Each of several processes draws it for the whole batch and keeps its share."""
    if state.plan.group.size == 1:
        return state.attack_generator
    start, whole = state.batches.share_position(number)
    return PartNoise(state.attack_generator, torch.arange(start, start + count, device=state.plan.device), whole)


def _check_loss(state: TrainingState, loss: float) -> None:
    """Stop a diverged run before it overwrites its last good checkpoint."""
    first = state.history[0]["loss"] if state.history else float("inf")
    if loss <= DIVERGED * max(first, 1.0):
        return
    kept = f"the last good checkpoint is {state.last} (epoch {state.epoch})" if state.epoch else "no epoch was finished"
    raise Diverged(f"training diverged in epoch {state.epoch + 1} (loss {loss:.4g}); {kept}")


def validate(state: TrainingState, model: nn.Module) -> ClassStats:
    """Compute statistics of a model on the validation split, with the same noise in every epoch.

    Losses are the objective's, as policies need them; robust accuracy is under the validation attack, in float32.
    """
    plan, phase, searched = state.plan, state.plan.phases[state.phase], state.engine.searched(model)
    stats = ClassStats.zeros(plan.num_classes, plan.device)
    indices = plan.validation[share_of(len(plan.validation), plan.group.share)]
    uniform = ClassControls.uniform(plan.num_classes).to(plan.device)
    with torch.no_grad(), frozen(model), frozen(searched):
        for x, y, index in ordered(phase.images, indices, phase.batch_size, plan.device, size=phase.size):
            terms = state.engine.objective(searched, x, y, uniform, generator=ExampleNoise(plan.seed, index))
            x_adv = plan.validation_attack(searched, x, y, generator=ExampleNoise(plan.seed + 1, index))
            logits_nat, logits_adv = logits_of(model(x)), logits_of(model(x_adv))
            stats += ClassStats.of(replace(terms, logits_nat=logits_nat, logits_adv=logits_adv), y, plan.num_classes)
    return plan.group.sum_stats(stats)


def check_stopping(state: TrainingState, val: ClassStats) -> None:
    """Apply patience and the guard after an epoch: set ``state.ended``, or go back to the most robust epoch."""
    plan = state.plan
    assert state.best is not None
    if plan.patience is not None and state.epoch - state.best[0] >= plan.patience:
        state.ended = f"no improvement (patience = {plan.patience})"
    if plan.guard is None:
        return
    robust = score("robust", val)
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
