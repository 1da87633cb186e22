"""MSE-R (Li et al., GGL, CVPR 2022): the mean squared error in a model's representation. Lower leaks more."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError

Represent = Callable[[Tensor], Tensor]
"""Images [n, C, H, W] to feature vectors [n, features]: "the feature vector before the final classification layer"."""

_AT_ONCE = 64


@torch.no_grad()
def features(images: Tensor, represent: Represent) -> Tensor:
    """The representation of each image, [n, features], computed in chunks."""
    found = torch.cat([represent(chunk) for chunk in torch.split(images, _AT_ONCE)])
    if not torch.isfinite(found).all():
        raise GradveilError(
            "the model's representation of these images is not finite, so MSE-R has no value: leave it out"
        )
    return found


def mse_r(guess: Tensor, truth: Tensor, represent: Represent) -> Tensor:
    """Mean squared error between the representations of each pair of images, [n]. Lower leaks more.

    >>> mse_r(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), lambda images: 3 * images.flatten(1))
    tensor([9.])
    """
    return (features(guess, represent) - features(truth, represent)).square().mean(dim=1)
