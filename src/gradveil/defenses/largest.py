"""Which entries are the largest: exactly so many of them, ties cut by position. No entry may be negative."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
_WORTH_A_HISTOGRAM = 2**13


def largest(values: Tensor, *counts: int) -> list[Tensor]:
    """For each count, a mask [size] of that many of the largest ``values`` [size]."""
    return largest_of_each(values, [len(values)], *([count] for count in counts))


def largest_of_each(values: Tensor, sizes: Sequence[int], *counts: Sequence[int]) -> list[Tensor]:
    """The same for parts of ``values`` [sum of sizes] that lie side by side: from each as many as each list says."""
    parts = [slice(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
    if values.is_cuda:
        return _by_sorting(values, parts, counts)
    plain = values.float().numpy()
    return [torch.from_numpy(mask) for mask in _by_thresholds(plain, parts, counts)]


def _by_sorting(values: Tensor, parts: Sequence[slice], counts: Sequence[Sequence[int]]) -> list[Tensor]:
    """On a GPU one sort of (part, value) ranks all parts at once: floats >= 0 are in the order of their bits."""
    starts, stops = torch.tensor([[part.start, part.stop] for part in parts], device=values.device).T
    part_of = torch.arange(len(parts), device=values.device).repeat_interleave(stops - starts, output_size=len(values))
    order = ((part_of << 32) | (0x7FFFFFFF - values.float().view(torch.int32))).argsort()
    rank = torch.arange(len(values), device=values.device) - starts[part_of]
    chosen = [rank < torch.tensor(few, device=values.device)[part_of] for few in counts]
    return [torch.empty_like(first).index_put_((order,), first) for first in chosen]


def _by_thresholds(values: Array, parts: Sequence[slice], counts: Sequence[Sequence[int]]) -> list[Array]:
    """On a CPU thresholds come first: torch's own selection returns places too, and takes many times as long."""
    masks = [np.zeros(len(values), dtype=np.bool_) for _ in counts]
    for part, *few in zip(parts, *counts, strict=True):
        here = values[part]
        found = _thresholds(here, [count for count in few if count])
        for mask, count in zip(masks, few, strict=True):
            if count:
                np.greater_equal(here, found[count], out=mask[part])
    for mask, few in zip(masks, counts, strict=True):
        if np.count_nonzero(mask) > sum(few):  # ties
            for part, count in zip(parts, few, strict=True):
                _cut(mask[part], values[part], count)
    return masks


def _cut(mask: Array, values: Array, count: int) -> None:
    """Drops the last of those at the threshold if there are too many."""
    extra = np.count_nonzero(mask) - count
    if extra:
        mask[np.flatnonzero(mask & (values == values[mask].min()))[-extra:]] = False


def _thresholds(values: Array, counts: list[int]) -> dict[int, float]:
    """The count-th largest value for each count.

    A histogram over the upper halves of the floats, which are in the order of the floats themselves, says in which bin
    each threshold lies, and only that bin is looked at closely.
    """
    if len(values) < _WORTH_A_HISTOGRAM:
        return _thresholds_by_selection(values, counts)
    bins = (values.view(np.uint32) >> 16).astype(np.uint16)
    up_to = np.bincount(bins).cumsum()
    found = {}
    for count in counts:
        place = len(values) - count
        its_bin = int(np.searchsorted(up_to, place, side="right"))
        within = place - (up_to[its_bin - 1] if its_bin else 0)
        found[count] = float(np.partition(values[bins == its_bin], within)[within])
    return found


def _thresholds_by_selection(values: Array, counts: list[int]) -> dict[int, float]:
    found, most = {}, values
    for count in sorted(set(counts), reverse=True):
        most = np.partition(most, len(most) - count)[len(most) - count :]
        found[count] = float(most[0])
    return found
