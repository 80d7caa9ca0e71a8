"""The last linear layer of a model, and class biases added to what it returns."""

# B batch, K classes

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from classwise.forward import device_of, frozen, logits_of

_ROUNDING = 1e-4
"""How far logits may be from the expected ones, relative to their size."""


def head_of(model: nn.Module, x: Tensor) -> tuple[str, nn.Linear] | None:
    """The name and module of the last linear layer that runs on ``x``, if it has one output for each logit."""
    asked: list[str] = []
    names = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    hooks = [module.register_forward_hook(lambda own, *_: asked.append(names[own])) for module in names]
    try:
        with torch.no_grad(), frozen(model):
            logits = logits_of(model(x[:1].to(device_of(model))))
    finally:
        for hook in hooks:
            hook.remove()
    head = model.get_submodule(asked[-1]) if asked else None
    if not isinstance(head, nn.Linear) or head.out_features != logits.shape[1]:
        return None
    return asked[-1], head


class Biased(nn.Module):
    """A model with constants added to its logits; in the state dict its own names get the prefix ``model.``."""

    class_bias: Tensor
    """(K,)"""

    def __init__(self, model: nn.Module, class_bias: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("class_bias", class_bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return logits_of(self.model(x)) + self.class_bias


def with_biases(model: nn.Module, biases: Tensor, x: Tensor) -> tuple[nn.Module, str | None]:
    """A copy of the model whose logits are higher by ``biases`` (K,), and the layer that holds them.

    The biases are added to those of the last linear layer. Where there is no such layer, or its biases are not simply
    added to the logits of ``x``, the copy is wrapped in a ``Biased`` and the layer is None.
    """
    changed = copy.deepcopy(model)
    biases = biases.to(device_of(model))
    found = head_of(changed, x)
    if found is not None and found[1].bias is not None:
        name, head = found
        with torch.no_grad():
            head.bias.add_(biases.to(head.bias.dtype))
        if _adds(model, changed, biases, x):
            return changed, name
        changed = copy.deepcopy(model)
    return Biased(changed, biases.to(torch.float32)), None


def _adds(model: nn.Module, changed: nn.Module, biases: Tensor, x: Tensor) -> bool:
    """Whether the logits of the two differ by the biases and nothing else."""
    x = x.to(device_of(model))
    with torch.no_grad(), frozen(model), frozen(changed):
        expected, found = logits_of(model(x)) + biases, logits_of(changed(x))
    return bool((found - expected).abs().max() <= _ROUNDING * (1 + expected.abs().max()))
