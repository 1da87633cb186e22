"""Who holds what: schemes that deal a labelled data set out to clients, by name.

>>> [len(share) for share in partition("iid", torch.arange(10) % 2, clients=3, seed=0)]
[4, 3, 3]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.registry import Registry
from gradveil.core.seeding import generator
from gradveil.data import partition as deals

Scheme = Callable[[Tensor, int, torch.Generator], list[Tensor]]
"""(labels [n], clients, rng) -> one ascending index tensor per client."""

PARTITIONS: Registry[Scheme] = Registry("partition")


def partition(spec: str, labels: Tensor, *, clients: int, seed: int) -> list[Tensor]:
    """The examples of each client, ascending; together each example exactly once, and nobody has none."""
    return PARTITIONS.build(spec)(labels, clients, generator(seed, "federated", "partition"))


@PARTITIONS.register("iid")
def iid() -> Scheme:
    """Equal shares, whatever the labels."""
    return deals.iid


@PARTITIONS.register("dirichlet")
def dirichlet(*, alpha: float = 0.5, equal: bool = False) -> Scheme:
    """Each class spread in proportions drawn from Dirichlet(alpha) (Hsu et al. 2019); small alpha is strong skew.

    With ``equal``, all clients have as many examples.
    """
    if not alpha > 0:
        raise GradveilError(f"partition dirichlet: alpha is above 0, not {alpha}")
    return partial(deals.dirichlet, alpha=alpha, equal=equal)


@PARTITIONS.register("shards")
def shards(*, each: int = 2) -> Scheme:
    """Sorted by label and cut; each client gets so many pieces of few labels (McMahan et al. 2017)."""
    if each < 1:
        raise GradveilError(f"partition shards: each is at least 1, not {each}")
    return partial(deals.shards, per_client=each)
