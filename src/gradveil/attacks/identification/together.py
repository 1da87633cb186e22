"""Who took part in an update of several examples: all candidates explain it together, as shares of a sum.

A gradient of a batch is the mean of its examples', so what was seen is linear in who took part. Each candidate alone
explains little of it, which is why angles say little; all of them together leave nothing but what the defense added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.identification.likeness import ROUNDING, TINY, Scores
from gradveil.core.trees import exact_norms
from gradveil.core.types import Params

ENTRIES = 2**15
"""The last so many entries of an update are compared: the classifier's, and of a small model all."""
FITTED = 200
"""So many candidates are fitted at once: the time grows with the square of their number."""
CLEARLY = 2.5
"""An entry so many deviations of the noise from zero was sent."""
ROUNDS = 10
"""How often shares and the noise of each piece are estimated, each from the other."""


@dataclass(frozen=True, kw_only=True)
class Together:
    """Minus the share of each candidate in the update: the best linear estimate, on the entries that were sent.

    The noise of each piece is estimated from what the shares leave of it (expectation maximisation), so that pieces
    with little noise count for more, and nothing has to be known of how a defense draws. Where pieces may have been
    scaled, each by what is unknown, that is estimated by least squares on the way.
    """

    examples: int
    """How many examples the gradient is the mean of."""
    bound: float | None = None
    """Each example's whole gradient was scaled to at most this norm."""
    scaled: bool = False
    """Each piece of the mean may have been scaled, by a factor that is not known."""
    cuts: Mapping[str, list[int]] = field(default_factory=dict)
    """Tensors that are taken in pieces: how many entries each piece has."""
    pruned: bool = False
    """Entries were left out."""
    covered: float = 0.0
    """The deviation of noise that came on top of what was left out."""
    rough: float = ROUNDING
    """How far, as a share of its length, a piece may be from what explains it, before any noise."""

    def against(self, replies: Sequence[Params]) -> Scores:
        names = list(replies[0])

        def entries(updates: Params) -> Tensor:
            """The compared entries of each candidate, [c, n]: nothing can be said before all candidates are there."""
            own = torch.cat([updates[name].flatten(1) for name in names], dim=1)
            if self.bound is not None:
                own = own * (self.bound / (exact_norms(own)[:, None] + TINY)).clamp(max=1)
            return own[:, -ENTRIES:]

        return entries

    def settled(self, entries: Tensor, replies: Sequence[Params]) -> Tensor:
        """[N, candidates]: how badly each candidate explains each reply, from the entries [candidates, n] of all."""
        piece = self._pieces(replies[0]).to(entries.device)
        flat = [torch.cat([tensor.flatten() for tensor in reply.values()])[-ENTRIES:].to(entries) for reply in replies]
        return torch.stack([-self._shares_of_all(entries, reply, piece) for reply in flat])

    def _shares_of_all(self, entries: Tensor, reply: Tensor, piece: Tensor) -> Tensor:
        """Of a long list first in groups, to which the others are noise; the best of all groups are fitted again."""
        count = len(entries)
        if count <= FITTED:
            return self._shares(entries, reply, piece)
        groups = -(-count // FITTED)
        shares = torch.empty(count, dtype=torch.float64, device=entries.device)
        for first in range(groups):
            shares[first::groups] = self._shares(entries[first::groups], reply, piece)
        best = shares.topk(FITTED).indices
        finalists = self._shares(entries[best], reply, piece)
        return (shares - shares.max() + finalists.min()).index_copy(0, best, finalists)  # all others rank behind them

    def _shares(self, entries: Tensor, reply: Tensor, piece: Tensor) -> Tensor:
        """[candidates]: the share of each, expected to be 1 / candidates and to vary as if ``examples`` were drawn."""
        count = len(entries)
        expected, varies = 1 / count, 1 / (self.examples * count)
        sent = reply.abs() > CLEARLY * self.covered
        if not sent.any():  # nothing was sent, and nobody is more likely than anybody
            return torch.full((count,), expected, dtype=torch.float64, device=reply.device)
        found, one = _products(entries, reply, piece, sent), torch.eye(count, dtype=torch.float64, device=reply.device)
        shares, unsure = torch.full_like(found.seen[0], expected), varies * one
        rounding = self.rough**2 * found.square / found.size + TINY
        for _ in range(ROUNDS):
            along, length = found.seen @ shares, (found.own @ shares) @ shares
            scale = along / (length + TINY) if self.scaled else torch.ones_like(along)
            missed = (found.square - 2 * scale * along + scale**2 * length).clamp(min=0)
            left = missed + scale**2 * torch.einsum("pij,ij->p", found.own, unsure)
            trust = 1 / (left / found.size + rounding)
            weighed = torch.einsum("p,pij->ij", trust * scale**2, found.own)
            unsure = torch.linalg.inv(weighed + one / varies)
            shares = expected + unsure @ ((trust * scale) @ found.seen - expected * weighed.sum(dim=1))
        return shares

    def _pieces(self, reply: Params) -> Tensor:
        """The number of the piece that each compared entry lies in."""
        sizes = [size for name, tensor in reply.items() for size in self.cuts.get(name, [tensor.numel()])]
        return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[-ENTRIES:]


class _Products(NamedTuple):
    """All that a fit asks of p pieces of c candidates and a reply, so that it goes over their entries once."""

    own: Tensor
    """[p, c, c]: of candidates with each other."""
    seen: Tensor
    """[p, c]: of candidates with the reply."""
    square: Tensor
    """[p]: of the reply with itself."""
    size: Tensor
    """[p]: how many entries were sent."""


def _products(entries: Tensor, reply: Tensor, piece: Tensor, sent: Tensor) -> _Products:
    _, sizes = torch.unique_consecutive(piece[sent], return_counts=True)
    own = torch.split(entries[:, sent].double(), sizes.tolist(), dim=1)
    seen = torch.split(reply[sent].double(), sizes.tolist())
    return _Products(
        torch.stack([part @ part.T for part in own]),
        torch.stack([part @ reply for part, reply in zip(own, seen, strict=True)]),
        torch.stack([part @ part for part in seen]),
        sizes.double(),
    )
