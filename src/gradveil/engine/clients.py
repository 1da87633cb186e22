"""The clients of a round: one after another, or side by side with their requests evaluated together.

Side by side, every client takes its next step at the same time. What a defense does with a gradient, it does for each
client in its turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from gradveil.core.errors import GradveilError
from gradveil.core.types import Loss, Params
from gradveil.engine.graphs import Graph, cuda_settings, flatten, on_one_gpu, signature, unflatten
from gradveil.models import Functional

T = TypeVar("T")
R = TypeVar("R", covariant=True)
SideBySide = Literal["auto", "true", "false"]

WORTH_CAPTURE = 2
"""A kind of request that came so often before is captured: it takes as long as a few calls."""
FREE = 0.25
"""The share of the card's memory that stays free: each graph keeps its own."""


@dataclass(frozen=True)
class Request(Generic[T]):
    """What a run needs computed before it can go on: a pure function, and the tensors that it takes.

    Requests whose functions are equal are the same work on other tensors, and can be evaluated together.
    """

    function: Callable[[Any], T]
    arguments: Any
    """Tensors in nested dicts and tuples."""

    def evaluate(self) -> T:
        return self.function(self.arguments)


class Gradient:
    """(parameters, buffers, inputs, targets) -> the gradient of the loss in the parameters, and the loss."""

    def __init__(self, model: Functional, loss: Loss) -> None:
        self.model, self.loss = model, loss

    def __call__(self, arguments: tuple[Params, Params, Tensor, Tensor]) -> tuple[Params, Tensor]:
        params, buffers, inputs, targets = arguments
        model = self.model if buffers is self.model.buffers else self.model.with_buffers(buffers)
        found: tuple[Params, Tensor] = grad_and_value(lambda p: model.loss(self.loss, p, inputs, targets))(params)
        return found

    def __eq__(self, other: object) -> bool:
        """Of the same module and loss: all tensors come with the call."""
        return isinstance(other, Gradient) and (self.model.module, self.loss) == (other.model.module, other.loss)

    def __hash__(self) -> int:
        return hash((self.model.module, self.loss))


class Run(Protocol[R]):
    """A local run that leaves computations to its caller."""

    @property
    def done(self) -> bool: ...

    def request(self) -> Request[Any]: ...

    def take(self, result: Any) -> None: ...

    def reply(self) -> R: ...


class Runner:
    """Runs clients to their replies. An error of one of them is its outcome, and the others go on.

    ``auto`` goes side by side on a GPU, and one after another where the model turns out not to allow it.
    """

    def __init__(self, side_by_side: SideBySide, device: str) -> None:
        self.batched = side_by_side == "true" or (side_by_side == "auto" and device == "cuda")
        self._insists = side_by_side == "true"
        self._together: Callable[[list[Request[Any]]], list[Any]] = ClientGraphs() if device == "cuda" else batched

    def __call__(self, starts: Sequence[Callable[[], Run[T]]]) -> list[T | GradveilError]:
        """The outcome of each run; it begins when its function is called."""
        groups = [starts] if self.batched else [[start] for start in starts]
        return [outcome for group in groups for outcome in self._in_step(group)]

    def _in_step(self, starts: Sequence[Callable[[], Run[T]]]) -> list[T | GradveilError]:
        outcomes: dict[int, T | GradveilError] = {}
        runs: dict[int, Run[T]] = {}
        for place, start in enumerate(starts):
            with _error_as_outcome(outcomes, place):
                runs[place] = start()
        while runs:
            requests: dict[int, Request[Any]] = {}
            for place, run in runs.items():
                with _error_as_outcome(outcomes, place):
                    requests[place] = run.request()
            for place, result in self._evaluated(requests, outcomes).items():
                with _error_as_outcome(outcomes, place):
                    runs[place].take(result)
                    if runs[place].done:
                        outcomes[place] = runs[place].reply()
            runs = {place: run for place, run in runs.items() if place not in outcomes}
        return [outcomes[place] for place in range(len(starts))]

    def _evaluated(self, requests: dict[int, Request[Any]], outcomes: dict[int, Any]) -> dict[int, Any]:
        if self.batched:
            try:
                return dict(zip(requests, self._together(list(requests.values())), strict=True))
            except GradveilError:
                pass  # one client's: evaluated alone, each has its own
            except RuntimeError as error:  # an operation that vmap or a graph does not know, or too little memory
                if self._insists:
                    line = " ".join(str(error).split())[:200]
                    raise GradveilError(f"clients cannot go side by side: {line}; use side_by_side=false") from error
                self.batched = False
        results = {}
        for place, request in requests.items():
            with _error_as_outcome(outcomes, place):
                results[place] = request.evaluate()
        return results


