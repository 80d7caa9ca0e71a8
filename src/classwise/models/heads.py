"""The last linear layer of a model, its features, and class biases added to the logits."""

# B batch, K classes, D features

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from classwise.core.errors import InputError
from classwise.core.model_calls import device_of, dtype_of, frozen, logits_of

_ROUNDING = 1e-4
"""The relative tolerance of logits."""
_HEAD_ROUNDING = 1e-3
"""The relative tolerance between logits and outputs of the last layer."""


def head_of(model: nn.Module, x: Tensor) -> tuple[str, nn.Linear] | None:
    """Return name and module of the last linear layer that is called on ``x``, if it has one output for each logit."""
    called: list[str] = []
    names = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    hooks = [module.register_forward_hook(lambda own, *_: called.append(names[own])) for module in names]
    try:
        with torch.no_grad(), frozen(model):
            logits = logits_of(model(x[:1].to(device_of(model))))
    finally:
        for hook in hooks:
            hook.remove()
    head = model.get_submodule(called[-1]) if called else None
    if not isinstance(head, nn.Linear) or head.out_features != logits.shape[1]:
        return None
    return called[-1], head


def plain_head(model: nn.Module, x: Tensor) -> nn.Linear:
    """Return the last linear layer of a model, whose outputs on ``x`` must be the logits.

    Raises ``InputError`` if there is none, or if it is not a plain ``nn.Linear``.
    """
    x = x[:1].to(device_of(model), dtype_of(model))
    found = head_of(model, x)
    if found is None:
        raise InputError(
            "the model has no last linear layer with one output for each class, which this repair method needs: "
            "use bias or finetune"
        )
    name, head = found
    if type(head) is not nn.Linear or not isinstance(head.weight, nn.Parameter):
        raise InputError(
            f"the last layer {name} is a {type(head).__name__}; this repair method needs a plain linear layer: "
            "use bias or finetune"
        )
    features, logits = features_of(model, head, x)
    if features.dim() != 2 or not _close(
        F.linear(features, head.weight, head.bias).to(logits.dtype), logits, _HEAD_ROUNDING
    ):
        raise InputError(
            f"the logits of the model differ from the outputs of its last linear layer {name}, which this repair "
            "method changes: use bias or finetune"
        )
    return head


def features_of(model: nn.Module, head: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs of the last layer (B, D) and the logits (B, K), in evaluation mode without gradients."""
    received: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, given: received.append(given[0]))
    try:
        with torch.no_grad(), frozen(model):
            logits = logits_of(model(x.to(dtype_of(model))))
    finally:
        hook.remove()
    return received[-1].detach(), logits


class Biased(nn.Module):
    """A model with a constant added to each logit; its names in the state dict get the prefix ``model.``."""

    class_bias: Tensor
    """(K,)"""

    def __init__(self, model: nn.Module, class_bias: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("class_bias", class_bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return logits_of(self.model(x)) + self.class_bias


def with_biases(model: nn.Module, biases: Tensor, x: Tensor) -> tuple[nn.Module, str | None]:
    """Return a copy of the model with ``biases`` (K,) added to its logits, and the name of the changed layer.

    The biases are added to those of the last linear layer. If there is none, or the logits of ``x`` do not change by
    the biases, the copy is wrapped in a ``Biased`` and the name is None.
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
    """Whether the logits of the two models differ by exactly the biases."""
    with torch.no_grad(), frozen(model), frozen(changed):
        expected, found = logits_of(model(x)) + biases, logits_of(changed(x))
    return _close(found, expected, _ROUNDING)


def _close(found: Tensor, expected: Tensor, rounding: float) -> bool:
    return bool((found - expected).abs().max() <= rounding * (1 + expected.abs().max()))
