"""Which entries are the largest: exactly so many of them, ties cut by position."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def largest(values: Tensor, *counts: int) -> list[Tensor]:
    """For each count, a mask [size] of that many of the largest ``values`` [size].

    On a CPU numpy's selection finds the thresholds, many times faster than torch's, which returns places too.
    """
    if values.is_cuda:
        order = values.topk(max(counts)).indices if max(counts) else values.new_empty(0, dtype=torch.int64)
        return [torch.zeros_like(values, dtype=torch.bool).index_fill_(0, order[:count], True) for count in counts]
    size = len(values)
    places = sorted({size - count for count in counts if 0 < count < size})
    found = np.partition(values.numpy(), places) if places else None
    return [_above(values, count, None if found is None else float(found[size - count])) if 0 < count < size
            else torch.full_like(values, count > 0, dtype=torch.bool) for count in counts]  # fmt: skip


def _above(values: Tensor, count: int, threshold: float | None) -> Tensor:
    """Everything above the threshold, and as many of those at it as are missing, from the first on."""
    assert threshold is not None
    mask = values > threshold
    missing = count - int(mask.sum())
    if missing:
        mask[torch.nonzero(values == threshold)[:missing, 0]] = True
    return mask
