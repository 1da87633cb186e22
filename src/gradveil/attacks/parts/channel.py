"""What a defense did between a client's gradient and its reply, as far as the adversary knows it.

From the update alone it can be estimated. Whether each tensor was clipped or all of them together, the norm of a tensor
in the update is the most that the same tensor of a candidate may have (Li et al. 2022). An update that was sparsified
has the same share of zeros in every large tensor. Soteria leaves whole columns of the classifier at zero. Noise spreads
the entries of many tensors by the same amount, whatever their gradients are. What is not found is taken for not done.
Columns behind ReLUs that no example drives are zero too, and are taken for left out: on an undefended update candidates
are then compared without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gradveil.core.trees import map_each
from gradveil.core.types import Params
from gradveil.engine import Given
from gradveil.engine.products import Moments
from gradveil.threat.observation import Observation

Per = Literal["tensor", "update", "example"]
"""What is clipped: each tensor, all of them together, or the gradient of each example."""

ChangeMoments = Callable[[dict[str, Moments]], dict[str, Moments]]

_LARGE = 100
"""Entries from which on a tensor's share of zeros means something."""
_MANY = 400
"""Entries from which on the median of a tensor is known to a few percent."""
_SAME_SPREAD = 0.1
_SAME_SHARE = 0.02
_FEWEST_ZEROS = 0.05


class Span(NamedTuple):
    """A linear layer whose input still lies in the span of the rows of its gradient."""

    weight: str
    """The name of the layer's weights."""
    examples: int
    """How many examples the gradient is of, private and added ones."""


class RightAngle(NamedTuple):
    """The gradient was replaced by a random direction at right angles to it, as CENSOR does."""

    whole: bool = False
    """All tensors are one vector; else each tensor is at right angles by itself."""
    spread: float | None = 0.0
    """Deviation of the log of the norms from those of the gradient; None where they say nothing."""
    released: bool = False
    """The projection leaves 1 - ||g|| times what a random direction has along the gradient."""
    projected: bool = True
    """False: nothing was taken out, and only the norms are the gradient's."""
    trials: int = 1
    """Of so many random directions the one was sent that lowers the loss most."""
    plain: bool = False
    """The gradient itself may have been sent."""
    told_apart: bool = False
    """A gradient that was sent is known from its last layer, as what is sent instead of it has another."""

    @property
    def exact(self) -> bool:
        """Whether the reply is at right angles to the gradient, unless the gradient itself was sent."""
        return self.projected and not self.released


@dataclass(frozen=True, kw_only=True)
class Channel:
    """What one defense did to a gradient, known or estimated. By default nothing."""

    bound: float | None = None
    """Scaled to at most this norm."""
    per: Per = "tensor"
    noise: float | None = None
    """The variance of noise that was added to every entry."""
    noise_by_tensor: Mapping[str, float] = field(default_factory=dict)
    """The same, by tensor, on the entries that were sent."""
    sometimes: float | None = None
    """The variance of noise that was added to some of the pieces, and nobody knows which."""
    pieces: Callable[[], Mapping[str, list[int]]] | None = None
    """How many entries each piece of a tensor has; a function, because to compute them takes passes of the model."""
    scaled: bool = False
    """Pieces may have been scaled, each by a factor that is not known."""
    counted: tuple[float, ...] = (1.0,)
    """By what each defended gradient was multiplied in what was sent: one number for each local step."""
    zeroed: frozenset[str] = frozenset()
    """Tensors of which entries were set to zero."""
    largest: bool = False
    """The entries that are left are the largest of their tensor."""
    span: Span | None = None
    right_angle: RightAngle | None = None
    draw: Callable[[Params, Params], Params] | None = None
    """One draw of the defense, from an update and N(0, 1) entries; differentiable, and safe under vmap."""

    @property
    def noisy(self) -> bool:
        return self.noise is not None or self.sometimes is not None or bool(self.noise_by_tensor)

    def then(self, link: Channel) -> Channel:
        """What is left after one more link, as one channel whose bound and noise are those of what was sent.

        Spans and right angles are left out: they change what can be compared at all.
        """
        bound, per = (self.bound, self.per) if link.bound is None else (link.bound * sum(link.counted), link.per)
        return Channel(
            bound=bound,
            per=per,
            noise=(self.noise or 0.0) + (link.noise or 0.0) * sum(weight**2 for weight in link.counted),
            noise_by_tensor=link.noise_by_tensor or self.noise_by_tensor,
            sometimes=link.sometimes or self.sometimes,
            pieces=link.pieces or self.pieces,
            zeroed=self.zeroed | link.zeroed,
            largest=self.largest or link.largest,
        )


