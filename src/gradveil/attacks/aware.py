"""What a defense did, estimated from the update alone, so that a candidate's update can be treated the same way.

An update that was clipped layer by layer has several layers of exactly the same norm, the largest. One that was
sparsified has the same share of zeros in every large tensor. Soteria leaves whole columns of the classifier at zero.
What is not found is taken for not done: on an undefended update nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradveil.attacks.engine import Given
from gradveil.core.trees import map_each
from gradveil.core.types import Params
from gradveil.threat.observation import Observation

_LARGE = 100
"""Entries from which on a tensor's share of zeros means something."""
_SAME_NORM = 1e-4
_SAME_SHARE = 0.02
_FEWEST_ZEROS = 0.05
UNBOUNDED = 1e15
"""Stands for no clip: a bound that divides and multiplies like any other."""


def estimated(seen: Sequence[Observation]) -> Given:
    """For each observation the clip bound, and which tensors were cut down, [N] each."""
    device = next(iter(seen[0].reply.values())).device
    bounds = [clip_bound(one.reply) for one in seen]
    cut = [{name: float(name in cut_tensors(one.reply)) for name in one.reply} for one in seen]
    return {
        "bound": torch.tensor(bounds, device=device),
        "cut": {name: torch.tensor([one[name] for one in cut], device=device) for name in seen[0].reply},
    }


def as_defended(update: Params, given: Given) -> Params:
    """The candidate's update under what was estimated of the defense: clipped, then only where something was sent."""

    def treated(tensor: Tensor, sent: Tensor, cut: Tensor) -> Tensor:
        norm = (tensor.square().sum() + 1e-30).sqrt()
        longest: Tensor = given["bound"]
        sparse = torch.where(cut > 0, (sent != 0).to(tensor), torch.ones_like(tensor))
        return tensor * (longest / norm.clamp(min=longest)) * sparse

    return map_each(treated, update, given["reply"], given["cut"])


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
