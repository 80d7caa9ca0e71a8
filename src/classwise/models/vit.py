"""Vision transformer with small patches for small images.

Dosovitskiy et al., An Image is Worth 16x16 Words (ICLR 2021), equations 1 to 4. State-dict names as in timm and DeiT:
``cls_token, pos_embed, patch_embed.proj, blocks.0.norm1, blocks.0.attn.qkv, ..., norm, head``.

5,362,762 parameters for ten classes with the settings of DeiT-Ti (Touvron et al., ICML 2021: width 192, 12 layers, 3
heads) and 4x4 patches on 32 pixels. With patches of 16 on 224 pixels and 1,000 classes these are DeiT-Ti's 5,717,416;
with width 768 and 12 heads, ViT-B/16's 86,567,656.

Deviations: no dropout. The position embeddings are learned for ``image_size`` and interpolated for other sizes, as in
the paper for fine-tuning (section 3.2). Height and width must be multiples of the patch size.
"""

# B batch, K classes, C channels, N tokens, D width, H heads

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from classwise.core.errors import InputError
from classwise.models.settings import Count, architecture


class Patches(nn.Module):
    """A linear embedding of each patch, as a convolution whose stride is its kernel size."""

    def __init__(self, in_channels: int, dim: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.proj = nn.Conv2d(in_channels, dim, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, height, width) -> (B, D, rows, columns)
        height, width = x.shape[2:]
        if height % self.patch or width % self.patch:
            raise InputError(f"vit: images of {height}x{width} pixels; expected multiples of patch={self.patch}")
        return cast(Tensor, self.proj(x))


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D)
        split = self.qkv(x).unflatten(2, (3, self.heads, -1))  # (B, N, 3, H, D / H)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value)
        return cast(Tensor, self.proj(out.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """Two linear layers with GELU, applied to each token."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.fc2(F.gelu(self.fc1(x))))


class Block(nn.Module):
    """Attention and MLP, each with layer norm first and a shortcut."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D)
        x = x + self.attn(self.norm1(x))
        return cast(Tensor, x + self.mlp(self.norm2(x)))


class ViT(nn.Module):
    """Vision transformer: ViT-Ti with 4x4 patches; ViT-S is dim=384, heads=6. The head uses the class token."""

    def __init__(
        self,
        *,
        patch: Count = 4,
        dim: Count = 192,
        depth: Count = 12,
        heads: Count = 3,
        image_size: Count = 32,
        num_classes: Count = 10,
        in_channels: Count = 3,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise InputError(f"vit: dim={dim}; expected a multiple of heads={heads}")
        if image_size % patch:
            raise InputError(f"vit: image_size={image_size}; expected a multiple of patch={patch}")
        self.grid = image_size // patch
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.grid**2, dim))
        self.patch_embed = Patches(in_channels, dim, patch)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes)
        for weight in (self.cls_token, self.pos_embed):
            nn.init.trunc_normal_(weight, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, height, width) -> (B, K)
        patches = self.patch_embed(x)
        rows, columns = patches.shape[2:]
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), patches.flatten(2).transpose(1, 2)], 1)
        tokens = self.blocks(tokens + self._positions(rows, columns))
        return cast(Tensor, self.head(self.norm(tokens[:, 0])))

    def _positions(self, rows: int, columns: int) -> Tensor:  # (1, N, D)
        """Return the position embeddings, interpolated if the grid differs from the learned one."""
        if (rows, columns) == (self.grid, self.grid):
            return self.pos_embed
        first, others = self.pos_embed[:, :1], self.pos_embed[:, 1:]
        square = others.transpose(1, 2).reshape(1, -1, self.grid, self.grid)
        resized = F.interpolate(square, (rows, columns), mode="bicubic", align_corners=False)
        return torch.cat([first, resized.flatten(2).transpose(1, 2)], 1)


vit = architecture(ViT)
