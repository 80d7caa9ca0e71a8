"""Initialization of convolutional networks."""

from __future__ import annotations

from torch import nn


def he_normal(model: nn.Module) -> None:
    """Initialize every convolution from N(0, 2 / fan-in) with zero bias, which preserves the variance through ReLUs.

    He et al., Delving Deep into Rectifiers (ICCV 2015), eq. 10. PyTorch's default has a sixth of this variance, so that
    the logits of an untrained network of 19 layers hardly depend on the image.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
