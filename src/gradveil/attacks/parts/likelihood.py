"""Ways to rank candidates by how well their own update explains what was seen; lower is better.

Most need a few numbers of each tensor: a candidate's update beside the reply. Each way follows the channel of a defense
in a method of its own, and one that has no use for what a link did stays as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from torch import Tensor

from gradveil.attacks.parts.channel import Channel, RightAngle, Span
from gradveil.core.trees import stack
from gradveil.core.types import Params

ROUNDING = 1e-4
"""How far, as a share of its length, a tensor may be from a candidate's that explains it: rounding, other kernels."""
NOTHING = 1e-8
"""What is so small, as a share of the whole update, is rounding: biases of keys in attention have no gradient."""
ROUGHLY = 1e-2
"""The same for several steps, whose rounding adds up and whose defense is not repeated."""
TINY = 1e-60
"""Stands for smaller squares when one is divided by."""
SAME_NORM = 1e-4
"""How far apart, as a share, the norms of a tensor may be that are meant to be equal: rounding, other kernels."""
RIGHT = 1e-3
"""How far from zero, in deviations of a random direction, the part along the gradient may be after projection."""

Scores = Callable[[Params], Tensor]
"""Updates of candidates [c, ...] by name -> how badly each explains each reply, [c, N]."""

By = Literal["norms", "orthogonality", "both"]


@dataclass(frozen=True)
class Comparison:
    """T pieces, which are whole tensors unless a channel says otherwise, of c candidates beside those of N replies."""

    names: tuple[str, ...]
    """The tensor that each piece is of."""
    products: Tensor
    """[T, c, N]: inner products of a candidate's piece with the reply's."""
    squares: Tensor
    """[T, c, 1]: the squared length of each piece of a candidate."""
    within: Tensor
    """[T, c, N]: that of the part to be compared; [T, c, 1] where it is all of it."""
    most: Tensor
    """[T, c, N]: the most that a part of so many entries could have; [T, c, 1] where it is all of them."""
    seen: Tensor
    """[T, 1, N]: the squared length of each piece of a reply."""
    sizes: Tensor
    """[T, 1, 1]: how many entries a piece has."""

    def whole(self) -> Comparison:
        """All pieces as one vector."""
        numbers = (self.products, self.squares, self.within, self.most, self.seen, self.sizes)
        return Comparison(("all",), *(part.sum(dim=0, keepdim=True) for part in numbers))


class Replies:
    """What was seen, laid out to be compared with groups of candidates.

    A channel says which entries were sent and what its pieces are. In double precision: the angle between the updates
    of like examples can be smaller than float32 resolves.
    """

    def __init__(self, replies: Sequence[Params], channel: Channel) -> None:
        self.channel, self.sizes_of = channel, {} if channel.pieces is None else channel.pieces()
        self.names, self.pieces = self._split(stack(replies))
        self.seen = torch.stack([piece.square().sum(dim=1) for piece in self.pieces]).unsqueeze(1)
        self.sizes = torch.tensor([piece.shape[1] for piece in self.pieces]).to(self.seen).view(-1, 1, 1)

    def beside(self, updates: Params) -> Comparison:
        """The comparison with candidates whose updates are [c, ...] by name."""
        _, each = self._split(updates)
        products = torch.stack([own @ reply.T for own, reply in zip(each, self.pieces, strict=True)])
        squares = [own.square() for own in each]
        whole = torch.stack([square.sum(dim=1) for square in squares]).unsqueeze(-1)
        within, most = whole, whole
        if self.channel.zeroed:
            sent = [(reply != 0).to(reply) for reply in self.pieces]
            within = torch.stack([square @ part.T for square, part in zip(squares, sent, strict=True)])
            if self.channel.largest:
                # by piece, what so many of the largest entries add up to as were sent: of 0 entries 0
                sums = [square.sort(dim=1, descending=True).values.cumsum(dim=1) for square in squares]
                sums = [torch.cat([torch.zeros_like(each[:, :1]), each], dim=1) for each in sums]
                most = torch.stack([each[:, part.sum(dim=1).long()] for each, part in zip(sums, sent, strict=True)])
        return Comparison(self.names, products, whole, within, most, self.seen, self.sizes)

    def _split(self, tree: Params) -> tuple[tuple[str, ...], list[Tensor]]:
        """Names and pieces of tensors [n, ...], each piece [n, entries]."""
        names: list[str] = []
        pieces: list[Tensor] = []
        for name, tensor in sorted(tree.items()):
            parts = torch.split(tensor.flatten(1).double(), self.sizes_of.get(name, tensor[0].numel()), dim=1)
            names += [name] * len(parts)
            pieces += parts
        return tuple(names), pieces


