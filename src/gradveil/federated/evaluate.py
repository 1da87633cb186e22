"""How good a global model is: accuracy and loss on examples that no client holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradveil.client import cross_entropy
from gradveil.core.types import Params
from gradveil.data import ImageSet
from gradveil.models import Functional

AT_ONCE = 1000


@dataclass(frozen=True)
class Quality:
    """The share of examples classified right, and the mean loss."""

    accuracy: float
    loss: float


def evaluate(model: Functional, params: Params, data: ImageSet) -> Quality:
    """The quality of a model, which should be in eval mode, at these parameters."""
    right = loss = 0.0
    device = next(iter(params.values())).device
    with torch.no_grad():
        for start in range(0, len(data), AT_ONCE):
            batch = data.batch(range(start, min(start + AT_ONCE, len(data)))).to(device)
            scores = model(params, batch.inputs)
            right += float((scores.argmax(dim=1) == batch.labels).sum())
            loss += float(cross_entropy(scores, batch.labels)) * len(batch)
    return Quality(right / len(data), loss / len(data))
