"""Who took part in an update of several examples: all candidates explain it together, as shares of a sum.

A gradient of a batch is the mean of its examples', so what was seen is linear in who took part. Each candidate alone
explains little of it, which is why angles say little; all of them together leave nothing but what the defense added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.attacks.identification.likeness import ROUNDING, TINY, Scores
from gradveil.core.trees import exact_norms
from gradveil.core.types import Params

ENTRIES = 2**15
"""The last so many entries of an update are compared: the classifier's, and of a small model all."""
FITTED = 200
"""So many candidates are fitted at once: the time grows with the square of their number."""
ROUNDS = 10
"""How often shares and the noise of each piece are estimated, each from the other."""


@dataclass(frozen=True, kw_only=True)
class Together:
    """Minus the share of each candidate in the update: the best linear estimate, on the entries that were sent.

    The noise of each piece is estimated from what the shares leave of it (expectation maximisation), so that pieces
    with little noise count for more, and nothing has to be known of how a defense draws.
    """

    examples: int
    """How many examples the gradient is the mean of."""
    bound: float | None = None
    """Each example's whole gradient was scaled to at most this norm."""
    scaled: bool = False
    """Each piece of the mean may have been scaled, by a factor that is not known."""
    cuts: Mapping[str, list[int]] = field(default_factory=dict)
    """Tensors that are taken in pieces: how many entries each piece has."""
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
        sent = reply != 0
        own, seen, piece = entries[:, sent].double(), reply[sent].double(), piece[sent]
        expected, varies = 1 / len(own), 1 / (self.examples * len(own))
        known = torch.eye(len(own)).to(own) / varies
        shares, unsure = torch.full_like(own[:, 0], expected), torch.eye(len(own)).to(own) * varies
        rounding = self.rough**2 * _mean_of_each(seen.square(), piece) + TINY
        for _ in range(ROUNDS):
            now = own * self._scale(shares @ own, seen, piece)
            left = (seen - shares @ now).square() + ((unsure @ now) * now).sum(dim=0)
            weighed = now / (_mean_of_each(left, piece) + rounding)
            unsure = torch.linalg.inv(weighed @ now.T + known)
            shares = expected + unsure @ (weighed @ (seen - expected * now.sum(dim=0)))
        return shares

    def _scale(self, explained: Tensor, seen: Tensor, piece: Tensor) -> Tensor:
        """What each piece of the mean was multiplied with, by least squares, for every entry."""
        if not self.scaled:
            return torch.ones_like(seen)
        return _mean_of_each(explained * seen, piece) / (_mean_of_each(explained.square(), piece) + TINY)

    def _pieces(self, reply: Params) -> Tensor:
        """The number of the piece that each compared entry lies in."""
        sizes = [size for name, tensor in reply.items() for size in self.cuts.get(name, [tensor.numel()])]
        return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[-ENTRIES:]


def _mean_of_each(values: Tensor, piece: Tensor) -> Tensor:
    """The mean over its piece, for every entry."""
    sums, counts = (
        torch.zeros(int(piece.max()) + 1).to(values).index_add(0, piece, part)
        for part in (values, torch.ones_like(values))
    )
    return (sums / counts)[piece]
