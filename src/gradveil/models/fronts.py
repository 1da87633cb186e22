"""Fronts: modules that inputs pass before the model, as in ``imprint:bins=128 > resnet18``. Data flows left to right.

A server that wants to read inputs off updates can put one there and choose its weights; as built here, a front is an
ordinary layer with ordinary weights.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import GradveilError
from gradveil.core.registry import Registry, split_spec
from gradveil.core.seeding import isolated
from gradveil.core.types import Domain

FRONTS: Registry[nn.Module] = Registry("front")
"""Factories take the domain, and give modules from [n, C, H, W] to the same shape."""

_ARROW = ">"


class Fronted(nn.Module):
    """A model behind a front."""

    def __init__(self, front: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self.front = front
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.model(self.front(inputs))
        return scores


class Imprint(nn.Module):
    """A fully connected layer of ``bins`` rows with a bias, and one that returns to the shape of the inputs."""

    def __init__(self, domain: Domain, *, bins: int, ceiling: float | None) -> None:
        super().__init__()
        self.shape = domain.shape
        self.ceiling = ceiling
        """Where the activation of a bin ends; None: nowhere, a ReLU."""
        self.query = nn.Linear(math.prod(domain.shape), bins)
        self.back = nn.Linear(bins, math.prod(domain.shape))

    def forward(self, inputs: Tensor) -> Tensor:
        asked = self.query(inputs.flatten(1))
        active = F.relu(asked) if self.ceiling is None else F.hardtanh(asked, 0.0, self.ceiling)
        pictures: Tensor = self.back(active).unflatten(1, self.shape)
        return pictures


@FRONTS.register("imprint")
def imprint(
    domain: Domain, *, bins: int = 128, kind: Literal["relu", "sparse"] = "relu", ceiling: float = 1.0
) -> Imprint:
    """The layers of Imprint (Fowl et al. 2022); ``kind=sparse`` is a hard-tanh that ends at ``ceiling``."""
    if not 2 <= bins <= 2**16:
        raise GradveilError(f"front imprint: bins is a whole number from 2 to {2**16}, not {bins}")
    if not 0 < ceiling < math.inf:
        raise GradveilError(f"front imprint: ceiling is above 0, not {ceiling}")
    return Imprint(domain, bins=bins, ceiling=ceiling if kind == "sparse" else None)


def split_front(spec: str) -> tuple[str | None, str]:
    """The spec of the front, None where there is none, and that of the model behind it.

    >>> split_front("imprint:bins=64 > lenet:init=wide")
    ('imprint:bins=64', 'lenet:init=wide')
    """
    front, arrow, model = spec.rpartition(_ARROW)
    return (front.strip() if arrow else None), model.strip()


def joined(front: str, model: str) -> str:
    """The spec of a model behind a front, the front in its one spelling."""
    return f"{FRONTS.canonical(front)} {_ARROW} {model}"


def fronted(front: str, model: nn.Module, domain: Domain, *, seed: int) -> Fronted:
    """The model behind a front that is initialised from ``seed`` alone."""
    with isolated(seed, "front", split_spec(front)[0]):
        return Fronted(FRONTS.build(front, domain), model).train(model.training)
