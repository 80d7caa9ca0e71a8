"""The last linear layer of a model, what it receives, and class biases added to what it returns."""

# B batch, K classes, D features

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, dtype_of, frozen, logits_of

_ROUNDING = 1e-4
"""How far logits may be from the expected ones, relative to their size."""
_HEAD_ROUNDING = 1e-3
"""The same for logits and the outputs of the last layer."""


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


def plain_head(model: nn.Module, x: Tensor) -> nn.Linear:
    """The last linear layer of a model, whose outputs on ``x`` are the logits.

    Raises ``InputError`` where there is none, or where it is not a plain ``nn.Linear``.
    """
    x = x[:1].to(device_of(model), dtype_of(model))
    found = head_of(model, x)
    if found is None:
        raise InputError(
            "the model has no last linear layer with one output for each class, which this repair method changes: "
            "use bias or finetune"
        )
    name, head = found
    if type(head) is not nn.Linear or not isinstance(head.weight, nn.Parameter):
        raise InputError(
            f"the last layer {name} is a {type(head).__name__}, not a plain linear layer, which this repair method "
            "needs: use bias or finetune"
        )
    features, logits = features_of(model, head, x)
    if features.dim() != 2 or not _close(
        F.linear(features, head.weight, head.bias).to(logits.dtype), logits, _HEAD_ROUNDING
    ):
        raise InputError(
            f"the logits of the model are not the outputs of its last linear layer {name}, which this repair method "
            "needs: use bias or finetune"
        )
    return head


def features_of(model: nn.Module, head: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the last layer receives (B, D) and what the model returns (B, K), in evaluation mode without gradients."""
    received: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, given: received.append(given[0]))
    try:
        with torch.no_grad(), frozen(model):
            logits = logits_of(model(x.to(dtype_of(model))))
    finally:
        hook.remove()
    return received[-1].detach(), logits


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
    added to the logits of ``x``, the copy is wrapped in a ``Biased`` and the layer is None. To those of a
    ``Biased`` they are added.
    """
    changed = copy.deepcopy(model)
    biases, x = biases.to(device_of(model)), x.to(device_of(model), dtype_of(model))
    if isinstance(changed, Biased):
        changed.class_bias += biases.to(changed.class_bias.dtype)
        return changed, None
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
    with torch.no_grad(), frozen(model), frozen(changed):
        expected, found = logits_of(model(x)) + biases, logits_of(changed(x))
    return _close(found, expected, _ROUNDING)


def _close(found: Tensor, expected: Tensor, rounding: float) -> bool:
    return bool((found - expected).abs().max() <= rounding * (1 + expected.abs().max()))