def estimate(reply: Params) -> Channel:
    """The noise and the zeros of an update, from the update alone; what it was clipped to differs by tensor."""
    variance = noise_level(reply) ** 2
    return Channel(noise=variance or None, zeroed=frozenset(cut_tensors(reply)))


class Adjustment:
    """What a comparison of candidates with replies takes into account of a defense: by default nothing.

    ``extra`` becomes a part of what is given of each problem. In it, ``weights`` by tensor and of its shape say how
    much entries count; ``confidence`` multiplies the distance, so that below 1 a plausible picture counts for more.
    """

    data_only = True
    """Whether nothing changes the comparison but weights and confidence."""

    def extra(self, seen: Sequence[Observation]) -> Given:  # noqa: ARG002
        """What is known of each problem beyond its reply, [N, ...]."""
        return {}

    def pair(self, update: Params, reply: Params, given: Given) -> tuple[Params, Params]:  # noqa: ARG002
        """What is compared instead of a candidate's update and the reply; differentiable, and safe under vmap."""
        return update, reply

    def of_moments(self, given: Given) -> ChangeMoments | None:  # noqa: ARG002
        """The moments of what is compared, from those of updates and replies; None where they do not tell."""
        return lambda found: found


class Estimated(Adjustment):
    """What the update itself tells of a defense is done to candidates as well.

    They are compared only where something was sent, no tensor of theirs is longer than that of the update without its
    noise, and tensors count by how much of them is not noise. An update that nobody clipped is its own bound too, so
    that its own gradient stays as it is. Where the update was sparsified, ``anew`` keeps as many entries of a candidate
    as were sent, its own largest (GGL's paper), instead of those that were sent: weaker, see docs/attacks/ggl.md.
    """

    data_only = False

    def __init__(self, *, anew: bool = False) -> None:
        self.anew = anew

    def extra(self, seen: Sequence[Observation]) -> Given:
        """By tensor how far it is to be trusted, the bound of its norm and, where any was cut down, whether it was."""
        device = next(iter(seen[0].reply.values())).device
        channels = [estimate(one.reply) for one in seen]
        trust = [trusts(one.reply, channel.noise or 0.0) for one, channel in zip(seen, channels, strict=True)]
        bounds = [clip_bounds(one.reply, share) for one, share in zip(seen, trust, strict=True)]
        found: dict[str, list[dict[str, float]]] = {"trust": trust, "bound": bounds}
        if any(channel.zeroed for channel in channels):
            found["cut"] = [{name: name in channel.zeroed for name in seen[0].reply} for channel in channels]
            if self.anew:
                sparse = [sparsified_tensors(one.reply) for one in seen]
                found["sparse"] = [{name: name in names for name in seen[0].reply} for names in sparse]
        return {
            key: {name: torch.tensor([one[name] for one in each], device=device) for name in seen[0].reply}
            for key, each in found.items()
        }

    def pair(self, update: Params, reply: Params, given: Given) -> tuple[Params, Params]:
        def trusted(tree: Params) -> Params:
            return map_each(torch.mul, tree, given["trust"])

        own = update
        if "cut" in given:  # before the clip: the bound is the norm of what was left
            absent = map_each(lambda sent, cut: cut & (sent == 0), given["reply"], given["cut"])
            if self.anew:
                small = map_each(_smallest, own, given["reply"])
                absent = map_each(torch.where, given["sparse"], small, absent)
            own = map_each(lambda tensor, gone: torch.where(gone, 0, tensor), own, absent)
        own = map_each(lambda tensor, bound: tensor * _shrunk(tensor.square().sum(), bound), own, given["bound"])
        return trusted(own), trusted(reply)

    def of_moments(self, given: Given) -> ChangeMoments | None:
        def treated(name: str, product: Tensor, square: Tensor, observed: Tensor) -> Moments:
            shrunk, trust = _shrunk(square, given["bound"][name]), given["trust"][name].square()
            return Moments(trust * shrunk * product, trust * shrunk.square() * square, trust * observed)

        return None if "cut" in given else lambda found: {name: treated(name, *each) for name, each in found.items()}


