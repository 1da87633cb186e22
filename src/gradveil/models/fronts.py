"""Fronts: modules that inputs pass before the model, as in ``imprint:bins=128 > resnet18``. Data flows left to right.

A server that wants to read inputs off updates can put one there and choose its weights; as built here, a front is an
ordinary layer with ordinary weights.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.core.errors import GradveilError
from gradveil.core.registry import find, join_spec, options_of, parse_options, split_spec
from gradveil.core.seeding import isolated
from gradveil.domains import Domain

_ARROW = ">"


class Imprint(nn.Module):
    """The layers of Imprint (Fowl et al. 2022): fully connected, of ``bins`` rows with a bias, and back to the inputs.

    With ``kind="sparse"`` the activation of a bin is a hard-tanh that ends at ``ceiling``, otherwise a ReLU.
    """

    def __init__(
        self, domain: Domain, *, bins: int = 128, kind: Literal["relu", "sparse"] = "relu", ceiling: float = 1.0
    ) -> None:
        super().__init__()
        if not 2 <= bins <= 2**16:
            raise GradveilError(f"front imprint: bins is a whole number from 2 to {2**16}, not {bins}")
        if not 0 < ceiling < math.inf:
            raise GradveilError(f"front imprint: ceiling is above 0, not {ceiling}")
        self.shape = domain.shape
        self.ceiling = ceiling if kind == "sparse" else None
        """Where the activation of a bin ends; None: nowhere."""
        self.query = nn.Linear(math.prod(domain.shape), bins)
        self.back = nn.Linear(bins, math.prod(domain.shape))

    def forward(self, inputs: Tensor) -> Tensor:
        asked = self.query(inputs.flatten(1))
        active = F.relu(asked) if self.ceiling is None else F.hardtanh(asked, 0.0, self.ceiling)
        pictures: Tensor = self.back(active).unflatten(1, self.shape)
        return pictures


class Fronted(nn.Module):
    """A model behind a front."""

    def __init__(self, front: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self.front = front
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.model(self.front(inputs))
        return scores


def split_front(spec: str) -> tuple[str | None, str]:
    """The spec of the front, None where there is none, and that of the model behind it.

    >>> split_front("imprint:bins=64 > lenet:init=wide")
    ('imprint:bins=64', 'lenet:init=wide')
    """
    front, arrow, model = spec.rpartition(_ARROW)
    return (front.strip() if arrow else None), model.strip()


def fronted_spec(front: str, model: str) -> str:
    """The spec of a model behind a front, the front in its one spelling."""
    return f"{join_spec(*_parse(front))} {_ARROW} {model}"


def fronted(front: str, model: nn.Module, domain: Domain, *, seed: int) -> Fronted:
    """The model behind a front that is initialised from ``seed`` alone."""
    name, options = _parse(front)
    with isolated(seed, "front", name):
        return Fronted(Imprint(domain, **options), model).train(model.training)


def _parse(front: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of a front. There is one, which files of broadcasts name."""
    name, raw = split_spec(front)
    return name, parse_options("front", name, options_of(find("front", name, {"imprint": Imprint})), raw)
