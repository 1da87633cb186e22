"""A fully connected network: its first layer gives a single input away exactly, as dW / db."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.domains import Domain
from gradveil.models.building import MODELS, Init, first_operation, initialised


class MLP(nn.Module):
    """``depth`` hidden layers of equal width, and one linear layer."""

    def __init__(
        self, domain: Domain, *, hidden: int, depth: int, activation: type[nn.Module], normalize: bool
    ) -> None:
        super().__init__()
        self.normalize = first_operation(domain, normalize)
        layers: list[nn.Module] = []
        features = math.prod(domain.shape)
        for _ in range(depth):
            layers += [nn.Linear(features, hidden), activation()]
            features = hidden
        self.body = nn.Sequential(*layers)
        self.fc = nn.Linear(features, domain.classes)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.fc(self.body(self.normalize(inputs).flatten(1)))
        return out


@MODELS.register("mlp")
def mlp(
    domain: Domain,
    *,
    hidden: int = 256,
    depth: int = 2,
    activation: Literal["relu", "sigmoid"] = "relu",
    normalize: bool = False,
    init: Init = "default",
) -> MLP:
    """Fully connected network with ``depth`` hidden layers; ``depth=0`` is a linear classifier."""
    if depth < 0 or hidden < 1:
        raise GradveilError(f"mlp needs depth of 0 or more and hidden of 1 or more, not depth={depth}, hidden={hidden}")
    kind = nn.ReLU if activation == "relu" else nn.Sigmoid
    return initialised(MLP(domain, hidden=hidden, depth=depth, activation=kind, normalize=normalize), init)
