"""What CENSOR leaves of the gradient in an update that is orthogonal to it: lengths, and the right angle itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradveil.attacks.identification.comparison import Comparison
from gradveil.attacks.identification.likeness import TINY, ByTensor, Per, shrinkage

By = Literal["norms", "orthogonality", "both"]
SAME_NORM = 1e-4
"""How far apart, as a share, the norms of a tensor may be that are meant to be equal: rounding, other kernels."""
RIGHT = 1e-3
"""How far from zero, in deviations of a random direction, the part along the gradient may be after projection."""


@dataclass(frozen=True, kw_only=True)
class Marks(ByTensor):
    """How unlikely the reply is if CENSOR drew it for the candidate: two log likelihood ratios, added.

    Norms: those of the candidate's tensors are those of the reply, up to ``spread``. Orthogonality: the part of the
    reply along a candidate's tensor is that of a random direction, N(0, 1) in its own units, for all candidates but the
    true one, for which projection left nothing of it; the released projection leaves 1 - ||g|| times as much.
    """

    by: By = "both"
    whole: bool = False
    """The gradient was projected as one vector."""
    spread: float | None = 0.0
    """Deviation of the log of the norms; None where they say nothing."""
    released: bool = False
    plain: bool = False
    """The gradient itself may have been sent."""
    variance: float = 0.0
    """Of noise that was added to every entry."""
    bound: float | None = None
    """What norms were clipped to, before or afterwards: angles stay what they are."""
    per: Per = "layer"

    def __call__(self, compared: Comparison) -> Tensor:
        pieces = compared.whole() if self.whole else compared
        scores = torch.zeros_like(compared.products[0])
        if self.by == "norms" or (self.by == "both" and self.spread is not None):
            scores = scores + self.norms_apart(pieces)
        if self.by != "norms":
            scores = scores + self.not_orthogonal(pieces)
        return torch.minimum(scores, self.not_the_same(pieces)) if self.plain and self.by == "both" else scores

    def norms_apart(self, pieces: Comparison) -> Tensor:
        """[c, N]: squared differences of the logs of norms, in units of how far they may differ."""
        kept = shrinkage(pieces, self.bound, self.per).square()
        expected = kept * pieces.squares + self.variance * pieces.sizes + TINY
        apart = (expected.log() - (pieces.seen + TINY).log()) / 2
        spread = SAME_NORM**2 + (self.spread or 0.0) ** 2 + self._noise(pieces) / pieces.sizes
        return (apart.square() / spread).sum(dim=0)

    def not_orthogonal(self, pieces: Comparison) -> Tensor:
        """[c, N]: how much more the reply lies along the candidate's gradient than projection leaves."""
        cosines = (pieces.products.square() / (pieces.squares * pieces.seen + TINY)).clamp(max=1 - 1e-6)
        along = (pieces.sizes - 1) * cosines / (1 - cosines)
        kept = (1 - pieces.squares.sqrt()).square() if self.released else torch.zeros_like(pieces.squares)
        left = RIGHT**2 + kept + self._noise(pieces)
        return (along / left - along + left.log()).sum(dim=0)

    def not_the_same(self, pieces: Comparison) -> Tensor:
        """[c, N]: how far the reply is from the candidate's gradient itself, in units of how far it may be."""
        away = (pieces.squares - 2 * pieces.products + pieces.seen).clamp(min=0) / (pieces.seen + TINY)
        return (away / (SAME_NORM**2 + self._noise(pieces))).sum(dim=0)

    def _noise(self, pieces: Comparison) -> Tensor:
        """Noise along any one direction, in units of what a random direction of the reply's length has there."""
        return self.variance * pieces.sizes / (pieces.seen + TINY)
