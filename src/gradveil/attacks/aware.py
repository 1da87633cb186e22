"""What a defense did, estimated from the update alone, so that a candidate's update can be treated the same way.

An update that was clipped layer by layer has several layers of exactly the same norm, the largest. One that was
sparsified has the same share of zeros in every large tensor. Soteria leaves whole columns of the classifier at zero.
Noise spreads the entries of many tensors by the same amount, whatever their gradients are. What is not found is taken
for not done. Columns behind ReLUs that no example drives are zero too, and are taken for left out: on an undefended
update candidates are then compared without them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradveil.attacks.engine import Given
from gradveil.core.trees import map_each
from gradveil.core.types import Params
from gradveil.joint.moments import Moments
from gradveil.threat.observation import Observation

_LARGE = 100
"""Entries from which on a tensor's share of zeros means something."""
_MANY = 400
"""Entries from which on the median of a tensor is known to a few percent."""
_SAME_SPREAD = 0.1
_SAME_NORM = 1e-4
_SAME_SHARE = 0.02
_FEWEST_ZEROS = 0.05
UNBOUNDED = 1e15
"""Stands for no clip: a bound that divides and multiplies like any other."""


def estimated(seen: Sequence[Observation]) -> Given:
    """For each observation the clip bound, how far each tensor is to be trusted, and which were cut down, [N] each.

    Where nothing was cut down in any, nothing is said of it.
    """
    device = next(iter(seen[0].reply.values())).device
    bounds = [clip_bound(one.reply) for one in seen]
    trust = [trusts(one.reply) for one in seen]
    cut = [cut_tensors(one.reply) for one in seen]
    found: Given = {
        "trust": {name: torch.tensor([one[name] for one in trust], device=device) for name in seen[0].reply},
        "bound": torch.tensor(bounds, device=device),
    }
    if any(cut):
        found["cut"] = {name: torch.tensor([name in one for one in cut], device=device) for name in seen[0].reply}
    return found


def as_defended(update: Params, given: Given) -> Params:
    """The candidate's update under what was estimated of the defense: clipped, then only where something was sent."""
    clipped = map_each(lambda tensor: tensor * _shrunk(tensor.square().sum(), given["bound"]), update)
    if "cut" not in given:
        return clipped
    return map_each(
        lambda tensor, sent, cut: torch.where(cut & (sent == 0), 0, tensor), clipped, given["reply"], given["cut"]
    )


def _shrunk(square: Tensor, bound: Tensor) -> Tensor:
    """What tensors of these squared lengths are multiplied by so that they are no longer than the bound."""
    return bound / (square + 1e-30).sqrt().clamp(min=bound)


class AsDefended:
    """The same, and what follows from trust, for the moments of tensors: enough where nothing was cut down."""

    def fits(self, given: Given) -> bool:
        return "cut" not in given

    def __call__(self, found: dict[str, Moments], given: Given) -> dict[str, Moments]:
        def treated(name: str, product: Tensor, square: Tensor, observed: Tensor) -> Moments:
            shrunk, trust = _shrunk(square, given["bound"]), given["trust"][name].square()
            return Moments(trust * shrunk * product, trust * shrunk.square() * square, trust * observed)

        return {name: treated(name, *each) for name, each in found.items()}


def as_trusted(update: Params, given: Given) -> Params:
    """An update in which tensors count by how much of them is not noise: for candidates and for what was seen."""
    return map_each(lambda tensor, trust: tensor * trust, update, given["trust"])


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


def trusts(update: Params) -> dict[str, float]:
    """By tensor the share of its square that noise does not explain (Wiener's rule), 1 where there is no noise."""
    variance = noise_level(update) ** 2
    if variance == 0:
        return dict.fromkeys(update, 1.0)
    explained = {name: variance * t.numel() / max(float(t.square().sum()), 1e-30) for name, t in update.items()}
    return {name: max(0.0, 1 - share) for name, share in explained.items()}


def clip_bound(update: Params) -> float:
    """The bound to which the layers of an update were clipped, UNBOUNDED if they do not look clipped."""
    norms = torch.stack([tensor.norm() for tensor in update.values()])
    largest = norms.max()
    alike = (norms - largest).abs() <= _SAME_NORM * largest
    return float(largest) if int(alike.sum()) >= 2 else UNBOUNDED


def cut_tensors(update: Params) -> set[str]:
    """Tensors that were sparsified, or of which whole columns are missing."""
    shares = {name: float((tensor == 0).float().mean()) for name, tensor in update.items()}
    large = [shares[name] for name, tensor in update.items() if tensor.numel() >= _LARGE]
    if large and min(large) > _FEWEST_ZEROS and max(large) - min(large) < _SAME_SHARE:
        return {name for name, share in shares.items() if share > 0}
    return {name for name, tensor in update.items() if tensor.dim() == 2 and _missing_columns(tensor)}


def _missing_columns(weight: Tensor) -> bool:
    """Whether a part of the columns, not all, is zero while every other column has an entry in most rows."""
    empty = (weight == 0).all(dim=0)
    share = float(empty.float().mean())
    return _FEWEST_ZEROS < share < 1 and float((weight[:, ~empty] != 0).float().mean()) > 0.5
