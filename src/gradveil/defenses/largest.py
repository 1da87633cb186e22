"""Which entries are the largest: exactly so many of them, ties cut by position."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SAMPLED_EVERY = 61
"""A prime: no kernel or channel count divides it, so that every place in a layer is in the sample."""
_WORTH_SAMPLING = 2**16

Array = np.ndarray[Any, Any]


def largest(values: Tensor, *counts: int) -> list[Tensor]:
    """For each count, a mask [size] of that many of the largest ``values`` [size].

    On a CPU thresholds are found first: torch's own selection returns places too, and takes many times as long.
    """
    if values.is_cuda:
        order = values.topk(max(counts)).indices if max(counts) else values.new_empty(0, dtype=torch.int64)
        return [torch.zeros_like(values, dtype=torch.bool).index_fill_(0, order[:count], True) for count in counts]
    plain = values.numpy()
    found = _thresholds(plain, [count for count in counts if 0 < count < len(plain)])
    return [torch.from_numpy(_from(plain, found[c], c) if c in found else np.full(len(plain), c > 0)) for c in counts]


def _from(values: Array, threshold: float, count: int) -> Array:
    """Everything from the threshold on, less the last of those at it if that is too many."""
    mask = values >= threshold
    extra = np.count_nonzero(mask) - count
    if extra:
        mask[np.flatnonzero(values == threshold)[-extra:]] = False
    return mask


def _thresholds(values: Array, counts: list[int]) -> dict[int, float]:
    """The count-th largest value for each count."""
    if len(values) < _WORTH_SAMPLING and counts:
        ordered = np.partition(values, sorted({len(values) - count for count in counts}))
        return {count: ordered[len(values) - count] for count in counts}
    return {count: _near_its_place_in_a_sample(values, count) for count in counts}


def _near_its_place_in_a_sample(values: Array, count: int) -> float:
    """The same for one count: a sample says about where it is, and only what lies near is looked at closely."""
    sample = -np.sort(-values[::_SAMPLED_EVERY])
    size = len(sample)
    place = count / len(values) * size
    slack = 8 * math.sqrt(place * (1 - place / size)) + 2
    high, low = (sample[min(size - 1, max(0, round(place + by)))] for by in (-slack, slack))
    above = int(np.count_nonzero(values > high))
    near = values[(values <= high) & (values >= low)]
    if not above < count <= above + len(near):
        near, above = values, 0
    place_in = len(near) - (count - above)
    return float(np.partition(near, place_in)[place_in])
