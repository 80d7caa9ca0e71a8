"""Logits and features of a run's model on natural and attacked images.

Verdicts hold predictions and no adversarial images, so attacks are repeated with the radius of the report.
"""

# N examples, K classes, D features

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from classwise.accelerate import release_memory, search_model
from classwise.analysis.run import Run
from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, exact, frozen, logits_of
from classwise.core.progress import SILENT, Progress
from classwise.core.streams import ExampleNoise
from classwise.core.types import Attack
from classwise.data.batches import ordered
from classwise.data.splits import balanced_subset
from classwise.evaluation.perturbations import read_perturbations
from classwise.models.heads import head_of

Floats = NDArray[np.float32]
BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Images and the outputs of a model for them."""

    index: NDArray[np.int64]
    """(N,) positions in the data set."""
    label: NDArray[np.int64]
    x: Tensor
    """(N, C, H, W) on the CPU."""
    logits: Floats
    """(N, K)"""
    features: Floats | None
    """(N, D) input of the last linear layer; None for a model without one."""

    @property
    def predicted(self) -> NDArray[np.int64]:
        """(N,)"""
        return np.asarray(self.logits.argmax(1))

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """(N, K) softmax."""
        return np.asarray(torch.from_numpy(self.logits).double().softmax(1).numpy())


def exact_logits(model: nn.Module, x: Tensor) -> Tensor:
    """Return (N, K) logits in float32 on the CPU, computed without TF32; the model keeps its mode."""
    device = device_of(model)
    with torch.no_grad(), frozen(model), exact(device):
        return logits_of(model(x.to(device))).float().cpu()


def linear_head(run: Run) -> tuple[str, nn.Linear]:
    """Return the name and the module of the last layer; raise ``InputError`` for a model without a linear one."""
    x, _, _ = next(ordered(run.images, [0], 1))
    found = head_of(run.model, x)
    if found is None:
        raise InputError(f"the model of {run.path} has no last linear layer with an output for every class")
    return found


def natural_outputs(run: Run, *, per_class: int | None = None, progress: Progress = SILENT) -> Outputs:
    """Return the outputs on all evaluated natural images, or on the first ``per_class`` of each class."""
    return _outputs(run, per_class, f"{run.name} on natural images", lambda x, *_: x, progress)


def attacked_outputs(
    run: Run, *, attack: str = "pgd", per_class: int | None = None, progress: Progress = SILENT
) -> Outputs:
    """Return the outputs on the same images under an attack; misclassified natural images are attacked too."""
    search = attack_of(run, attack)
    some, _, _ = next(ordered(run.images, selected_examples(run, per_class)[:BATCH], BATCH, device_of(run.model)))
    searched = search_model(run.model, some) if search.uses_optimized_copy else run.model

    def attacked(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        return search(searched, x, y, generator=ExampleNoise(0, rows))

    try:
        return _outputs(run, per_class, f"{attack} on {run.name}", attacked, progress)
    finally:
        release_memory(searched)


def selected_examples(run: Run, per_class: int | None) -> NDArray[np.int64]:
    """Return the positions of all evaluated examples, or of the first ``per_class`` of each class."""
    index = run.verdicts.index
    if per_class is None:
        return index
    if per_class < 1:
        raise InputError(f"per_class = {per_class}; expected at least 1")
    return np.asarray(index[balanced_subset(run.verdicts.label, per_class, run.num_classes)])


def attack_of(run: Run, attack: str) -> Attack:
    """Return an attack with the radius and the norm of the report."""
    threat = run.report.threat
    perturbations = read_perturbations([attack], threat.eps_text, threat.norm)
    if not perturbations.attacks:
        raise InputError(f"{attack!r} is not an attack that searches a ball")
    ((_, found),) = perturbations.attacks.values()
    return found


@contextmanager
def _captured_features(model: nn.Module, x: Tensor) -> Iterator[list[Tensor]]:
    """Collect the inputs of the last linear layer."""
    seen: list[Tensor] = []
    found = head_of(model, x)
    hook = None if found is None else found[1].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        yield seen
    finally:
        if hook is not None:
            hook.remove()


def _outputs(
    run: Run, per_class: int | None, task: str, change: Callable[[Tensor, Tensor, Tensor], Tensor], progress: Progress
) -> Outputs:
    """Return the outputs on changed images; ``change`` takes images, labels and positions."""
    index, model = selected_examples(run, per_class), run.model
    images, logits, features = [], [], []
    progress.start(task, len(index))
    for x, y, rows in ordered(run.images, index, BATCH, device_of(model)):
        changed = change(x, y, rows)
        with torch.no_grad(), frozen(model), _captured_features(model, changed) as seen:
            logits.append(logits_of(model(changed)).float().cpu())
        images.append(changed.cpu())
        features += [seen[-1].flatten(1).float().cpu()] if seen else []
        progress.advance(len(x))
    progress.finish()
    return Outputs(
        index=index,
        label=run.images.labels[index].astype(np.int64),
        x=torch.cat(images),
        logits=torch.cat(logits).numpy(),
        features=torch.cat(features).numpy() if features else None,
    )