class Likelihood(ABC):
    """A way to rank."""

    @abstractmethod
    def against(self, replies: Sequence[Params]) -> Scores:
        """How candidates are scored against these N replies."""

    def scores_of_all(self, numbers: Tensor, replies: Sequence[Params]) -> Tensor:  # noqa: ARG002
        """[N, candidates]: how badly each candidate explains each reply, from the numbers [candidates, n] of all.

        Ways that can say nothing of a candidate before they have seen all override this: their scores are numbers.
        """
        return numbers.T

    def through(self, channel: Channel) -> Likelihood:
        """The same after one more link of a defense."""
        if channel.span is not None:
            return InputSpan(span=channel.span)
        return self._changed(channel) if channel.right_angle is None else self._turned(channel.right_angle)

    def _changed(self, channel: Channel) -> Likelihood:  # noqa: ARG002
        """After clipping, noise and what was not sent."""
        return self

    def _turned(self, right_angle: RightAngle) -> Likelihood:
        """After what was so far explained was replaced by a random direction at right angles to it."""
        return OrthogonalLikelihood(right_angle=right_angle)


@dataclass(frozen=True, kw_only=True)
class ByTensor(Likelihood):
    """A likelihood that a few numbers of each tensor decide."""

    channel: Channel = field(default_factory=Channel)
    """What all links did that it went through."""

    def against(self, replies: Sequence[Params]) -> Scores:
        laid_out = Replies(replies, self.channel)
        return lambda updates: self(laid_out.beside(updates))

    @abstractmethod
    def __call__(self, compared: Comparison) -> Tensor:
        """How badly each candidate explains each reply, [c, N]."""

    def _changed(self, channel: Channel) -> Self:
        return replace(self, channel=self.channel.then(channel))

    def shrinkage(self, compared: Comparison) -> Tensor:
        """By how much clipping would have scaled each piece of a candidate, [T, c, 1] or [1, c, 1]."""
        squares = compared.squares if self.channel.per == "tensor" else compared.squares.sum(dim=0, keepdim=True)
        longest = float("inf") if self.channel.bound is None else self.channel.bound
        return (longest / (squares + TINY).sqrt()).clamp(max=1)


@dataclass(frozen=True, kw_only=True)
class Angle(ByTensor):
    """One minus the cosine of the two updates, all tensors as one vector: right for any defense, best for few."""

    def __call__(self, compared: Comparison) -> Tensor:
        whole = compared.whole()
        return (1 - whole.products / (whole.within * whole.seen + TINY).sqrt())[0]


@dataclass(frozen=True, kw_only=True)
class Directions(ByTensor):
    """How unlikely the reply is if each tensor is the candidate's, scaled and with Gaussian noise, both unknown.

    For a sum of several steps, each of which a defense changed by itself: what is left of a tensor beside the direction
    of the candidate's is an estimate of its noise.
    """

    def __call__(self, compared: Comparison) -> Tensor:
        along = (compared.products.square() / (compared.within * compared.seen + TINY)).clamp(max=1)
        left = 1 - along + ROUGHLY**2
        return (compared.sizes * left.log()).sum(dim=0) / compared.sizes.sum()


@dataclass(frozen=True, kw_only=True)
class Distance(ByTensor):
    """How unlikely the reply is if it is the candidate's update, clipped, in part not sent, and with Gaussian noise.

    A likelihood: tensor by tensor the squared distance over the variance of the noise. Where the noise may or may not
    have been added, the more likely of the two counts.
    """

    def __call__(self, compared: Comparison) -> Tensor:
        channel, shrunk = self.channel, self.shrinkage(compared)
        away = shrunk.square() * compared.within - 2 * shrunk * compared.products + compared.seen
        more = [channel.noise_by_tensor.get(name, 0.0) for name in compared.names]
        known = (channel.noise or 0.0) + torch.tensor(more).to(away).view(-1, 1, 1)
        whole = compared.seen.sum(dim=0) / compared.sizes.sum(dim=0)
        rounding = torch.maximum(ROUNDING**2 * compared.seen / compared.sizes, NOTHING**2 * whole)
        least = known + rounding + TINY
        variances = [least + extra for extra in {channel.sometimes or 0.0, 0.0}]
        # minus twice the log of the density of independent Gaussian entries, up to a constant
        fits = [away.clamp(min=0) / variance + compared.sizes * variance.log() for variance in variances]
        scores = torch.stack(fits).amin(dim=0)
        if channel.largest:  # how much larger entries it has than those that were sent, in units of rounding
            missing = (1 - compared.within / (compared.most + TINY)).clamp(min=0)
            scores = scores + compared.sizes * missing / ROUNDING
        return scores.sum(dim=0) / compared.sizes.sum()

    def _turned(self, right_angle: RightAngle) -> Likelihood:
        return OrthogonalLikelihood(right_angle=right_angle, channel=self.channel)


