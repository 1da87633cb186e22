"""PRECODE (Scheliga et al., WACV 2022): a variational bottleneck in front of the classifier makes its input random."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gradveil.core.errors import GradveilError
from gradveil.core.seeding import isolated
from gradveil.core.streams import Stream
from gradveil.defenses.base import DEFENSES, Defense
from gradveil.models.functional import AddsToLoss, Functional

_LARGEST = 2**16
_SMALLEST_STD = 1e-6
"""Added to the standard deviation, so that its logarithm stays finite however far the encoder goes."""


class Bottleneck(AddsToLoss):
    """Features [n, d] drawn again from a Gaussian code of K entries; adds the code's KL divergence to the loss.

    ``noise`` is [n, K], one draw for each example, or [1, K] for all: zeros, so that the code is its mean, unless the
    client puts its draw there.
    """

    noise: Tensor

    def __init__(self, features: int, size: int, kl_weight: float) -> None:
        super().__init__()
        self.encoder = nn.Linear(features, 2 * size)
        self.decoder = nn.Linear(size, features)
        self.kl_weight = kl_weight
        self.register_buffer("noise", torch.zeros(1, size), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        if features.dim() != 2:
            raise GradveilError(
                f"defense precode: the last torch.nn.Linear takes inputs of {features.dim()} axes, not [n, features]; "
                "pool or flatten them before it"
            )
        if len(self.noise) not in (1, len(features)):
            raise GradveilError(
                f"defense precode drew noise for {len(self.noise)} examples, but another defense asks for the loss of "
                f"{len(features)}: the two cannot be chained"
            )
        mean, spread = self.encoder(features).chunk(2, dim=-1)
        std = F.softplus(spread) + _SMALLEST_STD
        divergence = 0.5 * (mean.square() + std.square() - 1) - std.log()
        self.term = self.kl_weight * divergence.sum(dim=-1).mean()
        decoded: Tensor = self.decoder(mean + std * self.noise)
        return decoded


@DEFENSES.register("precode")
@dataclass(frozen=True, kw_only=True)
class Precode(Defense):
    """PRECODE (Scheliga et al. 2022): a variational bottleneck in front of the classifier, part of the shared model."""

    reshapes: ClassVar[bool] = True

    size: int = 256
    kl_weight: float = 1e-3

    def __post_init__(self) -> None:
        self._require_kinds()
        self._require(1 <= self.size <= _LARGEST, "size", f"a whole number from 1 to {_LARGEST}")
        self._require(0 <= self.kl_weight < math.inf, "kl_weight", "at least 0")

    def check(self, model: nn.Module) -> None:
        _last_linear(model)

    def on_model(self, model: nn.Module) -> nn.Module:
        if any(isinstance(layer, Bottleneck) for layer in model.modules()):
            raise GradveilError("defense precode: the model has its bottleneck already; name precode once")
        changed = copy.deepcopy(model)
        linear = _last_linear(changed)
        weight = linear.weight
        # Initialised on the CPU, so that it has the same weights wherever the model is.
        with isolated(0, "precode"), torch.device("meta" if weight.is_meta else "cpu"):
            bottleneck = Bottleneck(linear.in_features, self.size, self.kl_weight)
        bottleneck = bottleneck.to(device=weight.device, dtype=weight.dtype)
        behind = nn.Sequential(bottleneck, linear).train(linear.training)
        for name in [name for name, layer in changed.named_modules(remove_duplicate=False) if layer is linear]:
            changed.set_submodule(name, behind)
        return changed

    def on_forward(self, model: Functional, examples: int, rng: Stream) -> Functional:
        layers = [name for name, layer in model.module.named_modules() if isinstance(layer, Bottleneck)]
        if not layers:
            raise GradveilError("defense precode: the model has no bottleneck; build it with the defense's on_model")
        codes = {f"{name}.noise": model.buffers[f"{name}.noise"] for name in layers}
        return model.with_buffers({name: rng.normal((examples, code.shape[-1]), code) for name, code in codes.items()})


def _last_linear(model: nn.Module) -> nn.Linear:
    """The classifier: the last linear layer in the order of definition, attention's own ones left out."""
    found = [
        layer
        for name, layer in model.named_modules()
        if name and isinstance(layer, nn.Linear) and not isinstance(layer, NonDynamicallyQuantizableLinear)
    ]
    if not found:
        raise GradveilError(
            f"defense precode puts a bottleneck before the last torch.nn.Linear, but {type(model).__name__} has none: "
            "end the model with one"
        )
    return found[-1]
