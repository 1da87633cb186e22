"""What a model does first: normalise its inputs, so that everything outside models works on images in [0, 1]."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.core.types import Domain


class Normalize(nn.Module):
    """Subtracts the domain's mean and divides by its standard deviation, per channel: [n, C, H, W] to the same shape.

    The two are non-persistent buffers: public constants of the domain, neither parameters nor part of a state dict.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, domain: Domain) -> None:
        super().__init__()
        if not len(domain.mean) == len(domain.std) == domain.channels:
            raise GradveilError(f"a domain of {domain.channels} channels needs as many means and standard deviations")
        self.register_buffer("mean", torch.tensor(domain.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(domain.std).view(-1, 1, 1), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - self.mean) / self.std


def first_operation(domain: Domain, normalize: bool) -> nn.Module:
    """What a model does to its inputs first: normalise them, or nothing."""
    return Normalize(domain) if normalize else nn.Identity()


SMALL_SIDE = 64
"""The longest side that ``auto`` options still take for a small image, in the manner of CIFAR rather than ImageNet."""


def is_small(domain: Domain) -> bool:
    return max(domain.height, domain.width) <= SMALL_SIDE