def _smallest(tensor: Tensor, sent: Tensor) -> Tensor:
    """Which entries of a tensor are not among its largest, of which there are as many as were sent."""
    sizes = tensor.detach().abs()
    last = ((sent != 0).sum() - 1).clamp(min=0)
    return sizes < sizes.flatten().sort(descending=True).values.gather(0, last.view(1))


def _shrunk(square: Tensor, bound: Tensor) -> Tensor:
    """What tensors of these squared lengths are multiplied by so that they are no longer than the bound."""
    return bound / (square + 1e-30).sqrt().clamp(min=bound)


def noise_level(update: Params) -> float:
    """The deviation of noise that was added to every entry, 0 if nothing looks like it.

    Half of all entries of N(0, sigma) lie within 0.6745 sigma. Noise bounds that from below in every tensor, so those
    whose gradients are small in comparison agree about it; without noise tensors differ by more.
    """
    large = [tensor.flatten() for tensor in update.values() if tensor.numel() >= _MANY]
    if len(large) < 3:
        return 0.0
    spreads = torch.stack([tensor.abs().median() for tensor in large]) / 0.6745
    # a small tensor's median may be off by a tenth, so that the smallest spread is no measure by itself
    low = spreads.sort().values[len(spreads) // 10]
    alike = (spreads - low).abs() <= _SAME_SPREAD * low
    return float(spreads[alike].mean()) if int(alike.sum()) * 3 >= len(large) and int(alike.sum()) >= 2 else 0.0


def trusts(update: Params, variance: float) -> dict[str, float]:
    """By tensor the share of its square that noise of this variance does not explain (Wiener's rule)."""
    if variance == 0:
        return dict.fromkeys(update, 1.0)
    explained = {name: variance * t.numel() / max(float(t.square().sum()), 1e-30) for name, t in update.items()}
    return {name: max(0.0, 1 - share) for name, share in explained.items()}


def clip_bounds(update: Params, trust: Mapping[str, float]) -> dict[str, float]:
    """By tensor the norm of what is not noise, the bound that GGL takes it to be clipped to."""
    return {name: max(float(tensor.norm()) * trust[name] ** 0.5, 1e-15) for name, tensor in update.items()}


def sparsified_tensors(update: Params) -> set[str]:
    """Tensors that were sparsified, if the update was."""
    shares = {name: float((tensor == 0).float().mean()) for name, tensor in update.items()}
    large = [shares[name] for name, tensor in update.items() if tensor.numel() >= _LARGE]
    found = bool(large) and min(large) > _FEWEST_ZEROS and max(large) - min(large) < _SAME_SHARE
    return {name for name, share in shares.items() if share > 0 and found}


def cut_tensors(update: Params) -> set[str]:
    """Tensors that were sparsified, or of which whole columns are missing."""
    if sparse := sparsified_tensors(update):
        return sparse

    def lacks_columns(weight: Tensor) -> bool:
        """Whether a part of the columns, not all, is zero while every other column has an entry in most rows."""
        empty = (weight == 0).all(dim=0)
        share = float(empty.float().mean())
        return _FEWEST_ZEROS < share < 1 and float((weight[:, ~empty] != 0).float().mean()) > 0.5

    return {name for name, tensor in update.items() if tensor.dim() == 2 and lacks_columns(tensor)}
