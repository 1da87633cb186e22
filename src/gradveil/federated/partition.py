"""Who holds what: schemes that deal the examples of one data set out to clients, by name.

Every scheme returns one ascending index tensor per client; together they hold each example exactly once.

>>> [len(share) for share in partition("iid", torch.arange(10) % 2, clients=3, seed=0)]
[4, 3, 3]
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.registry import Registry
from gradveil.core.seeding import generator

MAX_ALPHA = 1e9
"""Above it the shares are even to all intents, and the sum of many draws may be infinite."""

PARTITIONS: Registry[list[Tensor]] = Registry("partition")


def partition(spec: str, labels: Tensor, *, clients: int, seed: int) -> list[Tensor]:
    """The examples of each client, ascending; nobody has none."""
    return PARTITIONS.build(spec, labels, clients, generator(seed, "federated", "partition"))


@PARTITIONS.register("iid")
def iid(labels: Tensor, clients: int, rng: torch.Generator) -> list[Tensor]:
    """Equal shares, to within one example, drawn without regard to the labels.

    >>> [len(share) for share in iid(torch.zeros(10), 3, torch.Generator().manual_seed(0))]
    [4, 3, 3]
    """
    _require(len(labels), clients)
    order = torch.randperm(len(labels), generator=rng)
    return [share.sort().values for share in order.tensor_split(clients)]


@PARTITIONS.register("dirichlet")
def dirichlet(
    labels: Tensor, clients: int, rng: torch.Generator, minimum: int = 1, *, alpha: float = 0.5, equal: bool = False
) -> list[Tensor]:
    """Each class spread in proportions drawn from Dirichlet(alpha) (Hsu et al. 2019); small alpha is strong skew.

    A client left with fewer than ``minimum`` examples is topped up at random from the client that then has most, so
    that strong skew ends too. With ``equal``, proportions are drawn for the clients instead and fitted to shares of one
    size, to within one example.
    """
    if not 0 < alpha <= MAX_ALPHA:
        raise GradveilError(f"alpha must be above 0 and at most {MAX_ALPHA:g}, not {alpha}; for even shares use iid")
    _require(len(labels), clients, each=minimum)
    order = torch.randperm(len(labels), generator=rng)
    shuffled = labels[order].long()
    counts = torch.bincount(shuffled)
    # by numpy, whose sampler is sound for tiny alphas too
    draws = np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=rng)))
    if equal:
        drawn = torch.from_numpy(draws.dirichlet(np.full(len(counts), alpha), size=clients))
        owner = _owners(shuffled, _fitted(drawn.T, counts))
    else:
        owner = _owners(shuffled, torch.from_numpy(draws.dirichlet(np.full(clients, alpha), size=len(counts))))
    _level(owner, clients, len(labels) // clients if equal else minimum, within=1 if equal else None)
    grouped = order[owner.argsort(stable=True)]
    ends = torch.bincount(owner, minlength=clients).cumsum(0)
    return [share.sort().values for share in grouped.tensor_split(ends[:-1])]


@PARTITIONS.register("shards")
def shards(labels: Tensor, clients: int, rng: torch.Generator, *, each: int = 2) -> list[Tensor]:
    """Sorted by label and cut; each client gets so many pieces of few labels (McMahan et al. 2017)."""
    if each < 1:
        raise GradveilError(f"each client needs at least one shard, not {each}")
    _require(len(labels), clients, each=each)
    order = torch.randperm(len(labels), generator=rng)
    by_label = order[labels[order].argsort(stable=True)]
    pieces = by_label.tensor_split(clients * each)
    dealt = torch.randperm(len(pieces), generator=rng).view(clients, each)
    return [torch.cat([pieces[i] for i in hand]).sort().values for hand in dealt.tolist()]


@PARTITIONS.register("victim")
def victim(labels: Tensor, clients: int, rng: torch.Generator, *, examples: int = 1) -> list[Tensor]:
    """So few examples for the first client, equal shares of the rest for the others (CENSOR, Figure 2).

    >>> [len(share) for share in victim(torch.zeros(10), 3, torch.Generator().manual_seed(0))]
    [1, 5, 4]
    """
    if examples < 1:
        raise GradveilError(f"the victim needs at least one example, not {examples}")
    if clients == 1:
        return iid(labels, clients, rng)
    _require(len(labels) - examples, clients - 1)
    order = torch.randperm(len(labels), generator=rng)
    shares = [order[:examples], *order[examples:].tensor_split(clients - 1)]
    return [share.sort().values for share in shares]


def _fitted(proportions: Tensor, counts: Tensor) -> Tensor:
    """Proportions [classes, clients] scaled until a class has its count and all clients the same (Sinkhorn)."""
    table = proportions.clamp(min=1e-9)
    each = counts.double().clamp(min=1e-9)[:, None]  # a class without examples keeps a trace: its sum divides
    for _ in range(200):
        table = table / table.sum(0) * (counts.sum() / table.shape[1])
        table = table / table.sum(1, keepdim=True) * each
    return table


def _owners(labels: Tensor, proportions: Tensor) -> Tensor:
    """The client of each example [n], given shuffled labels and how each class is spread, [classes, clients].

    An example's rank within its class, as a fraction in (0, 1), falls between two cumulative proportions of the class.
    One search serves all classes: class k asks at k + fraction in a table where its row is raised by k.
    """
    counts = torch.bincount(labels)
    cumulative = proportions.cumsum(1)
    table = (cumulative / cumulative[:, -1:] + torch.arange(len(counts))[:, None]).flatten()
    grouped = labels.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    rank = torch.empty_like(labels)
    rank[grouped] = torch.arange(len(labels)) - starts[labels[grouped]]
    fraction = (rank + 0.5).double() / counts[labels]
    owner = torch.searchsorted(table, labels + fraction) - labels * proportions.shape[1]
    return owner.clamp(max=proportions.shape[1] - 1)


def _level(owner: Tensor, clients: int, minimum: int, *, within: int | None) -> None:
    """Let clients with most examples hand some to those with fewest until nobody has fewer than ``minimum``.

    With ``within``, until shares also differ by at most so many. Examples are in random order, so the first will do.
    """
    counts = torch.bincount(owner, minlength=clients)
    while True:
        poorest, richest = int(counts.argmin()), int(counts.argmax())
        fewest, most = int(counts[poorest]), int(counts[richest])
        if fewest < minimum:
            amount = min(minimum - fewest, most - minimum)
        elif within is not None and most - fewest > within:
            amount = 1
        else:
            return
        owner[(owner == richest).nonzero().flatten()[:amount]] = poorest
        counts[richest] -= amount
        counts[poorest] += amount


def _require(examples: int, clients: int, *, each: int = 1) -> None:
    if clients < 1:
        raise GradveilError(f"there must be at least one client, not {clients}")
    if examples < clients * each:
        raise GradveilError(f"{examples} examples are too few for {clients} clients with at least {each} each")
