"""ATS (Gao et al., CVPR 2021): clients train on images under augmentation policies that were searched for privacy.

A policy is a sequence of sub-policies, named by their places in a library of 50; each is one image operation of a fixed
magnitude. The library's order and its magnitudes are those of the authors' release, because policies are named by them.

Image operations take images [n, C, H, W] in [0, 1] and an amount for each, [n], and give new images of the same shape
in [0, 1]. Each does what the operation of that name does in Pillow, for which policies are written. Where Pillow rounds
to 8 bits after every step, these keep the fractions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.defenses.base import DEFENSES, Defense

Operation = Callable[[Tensor, Tensor], Tensor]
Policy = tuple[int, ...]
Row = tuple[Tensor | float, Tensor | float, Tensor | float]

_STRONGEST = 9
_LONGEST = 10
_FRAME = 4
_LUMINANCE = (0.299, 0.587, 0.114)
_GREY = 128 / 255
_LEVELS = 256


@DEFENSES.register("ats")
@dataclass(frozen=True, kw_only=True)
class ATS(Defense):
    """ATS (Gao et al. 2021): train on images under searched augmentation policies, one drawn for each image."""

    policy: str = "3-1-7_43-18-18"
    crop: bool = False

    def __post_init__(self) -> None:
        self._require_kinds()
        known = {str(number) for number in range(len(LIBRARY))}
        for numbers in (part.split("-") for part in self.policy.split("_")):
            if not known.issuperset(numbers) or len(numbers) > _LONGEST:
                raise GradveilError(
                    f"defense ats: policy is numbers from 0 to {len(LIBRARY) - 1} joined by -, at most {_LONGEST}, and "
                    f"several policies are joined by _, such as 3-1-7_43-18-18, not {self.policy!r}"
                )

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Each as numbers of the library."""
        return tuple(tuple(map(int, part.split("-"))) for part in self.policy.split("_"))

    @torch.no_grad()
    def on_inputs(self, inputs: Tensor, rng: Stream) -> Tensor:
        policies, count = self.policies, len(inputs)
        chosen = rng.integers(len(policies), (count,), inputs.device)
        signs = 2 * rng.integers(2, (count, max(map(len, policies))), inputs.device) - 1
        start = inputs
        if self.crop:  # a frame of the same size, at most so many pixels off, every second one mirrored
            off = rng.integers(2 * _FRAME + 1, (2, count), inputs.device) - _FRAME
            mirrored = rng.integers(2, (count,), inputs.device) == 1
            start = crop_and_mirror(inputs, off[0], off[1], mirrored)
        outputs = start.clone()
        for number, policy in enumerate(policies):
            members = (chosen == number).nonzero().squeeze(1)
            if len(members):
                outputs[members] = transformed(start[members], policy, signs[members])
        return outputs


def transformed(images: Tensor, policy: Policy, signs: Tensor) -> Tensor:
    """Images [n, C, H, W] under one policy; ``signs`` [n, length] of 1 and -1 are of each image and operation."""
    for place, number in enumerate(policy):
        name, magnitude = LIBRARY[number]
        kind = KINDS[name]
        amount = torch.full((len(images),), kind.amount(magnitude), device=images.device)
        images = kind.operation(images, amount * signs[:, place] if kind.signed else amount)
    return images


LIBRARY: tuple[tuple[str, int], ...] = (
    ("invert", 7), ("contrast", 6), ("rotate", 2), ("shift_x", 9), ("sharpness", 1),
    ("sharpness", 3), ("shear_y", 2), ("shift_y", 2), ("autocontrast", 5), ("equalize", 2),
    ("shear_y", 5), ("posterize", 5), ("colour", 3), ("brightness", 5), ("sharpness", 9),
    ("brightness", 9), ("equalize", 5), ("equalize", 1), ("contrast", 7), ("sharpness", 5),
    ("colour", 5), ("shift_x", 5), ("equalize", 7), ("autocontrast", 8), ("shift_y", 3),
    ("sharpness", 6), ("brightness", 6), ("colour", 8), ("solarize", 0), ("invert", 0),
    ("equalize", 0), ("autocontrast", 0), ("equalize", 8), ("equalize", 4), ("colour", 5),
    ("equalize", 5), ("autocontrast", 4), ("solarize", 4), ("brightness", 3), ("colour", 0),
    ("solarize", 1), ("autocontrast", 0), ("shift_y", 3), ("shift_y", 3), ("autocontrast", 1),
    ("solarize", 1), ("equalize", 5), ("invert", 0), ("shift_y", 3), ("autocontrast", 1),
)  # fmt: skip
"""Operation and magnitude of each sub-policy, in the order by which policies name them, from 0 on."""


