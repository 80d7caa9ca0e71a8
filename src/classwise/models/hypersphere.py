"""The head of hypersphere embedding (Pang et al., NeurIPS 2020): logits s · cos θ.

θ_k is the angle between the features and the weights of class k. Every architecture has it as ``head=hypersphere``.
"""

# B batch, K classes, D features

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from classwise.core.errors import InputError


class HypersphereHead(nn.Linear):
    """``scale`` times the cosines between features and weight rows, with gradients through both normalizations.

    The scale is a buffer: it is saved and averaged with the weights and can be changed, but is not trained. The forward
    pass is in float32 or higher precision, because bfloat16 resolves cosines near one only to 0.004.
    """

    scale: Tensor

    def __init__(self, in_features: int, num_classes: int, scale: float = 15.0) -> None:
        super().__init__(in_features, num_classes, bias=False)
        if not scale > 0:
            raise InputError(f"scale = {scale}; expected a positive number")
        self.register_buffer("scale", torch.tensor(float(scale)))

    def forward(self, features: Tensor) -> Tensor:  # (B, D) -> (B, K)
        with torch.autocast(features.device.type, enabled=False):
            features = features.to(self.weight.dtype)
            return self.scale * F.linear(F.normalize(features, dim=1), F.normalize(self.weight, dim=1))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={float(self.scale):g}"


def with_hypersphere(model: nn.Module, scale: float = 15.0) -> nn.Module:
    """Replace the last linear layer of a model in place and return the model.

    The weights are initialized again, because some architectures start with zeros, which have no direction.
    """
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear or not linear[-1][0]:
        raise InputError("the model has no last linear layer; head=hypersphere replaces it")
    name, last = linear[-1]
    parent, _, leaf = name.rpartition(".")
    head = HypersphereHead(last.in_features, last.out_features, scale).to(last.weight)
    setattr(model.get_submodule(parent), leaf, head)
    return model
