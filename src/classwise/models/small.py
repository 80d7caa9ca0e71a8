"""Small networks for small images: that of the demo, and the MNIST network of TRADES.

``SmallCNN`` is the network of Zhang et al., Theoretically Principled Trade-off between Robustness and
Accuracy (ICML 2019), with the state-dict names of its code.
"""

# B batch, K classes

from __future__ import annotations

from collections import OrderedDict
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from classwise.models.settings import Count, Probability, architecture


class DigitsCNN(nn.Module):
    """The network of the demo, for 8x8 images: three convolutions, a linear head and about 26,000 parameters.

    It has no batch norm, so that training and evaluation mode are the same function.
    """

    def __init__(self, *, num_classes: Count = 10, in_channels: Count = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.linear = nn.Linear(64 * 2 * 2, num_classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, 8, 8) -> (B, K)
        out = F.relu(self.conv1(x))
        out = F.relu(self.conv2(out))
        out = F.relu(self.conv3(out))
        return cast(Tensor, self.linear(out.flatten(1)))


class SmallCNN(nn.Module):
    """The MNIST network of TRADES, for 28x28 images: four convolutions and three linear layers.

    The last layer is initialized to zero, as in the original: the logits of an untrained network are equal, and the
    gradient at the image is zero before the first training step.
    """

    def __init__(self, *, num_classes: Count = 10, in_channels: Count = 1, dropout: Probability = 0.5) -> None:
        super().__init__()
        self.feature_extractor = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(in_channels, 32, 3),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(32, 32, 3),
                relu2=nn.ReLU(),
                maxpool1=nn.MaxPool2d(2),
                conv3=nn.Conv2d(32, 64, 3),
                relu3=nn.ReLU(),
                conv4=nn.Conv2d(64, 64, 3),
                relu4=nn.ReLU(),
                maxpool2=nn.MaxPool2d(2),
            )
        )
        last = nn.Linear(200, num_classes)
        self.classifier = nn.Sequential(
            OrderedDict(
                fc1=nn.Linear(64 * 4 * 4, 200),
                relu1=nn.ReLU(),
                drop=nn.Dropout(dropout),
                fc2=nn.Linear(200, 200),
                relu2=nn.ReLU(),
                fc3=last,
            )
        )
        for module in self.feature_extractor:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, 28, 28) -> (B, K)
        return cast(Tensor, self.classifier(self.feature_extractor(x).flatten(1)))


digits_cnn = architecture(DigitsCNN)
small_cnn = architecture(SmallCNN)