def shift_x(images: Tensor, amount: Tensor) -> Tensor:
    """Move the content to the left by a share of the width, to the right below zero; black comes in."""
    return _nearest(images, _matrix(amount, x=(1.0, 0.0, amount * images.shape[3])), 0.0)


def shift_y(images: Tensor, amount: Tensor) -> Tensor:
    """Move the content up by a share of the height, down below zero; black comes in."""
    return _nearest(images, _matrix(amount, y=(0.0, 1.0, amount * images.shape[2])), 0.0)


def shear_x(images: Tensor, amount: Tensor) -> Tensor:
    """Move each row to the left by its distance from the top times the amount; black comes in."""
    return _bicubic(images, _matrix(amount, x=(1.0, amount, 0.0)))


def shear_y(images: Tensor, amount: Tensor) -> Tensor:
    """Move each column up by its distance from the left times the amount; black comes in."""
    return _bicubic(images, _matrix(amount, y=(amount, 1.0, 0.0)))


def rotate(images: Tensor, amount: Tensor) -> Tensor:
    """Turn by degrees, counter-clockwise, about the centre; grey comes in."""
    angle = amount.float() * (math.pi / 180)
    cosine, sine = angle.cos(), angle.sin()
    x, y = images.shape[3] / 2, images.shape[2] / 2
    across, down = (cosine, -sine, x - cosine * x + sine * y), (sine, cosine, y - sine * x - cosine * y)
    return _nearest(images, _matrix(amount, across, down), _GREY)


def crop_and_mirror(images: Tensor, right: Tensor, down: Tensor, mirrored: Tensor) -> Tensor:
    """Cut out a frame that lies so many whole pixels to the right and down; where ``mirrored``, turn left to right."""
    width = images.shape[3]
    across = torch.where(mirrored, -1.0, 1.0)
    offset = torch.where(mirrored, width, 0) + right
    return _nearest(images, _matrix(across, x=(across, 0.0, offset), y=(0.0, 1.0, down)), 0.0)


def brightness(images: Tensor, amount: Tensor) -> Tensor:
    """Away from black by a share, or toward it below zero."""
    return _away_from(torch.zeros_like(images), images, amount)


def contrast(images: Tensor, amount: Tensor) -> Tensor:
    """Away from the mean luminance by a share, or toward it below zero."""
    return _away_from(_luminance(images).mean(dim=(2, 3), keepdim=True), images, amount)


def colour(images: Tensor, amount: Tensor) -> Tensor:
    """Away from the grey picture by a share, or toward it below zero; a grey picture stays."""
    return _away_from(_luminance(images), images, amount)


def sharpness(images: Tensor, amount: Tensor) -> Tensor:
    """Away from the smoothed picture by a share, or toward it below zero; the outermost pixels stay."""
    if min(images.shape[2:]) < 3:
        return images.clone()
    kernel = images.new_ones(1, 1, 3, 3)
    kernel[..., 1, 1] = 5
    smooth = images.clone()
    inner = F.conv2d(images.flatten(0, 1).unsqueeze(1), kernel / kernel.sum())
    smooth[..., 1:-1, 1:-1] = inner.view(smooth[..., 1:-1, 1:-1].shape)
    return _away_from(smooth, images, amount)


def invert(images: Tensor, amount: Tensor) -> Tensor:  # noqa: ARG001
    """The negative; it has no amount."""
    return 1 - images


def solarize(images: Tensor, amount: Tensor) -> Tensor:
    """The negative of everything from a threshold on, given as one of 256 levels."""
    return torch.where(_levels(images) < _each(amount), images, 1 - images)


