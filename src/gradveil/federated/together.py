"""Runs of several clients: one after another, or side by side with what they ask for computed together.

Side by side, every client takes its next step at the same time. What a defense does with a gradient, it does for each
client in its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.func import vmap

from gradveil.client import Run, Wanted, finished
from gradveil.client.local import Gradient
from gradveil.core.errors import GradveilError
from gradveil.core.graphs import leaves, rebuilt, signature
from gradveil.federated.case import SideBySide
from gradveil.federated.lanes import Lanes

T = TypeVar("T")
Together = Callable[[list[Wanted[Any]]], list[Any]]


class Runner:
    """Finishes runs. An error of one of them is its result, and the others go on.

    ``auto`` goes side by side on a GPU, and one after another where the model turns out not to allow it.
    """

    def __init__(self, side_by_side: SideBySide, device: str) -> None:
        self.batched = side_by_side == "true" or (side_by_side == "auto" and device == "cuda")
        self._insists = side_by_side == "true"
        self._together: Together = Lanes() if device == "cuda" else batched

    def __call__(self, runs: Iterable[Run[T]]) -> list[T | GradveilError]:
        return self._in_lockstep(list(runs)) if self.batched else [_outcome(run) for run in runs]

    def _in_lockstep(self, runs: list[Run[T]]) -> list[T | GradveilError]:
        results: dict[int, T | GradveilError] = {}
        answers: dict[int, Any] = dict.fromkeys(range(len(runs)))
        while answers:
            wanted: dict[int, Wanted[Any]] = {}
            for place, answer in answers.items():
                try:
                    wanted[place] = next(runs[place]) if answer is None else runs[place].send(answer)
                except StopIteration as end:
                    results[place] = end.value
                except GradveilError as error:
                    results[place] = error
            answers = dict(zip(wanted, self._found(list(wanted.values())), strict=True))
        return [results[place] for place in range(len(runs))]

    def _found(self, works: list[Wanted[Any]]) -> list[Any]:
        if self.batched:
            try:
                return self._together(works)
            except RuntimeError as error:  # an operation that vmap or a graph does not know, or too little memory
                if self._insists:
                    line = " ".join(str(error).split())[:200]
                    raise GradveilError(f"clients cannot go side by side: {line}; use side_by_side=false") from error
                self.batched = False
        return [work.alone() for work in works]


def batched(works: list[Wanted[Any]]) -> list[Any]:
    """Gradients on equally many examples, each at its client's own parameters, in one call of ``vmap``."""
    alike: dict[Any, list[int]] = {}
    for place, work in enumerate(works):
        alike.setdefault((work.function, signature(leaves(work.given))), []).append(place)
    found: dict[int, Any] = {}
    for (function, _), places in alike.items():
        if len(places) > 1 and isinstance(function, Gradient):
            columns = zip(*(leaves(works[place].given) for place in places), strict=True)
            results = vmap(function)(rebuilt(works[places[0]].given, map(torch.stack, columns)))
            rows = zip(*(tensor.unbind() for tensor in leaves(results)), strict=True)
            found |= {place: rebuilt(results, iter(row)) for place, row in zip(places, rows, strict=True)}
        else:
            found |= {place: works[place].alone() for place in places}
    return [found[place] for place in range(len(works))]


def _outcome(run: Run[T]) -> T | GradveilError:
    try:
        return finished(run)
    except GradveilError as error:
        return error
