"""A model for a bench that was given none: the digits network after a second or two of adversarial training."""

# B batch

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from classwise.attacks import PGD
from classwise.data import load_data, to_float
from classwise.models import digits_cnn

STEPS, BATCH, LR = 100, 64, 5e-3
"""Enough that an attack with eps = 0.2 breaks some images and not others."""


def trained_digits() -> nn.Module:
    """On the CPU, the same at every call."""
    data = load_data("digits", split="train")
    x, y = to_float(data.images), torch.from_numpy(data.labels)
    attack = PGD(eps="0.2", steps=3)
    random = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = digits_cnn()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for _ in range(STEPS):
        rows = torch.randint(len(x), (BATCH,), generator=random)
        x_adv = attack(model, x[rows], y[rows], generator=random)
        optimizer.zero_grad()
        cross_entropy(model(x_adv), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.eval()
