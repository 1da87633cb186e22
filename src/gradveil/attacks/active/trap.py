"""Trap weights (Boenisch et al. 2023): a first layer whose rows few examples set off, and those that do are read.

Half of a row's weights are negative, drawn at random; the other half are the same numbers, positive and a little
smaller. On most images the negative half wins and the row stays silent. A row that only one example of the batch sets
off holds that example alone: its weight gradient over its bias gradient is the image, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks.analytic import normalization, on_gray, readable_layer, readout
from gradveil.attacks.base import ATTACKS, Attack, Budget, Crafted, Reconstruction, Server
from gradveil.attacks.parts.labels import infer_labels
from gradveil.attacks.parts.updates import explained
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.core.seeding import generator
from gradveil.threat.model import Knowledge
from gradveil.threat.observation import Observation

_SAME = 1e-3
"""Root mean square of the difference up to which two readouts are of one image."""
_OUTSIDE = 1e-3
"""How far a pixel of a plausible readout may lie outside [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class Trap(Attack):
    """One crafted broadcast, and a readout of every row."""

    scale: float
    sigma: float
    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.BATCH_SIZE, Knowledge.CRAFT})

    def craft(self, server: Server, history: Sequence[Observation], seed: int) -> Crafted | None:
        if history:
            return None
        name = readable_layer(server.module, server.domain, "trap")
        weight, bias = f"{name}.weight", f"{name}.bias"
        rows = trap_rows(server.sent[weight].shape, self.scale, self.sigma, generator(seed, "trap"))
        tampered = dict(zip((weight, bias), _behind_normalization(rows, server), strict=True))
        sent = {**server.sent, **{key: value.to(server.sent[key]) for key, value in tampered.items()}}
        return Crafted(module=server.module, model=server.model, sent=sent, tampered=tuple(tampered))

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:  # noqa: ARG002
        seen = [explained(one, "averaged") for one in seen]
        name, size = readable_layer(seen[0].module, seen[0].domain, "trap"), seen[0].batch_size or 1
        labels = infer_labels(seen, size)
        return [_reconstruction(most_credible(_read(one, name), size), labels[i]) for i, one in enumerate(seen)]


def trap_rows(shape: Sequence[int], scale: float, sigma: float, rng: torch.Generator) -> Tensor:
    """[rows, features]: at random places -|z| on one half and scale * |z| on the other, with z ~ N(0, sigma^2)."""
    rows, features = shape
    drawn = sigma * torch.randn((rows, features // 2), generator=rng).abs()
    places = torch.rand((rows, features), generator=rng).argsort(dim=1)
    return torch.zeros(rows, features).scatter_(
        1, places[:, : features // 2 * 2], torch.cat([-drawn, scale * drawn], 1)
    )


def _behind_normalization(rows: Tensor, server: Server) -> tuple[Tensor, Tensor]:
    """Weight and bias that answer normalised pixels as ``rows`` answer plain ones: a trap counts on pixels >= 0."""
    scaling = normalization(server.module)
    if scaling is None:
        return rows, torch.zeros(len(rows))
    mean, std = (part.cpu().expand(server.domain.shape).flatten() for part in (scaling.mean, scaling.std))
    return rows * std, rows @ mean


def _read(one: Observation, name: str) -> Tensor:
    """What every row says, [rows, C, H, W]: the rows that are driven most first, since rounding spares them."""
    weight, bias = one.reply[f"{name}.weight"], one.reply[f"{name}.bias"]
    order = bias.abs().argsort(descending=True, stable=True)
    return readout(weight[order], bias[order], one)


def most_credible(images: Tensor, count: int) -> Tensor:
    """Of readouts [rows, C, H, W] at most ``count`` different ones, those that most rows agree on first.

    Rows mix the examples that set them off in proportions of their own, so that what two rows say alike is one
    example. Among those that only one row says the ones of most contrast come first: mixtures are flatter.
    """
    flat = images.flatten(1)
    valid = flat.isfinite().all(dim=1) & (flat.min(dim=1).values > -_OUTSIDE) & (flat.max(dim=1).values < 1 + _OUTSIDE)
    flat, images = flat[valid], images[valid]
    alike = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist") < _SAME * flat.shape[1] ** 0.5
    first = ~alike.tril(diagonal=-1).any(dim=1)
    contrast = (flat - flat.mean(dim=1, keepdim=True)).abs().mean(dim=1)  # below 1, so it only settles ties
    credit = alike.sum(dim=1) + contrast
    best = credit.where(first, -torch.ones_like(credit)).argsort(descending=True, stable=True)
    return images[best[: min(count, int(first.sum()))]]


def _reconstruction(found: Tensor, labels: Tensor) -> Reconstruction:
    """What was read, and gray where nothing was."""
    own = 0.0 if len(found) else float("inf")
    return Reconstruction(
        inputs=on_gray(found.clamp(0, 1), len(labels)).cpu(),
        labels=labels.cpu(),
        objective=own,
        objectives=(own,),
        steps=(0,),
        trace=(own,),
        stopped="converged" if len(found) else "stuck",
        strategy="closed form",
    )


@ATTACKS.register("trap")
def trap(budget: Budget, *, scale: float = 0.95, sigma: float = 0.5) -> Attack:  # noqa: ARG001
    """Trap weights (Boenisch et al. 2023): a first layer that few examples set off; those are read off it exactly."""
    if not 0 < scale < 1 or not sigma > 0:
        raise GradveilError(f"attack trap: scale lies between 0 and 1 and sigma above 0, not {scale} and {sigma}")
    return Trap(scale=scale, sigma=sigma)
