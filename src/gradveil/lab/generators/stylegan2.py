"""StyleGAN2 (Karras et al., CVPR 2020) from a user's checkpoint in the layout of ``rosinality/stylegan2-pytorch``.

A mapping turns the code into a style w, which scales the input of every convolution. Features between stages carry it
and the image so far: [n, style + 3 * H * W + C * H * W]. The noise that the synthesis adds is the file's, so that the
same code gives the same image.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.progress import Progress
from gradveil.core.seeding import generator as seeded
from gradveil.core.tensor_files import Shapes
from gradveil.generators import Generator, resized
from gradveil.lab.generators.progan import pixel_norm
from gradveil.lab.generators.published import dimensions, read_checkpoint

LARGEST = 1024
_MAPPING_RATE = 0.01
_AVERAGED = 4096
_JOINED = ("input_input", "noise_weight", "activate_bias", "blur_kernel", "upsample_kernel")
"""Names here whose first underscore is a dot in the file."""


def _leaky(x: Tensor) -> Tensor:
    return F.leaky_relu(x, 0.2) * math.sqrt(2)


class Equalised(nn.Module):
    """A linear layer whose stored weights are larger than those it uses, by a factor that evens out their training."""

    def __init__(self, features: int, out: int, rate: float = 1.0) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(out, features) / rate), nn.Parameter(torch.zeros(out))
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * (self.rate / math.sqrt(x.shape[-1])), self.bias * self.rate)


class Modulated(nn.Module):
    """A convolution whose input is scaled by the style, and whose output is scaled back to unit variance."""

    def __init__(self, features: int, out: int, kernel: int, style: int, *, grows: bool, evens: bool) -> None:
        super().__init__()
        self.grows, self.evens = grows, evens
        self.weight = nn.Parameter(torch.randn(1, out, features, kernel, kernel))
        self.modulation = Equalised(style, features)
        if grows:
            self.blur_kernel: Tensor
            self.register_buffer("blur_kernel", torch.zeros(4, 4))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        weight = self.weight[0] / math.sqrt(self.weight[0, 0].numel())
        scale = self.modulation(w)
        x = x * scale[..., None, None]
        if self.grows:
            x = _filtered(F.conv_transpose2d(x, weight.transpose(0, 1), stride=2), self.blur_kernel)
        else:
            x = F.conv2d(x, weight, padding=weight.shape[-1] // 2)
        if not self.evens:
            return x
        power = scale.square() @ weight.square().sum(dim=(2, 3)).T
        return x * torch.rsqrt(power + 1e-8)[..., None, None]


class Styled(nn.Module):
    """A modulated convolution, a fixed noise, a bias and a leaky ReLU."""

    def __init__(self, features: int, out: int, style: int, *, grows: bool) -> None:
        super().__init__()
        self.conv = Modulated(features, out, 3, style, grows=grows, evens=True)
        self.noise_weight, self.activate_bias = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor, w: Tensor, noise: Tensor) -> Tensor:
        return _leaky(self.conv(x, w) + self.noise_weight * noise + self.activate_bias[:, None, None])


class ToImage(nn.Module):
    """What a stage adds to the image so far, which it enlarges first unless there is none."""

    def __init__(self, features: int, style: int, *, grows: bool) -> None:
        super().__init__()
        self.conv = Modulated(features, 3, 1, style, grows=False, evens=False)
        self.bias = nn.Parameter(torch.zeros(1, 3, 1, 1))
        if grows:
            self.upsample_kernel: Tensor
            self.register_buffer("upsample_kernel", torch.zeros(4, 4))

    def forward(self, x: Tensor, w: Tensor, image: Tensor | None) -> Tensor:
        new: Tensor = self.conv(x, w) + self.bias
        return new if image is None else new + _enlarged(image, self.upsample_kernel)


def _filtered(x: Tensor, kernel: Tensor) -> Tensor:
    """Every channel of [n, C, H, W] under one 4x4 filter: [n, C, H - 1, W - 1]."""
    out = F.conv2d(x.flatten(0, 1)[:, None], kernel.flip(0, 1)[None, None], padding=1)
    return out.view(*x.shape[:2], *out.shape[2:])


def _enlarged(x: Tensor, kernel: Tensor) -> Tensor:
    """Every channel at twice the side: zeros between the pixels, then the filter."""
    out = F.conv_transpose2d(x.flatten(0, 1)[:, None], kernel[None, None], stride=2, padding=1)
    return out.view(*x.shape[:2], *out.shape[2:])


class StyleGAN2(Generator):
    """``widths`` says how many features each side from 4x4 on has, ``mapping`` how many layers lead to the style."""

    classes = None

    def __init__(self, *, style: int, mapping: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        sides = [4 * 2**k for k in range(len(widths))]
        self.latent, self.widths, self.shape = style, widths, (3, sides[-1], sides[-1])
        self.stages = ("code", *(f"{side}x{side}" for side in sides[:-1]), "image")
        self.truncation = 1.0
        self.style = nn.ModuleDict({str(k + 1): Equalised(style, style, _MAPPING_RATE) for k in range(mapping)})
        self.input_input = nn.Parameter(torch.randn(1, widths[0], 4, 4))
        self.conv1 = Styled(widths[0], widths[0], style, grows=False)
        self.to_rgb1 = ToImage(widths[0], style, grows=False)
        self.convs, self.to_rgbs, self.noises = nn.ModuleList(), nn.ModuleList(), nn.Module()
        self.noises.register_buffer("noise_0", torch.zeros(1, 1, 4, 4))
        for k in range(1, len(widths)):
            self.convs.append(Styled(widths[k - 1], widths[k], style, grows=True))
            self.convs.append(Styled(widths[k], widths[k], style, grows=False))
            self.to_rgbs.append(ToImage(widths[k], style, grows=True))
            for index in (2 * k - 1, 2 * k):
                self.noises.register_buffer(f"noise_{index}", torch.zeros(1, 1, sides[k], sides[k]))
        self.center: Tensor
        self.register_buffer("center", torch.zeros(style), persistent=False)

    def stage(self, name: str, features: Tensor, wanted: Tensor | None) -> Tensor:  # noqa: ARG002  (has no classes)
        at = self.stages.index(name) - 1
        if at < 0:
            return self.center + self.truncation * (self.mapped(features) - self.center)
        if at == 0:
            w = features
            x = self.conv1(self.input_input.expand(len(w), -1, -1, -1), w, self._noise(0))
            image = self.to_rgb1(x, w, None)
        else:
            w, image, x = self._unpacked(features, at)
            x = self.convs[2 * at - 2](x, w, self._noise(2 * at - 1))
            x = self.convs[2 * at - 1](x, w, self._noise(2 * at))
            image = self.to_rgbs[at - 1](x, w, image)
        if name == "image":
            shown: Tensor = (image / 2 + 0.5).clamp(0, 1)
            return shown
        return torch.cat([w, image.flatten(1), x.flatten(1)], dim=1)

    def mapped(self, z: Tensor) -> Tensor:
        """Codes [n, latent] as styles [n, latent], before truncation."""
        w = pixel_norm(z)
        for layer in self.style.values():
            w = _leaky(layer(w))
        return w

    def _unpacked(self, features: Tensor, at: int) -> tuple[Tensor, Tensor, Tensor]:
        side = 2 * 2**at
        begin = self.latent + 3 * side**2
        w, image, x = features[:, : self.latent], features[:, self.latent : begin], features[:, begin:]
        return w, image.reshape(-1, 3, side, side), x.reshape(-1, self.widths[at - 1], side, side)

    def _noise(self, index: int) -> Tensor:
        noise: Tensor = getattr(self.noises, f"noise_{index}")
        return noise


def stylegan2(_progress: Progress, *, path: str, truncation: float = 1.0, size: int | None = None) -> Generator:
    """StyleGAN2 from your checkpoint, of any side from 8 to 1024."""
    return resized(load_stylegan2(Path(path).expanduser(), truncation=truncation), size)


def load_stylegan2(path: Path, *, truncation: float = 1.0) -> StyleGAN2:
    """The generator of a checkpoint; ``truncation`` below 1 draws styles towards their mean."""
    if not 0 < truncation <= 1:
        raise GradveilError(f"generator stylegan2: truncation is above 0 and at most 1, not {truncation}")
    built: list[StyleGAN2] = []

    def expect(found: Shapes) -> Shapes:
        with torch.device("meta"):
            built.append(_guessed(path, found))
        return {_published(name): tuple(tensor.shape) for name, tensor in built[0].state_dict().items()}

    tensors = read_checkpoint(path, expect, parts=("g_ema", "g"))
    model = built[0]
    model.load_state_dict({name: tensors[_published(name)] for name in model.state_dict()}, assign=True)
    model.truncation, model.center = truncation, torch.zeros(model.latent)
    if truncation < 1:
        with torch.no_grad():
            model.center = model.mapped(model.codes(_AVERAGED, seeded(0, "mean style"))).mean(dim=0)
    return model


def _guessed(path: Path, found: Shapes) -> StyleGAN2:
    """The architecture that a file's tensors hint at, without memory for its weights."""
    style = dimensions(path, found, "style.1.weight", 2)[0]
    mapping = sum(name.startswith("style.") and name.endswith(".weight") for name in found)
    grown = sum(name.startswith("to_rgbs.") and name.endswith(".conv.weight") for name in found)
    if not 8 <= 4 * 2**grown <= LARGEST:
        raise BadFileError(f"{path}: StyleGAN2 grows 1 to 8 times from 4x4, not {grown} times")
    first = dimensions(path, found, "input.input", 4)[1]
    grows = [dimensions(path, found, f"convs.{2 * k}.conv.weight", 5)[1] for k in range(grown)]
    return StyleGAN2(style=style, mapping=mapping, widths=(first, *grows))


def _published(name: str) -> str:
    """What the file calls one of our tensors."""
    start, dot, last = name.rpartition(".")
    return start + dot + (last.replace("_", ".", 1) if last in _JOINED else last)
