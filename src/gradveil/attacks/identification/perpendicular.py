"""Who is behind an update at right angles to a batch's gradient: those whose gradients add up to nothing along it.

CENSOR sends, for each tensor, a direction without any part along the gradient of the batch. That gradient is the mean
of its examples', so the parts of the update along theirs, which are not zero by themselves, add up to zero: as many
equations as there are tensors, for a set of candidates that has to fulfil all of them. Sets are searched by exchanging
one member at a time for whoever brings the sums nearest to zero, from many random sets. Norms need not be known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.identification.comparison import Layout, Replies
from gradveil.attacks.identification.likeness import TINY, Scores
from gradveil.attacks.identification.together import Together
from gradveil.core.seeding import generator
from gradveil.core.types import Params

FOUND = 1e-4
"""So near to zero, in deviations of a random set's, are sums that are zero but for rounding."""
EXACT = 1e-5
"""What differs among candidates by less than this, as a share, is rounding."""
STARTS = 40_000
"""From so many random sets at most. A few thousand find eight of 100 candidates where equations differ enough."""
EXCHANGES_AT_ONCE = 2**22
"""So many exchanges are looked at together."""
EXCHANGES = 2**26
"""So many first exchanges at most: of a longer list fewer sets are taken, for each has more of them."""
LONGEST = 100
"""Members exchanged in turn at most; sets of eight come to rest after ten or so."""


@dataclass(frozen=True, kw_only=True)
class Perpendicular:
    """How far the sums of the best set that a candidate belongs to are from zero, in deviations of a random set's."""

    examples: int
    """How many examples the gradient is the mean of."""
    otherwise: Together | None = None
    """What explains an update to which no set is at right angles, where the gradient itself may have been sent."""

    def against(self, replies: Sequence[Params]) -> Scores:
        laid_out = Replies(replies, Layout())
        others = [] if self.otherwise is None else [self.otherwise.against(replies)]

        def numbers(updates: Params) -> Tensor:
            """The part of each reply along each tensor of a candidate, [c, T * N], and what else is asked for."""
            parts = laid_out.beside(updates).products.transpose(0, 1).flatten(1)
            return torch.cat([parts, *(other(updates).to(parts) for other in others)], dim=1)

        return numbers

    def settled(self, numbers: Tensor, replies: Sequence[Params]) -> Tensor:
        """[N, candidates]: how badly each candidate explains each reply, from the numbers of all."""
        count, tensors = len(replies), len(replies[0])
        parts, rest = numbers[:, : tensors * count], numbers[:, tensors * count :]
        each = parts.reshape(len(parts), tensors, count).permute(2, 0, 1)
        scores = torch.stack([self._scores(own, number) for number, own in enumerate(each)])
        if self.otherwise is None:
            return scores
        found = scores.amin(dim=1, keepdim=True) < FOUND
        return torch.where(found, scores, self.otherwise.settled(rest, replies).to(scores))

    def _scores(self, parts: Tensor, number: int) -> Tensor:
        """[candidates], from parts [candidates, T] along one reply."""
        count = len(parts)
        if not parts.any():  # nothing was sent, and nobody is more likely than anybody
            return parts.new_zeros(count)
        size = min(self.examples, count)
        equations = _independent(parts)
        scores = torch.full((count,), torch.inf, dtype=parts.dtype)
        rng = generator(0, "perpendicular", number)
        starts = max(1, min(STARTS, EXCHANGES // (size * count)))
        together, products = max(1, min(starts, EXCHANGES_AT_ONCE // (size * count))), equations @ equations.T
        for _ in range(-(-starts // together)):
            drawn = torch.rand((together, count), generator=rng).topk(size, dim=1).indices
            sets = _exchanged(products, drawn)
            away = (equations[sets].sum(dim=1).square().mean(dim=1) / size).sqrt()
            scores = scores.scatter_reduce(0, sets.flatten(), away.repeat_interleave(size), "amin")
            if scores.min() < FOUND:
                break
        return scores.where(scores.isfinite(), 2 * scores[scores.isfinite()].max())


def _independent(parts: Tensor) -> Tensor:
    """Equations [candidates, t] that say the same as those of all tensors, and of which no two are alike.

    Tensors of one layer see much the same of an example. Left as they are, sets would be led by what they share.
    """
    alike = parts / (parts.square().mean(dim=0).sqrt() + TINY)
    _, spread, directions = torch.linalg.svd(alike - alike.mean(dim=0), full_matrices=False)
    kept = spread > EXACT * spread[0]
    unlike: Tensor = alike @ (directions[kept] / spread[kept, None]).T
    return unlike * math.sqrt(len(parts))


def _exchanged(products: Tensor, sets: Tensor) -> Tensor:
    """Sets [R, B] after the best exchange of one member, again and again, by the products [n, n] of candidates."""
    own = products.diagonal()
    rows = torch.arange(len(sets))
    for _ in range(LONGEST):
        along = products[sets].sum(dim=1)  # of everybody with the sum of each set, [R, n]
        out, into = own[sets] - 2 * along.gather(1, sets), own + 2 * along
        gained = out[:, :, None] + into[:, None, :] - 2 * products[sets]
        gained = gained.scatter(2, sets[:, None, :].expand(-1, sets.shape[1], -1), torch.inf)  # members stay out
        least, which = gained.flatten(1).min(dim=1)
        better = least < -TINY
        if not better.any():
            break
        place, new = which // len(products), which % len(products)
        sets = sets.clone()
        sets[rows[better], place[better]] = new[better]
    return sets
