"""Whether two computations of a gradient agree, asked before the faster one is relied on.

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

FEW = 2
"""On so many examples or problems computations are compared: one alone does not show how a model lays them out."""
SAME = 1e-2
"""Up to this share of their length, gradients differ by rounding."""
ROUNDING = 1e-6
"""Up to this share of the whole gradient, one tensor is rounding: that of a bias which changes nothing is no more."""
_OTHERS = 2
_ASIDE = 1e-2
"""How far other points are from the first: thousands of times farther than rounding reaches."""


def random_inputs(shape: tuple[int, ...]) -> Tensor:
    """A few inputs [FEW, *shape] in [0, 1] to compare on; two examples of a client may be equal, which hides errors."""
    return torch.rand((FEW, *shape), generator=generator(0, "layer rules"))


def agree_nearby(agree: Callable[[Params], bool], point: Params) -> bool:
    """Whether ``agree`` holds at a point or, because that may lie on a kink, at one of a few others beside it."""
    if agree(point):
        return True
    rng = generator(0, "beside a kink")
    return any(
        agree({name: x + (_ASIDE * torch.randn(x.shape, generator=rng)).to(x) for name, x in point.items()})
        for _ in range(_OTHERS)
    )


def same_gradients(found: Params, expected: Params) -> bool:
    """Whether the gradients of some examples, [n, ...] by name, are those expected, tensor by tensor."""
    if found.keys() != expected.keys():
        return False
    lengths = torch.stack([tensor.flatten(1).norm(dim=1) for tensor in expected.values()])
    away = torch.stack([(found[name] - tensor).flatten(1).norm(dim=1) for name, tensor in expected.items()])
    return bool((away <= SAME * lengths + ROUNDING * lengths.norm(dim=0)).all())
