"""The one check that a fast way gives what the plain one gives, made before the fast way is relied on.

At a kink of a network, such as a ReLU at zero or a tie in a max pool, the gradient jumps. Two right computations may
round a point on a kink to different sides and then differ by percents, on one processor and not on another. So a
difference counts only if it is there at points nearby too: a step aside leaves the kink, and a wrong rule stays wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradveil.core.seeding import generator
from gradveil.core.types import Params
from gradveil.engine.graphs import without_tf32

FEW = 2
"""On so many examples or problems ways are compared: one alone does not show how a model lays them out."""
SAME = 1e-2
"""Up to this share of their length, tensors differ by rounding."""
ROUNDING = 1e-5
"""Up to this share of all tensors, one of them is rounding: the gradient of a bias which changes nothing is no more."""
_TINY = 1e-12
_OTHERS = 2
_ASIDE = 1e-2
"""How far other points are from the first: thousands of times farther than rounding reaches."""


def random_inputs(shape: tuple[int, ...]) -> Tensor:
    """A few inputs [FEW, *shape] in [0, 1] to compare on; two examples of a client may be equal, which hides errors."""
    return torch.rand((FEW, *shape), generator=generator(0, "layer rules"))


def agree(same: Callable[[Params], bool], point: Params) -> bool:
    """Whether two ways are the ``same`` at a point or, because that may lie on a kink, at one of a few others nearby.

    They are compared in plain float32: with TF32, right ways differ by percents.
    """
    rng = generator(0, "beside a kink")
    with without_tf32():
        return same(point) or any(
            same({name: x + (_ASIDE * torch.randn(x.shape, generator=rng)).to(x) for name, x in point.items()})
            for _ in range(_OTHERS)
        )


def same_tensors(found: Params, expected: Params) -> bool:
    """Whether the tensors of some examples or problems, [n, ...] by name, are those expected, each for itself."""
    if found.keys() != expected.keys():
        return False
    if not expected:
        return True
    lengths = torch.stack([_lengths(tensor) for tensor in expected.values()])
    away = torch.stack([_lengths(found[name] - tensor) for name, tensor in expected.items()])
    return bool(is_rounding(away, lengths, lengths.norm(dim=0)).all())


def is_rounding(away: Tensor, length: Tensor, whole: Tensor) -> Tensor:
    """Whether a difference is rounding, in something so long that is a part of something as long as ``whole``."""
    return away <= SAME * length + ROUNDING * whole + _TINY


def _lengths(tensor: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(tensor.reshape(len(tensor), -1), dim=1)
    return lengths
