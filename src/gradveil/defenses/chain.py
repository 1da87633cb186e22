"""Several defenses, each working on what the one before it left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from torch import Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Params
from gradveil.defenses.accounting import Guarantee
from gradveil.defenses.base import Defense, Log, Step, Transform
from gradveil.models.functional import Functional


class Chain(Defense):
    """Every hook of every link, in order."""

    def __init__(self, links: Sequence[Defense]) -> None:
        self.links = tuple(links)
        for earlier, later in combinations(self.links, 2):
            _check_order(earlier, later)

    @property
    def changes_updates(self) -> bool:
        return any(link.changes_updates for link in self.links)

    @property
    def reshapes(self) -> bool:  # type: ignore[override]
        return any(link.reshapes for link in self.links)

    @property
    def delta(self) -> float | None:  # type: ignore[override]
        return next((link.delta for link in self.links if link.delta is not None), None)

    def planned(self) -> Guarantee | None:
        return next((plan for link in self.links if (plan := link.planned()) is not None), None)

    def check_steps(self, steps: int) -> None:
        for link in self.links:
            link.check_steps(steps)

    def check(self, model: nn.Module) -> None:
        for link in self.links:
            link.check(model)

    def on_model(self, model: nn.Module) -> nn.Module:
        for link in self.links:
            model = link.on_model(model)
        return model

    def on_inputs(self, inputs: Tensor, rng: Stream) -> Tensor:
        for link in self.links:
            inputs = link.on_inputs(inputs, rng)
        return inputs

    def prepared(self, start: Step) -> Defense:
        return Chain([link.prepared(start) for link in self.links])

    def on_forward(self, model: Functional, examples: int, rng: Stream) -> Functional:
        for link in self.links:
            model = link.on_forward(model, examples, rng)
        return model

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        for link in self.links:
            gradient = link.on_gradient(gradient, step)
        return gradient

    def on_update(self, update: Params, rng: Stream, log: Log) -> Params:
        for link in self.links:
            update = link.on_update(update, rng, log)
        return update


def links_of(defense: Defense) -> list[Defense]:
    """The defenses that a chain is made of, chains in it taken apart too; of any other defense itself."""
    return [part for link in defense.links for part in links_of(link)] if isinstance(defense, Chain) else [defense]


def _check_order(earlier: Defense, later: Defense) -> None:
    """Refuse a chain in which a link would undo what one before it did."""
    if later.starts_over and _changes_gradients(earlier):
        raise GradveilError(
            f"{type(later).__name__} begins with the private examples, so that what {type(earlier).__name__} did to "
            "their gradient would be lost: put it first in the chain"
        )
    if earlier.delta is not None and later.delta is not None:
        raise GradveilError(
            f"{type(earlier).__name__} and {type(later).__name__} both count an epsilon: use one of them"
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