def posterize(images: Tensor, amount: Tensor) -> Tensor:
    """Keep so many of the 8 bits of each entry."""
    step = 2 ** (8 - _each(amount).long())
    return (_levels(images) // step * step).to(images.dtype) / (_LEVELS - 1)


def autocontrast(images: Tensor, amount: Tensor) -> Tensor:  # noqa: ARG001
    """Stretch each channel so that it begins at 0 and ends at 1; a flat one stays. It has no amount."""
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    span = high - low
    return torch.where(span > 0, (images - low) / span.where(span > 0, torch.ones_like(span)), images)


def equalize(images: Tensor, amount: Tensor) -> Tensor:  # noqa: ARG001
    """Spread each channel's levels so that all are about equally frequent. It has no amount.

    In whole numbers, as Pillow counts: in a small image the steps are so coarse that the brightest levels all end at 1.
    """
    levels = _levels(images).flatten(2)
    histogram = levels.new_zeros(*levels.shape[:2], _LEVELS)
    histogram.scatter_add_(2, levels, torch.ones_like(levels))
    brightest = histogram.gather(2, levels.amax(dim=2, keepdim=True))
    step = (levels.shape[2] - brightest) // (_LEVELS - 1)
    below = histogram.cumsum(dim=2) - histogram
    new = ((step // 2 + below) // step.clamp(min=1)).clamp(max=_LEVELS - 1)
    spread = new.gather(2, levels).view(images.shape).to(images.dtype) / (_LEVELS - 1)
    return torch.where((step > 0).unsqueeze(-1), spread, images)


def _each(amount: Tensor) -> Tensor:
    """[n] shaped to be broadcast over images."""
    return amount.view(-1, 1, 1, 1)


def _levels(images: Tensor) -> Tensor:
    """The nearest of 256 levels, int64."""
    return (images * (_LEVELS - 1)).round().long()


def _luminance(images: Tensor) -> Tensor:
    """[n, 1, H, W]: by the usual weights of red, green and blue, or the mean of other channels."""
    if images.shape[1] != len(_LUMINANCE):
        return images.mean(dim=1, keepdim=True)
    return (images * images.new_tensor(_LUMINANCE).view(1, -1, 1, 1)).sum(dim=1, keepdim=True)


def _away_from(other: Tensor, images: Tensor, amount: Tensor) -> Tensor:
    return (images + _each(amount).to(images.dtype) * (images - other)).clamp(0, 1)


def _matrix(like: Tensor, x: Row = (1.0, 0.0, 0.0), y: Row = (0.0, 1.0, 0.0)) -> Tensor:
    """[n, 2, 3]: from which x and y in the picture a pixel is taken, as a map of places (x, y, 1)."""
    columns = [torch.as_tensor(e, dtype=torch.float32, device=like.device).expand(like.shape) for e in (*x, *y)]
    return torch.stack(columns, dim=-1).view(-1, 2, 3)


def _places(images: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From where each pixel is taken: x and y, [n, H, W], counted from the corner, and whether that is inside."""
    height, width = images.shape[2:]
    down = torch.arange(height, device=matrix.device).view(1, -1, 1) + 0.5
    right = torch.arange(width, device=matrix.device).view(1, 1, -1) + 0.5
    x, y = (row[:, 0] * right + row[:, 1] * down + row[:, 2] for row in matrix[..., None, None].unbind(1))
    return x, y, (x >= 0) & (x < width) & (y >= 0) & (y < height)


def _nearest(images: Tensor, matrix: Tensor, fill: float) -> Tensor:
    x, y, inside = _places(images, matrix)
    height, width = images.shape[2:]
    index = y.long().clamp(0, height - 1) * width + x.long().clamp(0, width - 1)
    taken = images.flatten(2).gather(2, index.flatten(1).unsqueeze(1).expand(-1, images.shape[1], -1))
    return torch.where(inside.unsqueeze(1), taken.view(images.shape), fill)


def _bicubic(images: Tensor, matrix: Tensor) -> Tensor:
    x, y, inside = _places(images, matrix)
    height, width = images.shape[2:]
    grid = torch.stack([2 * x / width - 1, 2 * y / height - 1], dim=-1).to(images.dtype)
    taken = F.grid_sample(images, grid, mode="bicubic", padding_mode="border", align_corners=False)
    return torch.where(inside.unsqueeze(1), taken.clamp(0, 1), 0.0)


def _up_to(most: float) -> Callable[[int], float]:
    return lambda magnitude: most * magnitude / _STRONGEST


@dataclass(frozen=True)
class GradedOperation:
    """An image operation, how much of it a magnitude from 0 to 9 is, and whether its sign is drawn for each image."""

    operation: Operation
    amount: Callable[[int], float] = lambda _magnitude: 0.0
    signed: bool = False


KINDS = {
    "shift_x": GradedOperation(shift_x, _up_to(150 / 331), signed=True),
    "shift_y": GradedOperation(shift_y, _up_to(150 / 331), signed=True),
    "shear_x": GradedOperation(shear_x, _up_to(0.3), signed=True),
    "shear_y": GradedOperation(shear_y, _up_to(0.3), signed=True),
    "rotate": GradedOperation(rotate, _up_to(30)),
    "brightness": GradedOperation(brightness, _up_to(0.5), signed=True),
    "contrast": GradedOperation(contrast, _up_to(0.5), signed=True),
    "colour": GradedOperation(colour, _up_to(0.5), signed=True),
    "sharpness": GradedOperation(sharpness, _up_to(0.5), signed=True),
    "posterize": GradedOperation(posterize, lambda magnitude: round(8 - 4 * magnitude / _STRONGEST)),
    "solarize": GradedOperation(solarize, lambda magnitude: 256 - 256 * magnitude / _STRONGEST),
    "autocontrast": GradedOperation(autocontrast),
    "equalize": GradedOperation(equalize),
    "invert": GradedOperation(invert),
}
