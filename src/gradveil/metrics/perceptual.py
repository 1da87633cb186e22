"""LPIPS (Zhang et al., CVPR 2018): how different two pictures look to a network trained on photographs.

Lower leaks more. The distance is a weighted squared difference of unit-length features, averaged over positions and
summed over layers, with weights that are not negative. So it is the squared Euclidean distance between two
*embeddings*, one per image, which makes all distances between two sets one matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.assets import fetch, read_numpy_pickle
from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT, Progress

_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
_PIXELS_AT_ONCE = 2**18  # per forward pass of the network: half a gigabyte of activations
_FLOATS_HELD = 2**28  # embeddings kept while the other side passes by: one gigabyte


@dataclass(frozen=True)
class _Network:
    """A backbone as stages of convolutions with ReLU; its features are the outputs of the stages."""

    file: str
    group: str
    convs: tuple[tuple[tuple[int, int], ...], ...]
    """For each stage the (stride, padding) of its convolutions."""
    pooled: frozenset[int]
    pool: int
    """Side of the max-pool, of stride 2, that comes before the stages in ``pooled``."""
    smallest: int
    """The shortest side from which the pools leave anything."""


_NETWORKS = {
    "vgg": _Network(
        file="vgg16.ckpt",
        group="VGG16_0",
        convs=tuple(((1, 1),) * count for count in (2, 2, 3, 3, 3)),
        pooled=frozenset({1, 2, 3, 4}),
        pool=2,
        smallest=16,
    ),
    "alex": _Network(
        file="alexnet.ckpt",
        group="AlexNet_0",
        convs=(((4, 2),), ((1, 2),), ((1, 1),), ((1, 1),), ((1, 1),)),
        pooled=frozenset({1, 2}),
        pool=3,
        smallest=31,
    ),
}


class LPIPS:
    """The perceptual distance with the original weights, which are fetched on first use.

    Raises ``NotAvailableError`` with the reason where the weights cannot be had: there is no substitute for them.
    """

    def __init__(self, net: Literal["vgg", "alex"] = "vgg", *, progress: Progress = SILENT) -> None:
        self.net = net
        self._network = _NETWORKS[net]
        content = read_numpy_pickle(fetch("lpips", progress=progress) / self._network.file)
        count = sum(len(stage) for stage in self._network.convs)
        layers = [content[self._network.group][f"Conv_{index}"] for index in range(count)]
        self._convs = [(_oihw(layer["kernel"]), torch.from_numpy(layer["bias"].copy())) for layer in layers]
        heads = [
            _oihw(content[f"NetLinLayer_{stage}"]["Conv_0"]["kernel"]) for stage in range(len(self._network.convs))
        ]
        self._roots = [head.view(1, -1, 1, 1).sqrt() for head in heads]
        self._remembered: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def remember(self, images: Tensor) -> None:
        """Embed these once, for every ``pairwise`` with this very tensor. More than a gigabyte is not kept."""
        if len(images) <= self._held_at_once(images):
            points = torch.cat([self._embed(chunk) for chunk in torch.split(images, self._at_once(images))])
            self._remembered = images, points

    @torch.no_grad()
    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """The distance of each pair of images, both [n, C, H, W] in [0, 1]: [n]."""
        chunks = zip(torch.split(a, self._at_once(a)), torch.split(b, self._at_once(b)), strict=True)
        return torch.cat([(self._embed(left) - self._embed(right)).square().sum(dim=1) for left, right in chunks])

    @torch.no_grad()
    def pairwise(self, a: Tensor, b: Tensor) -> Tensor:
        """The distance of every image of a [n, C, H, W] to every image of b [m, C, H, W]: [n, m].

        Images of a are embedded once and held, up to a gigabyte at a time, while those of b stream past.
        """
        blocks = []
        for held in torch.split(a, self._held_at_once(a)):
            left = torch.cat([self._embed(chunk) for chunk in torch.split(held, self._at_once(a))])
            lengths, columns = left.square().sum(dim=1)[:, None], []
            known = self._remembered[1] if self._remembered is not None and self._remembered[0] is b else None
            for part in torch.split(b, self._at_once(b)) if known is None else [b]:
                right = self._embed(part) if known is None else known
                # rounding must not make a distance negative
                columns.append((lengths + right.square().sum(dim=1) - 2 * left @ right.T).clamp(min=0))
            blocks.append(torch.cat(columns, dim=1))
        return torch.cat(blocks)

    def _embed(self, images: Tensor) -> Tensor:
        """Images [n, C, H, W] as points [n, D] whose squared distances are the perceptual ones."""
        if self._roots[0].device != images.device:
            self._convs = [(kernel.to(images.device), bias.to(images.device)) for kernel, bias in self._convs]
            self._roots = [root.to(images.device) for root in self._roots]
        _, channels, height, width = images.shape
        if channels not in (1, 3):
            raise GradveilError(f"LPIPS compares grey or RGB images, not images of {channels} channels")
        if min(height, width) < self._network.smallest:
            need = self._network.smallest
            raise GradveilError(f"LPIPS ({self.net}) needs sides of {need} or more, not {height}x{width}")
        shift, scale = (torch.tensor(v, device=images.device).view(3, 1, 1) for v in (_SHIFT, _SCALE))
        x = (images.expand(-1, 3, -1, -1) * 2 - 1 - shift) / scale
        kernels, scaled = iter(self._convs), []
        for stage, (convs, root) in enumerate(zip(self._network.convs, self._roots, strict=True)):
            if stage in self._network.pooled:
                x = F.max_pool2d(x, self._network.pool, stride=2)
            for stride, padding in convs:
                kernel, bias = next(kernels)
                x = F.relu(F.conv2d(x, kernel, bias, stride=stride, padding=padding))
            length = x.square().sum(dim=1, keepdim=True).sqrt() + 1e-10
            positions = x.shape[-2] * x.shape[-1]
            scaled.append((x / length * root / positions**0.5).flatten(1))
        return torch.cat(scaled, dim=1)

    def _at_once(self, images: Tensor) -> int:
        return max(1, _PIXELS_AT_ONCE // (images.shape[-2] * images.shape[-1]))

    def _held_at_once(self, images: Tensor) -> int:
        return max(1, _FLOATS_HELD // self._embed(images[:1]).shape[1])


def _oihw(kernel: Any) -> Tensor:
    """A convolution kernel stored as [height, width, in, out], as torch wants it."""
    return torch.from_numpy(kernel.transpose(3, 2, 0, 1).copy())
