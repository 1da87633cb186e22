"""Priors of a generator: pictures are what it draws, and its code, its features or its weights are unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call

from gradveil.attacks.engine import Given
from gradveil.attacks.parts.priors import gaussian
from gradveil.core.errors import GradveilError
from gradveil.core.types import Domain, Params
from gradveil.generators import Generator

CodeCost = Literal["kl", "norm", "none"]
"""R1: how far the entries of a code, taken together, are from N(0, 1). R2: how far its length is from a typical one."""


class Codes:
    """The code is unknown (GGL). ``limit`` bounds its entries by a tanh."""

    def __init__(
        self, generator: Generator, device: torch.device, *, cost: CodeCost, weight: float, limit: float | None
    ) -> None:
        self.generator, self.device = generator, device
        self.kind, self.weight, self.limit = cost, weight, limit

    def starts(self, batch_size: int, rngs: Sequence[torch.Generator]) -> Params:
        return {"code": gaussian(rngs, (batch_size, self.generator.latent)).to(self.device)}

    def given(self) -> Given:
        return {}

    def code(self, unknowns: Params) -> Tensor:
        """The code that the generator gets."""
        code = unknowns["code"]
        return code if self.limit is None else self.limit * torch.tanh(code / self.limit)

    def decode(self, unknowns: Params, given: Given) -> Tensor:
        return self.generator.decode(self.code(unknowns), given["labels"])

    def cost(self, unknowns: Params) -> Tensor | None:
        if self.kind == "none" or self.weight == 0:
            return None
        code = self.code(unknowns)
        if self.kind == "norm":
            return self.weight * (code.square().sum(dim=-1) - code.shape[-1]).square().mean()
        mean, variance = code.mean(dim=-1), code.var(dim=-1) + 1e-8
        return self.weight * 0.5 * (variance + mean.square() - 1 - variance.log()).mean()

    def project(self, unknowns: Params) -> Params:
        return unknowns


class OwnWeights:
    """Each problem has its own copy of the generator's weights, which are unknown while the code stays (GIAS)."""

    def __init__(self, generator: Generator, codes: Tensor) -> None:
        self.generator, self.codes = generator, codes

    def starts(self, batch_size: int, rngs: Sequence[torch.Generator]) -> Params:  # noqa: ARG002
        count = len(self.codes)
        return {
            name: weight.detach().expand(count, *weight.shape).clone()
            for name, weight in self.generator.named_parameters()
        }

    def given(self) -> Given:
        return {"code": self.codes}

    def decode(self, unknowns: Params, given: Given) -> Tensor:
        weights = {name: tensor for name, tensor in unknowns.items() if name not in ("labels", "mix")}
        images: Tensor = functional_call(self.generator, weights, (given["code"], given["labels"]))
        return images

    def cost(self, unknowns: Params) -> Tensor | None:  # noqa: ARG002
        return None

    def project(self, unknowns: Params) -> Params:
        return unknowns


class Features:
    """The features between two stages are unknown, within an l1 ball around where they start (GIFD)."""

    def __init__(self, generator: Generator, stage: str, center: Tensor, radius: float) -> None:
        self.generator, self.stage, self.center, self.radius = generator, stage, center, radius

    def starts(self, batch_size: int, rngs: Sequence[torch.Generator]) -> Params:  # noqa: ARG002
        return {"features": self.center.clone()}

    def given(self) -> Given:
        return {}

    def decode(self, unknowns: Params, given: Given) -> Tensor:
        return self.generator.onward(unknowns["features"], self.stage, given["labels"])

    def cost(self, unknowns: Params) -> Tensor | None:  # noqa: ARG002
        return None

    def project(self, unknowns: Params) -> Params:
        away = (unknowns["features"] - self.center).flatten(0, 1).flatten(1)
        near = into_l1_ball(away, self.radius).view_as(self.center)
        return {**unknowns, "features": self.center + near}


def into_l1_ball(points: Tensor, radius: float) -> Tensor:
    """The nearest points [n, d] whose absolute entries add up to at most ``radius`` (Duchi et al. 2008)."""
    sizes = points.abs()
    ordered = sizes.sort(dim=1, descending=True).values
    excess = ordered.cumsum(dim=1) - radius
    counts = torch.arange(1, points.shape[1] + 1, device=points.device)
    last = (ordered * counts > excess).sum(dim=1, keepdim=True).clamp_min(1)
    threshold = (excess.gather(1, last - 1) / last).clamp_min(0)
    return points.sign() * (sizes - threshold).clamp_min(0)


def fitting(generator: Generator, domain: Domain) -> Generator:
    """The generator, if it draws what the inputs look like."""
    if generator.shape != domain.shape:
        drawn, wanted = ("x".join(map(str, shape)) for shape in (generator.shape, domain.shape))
        raise GradveilError(f"the generator draws {drawn}, but the inputs are {wanted}: choose another generator=")
    return generator
