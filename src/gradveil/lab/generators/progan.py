"""The generator of progressive growing (Karras et al., ICLR 2018), and weights for 128x128 faces.

A code of unit mean square grows from 1x1 to 4x4 and then doubles its side five times. Every convolution is followed by
a leaky ReLU and by pixel norm: each position's features are scaled to a mean square of 1. The growth is over: only the
image at the last side is drawn, as in the published module.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.assets import fetch
from gradveil.core.errors import BadFileError
from gradveil.core.progress import Progress
from gradveil.core.reading import read_bytes, read_json
from gradveil.core.types import Json
from gradveil.generators import Generator, resized

FACES = (512, 512, 512, 512, 256, 128)
"""Features at 4x4, 8x8, ... 128x128 of the published generator of faces."""
_TYPES = {"float32": np.dtype("<f4"), "int32": np.dtype("<i4")}
_APPLY, _MODEL = "module_apply_default", "module/g_model"


def pixel_norm(x: Tensor) -> Tensor:
    """Features [n, C, ...] scaled to a mean square of 1 over C."""
    return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-8)


class ProGAN(Generator):
    """Two convolutions at each side from 4x4 on; ``widths`` says how many features each side has."""

    classes = None

    def __init__(self, *, latent: int = 512, widths: tuple[int, ...] = FACES) -> None:
        super().__init__()
        sides = [4 * 2**k for k in range(len(widths))]
        self.latent, self.shape = latent, (3, sides[-1], sides[-1])
        self.stages = (*(f"{side}x{side}" for side in sides), "image")
        entries = (latent, *widths[:-1])
        self.first = nn.ModuleList(
            nn.Conv2d(entry, width, 3, padding=1) if k else nn.Conv2d(entry, width, 4, padding=3)
            for k, (entry, width) in enumerate(zip(entries, widths, strict=True))
        )
        self.second = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for width in widths)
        self.to_image = nn.Conv2d(widths[-1], 3, 1)

    def stage(self, name: str, features: Tensor, wanted: Tensor | None) -> Tensor:  # noqa: ARG002  (has no classes)
        if name == "image":
            image: Tensor = self.to_image(features)
            return image.clamp(0, 1)
        k = self.stages.index(name)
        x = F.interpolate(features, scale_factor=2.0) if k else pixel_norm(features)[:, :, None, None]
        for layer in (self.first[k], self.second[k]):
            x = pixel_norm(F.leaky_relu(layer(x), 0.2))
        return x


def progan_128(progress: Progress, *, size: int | None = None) -> Generator:
    """ProGAN of faces, 128x128, fetched (102 MB): trained by its authors on CelebA."""
    return resized(load_progan(fetch("progan-128", progress=progress)), size)


def load_progan(folder: Path, *, latent: int = 512, widths: tuple[int, ...] = FACES) -> ProGAN:
    """The generator whose weights a folder holds for TensorFlow.js."""
    weights = read_tfjs(folder)
    with torch.device("meta"):
        model = ProGAN(latent=latent, widths=widths)
    state = {}
    for name, wanted in model.state_dict().items():
        source = _source(name, len(widths))
        kernel = wanted.dim() == 4
        shape = [*wanted.shape[2:], wanted.shape[1], wanted.shape[0]] if kernel else list(wanted.shape)
        if source not in weights or list(weights[source].shape) != shape or weights[source].dtype != torch.float32:
            raise BadFileError(f"{folder} holds no weight {source!r} of shape {shape}: is it the right folder?")
        # TensorFlow keeps kernels as [height, width, in, out].
        state[name] = weights[source].permute(3, 2, 0, 1).contiguous() if kernel else weights[source]
    model.load_state_dict(state, assign=True)
    return model


def _source(name: str, sides: int) -> str:
    """What the published module calls one of our tensors: convolutions are numbered in their order."""
    part, *index, kind = name.split(".")
    if part == "to_image":
        return f"{_APPLY}/Conv2D_{2 * sides}/merged_input" if kind == "weight" else f"{_APPLY}/add_{4 * sides + 2}"
    k, which = int(index[0]), int(part == "second")
    number = 2 * k + which
    if kind == "bias":
        return f"{_MODEL}/res_{k}/conv{which}/bias"
    return f"{_APPLY}/Conv2D{f'_{number}' if number else ''}/merged_input"


def read_tfjs(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder by name, as TensorFlow.js keeps them.

    ``model.json`` lists names, types and shapes; shards hold the numbers. Those that are longer or shorter than listed
    are refused.
    """
    listing = folder / "model.json"
    try:
        groups = read_json(listing)["weightsManifest"]
        weights: dict[str, Tensor] = {}
        for group in groups:
            outside = next((name for name in group["paths"] if Path(name).name != name), None)
            if outside is not None:
                raise BadFileError(f"{listing} names a shard outside its folder: {outside!r}")
            blob = b"".join(read_bytes(folder / name, most=2**31) for name in group["paths"])
            weights |= _cut(blob, group["weights"], listing)
        return weights
    except OSError as error:
        raise BadFileError(f"cannot read {error.filename}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BadFileError(f"{listing} does not list weights as TensorFlow.js does") from None


def _cut(blob: bytes, entries: list[Json], listing: Path) -> dict[str, Tensor]:
    """The tensors of one group, which stand one after the other without gaps."""
    found, at = {}, 0
    for entry in entries:
        kind, shape = _TYPES[entry["dtype"]], tuple(entry["shape"])
        if not all(type(side) is int and side >= 0 for side in shape):
            raise BadFileError(f"{listing}: weight {entry['name']!r} has an impossible shape")
        count = math.prod(shape)
        if at + count * kind.itemsize > len(blob):
            raise BadFileError(f"{listing.parent}: the shards end within weight {entry['name']!r}; get them again")
        found[entry["name"]] = torch.from_numpy(np.frombuffer(blob, kind, count, at).reshape(shape).copy())
        at += count * kind.itemsize
    if at != len(blob):
        raise BadFileError(f"{listing.parent}: the shards hold {len(blob) - at:,} bytes more than {listing.name} lists")
    return found
