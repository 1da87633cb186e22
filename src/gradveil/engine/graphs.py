"""How a GPU computes: plain float32 with the fastest kernels, and repeated work replayed as a CUDA graph.

A small kernel takes the host longer to start than the card to do. A CUDA graph starts all of them in one go.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gradveil.core.types import Params

T = TypeVar("T")
Evaluate = Callable[[Params], tuple[Params, Tensor]]
"""All problems of a run, whatever is given bound to them: unknowns -> gradients and objectives."""
forward_mode = threading.RLock()
"""Held by clients while they take forward derivatives: torch counts the levels of these for all threads together."""


class _Backends:
    """The settings of torch are those of the whole process: what threads asked for lasts until the last has ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asked: dict[object, tuple[bool | None, bool | None]] = {}
        """TF32 and cuDNN's trials, as they are needed now; where two differ, the later one counts."""
        self._before = (False, False, False)

    def ask(self, key: object, tf32: bool | None, benchmark: bool | None) -> None:
        if not self.asked:
            cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
            self._before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark
        self.asked[key] = tf32, benchmark
        self._set()

    def end(self, key: object) -> None:
        del self.asked[key]
        self._set()

    def _set(self) -> None:
        convolutions, products, trials = self._before
        for tf32, benchmark in self.asked.values():
            convolutions, products = (convolutions, products) if tf32 is None else (tf32, tf32)
            trials = trials if benchmark is None else benchmark
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = convolutions, products
        torch.backends.cudnn.benchmark = trials


_backends = _Backends()


@contextlib.contextmanager
def cuda_settings(*, tf32: bool | None = None, benchmark: bool | None = None) -> Iterator[None]:
    """Let products be rounded to TF32 or not, and cuDNN try its kernels or not; None leaves a setting as it is.

    Left to its own rule, cuDNN takes a kernel for second derivatives that can be 25 times too slow.
    """
    key = object()
    with _backends.lock:
        _backends.ask(key, tf32, benchmark)
    try:
        yield
    finally:
        with _backends.lock:
            _backends.end(key)


def without_tf32() -> AbstractContextManager[None]:
    """Plain float32: torch lets convolutions round to TF32 by itself, which changes gradients by percents."""
    return cuda_settings(tf32=False)


class Graph(Generic[T]):
    """A function of a tree of tensors on one GPU, captured for the shapes of ``like``.

    It must not read anything else that changes, for what it closes over is read where it lay at capture, and must not
    write into what it is given.
    """

    def __init__(self, function: Callable[[Any], T], like: Any) -> None:
        self._function = function  # holds on to what it closes over: the graph reads that memory
        self._structure = structure(like)
        self._held = [tensor.detach().clone() for tensor in flatten(like)]
        self._loaded: list[Tensor | None] = [None] * len(self._held)
        self._held_by_type = _by_type(self._held)
        held = unflatten(like, iter(self._held))
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # before capture, so that libraries have chosen their kernels and made their workspaces
                function(held)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # On a stream of its own: libraries keep a workspace per stream, and graphs may run beside each other.
        with torch.cuda.graph(self._graph, stream=side):
            self.output = function(held)  # overwritten by every replay
        self._results = flatten(self.output)
        self._results_by_type = _by_type(self._results)

    def load(self, given: Any, *, edited: bool = True) -> None:
        """Copy in what the next replay works on. Where nobody edits tensors, those loaded last time are there still."""
        if structure(given) != self._structure:
            raise ValueError("the tensors of a graph come under the names and in the order of its capture")
        tensors, before = flatten(given), self._loaded
        self._loaded = [None if edited else tensor for tensor in tensors]
        for places in self._held_by_type:
            new = [i for i in places if edited or tensors[i] is not before[i]]
            if new:
                torch._foreach_copy_([self._held[i] for i in new], [tensors[i] for i in new])

    def replay(self) -> None:
        self._graph.replay()

    def result(self) -> T:
        """The result of the last replay, in memory of its own."""
        copies = list(self._results)
        for places in self._results_by_type:
            for i, copy in zip(places, torch._foreach_add([self._results[i] for i in places], 0), strict=True):
                copies[i] = copy
        found: T = unflatten(self.output, iter(copies))
        return found


