"""Work of several clients on one GPU at the same time: each a CUDA graph on a stream of its own.

One client's step leaves most of a large card idle, and its host starts kernels more slowly than the card does them.
Captured, the steps of ten clients start in ten calls and run beside each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from gradveil.client import Wanted
from gradveil.core.graphs import Graph, leaves, on_one_gpu, rebuilt, signature
from gradveil.core.precise import kernels_tried

WORTH_CAPTURE = 2
"""Work of a shape asked for so often before is captured: it takes as long as a few calls."""
FREE = 0.25
"""The share of the card's memory that stays free: each graph keeps its own."""


class Lanes:
    """Computes the work of several clients. What is new, or finds no room, is done alone."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, list[Graph[Any]]] = defaultdict(list)
        self._asked: Counter[Hashable] = Counter()
        self._streams: list[torch.cuda.Stream] = []

    def __call__(self, works: list[Wanted[Any]]) -> list[Any]:
        lanes = self._assigned(works)
        main = torch.cuda.current_stream()
        for work, lane in zip(works, lanes, strict=True):
            if lane is not None:
                lane.load(work.given, edited=False)  # local runs make new tensors
        streams = self._first_streams(len(works))
        for lane, stream in zip(lanes, streams, strict=True):
            stream.wait_stream(main)
            if lane is not None:
                with torch.cuda.stream(stream):
                    lane.replay()
        alone = [work.alone() if lane is None else None for work, lane in zip(works, lanes, strict=True)]
        for stream in streams:
            main.wait_stream(stream)
        return [found if lane is None else lane.copied() for lane, found in zip(lanes, alone, strict=True)]

    def _assigned(self, works: list[Wanted[Any]]) -> list[Graph[Any] | None]:
        """A graph for each work, no two the same; None where it is done alone."""
        taken: Counter[Hashable] = Counter()
        lanes: list[Graph[Any] | None] = []
        for work in works:
            tensors = leaves(work.given)
            kind = (work.function, signature(tensors))
            graphs = self._graphs[kind]
            self._asked[kind] += 1
            if taken[kind] == len(graphs) and self._worth_capture(kind, tensors):
                with kernels_tried():
                    graphs.append(Graph(_ChannelsLast(work.function), work.given))
            lanes.append(graphs[taken[kind]] if taken[kind] < len(graphs) else None)
            taken[kind] += 1
        return lanes

    def _worth_capture(self, kind: Hashable, tensors: list[Tensor]) -> bool:
        free, whole = torch.cuda.mem_get_info()
        return on_one_gpu(tensors) and self._asked[kind] > WORTH_CAPTURE and free > FREE * whole

    def _first_streams(self, count: int) -> list[torch.cuda.Stream]:
        while len(self._streams) < count:
            self._streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        return self._streams[:count]


class _ChannelsLast:
    """The same function on images and weights in the layout that tensor cores read; results in the usual one."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, given: Any) -> Any:
        return _laid_out(self._function(_laid_out(given, torch.channels_last)), torch.contiguous_format)


def _laid_out(tree: Any, layout: torch.memory_format) -> Any:
    return rebuilt(tree, (x.contiguous(memory_format=layout) if x.dim() == 4 else x for x in leaves(tree)))
