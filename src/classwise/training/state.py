"""The state of a training between epochs, and its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from classwise.core.errors import InputError, one_line
from classwise.core.types import ClassControls
from classwise.storage.files import write_json
from classwise.storage.run_directory import RunDirectory
from classwise.training.checkpoint import load_state, save_state, save_weights
from classwise.training.data import phase_at
from classwise.training.history import Record, write_history
from classwise.training.plan import Plan, make_batches, make_engine


class TrainingState:
    """Everything that training changes. The main process writes it to the run directory after every epoch."""

    def __init__(self, plan: Plan, directory: RunDirectory) -> None:
        self.plan, self.directory = plan, directory
        self.data_generator = torch.Generator().manual_seed(plan.seed)
        self.attack_generator = torch.Generator(plan.device).manual_seed(plan.seed)
        self.phase = 0
        self.batches = make_batches(plan, self.data_generator)
        self.engine = make_engine(plan, plan.model.to(plan.device))
        self.controls = plan.policy.start(plan.task).to(plan.device)
        self.epoch = 0
        """Number of finished epochs."""
        self.history: list[Record] = []
        self.best: tuple[int, float] | None = None
        """The best epoch, counted from 1, and its score."""
        self.ended: str | None = None
        """Why training ended early."""
        self.best_robust = 0.0
        """The best robust accuracy on validation so far, for the guard."""
        self.step_factor = 1
        """Factor by which the guard has multiplied the recipe's number of attack steps."""

    @property
    def last(self) -> Path:
        """The checkpoint of the last finished epoch."""
        return self.directory.checkpoints / "last.pt"

    @property
    def most_robust(self) -> Path:
        """The checkpoint to which the guard goes back."""
        return self.directory.checkpoints / "sound.pt"

    def start(self, *, resume: bool) -> None:
        """Record the validation split of a new run, or load the last checkpoint."""
        if resume and self.last.exists():
            self.load()
        elif self.plan.group.is_main:
            indices = self.plan.validation.tolist()
            write_json(self.directory.validation, {"seed": self.plan.seed, "indices": indices})

    def enter_epoch(self) -> None:
        """Prepare batches, engine and objective for the next epoch."""
        phase = phase_at(self.plan.phases, self.epoch)
        if phase != self.phase:
            self.phase = phase
            self.batches = make_batches(self.plan, self.data_generator, phase)
            self.engine.reset()
        awp = self.plan.awp if self.plan.awp is not None and self.epoch + 1 >= self.plan.awp.begin else None
        if awp is not self.engine.awp:
            self.engine.awp = awp
            self.engine.reset()
        self.batches.sampling = self.controls.sampling
        self.plan.objective.on_epoch(self.engine.model, self.epoch + 1)

    def increase_attack_steps(self, factor: int) -> None:
        """Multiply the steps of the training attack."""
        self.step_factor *= factor
        objective: Any = self.engine.objective
        attack = replace(objective.attack, steps=factor * objective.attack.steps, step_size=None)
        self.engine.objective = replace(objective, attack=attack)
        self.engine.reset()

    def save_weights(self, name: str) -> None:
        """Write the weights of the model that the run produces: the averaged one if there is an average."""
        if self.plan.group.is_main:
            save_weights(self.directory.checkpoints / f"{name}.safetensors", self.engine.result)

    def save(self) -> None:
        """Write the checkpoint and metrics.jsonl."""
        if not self.plan.group.is_main:
            return
        random = {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.plan.device) if self.plan.device.type == "cuda" else None,
            "data": self.data_generator.get_state(),
            "attack": self.attack_generator.get_state(),
        }
        state = {
            **self._learned(),
            "epoch": self.epoch,
            "best": self.best,
            "guard": {"best_robust": self.best_robust, "step_factor": self.step_factor, "ended": self.ended},
            "history": self.history,
            "random": random,
        }
        save_state(self.last, state)
        write_history(self.directory.metrics, self.history)

    def load(self) -> None:
        """Continue from the last checkpoint."""
        state = load_state(self.last)
        try:
            self._restore(state)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"{self.last} does not match this run: {one_line(error, 120)}") from error
        if self.plan.group.is_main:
            write_history(self.directory.metrics, self.history)

    def _restore(self, state: dict[str, Any]) -> None:
        self.epoch, self.best, self.history = state["epoch"], state["best"], state["history"]
        self.best_robust, self.ended = state["guard"]["best_robust"], state["guard"]["ended"]
        if state["guard"]["step_factor"] > 1:
            self.increase_attack_steps(state["guard"]["step_factor"])
        self._restore_learned(state)
        torch.set_rng_state(state["random"]["torch"])
        if self.plan.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"], self.plan.device)
        self.data_generator.set_state(state["random"]["data"])
        self.attack_generator.set_state(state["random"]["attack"])

    def save_most_robust(self) -> None:
        """Write the checkpoint that the guard restores."""
        if self.plan.group.is_main:
            save_state(self.most_robust, self._learned())

    def restore_most_robust(self) -> None:
        """Go back to the weights, average, policy and controls of the most robust epoch."""
        self._restore_learned(load_state(self.most_robust))

    def _learned(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "model": engine.model.state_dict(),
            "optimizer": engine.optimizer.state_dict(),
            "average": None if engine.average is None else engine.average.state_dict(),
            "policy": self.plan.policy.state_dict(),
            "controls": {name: getattr(self.controls, name) for name in ClassControls.__slots__},
        }

    def _restore_learned(self, state: dict[str, Any]) -> None:
        engine = self.engine
        engine.model.load_state_dict(state["model"])
        engine.optimizer.load_state_dict(state["optimizer"])
        if engine.average is not None:
            engine.average.load_state_dict(state["average"])
        self.plan.policy.load_state_dict(state["policy"])
        self.controls = ClassControls(**state["controls"]).to(self.plan.device)
