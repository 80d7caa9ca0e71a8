"""An exponential moving average of weights and batch-norm statistics."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, tied ones once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


class WeightAverage:
    """w_avg ← d · w_avg + (1 - d) · w after every step, where d grows to ``decay`` as min(decay, t / (t + 9)).

    Without the growth the average consists of the random initial weights for the first epochs, its class statistics
    are noise, and a policy that adds them up for good never recovers from them.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.updates = decay, 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the present weights; counters are copied."""
        share = 1 - min(self.decay, self.updates / (self.updates + 9))
        self.updates += 1
        pairs = list(zip(_tensors(self.model), _tensors(model), strict=True))
        smooth = [(average, current) for (_, average), (_, current) in pairs if average.is_floating_point()]
        torch._foreach_lerp_([average for average, _ in smooth], [current for _, current in smooth], share)
        for (_, average), (_, current) in pairs:
            if not average.is_floating_point():
                average.copy_(current)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""
        self.model.load_state_dict(state["model"])
        self.updates = state["updates"]
