"""The random weights a convolutional network begins with."""

from __future__ import annotations

from torch import nn


def he_normal(model: nn.Module) -> None:
    """Draw every convolution from N(0, 2 / fan-in), its bias zero: a ReLU then keeps the size of what it is given.

    He et al., Delving Deep into Rectifiers (ICCV 2015), eq. 10. Torch's own start has a sixth of this variance, and
    what an untrained network of nineteen layers says of its images is then lost among its biases.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
