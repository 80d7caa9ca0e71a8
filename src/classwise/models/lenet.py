"""LeNet-5 with ReLUs, for images of 28 and 32 pixels.

LeCun et al., Gradient-Based Learning Applied to Document Recognition (Proc. IEEE 1998), figure 2: C1, S2, C3, S4, C5,
F6. State-dict names as in the widely used CIFAR code: ``conv1, conv2, fc1, fc2, fc3``.

61,706 parameters for one channel and ten classes, 62,006 for three channels, the usual counts of its modern form.

Deviations: ReLU instead of the scaled tanh, max-pooling instead of trainable subsampling, every map of C3 connected to
all six maps of S2, and a linear head with cross-entropy instead of radial basis functions. As in the paper, images of
28 pixels are padded to 32, here by zeros; for larger images, S4 takes the maxima of 5x5 regions.
"""

# B batch, K classes, C channels

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from classwise.models.settings import Count, architecture

FIELD = 32
"""The height and width to which smaller images are padded."""


class LeNet(nn.Module):
    """LeNet-5 with ReLUs: convolutions of 5x5 with 6 and 16 planes, then linear layers with 120 and 84 units."""

    def __init__(self, *, num_classes: Count = 10, in_channels: Count = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, K)
        above, left = (max(0, FIELD - size) for size in x.shape[2:])
        x = F.pad(x, (left // 2, left - left // 2, above // 2, above - above // 2))
        out = F.max_pool2d(F.relu(self.conv1(x)), 2)
        out = F.adaptive_max_pool2d(F.relu(self.conv2(out)), 5)
        out = F.relu(self.fc2(F.relu(self.fc1(out.flatten(1)))))
        return cast(Tensor, self.fc3(out))


lenet = architecture(LeNet)
