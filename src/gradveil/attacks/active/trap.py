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

from gradveil.attacks.analytic import filled_up, normalization, readable_layer, readout
from gradveil.attacks.base import ATTACKS, Attack, Crafted, Reconstruction, Server
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


@ATTACKS.register("trap")
@dataclass(frozen=True, kw_only=True)
class Trap(Attack):
    """Trap weights (Boenisch et al. 2023): a first layer that few examples set off; those are read off it exactly."""

    scale: float = 0.95
    sigma: float = 0.5
    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.BATCH_SIZE, Knowledge.CRAFT})

    def __post_init__(self) -> None:
        if not 0 < self.scale < 1 or not self.sigma > 0:
            raise GradveilError(
                f"attack trap: scale lies between 0 and 1 and sigma above 0, not {self.scale} and {self.sigma}"
            )

    def craft(self, server: Server, history: Sequence[Observation], seed: int) -> Crafted | None:
        if history:
            return None
        name = readable_layer(server.module, server.domain, "trap")
        weight, bias = f"{name}.weight", f"{name}.bias"
        rows = trap_rows(server.sent[weight].shape, self.scale, self.sigma, generator(seed, "trap"))
        start, scaling = torch.zeros(len(rows)), normalization(server.module)
        if scaling is not None:  # a trap counts on pixels >= 0: it answers normalised ones as plain ones
            mean, std = (part.cpu().expand(server.domain.shape).flatten() for part in (scaling.mean, scaling.std))
            rows, start = rows * std, rows @ mean
        tampered = {weight: rows.to(server.sent[weight]), bias: start.to(server.sent[bias])}
        return Crafted(server.module, server.model, {**server.sent, **tampered}, tuple(tampered))

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:  # noqa: ARG002
        seen = [explained(one, "averaged") for one in seen]
        name, size = readable_layer(seen[0].module, seen[0].domain, "trap"), seen[0].batch_size or 1
        found = []
        for one, labels in zip(seen, infer_labels(seen, size), strict=True):
            weight, bias = one.reply[f"{name}.weight"], one.reply[f"{name}.bias"]
            order = bias.abs().argsort(descending=True, stable=True)  # those driven most first: rounding spares them
            read = most_credible(readout(weight[order], bias[order], one), size)
            own, stopped = (0.0, "converged") if len(read) else (float("inf"), "stuck")
            inputs = filled_up(one.domain.valid(read), size, one.domain)
            found.append(Reconstruction.closed_form(inputs, labels, own, stopped=stopped))
        return found


def trap_rows(shape: Sequence[int], scale: float, sigma: float, rng: torch.Generator) -> Tensor:
    """[rows, features]: at random places -|z| on one half and scale * |z| on the other, with z ~ N(0, sigma^2)."""
    rows, features = shape
    drawn = sigma * torch.randn((rows, features // 2), generator=rng).abs()
    places = torch.rand((rows, features), generator=rng).argsort(dim=1)
    return torch.zeros(rows, features).scatter_(
        1, places[:, : features // 2 * 2], torch.cat([-drawn, scale * drawn], 1)
    )


def most_credible(images: Tensor, count: int) -> Tensor:
    """Of readouts [rows, ...] at most ``count`` different ones, those that most rows agree on first.

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
