"""A small convolutional generator, after the DCGAN in the appendix of GGL (Li et al., CVPR 2022).

There: a code of 128, a linear layer to 512x4x4, three transposed convolutions of 2x2 with stride 2, batch norm between
them. A 2x2 kernel with stride 2 paints every pixel block apart; ``kernel=4`` lets neighbors overlap and is what the
shipped weights use. With classes, the scale and shift after each norm are those of the class.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import GradveilError
from gradveil.core.types import Json
from gradveil.generators.base import Generator

SIDE = 32


class ClassNorm(nn.Module):
    """Batch norm whose scale and shift depend on the class: the mean of the classes' own, by their shares."""

    def __init__(self, features: int, classes: int | None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features, affine=False)
        self.scale = nn.Parameter(torch.ones(classes or 1, features))
        self.shift = nn.Parameter(torch.zeros(classes or 1, features))

    def forward(self, x: Tensor, wanted: Tensor | None) -> Tensor:
        shares = torch.ones(len(x), 1, device=x.device, dtype=x.dtype) if wanted is None else wanted
        scale, shift = shares @ self.scale, shares @ self.shift
        flat: Tensor = self.norm(x.flatten(2) if x.dim() > 2 else x)
        around = (1,) * (x.dim() - 2)
        return flat.view_as(x) * scale.view(*scale.shape, *around) + shift.view(*shift.shape, *around)


class DCGAN(Generator):
    """Codes to images of up to 32x32; smaller ones are cut out of the middle."""

    stages = ("code", "8x8", "16x16", "image")

    def __init__(
        self,
        *,
        channels: int = 3,
        height: int = 32,
        width: int = 32,
        classes: int | None = None,
        latent: int = 128,
        features: int = 128,
        kernel: int = 4,
    ) -> None:
        super().__init__()
        if max(height, width) > SIDE or kernel not in (2, 4):
            raise GradveilError("a dcgan draws images of up to 32x32, with a kernel of 2 or 4")
        self.options: Json = {
            "channels": channels, "height": height, "width": width, "classes": classes, "latent": latent,
            "features": features, "kernel": kernel,
        }  # fmt: skip
        self.shape, self.classes, self.latent = (channels, height, width), classes, latent
        self.code = nn.Linear(latent, 4 * features * 16, bias=False)
        self.code_norm = ClassNorm(4 * features, classes)
        edge = (kernel - 2) // 2
        self.up8 = nn.ConvTranspose2d(4 * features, 2 * features, kernel, stride=2, padding=edge, bias=False)
        self.norm8 = ClassNorm(2 * features, classes)
        self.up16 = nn.ConvTranspose2d(2 * features, features, kernel, stride=2, padding=edge, bias=False)
        self.norm16 = ClassNorm(features, classes)
        self.up32 = nn.ConvTranspose2d(features, channels, kernel, stride=2, padding=edge)

    def stage(self, name: str, features: Tensor, wanted: Tensor | None) -> Tensor:
        match name:
            case "code":
                return F.relu(self.code_norm(self.code(features).view(len(features), -1, 4, 4), wanted))
            case "8x8":
                return F.relu(self.norm8(self.up8(features), wanted))
            case "16x16":
                return F.relu(self.norm16(self.up16(features), wanted))
        _, height, width = self.shape
        top, left = (SIDE - height) // 2, (SIDE - width) // 2
        return torch.sigmoid(self.up32(features)[..., top : top + height, left : left + width])
