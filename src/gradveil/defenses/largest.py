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


def parts_of(sizes: Sequence[int]) -> list[slice]:
    """Where stretches of these sizes lie side by side."""
    return [slice(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


class LargestOfEach:
    """Picks from parts of a vector that lie side by side, such as layers: from each as many as each list says."""

    def __init__(self, sizes: Sequence[int], *counts: Sequence[int]) -> None:
        self.sizes, self.counts = list(sizes), counts
        self.parts = parts_of(sizes)
        self._sorted: _Sorted | None = None

    def __call__(self, values: Tensor) -> list[Tensor]:
        """For each list of counts, a mask of the largest ``values`` [sum of sizes]."""
        if not values.is_cuda:
            return [torch.from_numpy(mask) for mask in self.of_array(values.float().numpy())]
        return self._ranked(values.device).masks(values)

    def places(self, values: Tensor) -> list[Tensor]:
        """For each list of counts, where the largest are: part by part, within a part in any order."""
        if not values.is_cuda:
            return [mask.nonzero()[:, 0] for mask in self(values)]
        return self._ranked(values.device).places(values)

    def _ranked(self, device: torch.device) -> _Sorted:
        if self._sorted is None or self._sorted.part_of.device != device:
            self._sorted = _Sorted(self.sizes, self.counts, device)
        return self._sorted

    def of_array(self, values: Array) -> list[Array]:
        """The same for an array of float32. The bits of floats >= 0 are in the order of the floats, NaN the largest."""
        return _by_thresholds(values.view(np.uint32), self.parts, self.counts)


class _Sorted:
    """On a GPU one sort of (part, value) ranks all parts at once: floats >= 0 are in the order of their bits."""

    def __init__(self, sizes: Sequence[int], counts: Sequence[Sequence[int]], device: torch.device) -> None:
        lengths = torch.tensor(sizes, device=device)
        part = torch.arange(len(sizes), device=device).repeat_interleave(lengths, output_size=sum(sizes))
        rank = torch.arange(len(part), device=device) - (lengths.cumsum(0) - lengths)[part]
        self.part_of = part << 32
        self.first = [rank < torch.tensor(few, device=device)[part] for few in counts]
        self.ranks = [first.nonzero()[:, 0] for first in self.first]

    def masks(self, values: Tensor) -> list[Tensor]:
        order = self._order(values)
        return [torch.empty_like(first).index_put_((order,), first) for first in self.first]

    def places(self, values: Tensor) -> list[Tensor]:
        order = self._order(values)
        return [order[ranks] for ranks in self.ranks]

    def _order(self, values: Tensor) -> Tensor:
        return (self.part_of | (0x7FFFFFFF - values.float().view(torch.int32))).argsort()


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


def _thresholds(values: Array, counts: list[int]) -> dict[int, int]:
    """The count-th largest value for each count.

    A histogram over the upper halves of the values says in which bin each threshold lies, and only that bin is looked
    at closely.
    """
    if len(values) < _WORTH_A_HISTOGRAM:
        return _thresholds_by_selection(values, counts)
    bins = (values >> 16).astype(np.uint16)
    up_to = np.bincount(bins).cumsum()
    found = {}
    for count in counts:
        place = len(values) - count
        its_bin = int(np.searchsorted(up_to, place, side="right"))
        within = place - (up_to[its_bin - 1] if its_bin else 0)
        found[count] = np.partition(values[bins == its_bin], within)[within]
    return found


def _thresholds_by_selection(values: Array, counts: list[int]) -> dict[int, int]:
    found, most = {}, values.copy()
    for count in sorted(set(counts), reverse=True):
        place = len(most) - count
        most.partition(place)
        most = most[place:]
        found[count] = most[0]
    return found
