"""ATS (Gao et al., CVPR 2021): clients train on images under augmentation policies that were searched for privacy.

A policy is a sequence of sub-policies, named by their places in a library of 50; each is one image operation of a fixed
magnitude. The library's order and its magnitudes are those of the authors' release, because policies are named by them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.defenses import image_operations as operations
from gradveil.defenses.base import Defense
from gradveil.defenses.registry import DEFENSES

Policy = tuple[int, ...]

_STRONGEST = 9
_LONGEST = 10
_FRAME = 4


@dataclass(frozen=True)
class Kind:
    """An image operation, how much of it a magnitude from 0 to 9 is, and whether its sign is drawn for each image."""

    operation: operations.Operation
    amount: Callable[[int], float]
    signed: bool = False


def _up_to(most: float) -> Callable[[int], float]:
    return lambda magnitude: most * magnitude / _STRONGEST


def _none(magnitude: int) -> float:  # noqa: ARG001
    return 0.0


KINDS: dict[str, Kind] = {
    "shift_x": Kind(operations.shift_x, _up_to(150 / 331), signed=True),
    "shift_y": Kind(operations.shift_y, _up_to(150 / 331), signed=True),
    "shear_x": Kind(operations.shear_x, _up_to(0.3), signed=True),
    "shear_y": Kind(operations.shear_y, _up_to(0.3), signed=True),
    "rotate": Kind(operations.rotate, _up_to(30)),
    "brightness": Kind(operations.brightness, _up_to(0.5), signed=True),
    "contrast": Kind(operations.contrast, _up_to(0.5), signed=True),
    "colour": Kind(operations.colour, _up_to(0.5), signed=True),
    "sharpness": Kind(operations.sharpness, _up_to(0.5), signed=True),
    "posterize": Kind(operations.posterize, lambda magnitude: round(8 - 4 * magnitude / _STRONGEST)),
    "solarize": Kind(operations.solarize, lambda magnitude: 256 - 256 * magnitude / _STRONGEST),
    "autocontrast": Kind(operations.autocontrast, _none),
    "equalize": Kind(operations.equalize, _none),
    "invert": Kind(operations.invert, _none),
}

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


@DEFENSES.register("ats")
class ATS(Defense):
    """ATS (Gao et al. 2021): train on images under searched augmentation policies, one drawn for each image."""

    def __init__(self, *, policy: str = "3-1-7_43-18-18", crop: bool = False) -> None:
        self.policies = tuple(_parsed(part, policy) for part in policy.split("_"))
        self.crop = crop

    @torch.no_grad()
    def on_inputs(self, inputs: Tensor, rng: Stream) -> Tensor:
        count, longest = len(inputs), max(map(len, self.policies))
        chosen = rng.integers(len(self.policies), (count,), inputs.device)
        signs = 2 * rng.integers(2, (count, longest), inputs.device) - 1
        start = _cropped(inputs, rng) if self.crop else inputs
        outputs = start.clone()
        for number, policy in enumerate(self.policies):
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


def _parsed(part: str, whole: str) -> Policy:
    """``3-1-7`` as numbers of the library."""
    numbers = part.split("-")
    known = {str(number) for number in range(len(LIBRARY))}
    if not known.issuperset(numbers) or len(numbers) > _LONGEST:
        raise GradveilError(
            f"defense ats: policy is numbers from 0 to {len(LIBRARY) - 1} joined by -, at most {_LONGEST}, and several "
            f"policies are joined by _, such as 3-1-7_43-18-18, not {whole!r}"
        )
    return tuple(map(int, numbers))


def _cropped(inputs: Tensor, rng: Stream) -> Tensor:
    """A frame of the same size, at most four pixels off in each direction, every second one mirrored."""
    off = rng.integers(2 * _FRAME + 1, (2, len(inputs)), inputs.device) - _FRAME
    mirrored = rng.integers(2, (len(inputs),), inputs.device) == 1
    return operations.crop_and_mirror(inputs, off[0], off[1], mirrored)
