"""Who took part in an update of several examples.

A gradient of a batch is the mean of its examples', so what was seen is linear in who took part. Each candidate alone
explains little of it, which is why angles say little; all of them together, as shares of a sum, leave nothing but what
the defense added.

CENSOR sends, for each tensor, a direction without any part along the gradient of the batch. The parts of the update
along the gradients of its examples, which are not zero by themselves, then add up to zero: as many equations as there
are tensors, for a set of candidates that has to fulfil all of them. Sets are searched by exchanging one member at a
time for whoever brings the sums nearest to zero, from many random sets. Norms need not be known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradveil.attacks.parts.channel import Channel, RightAngle
from gradveil.attacks.parts.likelihood import ROUNDING, TINY, Angle, Likelihood, Replies, Scores
from gradveil.core.seeding import generator
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
class MixtureFit(Likelihood):
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
    pieces: Mapping[str, list[int]] = field(default_factory=dict)
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

    def scores_of_all(self, entries: Tensor, replies: Sequence[Params]) -> Tensor:
        """[N, candidates]: how badly each candidate explains each reply, from the entries [candidates, n] of all."""
        sizes = [size for name, tensor in replies[0].items() for size in self.pieces.get(name, [tensor.numel()])]
        piece = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[-ENTRIES:].to(entries.device)
        flat = [torch.cat([tensor.flatten() for tensor in reply.values()])[-ENTRIES:].to(entries) for reply in replies]
        return torch.stack([-self._shares_of_all(entries, reply, piece) for reply in flat])

    def _changed(self, channel: Channel) -> Likelihood:
        """Noise tells itself, but for what it covers of what was not sent."""
        by_example = channel.bound is not None and channel.per == "example"
        covers = self.pruned and channel.noise is not None
        return replace(
            self,
            bound=channel.bound if by_example else self.bound,
            scaled=self.scaled or channel.scaled or (channel.bound is not None and not by_example),
            pieces=self.pieces if channel.pieces is None else channel.pieces(),
            pruned=self.pruned or bool(channel.zeroed),
            covered=(self.covered**2 + (channel.noise or 0.0)) ** 0.5 if covers else self.covered,
        )

    def _turned(self, right_angle: RightAngle) -> Likelihood:
        """The right angle is that of the whole batch's gradient: no candidate has it by itself, but the right set has.

        Not so after several steps, whose sum is at right angles to nothing, nor with one angle for all tensors.
        """
        if self.rough > ROUNDING or right_angle.whole or not right_angle.exact:
            return Angle()
        return OrthogonalSets(examples=self.examples, otherwise=self if right_angle.plain else None)

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
        # all that a fit asks of p pieces, so that it goes over their entries once: products of candidates with each
        # other [p, c, c] and with the reply [p, c], the square of the reply [p], and how many entries were sent [p]
        _, sizes = torch.unique_consecutive(piece[sent], return_counts=True)
        parts = torch.split(entries[:, sent].double(), sizes.tolist(), dim=1)
        replied = torch.split(reply[sent].double(), sizes.tolist())
        own = torch.stack([part @ part.T for part in parts])
        seen = torch.stack([part @ other for part, other in zip(parts, replied, strict=True)])
        square, size = torch.stack([part @ part for part in replied]), sizes.double()
        one = torch.eye(count, dtype=torch.float64, device=reply.device)
        shares, unsure = torch.full_like(seen[0], expected), varies * one
        rounding = self.rough**2 * square / size + TINY
        for _ in range(ROUNDS):
            along, length = seen @ shares, (own @ shares) @ shares
            scale = along / (length + TINY) if self.scaled else torch.ones_like(along)
            missed = (square - 2 * scale * along + scale**2 * length).clamp(min=0)
            left = missed + scale**2 * torch.einsum("pij,ij->p", own, unsure)
            trust = 1 / (left / size + rounding)
            weighed = torch.einsum("p,pij->ij", trust * scale**2, own)
            unsure = torch.linalg.inv(weighed + one / varies)
            shares = expected + unsure @ ((trust * scale) @ seen - expected * weighed.sum(dim=1))
        return shares


@dataclass(frozen=True, kw_only=True)
class OrthogonalSets(Likelihood):
    """How far the sums of the best set that a candidate belongs to are from zero, in deviations of a random set's."""

    examples: int
    """How many examples the gradient is the mean of."""
    otherwise: MixtureFit | None = None
    """What explains an update to which no set is at right angles, where the gradient itself may have been sent."""

    def against(self, replies: Sequence[Params]) -> Scores:
        laid_out = Replies(replies, Channel())
        others = [] if self.otherwise is None else [self.otherwise.against(replies)]

        def numbers(updates: Params) -> Tensor:
            """The part of each reply along each tensor of a candidate, [c, T * N], and what else is asked for."""
            parts = laid_out.beside(updates).products.transpose(0, 1).flatten(1)
            return torch.cat([parts, *(other(updates).to(parts) for other in others)], dim=1)

        return numbers

    def scores_of_all(self, numbers: Tensor, replies: Sequence[Params]) -> Tensor:
        """[N, candidates]: how badly each candidate explains each reply, from the numbers of all."""
        count, tensors = len(replies), len(replies[0])
        parts, rest = numbers[:, : tensors * count], numbers[:, tensors * count :]
        each = parts.reshape(len(parts), tensors, count).permute(2, 0, 1)
        scores = torch.stack([self._scores(own, number) for number, own in enumerate(each)])
        if self.otherwise is None:
            return scores
        found = scores.amin(dim=1, keepdim=True) < FOUND
        return torch.where(found, scores, self.otherwise.scores_of_all(rest, replies).to(scores))

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