@dataclass(frozen=True, kw_only=True)
class OrthogonalLikelihood(ByTensor):
    """How unlikely the reply is if CENSOR drew it for the candidate: two log likelihood ratios, added.

    Norms: those of the candidate's tensors are those of the reply, up to a spread. Orthogonality: the part of the
    reply along a candidate's tensor is that of a random direction, N(0, 1) in its own units, for all candidates but the
    true one, for which projection left nothing of it; the released projection leaves 1 - ||g|| times as much. Without a
    projection, the best of several draws goes down the true gradient further than the others.
    """

    by: By = "both"
    right_angle: RightAngle = field(default_factory=RightAngle)

    def against(self, replies: Sequence[Params]) -> Scores:
        """Whole tensors, whatever else was done to them."""
        laid_out = Replies(replies, Channel())
        return lambda updates: self(laid_out.beside(updates))

    def __call__(self, compared: Comparison) -> Tensor:
        pieces = compared.whole() if self.right_angle.whole else compared
        scores = torch.zeros_like(compared.products[0])
        if self.by == "norms" or (self.by == "both" and self.right_angle.spread is not None):
            scores = scores + self.norms_apart(pieces)
        if self.by != "norms":
            scores = scores + (self.not_orthogonal(pieces) if self.right_angle.projected else self.not_best(pieces))
        may_be_plain = self.right_angle.plain and self.by == "both"
        return torch.minimum(scores, self.not_the_same(pieces)) if may_be_plain else scores

    def _turned(self, right_angle: RightAngle) -> Likelihood:
        return replace(self, right_angle=right_angle)

    def norms_apart(self, pieces: Comparison) -> Tensor:
        """[c, N]: squared differences of the logs of norms, in units of how far they may differ.

        A tensor of zeros had no direction but the gradient's, as happens under eq. 11, and says nothing of its norm.
        """
        kept = self.shrinkage(pieces).square()
        expected = kept * pieces.squares + (self.channel.noise or 0.0) * pieces.sizes + TINY
        apart = (expected.log() - (pieces.seen + TINY).log()) / 2
        spread = SAME_NORM**2 + (self.right_angle.spread or 0.0) ** 2 + self._noise(pieces) / pieces.sizes
        return torch.where(pieces.seen > 0, apart.square() / spread, 0).sum(dim=0)

    def not_orthogonal(self, pieces: Comparison) -> Tensor:
        """[c, N]: how much more the reply lies along the candidate's gradient than projection leaves."""
        cosines = (pieces.products.square() / (pieces.squares * pieces.seen + TINY)).clamp(max=1 - 1e-6)
        along = (pieces.sizes - 1) * cosines / (1 - cosines)
        kept = (1 - pieces.squares.sqrt()).square() if self.right_angle.released else torch.zeros_like(pieces.squares)
        left = RIGHT**2 + kept + self._noise(pieces)
        return (along / left - along + left.log()).sum(dim=0)

    def not_best(self, pieces: Comparison) -> Tensor:
        """[c, N]: how unlikely the largest of so many N(0, 1) numbers is as small as the part along the gradient.

        The largest of T has the density T phi(z) Phi(z)^(T - 1), and a direction drawn for another example phi(z).
        """
        spread = (pieces.squares * pieces.seen / pieces.sizes).sum(dim=0) + TINY
        down = pieces.products.sum(dim=0) / spread.sqrt()
        likely: Tensor = torch.special.log_ndtr(down)
        return -2 * (self.right_angle.trials - 1) * likely

    def not_the_same(self, pieces: Comparison) -> Tensor:
        """[c, N]: how far the reply is from the candidate's gradient itself, in units of how far it may be."""
        away = (pieces.squares - 2 * pieces.products + pieces.seen).clamp(min=0) / (pieces.seen + TINY)
        return (away / (SAME_NORM**2 + self._noise(pieces))).sum(dim=0)

    def _noise(self, pieces: Comparison) -> Tensor:
        """Noise along any one direction, in units of what a random direction of the reply's length has there."""
        return (self.channel.noise or 0.0) * pieces.sizes / (pieces.seen + TINY)


@dataclass(frozen=True, kw_only=True)
class InputSpan(Likelihood):
    """The share of what a candidate sends into a layer that lies outside the span of what the reply shows.

    The gradient of a linear layer's weights is the sum over examples of (output gradient) x (what entered), so its rows
    lie in the span of what entered. A defense that makes the output gradients random, or adds gradients of its own,
    leaves that span.
    """

    span: Span

    def against(self, replies: Sequence[Params]) -> Scores:
        seen = torch.stack([reply[self.span.weight] for reply in replies]).double()
        span = torch.linalg.svd(seen, full_matrices=False).Vh[:, : self.span.examples]

        def scores(updates: Params) -> Tensor:
            rows = updates[self.span.weight].double()  # of one example: all rows are parallel
            longest = rows.norm(dim=2).argmax(dim=1)
            entered = torch.nn.functional.normalize(rows[torch.arange(len(rows)), longest], dim=1)
            return 1 - torch.einsum("nri,ci->cnr", span, entered).square().sum(dim=2)

        return scores
