"""A vision transformer (Dosovitskiy et al., ICLR 2021) whose attention is written out in plain operations.

PyTorch's fused attention has no second derivative on the CPU, and gradient matching needs one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import GradveilError
from gradveil.domains import Images
from gradveil.models.building import MODELS, Init, first_operation, initialised, is_small


class Attention(nn.Module):
    """Multi-head self-attention: tokens [n, t, dim] to the same shape."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        # [n, t, 3 * dim] -> three of [n, heads, t, dim / heads]
        split = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = split[0], split[1], split[2]
        weight = (query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).softmax(dim=-1)
        out: Tensor = self.proj((weight @ value).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added to what came in."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.norm1(tokens))
        out: Tensor = tokens + self.fc2(F.gelu(self.fc1(self.norm2(tokens))))
        return out


class ViT(nn.Module):
    """Patches as tokens behind a class token, learned positions, ``depth`` blocks, one linear layer on that token."""

    def __init__(self, domain: Images, *, patch: int, depth: int, dim: int, heads: int, normalize: bool) -> None:
        super().__init__()
        self.normalize = first_operation(domain, normalize)
        tokens = (domain.height // patch) * (domain.width // patch)
        self.patches = nn.Conv2d(domain.channels, dim, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1 + tokens, dim), std=0.02))
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, domain.classes)

    def forward(self, inputs: Tensor) -> Tensor:
        patches = self.patches(self.normalize(inputs)).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(patches), -1, -1), patches], dim=1) + self.positions
        out: Tensor = self.head(self.norm(self.blocks(tokens)[:, 0]))
        return out


@MODELS.register("vit")
def vit(
    domain: Images,
    *,
    patch: int | None = None,
    depth: int = 6,
    dim: int = 192,
    heads: int = 3,
    normalize: bool = True,
    init: Init = "default",
) -> ViT:
    """Vision transformer; ``patch`` is 4 for sides up to 64 and 16 above unless given."""
    patch = patch or (4 if is_small(domain) else 16)
    if domain.height % patch or domain.width % patch:
        raise GradveilError(f"vit cannot cut {domain.height}x{domain.width} images into patches of {patch}: set patch=")
    if dim % heads:
        raise GradveilError(f"vit needs dim divisible by heads, not dim={dim}, heads={heads}")
    return initialised(ViT(domain, patch=patch, depth=depth, dim=dim, heads=heads, normalize=normalize), init)
