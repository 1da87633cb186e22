"""BigGAN-deep (Brock et al., ICLR 2019) from a user's checkpoint in the layout of ``pytorch-pretrained-biggan``.

Code and class embedding together steer the scale and shift of every norm, so that every stage reads the code: features
between stages are [n, latent + C * H * W], the code first. Spectral norms are folded into the weights once, and of the
norms' statistics, which the file keeps for 51 truncations, only those of the chosen one are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.progress import Progress
from gradveil.core.tensor_files import Shapes
from gradveil.generators import Generator, resized
from gradveil.lab.generators.published import dimensions, read_checkpoint

WIDTHS = {
    128: (16, 16, 8, 4, 2, 1),
    256: (16, 16, 8, 8, 4, 2, 1),
    512: (16, 16, 8, 8, 4, 2, 1, 1),
}
"""Features at 4x4, 8x8, ... in multiples of the channel width, by the side of the images."""
ATTENTION = 8
"""Where among the layers the attention stands."""
STATISTICS = 51
_EPS = 1e-4
_PLAIN = ("embeddings.weight", "bn.weight")
"""The weights that are not under a spectral norm."""
_TO_RGB = "conv_to_rgb"


class Norm(nn.Module):
    """Batch norm by fixed statistics; scale and shift are its own, or linear in a condition [n, condition]."""

    def __init__(self, features: int, condition: int | None) -> None:
        super().__init__()
        self.running_means: Tensor
        self.running_vars: Tensor
        self.register_buffer("running_means", torch.zeros(features))
        self.register_buffer("running_vars", torch.ones(features))
        self.steered = condition is not None
        if condition is None:
            self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        else:
            self.scale, self.offset = (nn.Linear(condition, features, bias=False) for _ in range(2))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale = 1 + self.scale(condition) if self.steered else self.weight
        shift = self.offset(condition) if self.steered else self.bias
        standard = (x - self.running_means[:, None, None]) * torch.rsqrt(self.running_vars + _EPS)[:, None, None]
        return standard * scale[..., None, None] + shift[..., None, None]


class DeepBlock(nn.Module):
    """Four convolutions through a narrow middle, beside the identity, whose last features are dropped where needed."""

    def __init__(self, features: int, out: int, condition: int, *, grows: bool) -> None:
        super().__init__()
        middle = features // 4
        self.out, self.grows = out, grows
        self.bn_0, self.conv_0 = Norm(features, condition), nn.Conv2d(features, middle, 1)
        self.bn_1, self.conv_1 = Norm(middle, condition), nn.Conv2d(middle, middle, 3, padding=1)
        self.bn_2, self.conv_2 = Norm(middle, condition), nn.Conv2d(middle, middle, 3, padding=1)
        self.bn_3, self.conv_3 = Norm(middle, condition), nn.Conv2d(middle, out, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        new = self.conv_0(F.relu(self.bn_0(x, condition)))
        new = F.relu(self.bn_1(new, condition))
        new = self.conv_1(F.interpolate(new, scale_factor=2.0) if self.grows else new)
        new = self.conv_2(F.relu(self.bn_2(new, condition)))
        new = self.conv_3(F.relu(self.bn_3(new, condition)))
        kept = F.interpolate(x[:, : self.out], scale_factor=2.0) if self.grows else x[:, : self.out]
        out: Tensor = new + kept
        return out


class SpatialAttention(nn.Module):
    """Every position adds a mixture of all positions, taken at half the resolution."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.snconv1x1_theta, self.snconv1x1_phi = (nn.Conv2d(features, features // 8, 1, bias=False) for _ in range(2))
        self.snconv1x1_g = nn.Conv2d(features, features // 2, 1, bias=False)
        self.snconv1x1_o_conv = nn.Conv2d(features // 2, features, 1, bias=False)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # noqa: ARG002  (called as a block is)
        asks = self.snconv1x1_theta(x).flatten(2)
        keys = F.max_pool2d(self.snconv1x1_phi(x), 2).flatten(2)
        values = F.max_pool2d(self.snconv1x1_g(x), 2).flatten(2)
        mixed = values @ torch.softmax(asks.mT @ keys, dim=-1).mT
        added: Tensor = self.snconv1x1_o_conv(mixed.reshape(len(x), -1, *x.shape[2:]))
        return x + self.gamma * added


class BigGAN(Generator):
    """The stages are the layers of the checkpoint: 13 for images of 256x256, the search of GIFD."""

    def __init__(self, *, side: int, latent: int, classes: int, width: int, truncation: float = 1.0) -> None:
        super().__init__()
        widths = tuple(width * multiple for multiple in WIDTHS[side])
        self.latent, self.classes, self.shape, self.truncation = latent, classes, (3, side, side), truncation
        self.widest = widths[0]
        self.embeddings = nn.Linear(classes, latent, bias=False)
        self.gen_z = nn.Linear(2 * latent, 16 * self.widest)
        layers, names = [], []
        for k, (entry, out) in enumerate(pairwise(widths)):
            here, twice = 4 * 2**k, 8 * 2**k
            layers += [DeepBlock(entry, entry, 2 * latent, grows=False), DeepBlock(entry, out, 2 * latent, grows=True)]
            names += [f"{here}x{here}-b" if k else "4x4", f"{twice}x{twice}"]
        attended = widths[ATTENTION // 2]
        layers.insert(ATTENTION, SpatialAttention(attended))  # type: ignore[arg-type]
        names.insert(ATTENTION, "attention")
        self.stages = (*names[:-1], "image")
        self.layers = nn.ModuleList(layers)
        self.bn = Norm(widths[-1], None)
        # The published convolution draws as many channels as it reads and throws all but three away.
        self.conv_to_rgb = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def codes(self, count: int, rng: torch.Generator) -> Tensor:
        empty = torch.empty(count, self.latent, device=rng.device)
        return self.truncation * nn.init.trunc_normal_(empty, a=-2.0, b=2.0, generator=rng)

    def stage(self, name: str, features: Tensor, wanted: Tensor | None) -> Tensor:
        at = self.stages.index(name)
        z, hidden = features[:, : self.latent], features[:, self.latent :]
        condition = torch.cat([z, self.embeddings(wanted)], dim=1)
        if at == 0:
            x = self.gen_z(condition).view(-1, 4, 4, self.widest).permute(0, 3, 1, 2)
        else:
            side = 4 * 2 ** sum(isinstance(layer, DeepBlock) and layer.grows for layer in self.layers[:at])
            x = hidden.reshape(len(z), -1, side, side)
        x = self.layers[at](x, condition)
        if at < len(self.stages) - 1:
            return torch.cat([z, x.flatten(1)], dim=1)
        return torch.tanh(self.conv_to_rgb(F.relu(self.bn(x, condition)))) / 2 + 0.5


def biggan(_progress: Progress, *, path: str, truncation: float = 1.0, size: int | None = None) -> Generator:
    """BigGAN-deep from your checkpoint (128, 256 or 512), with ImageNet's classes if it has them."""
    return resized(load_biggan(Path(path).expanduser(), truncation=truncation), size)


def load_biggan(path: Path, *, truncation: float = 1.0) -> BigGAN:
    """The generator of a checkpoint, with the statistics of the nearest of the 51 truncations from 0 to 1."""
    if not 0 < truncation <= 1:
        raise GradveilError(f"generator biggan: truncation is above 0 and at most 1, not {truncation}")
    built: list[BigGAN] = []

    def expect(found: Shapes) -> Shapes:
        with torch.device("meta"):
            built.append(_guessed(path, found, truncation))
        return _published({name: tuple(tensor.shape) for name, tensor in built[0].state_dict().items()})

    tensors = read_checkpoint(path, expect)
    row = round(truncation * (STATISTICS - 1))
    built[0].load_state_dict({name: _own(path, name, tensors, row) for name in built[0].state_dict()}, assign=True)
    return built[0]


def _guessed(path: Path, found: Shapes, truncation: float) -> BigGAN:
    """The architecture that a file's tensors hint at, without memory for its weights."""
    latent, classes = dimensions(path, found, "embeddings.weight", 2)
    width = dimensions(path, found, f"generator.{_TO_RGB}.weight_orig", 4)[0]
    blocks = sum(name.startswith("generator.layers.") and name.endswith(".conv_0.bias") for name in found)
    sides = [side for side, widths in WIDTHS.items() if 2 * (len(widths) - 1) == blocks]
    if not sides or width % 4:
        raise BadFileError(
            f"{path}: BigGAN-deep has 10, 12 or 14 blocks of width 4 or a multiple, not {blocks} of {width}"
        )
    return BigGAN(side=sides[0], latent=latent, classes=classes, width=width, truncation=truncation)


def _published(own: Shapes) -> Shapes:
    """Names and shapes in the file, from those here."""
    width = own[f"{_TO_RGB}.weight"][1]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in own.items():
        there = _there(name)
        shape = (width, *shape[1:]) if name.startswith(_TO_RGB) else shape
        if ".running_" in name:
            shapes[there] = (STATISTICS, *shape)
        elif name.endswith(".weight") and name not in _PLAIN:
            shapes |= {f"{there}_orig": shape, f"{there}_u": shape[:1], f"{there}_v": (math.prod(shape[1:]),)}
        else:
            shapes[there] = shape
    return shapes


def _own(path: Path, name: str, tensors: Mapping[str, Tensor], row: int) -> Tensor:
    """One of our tensors from those of the file."""
    there = _there(name)
    if ".running_" in name:
        return tensors[there][row].clone()
    if there in tensors:
        return tensors[there][:3].clone() if name.startswith(_TO_RGB) else tensors[there]
    weight = tensors[f"{there}_orig"]
    largest = tensors[f"{there}_u"] @ weight.flatten(1) @ tensors[f"{there}_v"]
    normed = (weight[:3] if name.startswith(_TO_RGB) else weight) / largest
    if not bool(torch.isfinite(largest) & torch.isfinite(normed).all()):
        raise BadFileError(f"{path}: tensor '{there}_orig' has the largest singular value {float(largest):g}")
    return normed


def _there(name: str) -> str:
    """What the file calls one of our modules."""
    return name if name.startswith("embeddings.") else f"generator.{name}"
