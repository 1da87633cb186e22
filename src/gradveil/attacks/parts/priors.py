"""Where reconstructions come from: the unknowns of a search, and how they decode to inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call

from gradveil.core.types import Params
from gradveil.domains import Domain
from gradveil.engine import Given
from gradveil.generators import Generator

CodeCost = Literal["kl", "norm", "none"]
"""R1: how far the entries of a code, taken together, are from N(0, 1). R2: how far its length is from a typical one."""

Condition = Literal["label", "wrong", "none"]


class Prior(ABC):
    """The unknowns of a problem: where they start, what they decode to, how likely they are, and their valid set."""

    @abstractmethod
    def starts(self, batch_size: int, rngs: Sequence[torch.Generator]) -> Params:
        """Starting points [N, ...] of N problems; each generator alone decides its own."""

    @abstractmethod
    def decode(self, unknowns: Params, given: Given) -> Tensor:
        """The inputs [B, ...] of one problem; what is given of it may help, such as its labels."""

    def given(self) -> Given:
        """What this prior adds to what is given of each problem, [N, ...]."""
        return {}

    def cost(self, unknowns: Params) -> Tensor | None:  # noqa: ARG002
        """What these unknowns cost by themselves, a scalar; None for nothing."""
        return None

    def project(self, unknowns: Params) -> Params:
        """Unknowns [N, ...] of all problems, brought back into their valid set."""
        return unknowns


class Pixels(Prior):
    """The input itself is unknown, in units of the domain's mean and deviation, so that steps fit any data set.

    ``free`` pixels are raw values that may leave [0, 1] on the way, as in DLG.
    """

    def __init__(self, domain: Domain, device: torch.device | str, *, free: bool = False) -> None:
        self.domain, self.free = domain, free
        self.mean, self.std = domain.moments(device=device)
        if free:
            self.mean, self.std = torch.zeros_like(self.mean), torch.ones_like(self.std)

    def starts(self, batch_size: int, rngs: Sequence[torch.Generator]) -> Params:
        return {"pixels": _gaussian(rngs, (batch_size, *self.domain.shape)).to(self.mean.device)}

    def decode(self, unknowns: Params, given: Given) -> Tensor:  # noqa: ARG002
        return self.mean + self.std * unknowns["pixels"]

    def project(self, unknowns: Params) -> Params:
        """The nearest unknowns that decode into [0, 1]; those that are not pixels as they are."""
        if self.free:
            return unknowns
        low, high = -self.mean / self.std, (1 - self.mean) / self.std
        return {**unknowns, "pixels": unknowns["pixels"].clamp(low, high)}


class Codes(Prior):
    """The code of a generator is unknown (GGL). ``limit`` bounds its entries by a tanh.

    ``condition`` is the class that the generator is asked for: the label that was read or, as a control, another or no
    class.
    """

    def __init__(
        self,
        generator: Generator,
        device: torch.device,
        *,
        cost: CodeCost = "none",
        weight: float = 0.0,
        limit: float | None = None,
        condition: Condition = "label",
    ) -> None:
        self.generator, self.device, self.condition = generator, device, condition
        self.kind, self.weight, self.limit = cost, weight, limit

    def starts(self, batch_size: int, rngs: Sequence[torch.Generator]) -> Params:
        return {"code": _gaussian(rngs, (batch_size, self.generator.latent)).to(self.device)}

    def code(self, unknowns: Params) -> Tensor:
        """The code that the generator gets."""
        code = unknowns["code"]
        return code if self.limit is None else self.limit * torch.tanh(code / self.limit)

    def decode(self, unknowns: Params, given: Given) -> Tensor:
        labels: Tensor | None = given["labels"]
        if self.condition == "none":
            labels = None
        elif self.condition == "wrong":
            labels = (given["labels"] + 1) % (self.generator.classes or 1)
        return self.generator.decode(self.code(unknowns), labels)

    def cost(self, unknowns: Params) -> Tensor | None:
        if self.kind == "none" or self.weight == 0:
            return None
        code = self.code(unknowns)
        if self.kind == "norm":
            return self.weight * (code.square().sum(dim=-1) - code.shape[-1]).square().mean()
        mean, variance = code.mean(dim=-1), code.var(dim=-1) + 1e-8
        return self.weight * 0.5 * (variance + mean.square() - 1 - variance.log()).mean()


class OwnWeights(Prior):
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


class Features(Prior):
    """The features between two stages of a generator are unknown, within an l1 ball around their start (GIFD)."""

    def __init__(self, generator: Generator, stage: str, center: Tensor, radius: float) -> None:
        self.generator, self.stage, self.center, self.radius = generator, stage, center, radius

    def starts(self, batch_size: int, rngs: Sequence[torch.Generator]) -> Params:  # noqa: ARG002
        return {"features": self.center.clone()}

    def decode(self, unknowns: Params, given: Given) -> Tensor:
        return self.generator.onward(unknowns["features"], self.stage, given["labels"])

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


def _gaussian(rngs: Sequence[torch.Generator], shape: tuple[int, ...]) -> Tensor:
    """Independent N(0, 1) entries [N, *shape], drawn on the CPU so that a seed means the same on every device."""
    return torch.stack([torch.randn(shape, generator=rng) for rng in rngs])
