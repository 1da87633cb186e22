"""What a defense is: the identity at four hooks of a client's local run, of which it overrides one or two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradveil.core.registry import Registry
from gradveil.core.types import Batch, Params


class Log:
    """Figures a defense reports while it works, such as how often it fell back; each becomes its mean in the result."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)

    def add(self, name: str, value: float | Tensor) -> None:
        self._values[name].append(float(value.detach()) if isinstance(value, Tensor) else value)

    def merge(self, other: Log) -> None:
        for name, values in other._values.items():
            self._values[name].extend(values)

    def means(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in sorted(self._values.items())}


@dataclass(frozen=True)
class Step:
    """What a defense may look at in one local step: everything here is on the client's side."""

    params: Params
    batch: Batch
    loss_at: Callable[[Params], Tensor]
    """The loss on this step's batch at other parameters."""
    number: int
    """Counts from 1 over the whole local run."""
    lr: float
    rng: torch.Generator
    log: Log = field(default_factory=Log)


class Defense:
    """Sends everything as it is. Overrides return new objects and never edit an argument in place."""

    def on_model(self, model: nn.Module) -> nn.Module:
        """Change the architecture that server and clients agree on, before the first broadcast."""
        return model

    def on_data(self, batch: Batch, rng: torch.Generator) -> Batch:  # noqa: ARG002
        """Change the local examples before training starts."""
        return batch

    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        """Change the gradient of one local step before the optimiser takes it."""
        return gradient

    def on_update(self, update: Params, rng: torch.Generator, log: Log) -> Params:  # noqa: ARG002
        """Change what leaves the client."""
        return update


DEFENSES: Registry[Defense] = Registry("defense")


@DEFENSES.register("none")
def none() -> Defense:
    """No defense: the update leaves as it is."""
    return Defense()
