"""Work that a GPU repeats with tensors of the same shapes: its kernels are captured once and then replayed.

A small kernel takes the host longer to start than the card to do. A CUDA graph starts all of them in one go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Graph(Generic[T]):
    """A function of a tree of tensors on one GPU, captured for the shapes of ``like``.

    It must not read anything else that changes, for what it closes over is read where it lay at capture, and must not
    write into what it is given.
    """

    def __init__(self, function: Callable[[Any], T], like: Any) -> None:
        self._function = function  # holds on to what it closes over: the graph reads that memory
        self._names = names_of(like)
        self._held = [tensor.detach().clone() for tensor in leaves(like)]
        self._loaded: list[Tensor | None] = [None] * len(self._held)
        self._held_by_type = _by_type(self._held)
        held = rebuilt(like, iter(self._held))
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # before capture, so that libraries have chosen their kernels and made their workspaces
                function(held)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # On a stream of its own: libraries keep a workspace per stream, and graphs may run beside each other.
        with torch.cuda.graph(self._graph, stream=side):
            self.result = function(held)  # overwritten by every replay
        self._results = leaves(self.result)
        self._results_by_type = _by_type(self._results)

    def load(self, given: Any, *, edited: bool = True) -> None:
        """Copy in what the next replay works on. Where nobody edits tensors, those loaded last time are there still."""
        if names_of(given) != self._names:
            raise ValueError("the tensors of a graph come under the names and in the order of its capture")
        tensors, before = leaves(given), self._loaded
        self._loaded = [None if edited else tensor for tensor in tensors]
        for places in self._held_by_type:
            new = [i for i in places if edited or tensors[i] is not before[i]]
            if new:
                torch._foreach_copy_([self._held[i] for i in new], [tensors[i] for i in new])

    def replay(self) -> None:
        self._graph.replay()

    def copied(self) -> T:
        """The result of the last replay, in memory of its own."""
        copies = list(self._results)
        for places in self._results_by_type:
            for i, copy in zip(places, torch._foreach_add([self._results[i] for i in places], 0), strict=True):
                copies[i] = copy
        found: T = rebuilt(self.result, iter(copies))
        return found


class Replayed(Generic[T]):
    """A pure function of a tree of tensors. On a GPU, calls after the first with the same shapes replay a graph.

    Where the function cannot be captured, or tensors lie on several devices, it is simply called.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self._asked: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, Graph[T] | None] = {}

    def __call__(self, given: Any) -> T:
        tensors = leaves(given)
        if not on_one_gpu(tensors):
            return self._function(given)
        shapes = signature(tensors)
        self._asked[shapes] += 1
        if self._asked[shapes] == 1:
            return self._function(given)
        if shapes not in self._graphs:
            self._graphs[shapes] = capture_or_none(self._function, given)
        graph = self._graphs[shapes]
        if graph is None:
            return self._function(given)
        graph.load(given)
        graph.replay()
        return graph.copied()

    def __deepcopy__(self, _memo: dict[int, Any]) -> Replayed[T]:
        """A copy captures its own graphs."""
        return Replayed(self._function)


_lanes: dict[int, list[torch.cuda.Stream]] = {}
"""Streams of each card, kept: libraries make a workspace for every stream that they meet, and must not while a graph is
captured."""


def side_by_side(works: Sequence[Callable[[], T]]) -> list[T]:
    """The results of work that does not depend on each other, each on a stream of its own.

    Started one by one from Python, the card does them nearly in turn; in a graph they do run beside each other.
    """
    main = torch.cuda.current_stream()
    lanes = _lanes.setdefault(main.device_index, [])
    while len(lanes) < len(works):
        lanes.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    results = []
    for lane, work in zip(lanes, works, strict=False):
        lane.wait_stream(main)
        with torch.cuda.stream(lane):
            results.append(work())
    for lane in lanes[: len(works)]:
        main.wait_stream(lane)
    return results


def leaves(tree: Any) -> list[Tensor]:
    """All tensors in nested dicts and tuples, in their order. (PyTorch's own function for it is ten times slower.)"""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    for part in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(part, Tensor):  # without a call for each of them, for this is done in every step
            found.append(part)
        else:
            found += leaves(part)
    return found


def names_of(tree: Any) -> Any:
    """The same nesting with names alone."""
    if isinstance(tree, Tensor):
        return None
    if isinstance(tree, dict):
        return [(name, None if isinstance(part, Tensor) else names_of(part)) for name, part in tree.items()]
    return [names_of(part) for part in tree]


def rebuilt(like: Any, tensors: Iterator[Tensor]) -> Any:
    """A tree like another with these tensors in it."""
    if isinstance(like, Tensor):
        return next(tensors)
    if isinstance(like, dict):
        return {name: rebuilt(part, tensors) for name, part in like.items()}
    return tuple(rebuilt(part, tensors) for part in like)


def _by_type(tensors: list[Tensor]) -> list[list[int]]:
    """Where the tensors of each type are: one call for many is fast for one type only."""
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    return list(places.values())


def capture_or_none(function: Callable[[Any], T], given: Any) -> Graph[T] | None:
    """None where the function asks the card for a number, or does anything else that a graph cannot hold."""
    try:
        return Graph(function, given)
    except RuntimeError:
        return None


def on_one_gpu(tensors: list[Tensor]) -> bool:
    """Whether a graph of work on these tensors could be captured now."""
    device = tensors[0].device
    return (
        device.type == "cuda"
        and all(tensor.device == device for tensor in tensors)
        and not torch.cuda.is_current_stream_capturing()
    )


def signature(tensors: list[Tensor]) -> Hashable:
    """What a graph is good for: shapes, types and the precision of products."""
    precision = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    return precision, tuple((tensor.shape, tensor.dtype) for tensor in tensors)
