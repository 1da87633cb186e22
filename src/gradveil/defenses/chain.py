"""Several defenses, each working on what the one before it left."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradveil.core.types import Params
from gradveil.defenses.base import Defense, Log, Step
from gradveil.models.functional import Functional


class Chain(Defense):
    """Every hook of every link, in order."""

    def __init__(self, links: Sequence[Defense]) -> None:
        self.links = tuple(links)

    @property
    def reshapes(self) -> bool:  # type: ignore[override]
        return any(link.reshapes for link in self.links)

    def check(self, model: nn.Module) -> None:
        for link in self.links:
            link.check(model)

    def on_model(self, model: nn.Module) -> nn.Module:
        for link in self.links:
            model = link.on_model(model)
        return model

    def on_inputs(self, inputs: Tensor, rng: torch.Generator) -> Tensor:
        for link in self.links:
            inputs = link.on_inputs(inputs, rng)
        return inputs

    def prepared(self, start: Step) -> Defense:
        return Chain([link.prepared(start) for link in self.links])

    def on_forward(self, model: Functional, examples: int, rng: torch.Generator) -> Functional:
        for link in self.links:
            model = link.on_forward(model, examples, rng)
        return model

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        for link in self.links:
            gradient = link.on_gradient(gradient, step)
        return gradient

    def on_update(self, update: Params, rng: torch.Generator, log: Log) -> Params:
        for link in self.links:
            update = link.on_update(update, rng, log)
        return update
