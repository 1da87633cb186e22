"""Deals the examples of one data set out to clients: evenly, skewed by label, or by shards of one label.

Every function returns one ascending index tensor per client; together they hold each example exactly once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradveil.core.errors import GradveilError

MAX_ALPHA = 1e9
"""Above it the shares are even to all intents, and the sum of many draws may be infinite."""


def iid(labels: Tensor, clients: int, rng: torch.Generator) -> list[Tensor]:
    """Equal shares, to within one example, drawn without regard to the labels.

    >>> [len(share) for share in iid(torch.zeros(10), 3, torch.Generator().manual_seed(0))]
    [4, 3, 3]
    """
    _require(len(labels), clients)
    order = torch.randperm(len(labels), generator=rng)
    return [share.sort().values for share in order.tensor_split(clients)]


def dirichlet(
    labels: Tensor, clients: int, rng: torch.Generator, *, alpha: float, minimum: int = 1, equal: bool = False
) -> list[Tensor]:
    """Each class is spread over the clients in proportions drawn from Dirichlet(alpha); small alpha is strong skew.

    The scheme of Hsu, Qi and Brown 2019. A client left with fewer than ``minimum`` examples is topped up at random from
    the client that then has most, so that strong skew ends too. With ``equal``, proportions are drawn for the clients
    instead and fitted to shares of one size, to within one example.
    """
    if not 0 < alpha <= MAX_ALPHA:
        raise GradveilError(f"alpha must be above 0 and at most {MAX_ALPHA:g}, not {alpha}; for even shares use iid")
    _require(len(labels), clients, each=minimum)
    order = torch.randperm(len(labels), generator=rng)
    shuffled = labels[order].long()
    counts = torch.bincount(shuffled)
    if equal:
        proportions = _fitted(_dirichlet_rows(clients, len(counts), rng, alpha).T, counts)
        owner = _levelled(_proportional_owners(shuffled, proportions), clients)
    else:
        proportions = _dirichlet_rows(len(counts), clients, rng, alpha)
        owner = _topped_up(_proportional_owners(shuffled, proportions), clients, minimum)
    return _by_owner(order, owner, clients)


def shards(labels: Tensor, clients: int, rng: torch.Generator, *, per_client: int = 2) -> list[Tensor]:
    """Sorted by label, cut into equal shards, ``per_client`` random shards for each client (McMahan et al. 2017)."""
    if per_client < 1:
        raise GradveilError(f"each client needs at least one shard, not {per_client}")
    _require(len(labels), clients, each=per_client)
    order = torch.randperm(len(labels), generator=rng)
    by_label = order[labels[order].argsort(stable=True)]
    pieces = by_label.tensor_split(clients * per_client)
    dealt = torch.randperm(len(pieces), generator=rng).view(clients, per_client)
    return [torch.cat([pieces[i] for i in hand]).sort().values for hand in dealt.tolist()]


def _fitted(proportions: Tensor, counts: Tensor) -> Tensor:
    """Proportions [classes, clients] scaled until a class has its count and all clients the same (Sinkhorn)."""
    table = proportions.clamp(min=1e-9)
    each = counts.double().clamp(min=1e-9)[:, None]  # a class without examples keeps a trace: its sum divides
    for _ in range(200):
        table = table / table.sum(0) * (counts.sum() / table.shape[1])
        table = table / table.sum(1, keepdim=True) * each
    return table


def _proportional_owners(labels: Tensor, proportions: Tensor) -> Tensor:
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


def _dirichlet_rows(rows: int, columns: int, rng: torch.Generator, alpha: float) -> Tensor:
    """Rows drawn from Dirichlet(alpha) [rows, columns], by numpy, whose sampler is sound for tiny alphas too."""
    seed = int(torch.randint(2**63 - 1, (), generator=rng))
    return torch.from_numpy(np.random.default_rng(seed).dirichlet(np.full(columns, alpha), size=rows))


def _topped_up(owner: Tensor, clients: int, minimum: int) -> Tensor:
    """Owners [n] that leave every client at least ``minimum``; examples are in random order, so the first will do."""
    owner = owner.clone()
    counts = torch.bincount(owner, minlength=clients)
    while int(counts.min()) < minimum:
        _give(owner, counts, min(minimum - int(counts.min()), int(counts.max()) - minimum))
    return owner


def _levelled(owner: Tensor, clients: int) -> Tensor:
    """Owners [n] whose shares differ by one example at most."""
    owner = _topped_up(owner, clients, len(owner) // clients)
    counts = torch.bincount(owner, minlength=clients)
    while int(counts.max() - counts.min()) > 1:
        _give(owner, counts, 1)
    return owner


def _give(owner: Tensor, counts: Tensor, amount: int) -> None:
    """Let the client with most examples hand so many to the one with fewest, in both tensors."""
    poorest, richest = int(counts.argmin()), int(counts.argmax())
    owner[(owner == richest).nonzero().flatten()[:amount]] = poorest
    counts[richest] -= amount
    counts[poorest] += amount


def _by_owner(order: Tensor, owner: Tensor, clients: int) -> list[Tensor]:
    grouped = order[owner.argsort(stable=True)]
    ends = torch.bincount(owner, minlength=clients).cumsum(0)
    return [share.sort().values for share in grouped.tensor_split(ends[:-1])]


def _require(examples: int, clients: int, *, each: int = 1) -> None:
    if clients < 1:
        raise GradveilError(f"there must be at least one client, not {clients}")
    if examples < clients * each:
        raise GradveilError(f"{examples} examples are too few for {clients} clients with at least {each} each")
