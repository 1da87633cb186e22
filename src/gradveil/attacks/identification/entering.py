"""What entered a linear layer, read off the gradient of its weights whatever came back to it.

The gradient of the weights is the sum over examples of (slope at the outputs) x (what entered), so its rows lie in the
span of what entered. A defense that makes the slopes random, or adds gradients of its own, leaves that span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradveil.attacks.identification.likeness import Scores
from gradveil.core.types import Params


@dataclass(frozen=True, kw_only=True)
class Entering:
    """The share of what a candidate sends into a layer that lies outside the span of what the reply shows."""

    weight: str
    """The name of the layer's weights."""
    examples: int
    """How many examples the gradient is of, private and added ones."""

    def against(self, replies: Sequence[Params]) -> Scores:
        seen = torch.stack([reply[self.weight] for reply in replies]).double()
        span = torch.linalg.svd(seen, full_matrices=False).Vh[:, : self.examples]

        def scores(updates: Params) -> torch.Tensor:
            rows = updates[self.weight].double()  # of one example: all rows are parallel
            longest = rows.norm(dim=2).argmax(dim=1)
            entered = torch.nn.functional.normalize(rows[torch.arange(len(rows)), longest], dim=1)
            return 1 - torch.einsum("nri,ci->cnr", span, entered).square().sum(dim=2)

        return scores
