"""What a defense did between a client's gradient and its reply, as far as the adversary knows it.

From the update alone it can be estimated. An update that was clipped layer by layer has several layers of exactly the
same norm, the largest. One that was sparsified has the same share of zeros in every large tensor. Soteria leaves whole
columns of the classifier at zero. Noise spreads the entries of many tensors by the same amount, whatever their
gradients are. What is not found is taken for not done. Columns behind ReLUs that no example drives are zero too, and
are taken for left out: on an undefended update candidates are then compared without them.
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
_SAME_NORM = 1e-4
_SAME_SHARE = 0.02
_FEWEST_ZEROS = 0.05
_UNBOUNDED = 1e15
"""Stands for no clip: a bound that divides and multiplies like any other."""


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
    plain: bool = False
    """The gradient itself may have been sent."""

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
    """The channel that an update went through, from the update alone."""
    variance = noise_level(reply) ** 2
    return Channel(bound=clip_bound(reply), noise=variance or None, zeroed=frozenset(cut_tensors(reply)))


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

    They are clipped, and compared only where something was sent, in tensors that count by how much is not noise.
    """

    data_only = False

    def extra(self, seen: Sequence[Observation]) -> Given:
        """The clip bound, how far each tensor is to be trusted and, where any was cut down, which were."""
        names, device = list(seen[0].reply), next(iter(seen[0].reply.values())).device
        channels = [estimate(one.reply) for one in seen]
        trust = [trusts(one.reply, channel.noise or 0.0) for one, channel in zip(seen, channels, strict=True)]
        bounds = [_UNBOUNDED if channel.bound is None else channel.bound for channel in channels]
        found: Given = {
            "trust": {name: torch.tensor([one[name] for one in trust], device=device) for name in names},
            "bound": torch.tensor(bounds, device=device),
        }
        if any(channel.zeroed for channel in channels):
            found["cut"] = {
                name: torch.tensor([name in one.zeroed for one in channels], device=device) for name in names
            }
        return found

    def pair(self, update: Params, reply: Params, given: Given) -> tuple[Params, Params]:
        def trusted(tree: Params) -> Params:
            return map_each(torch.mul, tree, given["trust"])

        own = map_each(lambda tensor: tensor * _shrunk(tensor.square().sum(), given["bound"]), update)
        if "cut" in given:
            own = map_each(
                lambda tensor, sent, cut: torch.where(cut & (sent == 0), 0, tensor), own, given["reply"], given["cut"]
            )
        return trusted(own), trusted(reply)

    def of_moments(self, given: Given) -> ChangeMoments | None:
        def treated(name: str, product: Tensor, square: Tensor, observed: Tensor) -> Moments:
            shrunk, trust = _shrunk(square, given["bound"]), given["trust"][name].square()
            return Moments(trust * shrunk * product, trust * shrunk.square() * square, trust * observed)

        return None if "cut" in given else lambda found: {name: treated(name, *each) for name, each in found.items()}


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


def clip_bound(update: Params) -> float | None:
    """The bound to which the layers of an update were clipped, None if they do not look clipped."""
    norms = torch.stack([tensor.norm() for tensor in update.values()])
    largest = norms.max()
    alike = (norms - largest).abs() <= _SAME_NORM * largest
    return float(largest) if int(alike.sum()) >= 2 else None


def cut_tensors(update: Params) -> set[str]:
    """Tensors that were sparsified, or of which whole columns are missing."""
    shares = {name: float((tensor == 0).float().mean()) for name, tensor in update.items()}
    large = [shares[name] for name, tensor in update.items() if tensor.numel() >= _LARGE]
    if large and min(large) > _FEWEST_ZEROS and max(large) - min(large) < _SAME_SHARE:
        return {name for name, share in shares.items() if share > 0}

    def lacks_columns(weight: Tensor) -> bool:
        """Whether a part of the columns, not all, is zero while every other column has an entry in most rows."""
        empty = (weight == 0).all(dim=0)
        share = float(empty.float().mean())
        return _FEWEST_ZEROS < share < 1 and float((weight[:, ~empty] != 0).float().mean()) > 0.5

    return {name for name, tensor in update.items() if tensor.dim() == 2 and lacks_columns(tensor)}