class CudaGraphCache(Generic[T]):
    """A pure function of a tree of tensors. On a GPU, calls after the first with the same shapes replay a graph.

    Where the function cannot be captured, or tensors lie on several devices, it is simply called.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self._calls: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, Graph[T] | None] = {}

    def __call__(self, given: Any) -> T:
        tensors = flatten(given)
        if not on_one_gpu(tensors):
            return self._function(given)
        shapes = signature(tensors)
        self._calls[shapes] += 1
        if self._calls[shapes] == 1:
            return self._function(given)
        if shapes not in self._graphs:
            try:
                self._graphs[shapes] = Graph(self._function, given)
            except RuntimeError:  # it asks the card for a number, or does anything else that a graph cannot hold
                self._graphs[shapes] = None
        graph = self._graphs[shapes]
        if graph is None:
            return self._function(given)
        graph.load(given)
        graph.replay()
        return graph.result()

    def __deepcopy__(self, _memo: dict[int, Any]) -> CudaGraphCache[T]:
        """A copy captures its own graphs."""
        return CudaGraphCache(self._function)


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


def flatten(tree: Any) -> list[Tensor]:
    """All tensors in nested dicts and tuples, in their order. (PyTorch's own function for it is ten times slower.)"""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    for part in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(part, Tensor):  # without a call for each of them, for this is done in every step
            found.append(part)
        else:
            found += flatten(part)
    return found


def structure(tree: Any) -> Any:
    """The same nesting with names alone."""
    if isinstance(tree, Tensor):
        return None
    if isinstance(tree, dict):
        return [(name, None if isinstance(part, Tensor) else structure(part)) for name, part in tree.items()]
    return [structure(part) for part in tree]


def unflatten(like: Any, tensors: Iterator[Tensor]) -> Any:
    """A tree like another with these tensors in it."""
    if isinstance(like, Tensor):
        return next(tensors)
    if isinstance(like, dict):
        return {name: unflatten(part, tensors) for name, part in like.items()}
    return tuple(unflatten(part, tensors) for part in like)


def _by_type(tensors: list[Tensor]) -> list[list[int]]:
    """Where the tensors of each type are: one call for many is fast for one type only."""
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    return list(places.values())


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


def captured(evaluate: Evaluate, unknowns: Params) -> Evaluate:
    """The same function, for unknowns of the same shapes. The gradients it returns are overwritten by the next call."""
    graph = Graph(evaluate, unknowns)

    def replayed(point: Params) -> tuple[Params, Tensor]:
        graph.load({name: point[name] for name in unknowns})
        graph.replay()
        gradients, values = graph.output
        return gradients, values.clone()

    return replayed


def captured_by_parts(
    evaluate: Callable[[Params, Any], tuple[Params, Tensor]], unknowns: Params, given: Any, size: int
) -> Evaluate:
    """The same where one graph cannot hold all problems: ``size`` of them at a time are copied into it."""
    count = len(next(iter(unknowns.values())))
    parts = [slice(start, start + size) for start in (min(i, count - size) for i in range(0, count, size))]
    graph = Graph(lambda both: evaluate(*both), at((unknowns, given), parts[0]))

    def replayed(point: Params) -> tuple[Params, Tensor]:
        found: list[tuple[Params, Tensor]] = []
        done = 0
        for part in parts:
            graph.load(at(({name: point[name] for name in unknowns}, given), part))
            graph.replay()
            fresh = slice(done - part.start, None)  # the last part begins within the one before
            found.append(at(graph.result(), fresh))
            done = part.stop
        return concatenated(found)

    return replayed


def at(tree: Any, index: int | slice) -> Any:
    """One or some of the problems that a nesting of tensors [N, ...] is about."""
    return tree_map(lambda tensor: tensor[index], tree)


def concatenated(parts: Sequence[tuple[Params, Tensor]]) -> tuple[Params, Tensor]:
    """The gradients and objectives of parts of the problems, as those of all."""
    if len(parts) == 1:
        return parts[0]
    gradients = {name: torch.cat([gradient[name] for gradient, _ in parts]) for name in parts[0][0]}
    return gradients, torch.cat([values for _, values in parts])
