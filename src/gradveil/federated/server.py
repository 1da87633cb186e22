"""The server's side as pure functions: who takes part, what is kept of their replies, and the step that is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.core.trees import add, all_finite, map_each, scaled, stack
from gradveil.core.types import Params, Recipe


@dataclass(frozen=True)
class State:
    """What the server holds between rounds; it broadcasts the parameters and the running statistics."""

    params: Params
    buffers: Params = field(default_factory=dict)
    """Running statistics of layers such as batch norm, by name; empty for a model without them."""
    velocity: Params = field(default_factory=dict)
    """The server's momentum; empty before the first step and without momentum."""


def participants(clients: int, per_round: int | None, *, seed: int, round_number: int) -> list[int]:
    """The clients of one round, ascending: drawn without repeats from the seed and the round alone.

    >>> participants(10, 3, seed=0, round_number=1) == participants(10, 3, seed=0, round_number=1)
    True
    """
    if per_round is None:
        return list(range(clients))
    drawn = torch.randperm(clients, generator=generator(seed, "federated", "participants", round_number))
    return sorted(drawn[:per_round].tolist())


def complaint(reply: Params, like: Params) -> str | None:
    """Why a reply cannot be used, or None: the server trusts neither shapes nor numbers."""
    wrong = reply.keys() ^ like.keys()
    wrong |= {name for name in reply.keys() & like.keys() if reply[name].shape != like[name].shape}
    if wrong:
        return f"it is not of this model: {min(wrong)!r} is missing, unknown or of another shape"
    return None if all_finite(reply) else "it holds NaN or infinity"


def average(trees: Sequence[Params], weights: Sequence[float]) -> Params:
    """The mean of named tensors by weight; of whole numbers, such as counters, the largest.

    >>> average([{"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}], [3, 1])
    {'w': tensor([1.])}
    """
    share = torch.tensor(weights, dtype=torch.float64) / sum(weights)

    def mean(values: Tensor) -> Tensor:
        if not values.is_floating_point():
            return values.amax(dim=0)
        total: Tensor = torch.tensordot(share.to(values), values, dims=1)
        return total

    return map_each(mean, stack(trees))


def as_difference(reply: Params, recipe: Recipe) -> Params:
    """A reply as a change of the parameters: a gradient is one step of the recipe's learning rate against it."""
    return scaled(reply, -recipe.lr) if recipe.sends == "gradient" else reply


def stepped(state: State, change: Params, buffers: Params, *, lr: float, momentum: float) -> State:
    """The state after one server step along the mean change of the clients (FedAvgM, Hsu et al. 2019)."""
    velocity = add(change, state.velocity, momentum) if momentum and state.velocity else change
    moved = add(state.params, velocity, lr)
    if not all_finite(moved):
        raise GradveilError("the training diverged: the global model holds NaN or infinity; lower lr or server_lr")
    return State(moved, buffers, velocity if momentum else {})
