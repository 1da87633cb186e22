"""Several defenses, each working on what the one before it left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.core.types import Params
from gradveil.defenses.base import Defense, Log, Step, Transform
from gradveil.models.functional import Functional


class Chain(Defense):
    """Every hook of every link, in order."""

    def __init__(self, links: Sequence[Defense]) -> None:
        self.links = tuple(links)
        for earlier, later in combinations(self.links, 2):
            _check_order(earlier, later)

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


def _check_order(earlier: Defense, later: Defense) -> None:
    """Refuse a chain in which a link would undo what one before it did."""
    if later.starts_over and _changes_gradients(earlier):
        raise GradveilError(
            f"{type(later).__name__} begins with the private examples, so that what {type(earlier).__name__} did to "
            "their gradient would be lost: put it first in the chain"
        )
    if earlier.guaranteed and not isinstance(later, Transform) and _changes_gradients(later):
        raise GradveilError(
            f"{type(later).__name__} looks at the private examples again, so that the guarantee of "
            f"{type(earlier).__name__} would not hold: only what needs no examples may follow it, such as sparsify"
        )


def _changes_gradients(link: Defense) -> bool:
    if isinstance(link, Transform):
        return link.at == "step"
    kind = type(link)
    return kind.on_gradient is not Defense.on_gradient or kind.prepared is not Defense.prepared
