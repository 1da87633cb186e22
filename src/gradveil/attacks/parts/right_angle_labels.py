"""Reading labels off replies that stand at right angles to the gradient, as CENSOR's do.

The gradient of the last layer's bias is the mean over the batch of p - e_c: predictions p less the label's unit vector.
That of its weights is the mean of (p - e_c) h' with the representation h. What was sent is at right angles to both, and
as long as they are. The adversary has the model, so it knows what p and h look like on stand-ins for private inputs.
For labels it supposes, it computes how far a stand-in misses the right angles and the norms, and from many stand-ins
how likely those labels miss neither. Several replies to one model have to agree on p, so each tells much.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, one_hot

from gradveil.attacks.parts.channel import RightAngle
from gradveil.attacks.parts.right_angles import comparable
from gradveil.core.seeding import generator
from gradveil.core.types import cross_entropy
from gradveil.models import classifier, representation
from gradveil.threat.observation import Observation

_STAND_INS, _FEW, _LARGE = 512, 128, 1_000_000
"""How many stand-ins there are, and for models of how many parameters they are few: passes take long there."""
_GROUPS = 256
"""Batches of stand-ins that one set of labels is judged by."""
_MOST_REPLIES = 8
_MOST_BROADCASTS = 16
"""More replies than that add nothing."""
_NORM_WEIGHT = 3.0
_WIDER = 2.0
"""Private inputs differ by more than stand-ins do: deviations are taken to be so much larger."""
_FLOOR = 0.03
"""The smallest deviation, in units of what chance misses a right angle by."""
_TINY = 1e-20
_BARE = 1e-3
"""The share of its length up to which the rows of a last layer add up to nothing."""
_ALL_SETS, _BEAM = 4000, 16
"""Sets of labels up to which all are tried, and how many are kept from round to round where there are more."""
_AT_ONCE = 64
"""Sets of labels that are judged in one call."""


def bare_replies(one: Observation, angle: RightAngle) -> list[Observation] | None:
    """Those exchanges of a client whose reply is the gradient itself; None where that cannot be told.

    Predictions and labels both add up to one, so that the rows of the last layer's gradient add up to zero. Those of a
    random direction at right angles to it do not.
    """
    if not angle.plain:
        return []
    name = classifier(one.module, one.domain)
    parts = [part for part in (f"{name}.weight", f"{name}.bias") if part in one.reply]
    if not angle.told_apart or one.loss is not cross_entropy or not parts:
        return None

    def bare(exchange: Observation) -> bool:
        rows = torch.column_stack([exchange.reply[part] for part in parts])
        return bool(rows.sum(dim=0).norm() < _BARE * rows.norm())

    return [exchange for exchange in comparable(one) if bare(exchange)]


class StandIns(NamedTuple):
    """What a broadcast makes of stand-ins for private inputs: predictions [P, C] and representations [P, n]."""

    predictions: Tensor
    features: Tensor


def stand_ins(one: Observation) -> StandIns:
    """Of the broadcast of one exchange."""
    name, device = classifier(one.module, one.domain), next(iter(one.sent.values())).device
    large = sum(tensor.numel() for tensor in one.sent.values()) >= _LARGE
    inputs = one.domain.stand_ins(_FEW if large else _STAND_INS, generator(0, "stand-ins for labels")).to(device)
    with torch.no_grad():
        features = representation(one.module, one.domain)(inputs, one.sent)
        outputs = linear(features, one.sent[f"{name}.weight"], one.sent.get(f"{name}.bias"))
    return StandIns(outputs.softmax(dim=-1), features)


def labels_at_right_angles(one: Observation, batch_size: int, angle: RightAngle, known: dict[int, StandIns]) -> Tensor:
    """The most likely labels [batch_size], in rising order; ``known`` keeps what broadcasts make of stand-ins.

    Small batches are found among all sets of labels. For larger ones, the likeliest of many random sets
    are kept, and one label of each is changed, until nothing gains: that may miss.
    """
    alike, bare = dict[int, list[Observation]](), {id(other) for other in bare_replies(one, angle) or ()}
    for exchange in comparable(one):
        if id(exchange) not in bare:
            alike.setdefault(id(exchange.sent), []).append(exchange)
    groups = list(alike.values())[-_MOST_BROADCASTS:]
    for replies in groups:
        if id(replies[0].sent) not in known:
            known[id(replies[0].sent)] = stand_ins(replies[0])
    judges = [
        _Judge(replies[-_MOST_REPLIES:], known[id(replies[0].sent)], batch_size, with_norms=angle.spread == 0)
        for replies in groups
    ]

    def likelihoods(labels: Tensor) -> Tensor:
        """[H] of sets of labels [H, B]."""
        parts = torch.split(labels, _AT_ONCE)
        return torch.cat([torch.stack([judge(part) for judge in judges]).sum(dim=0) for part in parts])

    classes = torch.arange(one.domain.classes, device=judges[0].device)
    if math.comb(len(classes) + batch_size - 1, batch_size) <= _ALL_SETS:
        sets = torch.combinations(classes, batch_size, with_replacement=True)
        return sets[likelihoods(sets).argmax()]
    rng = generator(0, "sets of labels")
    sets = torch.randint(len(classes), (_ALL_SETS, batch_size), generator=rng).to(classes)
    kept = sets[likelihoods(sets).topk(_BEAM).indices]
    for _ in range(2 * batch_size):
        changed = kept.repeat_interleave(batch_size * len(classes), dim=0)
        place = torch.arange(batch_size, device=classes.device).repeat_interleave(len(classes)).repeat(len(kept))
        changed[torch.arange(len(changed)), place] = classes.repeat(len(kept) * batch_size)
        sets = torch.cat([kept, changed]).sort(dim=1).values
        sets = torch.unique(sets, dim=0)
        before, kept = kept[0], sets[likelihoods(sets).topk(min(_BEAM, len(sets))).indices]
        if torch.equal(before.sort().values, kept[0]):
            break
    return kept[0].sort().values


class _Judge:
    """How likely labels are, by all replies to one broadcast."""

    def __init__(self, replies: list[Observation], like: StandIns, batch_size: int, *, with_norms: bool) -> None:
        name = classifier(replies[-1].module, replies[-1].domain)
        self.with_norms, self.device = with_norms, like.features.device
        self.predictions, self.features = like
        rng, count = generator(0, "groups for labels"), len(self.features)
        # one example: every stand-in once
        drawn = (
            torch.arange(count)[:, None]
            if batch_size == 1
            else torch.randint(count, (_GROUPS, batch_size), generator=rng)
        )
        self.groups = drawn.to(self.device)
        self.bias, self.bias_norm = _directions(replies, f"{name}.bias")
        weight, self.weight_norm = _directions(replies, f"{name}.weight")
        # [stand-ins, replies, classes]: the product of a reply's rows with a representation
        self.products = None if weight is None else torch.einsum("rcn,pn->prc", weight, self.features)

    def __call__(self, labels: Tensor) -> Tensor:
        """The logs of the likelihoods [H] of labels [H, B]: the density of all misses at zero, taken for normal."""
        errors = self.predictions[self.groups] - one_hot(labels, self.predictions.shape[1]).unsqueeze(1)
        misses = list[Tensor]()
        if self.bias is not None:
            mean = errors.mean(dim=2)
            length = mean.norm(dim=-1) + _TINY
            misses.append(mean @ self.bias.T / length[..., None] * math.sqrt(mean.shape[-1]))
            misses.append(_NORM_WEIGHT * (length / self.bias_norm).log()[..., None])
        if self.products is not None:
            features = self.features[self.groups]
            alike = torch.einsum("hmbc,hmdc->hmbd", errors, errors) * torch.einsum("mbn,mdn->mbd", features, features)
            length = (alike.sum(dim=(2, 3)).clamp(min=0) / labels.shape[1] ** 2).sqrt() + _TINY
            along = torch.einsum("hmbc,mbrc->hmr", errors, self.products[self.groups]) / labels.shape[1]
            entries = errors.shape[-1] * features.shape[-1]
            misses.append(along / length[..., None] * math.sqrt(entries))
            misses.append(_NORM_WEIGHT * (length / self.weight_norm).log()[..., None])
        if not misses:  # a reply of zeros says nothing
            return errors.new_zeros(len(labels)).double()
        if not self.with_norms:
            misses = misses[::2]
        missed = torch.cat(misses, dim=-1).double()
        # a broadcast that makes NaN of inputs says nothing either
        return _density_at_zero(missed) if bool(missed.isfinite().all()) else missed.new_zeros(len(labels))


def _directions(replies: list[Observation], name: str) -> tuple[Tensor | None, float]:
    """Unit tensors [R, ...] of one parameter of all replies, and their mean norm; None where that says nothing."""
    if name not in replies[-1].reply:
        return None, 1.0
    tensors = torch.stack([one.reply[name] for one in replies])
    norms = tensors.flatten(1).norm(dim=1)
    if not bool(((norms > 0) & norms.isfinite()).all()):
        return None, 1.0
    return tensors / norms.view(-1, *[1] * (tensors.dim() - 1)), float(norms.mean())


def _density_at_zero(misses: Tensor) -> Tensor:
    """[H]: the log of the normal density at zero that has the mean and covariance of misses [H, M, K]."""
    mean = misses.mean(dim=1)
    away = (misses - mean[:, None]) * _WIDER
    covariance = away.mT @ away / misses.shape[1]
    covariance.diagonal(dim1=-2, dim2=-1).add_(_FLOOR**2)
    factor = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(factor, mean[..., None], upper=False)[..., 0]
    found: Tensor = -0.5 * white.square().sum(dim=-1) - factor.diagonal(dim1=-2, dim2=-1).log().sum(dim=-1)
    return found