@contextmanager
def _error_as_outcome(outcomes: dict[int, Any], place: int) -> Iterator[None]:
    try:
        yield
    except GradveilError as error:
        outcomes[place] = error


def batched(requests: list[Request[Any]]) -> list[Any]:
    """Gradients on equally many examples, each at its client's own parameters, in one call of ``vmap``."""
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for place, request in enumerate(requests):
        alike[request.function, signature(flatten(request.arguments))].append(place)
    results: dict[int, Any] = {}
    for places in alike.values():
        first = requests[places[0]]
        if len(places) == 1 or not isinstance(first.function, Gradient):
            results |= {place: requests[place].evaluate() for place in places}
            continue
        columns = zip(*(flatten(requests[place].arguments) for place in places), strict=True)
        joint = vmap(first.function)(unflatten(first.arguments, map(torch.stack, columns)))
        rows = zip(*(tensor.unbind() for tensor in flatten(joint)), strict=True)
        results |= {place: unflatten(joint, iter(row)) for place, row in zip(places, rows, strict=True)}
    return [results[place] for place in range(len(requests))]


class ClientGraphs:
    """Evaluates requests at the same time on one GPU: each as a CUDA graph on a stream of its own.

    One client's step leaves most of a large card idle, and its host starts kernels more slowly than the card does them.
    Captured, the steps of ten clients start in ten calls and run beside each other. What is new, or finds no room, is
    evaluated alone.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, list[Graph[Any]]] = defaultdict(list)
        self._requested: Counter[Hashable] = Counter()
        self._streams: list[torch.cuda.Stream] = []

    def __call__(self, requests: list[Request[Any]]) -> list[Any]:
        graphs = self._assigned(requests)
        main = torch.cuda.current_stream()
        for request, graph in zip(requests, graphs, strict=True):
            if graph is not None:
                graph.load(request.arguments, edited=False)  # local runs make new tensors
        while len(self._streams) < len(requests):
            self._streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        streams = self._streams[: len(requests)]
        for graph, stream in zip(graphs, streams, strict=True):
            stream.wait_stream(main)
            if graph is not None:
                with torch.cuda.stream(stream):
                    graph.replay()
        alone = [request.evaluate() if graph is None else None for request, graph in zip(requests, graphs, strict=True)]
        for stream in streams:
            main.wait_stream(stream)
        return [result if graph is None else graph.result() for graph, result in zip(graphs, alone, strict=True)]

    def _assigned(self, requests: list[Request[Any]]) -> list[Graph[Any] | None]:
        """A graph for each request, no two the same; None where it is evaluated alone."""
        taken: Counter[Hashable] = Counter()
        assigned: list[Graph[Any] | None] = []
        for request in requests:
            tensors = flatten(request.arguments)
            kind = (request.function, signature(tensors))
            graphs = self._graphs[kind]
            self._requested[kind] += 1
            if taken[kind] == len(graphs):
                free, whole = torch.cuda.mem_get_info()
                if on_one_gpu(tensors) and self._requested[kind] > WORTH_CAPTURE and free > FREE * whole:
                    with cuda_settings(benchmark=True):
                        graphs.append(Graph(_channels_last(request.function), request.arguments))
            assigned.append(graphs[taken[kind]] if taken[kind] < len(graphs) else None)
            taken[kind] += 1
        return assigned


def _channels_last(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function on images and weights in the layout that tensor cores read; results in the usual one."""

    def laid_out(tree: Any, layout: torch.memory_format) -> Any:
        return unflatten(tree, (x.contiguous(memory_format=layout) if x.dim() == 4 else x for x in flatten(tree)))

    return lambda arguments: laid_out(function(laid_out(arguments, torch.channels_last)), torch.contiguous_format)
