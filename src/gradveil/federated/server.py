"""The server's side as pure functions: who takes part, what is kept of their replies, and the step that is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.core.trees import added_at_once, all_finite, scaled
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
    measured = [name for name, tensor in trees[0].items() if tensor.is_floating_point()]
    mean = _mean([[tree[name] for name in measured] for tree in trees], weights) if measured else []
    means = dict(zip(measured, mean, strict=True))
    return {name: means[name] if name in means else _largest(trees, name) for name in trees[0]}


def _mean(each: Sequence[list[Tensor]], weights: Sequence[float]) -> list[Tensor]:
    """The mean by weight of lists of tensors, in one call for each list."""
    first, *others = (weight / sum(weights) for weight in weights)
    total = list(torch._foreach_mul(each[0], first))
    for tensors, share in zip(each[1:], others, strict=True):
        torch._foreach_add_(total, tensors, alpha=share)
    return total


def _largest(trees: Sequence[Params], name: str) -> Tensor:
    return torch.stack([tree[name] for tree in trees]).amax(dim=0)


def as_difference(reply: Params, recipe: Recipe) -> Params:
    """A reply as a change of the parameters: a gradient is one step of the recipe's learning rate against it."""
    return scaled(reply, -recipe.lr) if recipe.sends == "gradient" else reply


def stepped(state: State, change: Params, buffers: Params, *, lr: float, momentum: float) -> State:
    """The state after one server step along the mean change of the clients (FedAvgM, Hsu et al. 2019)."""
    velocity = added_at_once(change, state.velocity, momentum) if momentum and state.velocity else change
    moved = added_at_once(state.params, velocity, lr)
    if not all_finite(moved):
        raise GradveilError("the training diverged: the global model holds NaN or infinity; lower lr or server_lr")
    return State(moved, buffers, velocity if momentum else {})
