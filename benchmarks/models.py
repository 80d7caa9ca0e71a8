"""Models for benchmarks on a CPU, adversarially trained on first use for up to two minutes.

python -m benchmarks evaluate --model benchmarks/models.py:mnist_small_cnn --data mnist --eps 0.3 --images 500 \
  --batch-size 250 --attack pgd:steps=40,step_size=0.01,start=zero --peers
python -m benchmarks evaluate --model benchmarks/models.py:cifar10_tiny_cnn --data cifar10 --eps 4/255 --images 4000 \
  --batch-size 250 --attack fast --rounds 1 --peers
"""

# B batch

from __future__ import annotations

import torch
from torch import nn

from classwise.attacks import PGD
from classwise.data import Batches, load_data
from classwise.models import digits_cnn, small_cnn


def digits_net() -> nn.Module:
    """The digits network. PGD at eps = 0.2 breaks some of the images."""
    torch.manual_seed(0)
    attack = PGD(eps="0.2", steps=3)
    return trained(digits_cnn(), "digits", attack, images=1000, epochs=6, batch_size=64, lr=5e-3)


def mnist_small_cnn(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
    """The MNIST network of TRADES."""
    torch.manual_seed(0)
    attack = PGD(eps=0.3, steps=5, step_size=0.1)
    return trained(small_cnn(in_channels=in_channels), "mnist", attack, images=12_000, epochs=4)


def cifar10_tiny_cnn(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """A network of three convolutions, small enough for an ensemble of attacks on thousands of images."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(a, b, 4, stride=2, padding=1) for a, b in ((in_channels, 24), (24, 48), (48, 48))]
    body = [part for layer in layers for part in (layer, nn.ReLU())]
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(48 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, num_classes))
    return trained(model, "cifar10", PGD(eps="4/255", steps=3, step_size=0.008), images=15_000, epochs=6)


def trained(
    model: nn.Module, data: str, attack: PGD, *, images: int, epochs: int, batch_size: int = 150, lr: float = 1e-3
) -> nn.Module:
    """Train as Madry et al. (2018), with a radius that grows over the first half of training."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    batches = Batches(
        load_data(data, split="train"),
        range(images),
        batch_size=batch_size,
        device="cpu",
        generator=torch.Generator().manual_seed(0),
    )
    random = torch.Generator().manual_seed(1)
    for epoch in range(epochs):
        share = min(1.0, 2 * (epoch + 0.5) / epochs)
        for x, y, _ in batches:
            x_adv = attack(model, x, y, eps_scale=torch.full((len(x),), share), generator=random)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x_adv), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model.eval()
