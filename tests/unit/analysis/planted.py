"""Evaluated runs of known models on known images."""

# N examples, C channels, H height, W width, K classes

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import classwise as cw
from classwise.analysis import Run

FACTORY = """
import numpy as np
from pathlib import Path
from classwise.data import ImageSet

def make():
    found = np.load(Path(__file__).parent / "data.npz")
    return ImageSet(
        name=f"{__file__}:make", split="test", images=found["x"], labels=found["y"], classes=found["classes"].tolist()
    )
"""


class Linear(nn.Module):
    """Logits W z + b of the flattened image."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(weight.shape[1], weight.shape[0])
        self.layer.weight.data, self.layer.bias.data = weight.float(), bias.float()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))


class Headless(nn.Module):
    """As many logits as channels, by a convolution: there is no last linear layer."""

    def __init__(self, num_classes: int, channels: int = 1) -> None:
        super().__init__()
        self.last = nn.Conv2d(channels, num_classes, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x).mean((2, 3))


def planted(
    folder: Path,
    model: nn.Module,
    x: Tensor,
    y: Sequence[int] | Tensor,
    classes: Sequence[str],
    *,
    attacks: Sequence[str] = ("pgd:steps=3",),
    eps: float = 0.1,
    norm: str = "Linf",
) -> Run:
    """An evaluated run of a model at hand on images (N, C, H, W)."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "data.npz", x=x.float().numpy(), y=torch.as_tensor(y).numpy(), classes=np.array(classes))
    (folder / "data.py").write_text(FACTORY, encoding="utf-8")
    out = folder / "run"
    cw.evaluate(model, f"{folder}/data.py:make", attacks=list(attacks), eps=eps, norm=norm, out=out)
    return Run(out, loaded=model)


def thousand(folder: Path) -> Run:
    """A thousand classes with one image each."""
    random = torch.Generator().manual_seed(0)
    model = Linear(torch.randn(1000, 16, generator=random), torch.zeros(1000))
    x = torch.rand(1000, 1, 4, 4, generator=random)
    return planted(folder, model, x, range(1000), [f"class {label}" for label in range(1000)], attacks=["fgsm"])
