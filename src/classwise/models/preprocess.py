"""Preprocessing as a part of the model: resizing, cropping and normalization of images in [0, 1]."""

# B batch, C channels, H height, W width, K classes

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from classwise.core.errors import InputError
from classwise.core.model_calls import logits_of
from classwise.models.normalize import Normalize

MODES = {"nearest": "nearest-exact", "bilinear": "bilinear", "bicubic": "bicubic"}
"""Pillow's names of resampling filters, and torch's."""

LARGEST = 4096
"""The largest side in pixels; larger ones are mistakes or malicious."""


class Resize(nn.Module):
    """Resize as Pillow does, with antialiasing but without rounding to 8 bits, then center-crop.

    ``size`` is (height, width), or the length of the shorter side.
    """

    def __init__(
        self, size: int | tuple[int, int], mode: str = "bilinear", crop: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        sides = [*(size if isinstance(size, tuple) else (size,)), *(crop or ())]
        if not all(1 <= side <= LARGEST for side in sides):
            raise InputError(f"images of {'x'.join(map(str, sides))} pixels; expected sides from 1 to {LARGEST}")
        if mode not in MODES:
            raise InputError(f"resampling {mode!r} is not supported; expected one of {', '.join(MODES)}")
        self.size, self.mode, self.crop = size, mode, crop

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W)
        height, width = x.shape[2:]
        wanted = self.size if isinstance(self.size, tuple) else _by_shorter_side(height, width, self.size)
        if wanted != (height, width):
            x = F.interpolate(x, wanted, mode=MODES[self.mode], antialias=self.mode != "nearest")
            x = x.clamp(0, 1)  # bicubic interpolation overshoots at edges; Pillow clips
        if self.crop is None:
            return x
        top, left = ((have - want) // 2 for have, want in zip(wanted, self.crop, strict=True))
        if top < 0 or left < 0:
            raise InputError(f"images of {wanted[0]}x{wanted[1]} pixels are too small for a crop to {self.crop}")
        return x[:, :, top : top + self.crop[0], left : left + self.crop[1]]

    def extra_repr(self) -> str:
        return f"size={self.size}, mode={self.mode!r}, crop={self.crop}"


class Prepared(nn.Module):
    """Preprocessing followed by a model, whose names in the state dict get the prefix ``model.``."""

    def __init__(self, model: nn.Module, resize: Resize | None, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.resize = resize or nn.Identity()
        self.normalize = Normalize(mean, std)
        self.model = model

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, K)
        return logits_of(self.model(self.normalize(self.resize(x))))


def _by_shorter_side(height: int, width: int, size: int) -> tuple[int, int]:
    """Return height and width after resizing the shorter side to ``size``, rounded down.

    >>> _by_shorter_side(100, 151, 50)
    (50, 75)
    """
    if height <= width:
        return size, int(size * width / height)
    return int(size * height / width), size
