"""Runs of several clients: one after another, or side by side with their gradients computed in one batched call.

Side by side, every client takes its next step at the same time. Gradients asked for on equally many examples are one
``vmap`` over the clients' own parameters; what a defense does with a gradient, it does for each client in its turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor
from torch.func import grad_and_value, vmap

from gradveil.client import Run, Wanted, finished
from gradveil.core.errors import GradveilError
from gradveil.core.trees import map_each, stack
from gradveil.core.types import Params
from gradveil.federated.case import SideBySide

T = TypeVar("T")
Found = tuple[Params, Tensor]
"""A gradient and the loss."""

MOST_EXAMPLES = 8192
"""At most so many examples of all clients in one batched call: more gain nothing and may not fit."""


class Runner:
    """Finishes runs. An error of one of them is its result, and the others go on.

    ``auto`` goes side by side on a GPU, and one after another where the model turns out not to allow it.
    """

    def __init__(self, side_by_side: SideBySide, device: str) -> None:
        self.batched = side_by_side == "true" or (side_by_side == "auto" and device == "cuda")
        self._insists = side_by_side == "true"

    def __call__(self, runs: Iterable[Run[T]]) -> list[T | GradveilError]:
        return self._in_lockstep(list(runs)) if self.batched else [_outcome(run) for run in runs]

    def _in_lockstep(self, runs: list[Run[T]]) -> list[T | GradveilError]:
        results: dict[int, T | GradveilError] = {}
        answers: dict[int, Found | None] = dict.fromkeys(range(len(runs)))
        while answers:
            wanted: dict[int, Wanted] = {}
            for place, answer in answers.items():
                try:
                    wanted[place] = next(runs[place]) if answer is None else runs[place].send(answer)
                except StopIteration as end:
                    results[place] = end.value
                except GradveilError as error:
                    results[place] = error
            answers = dict(self._gradients(wanted))
        return [results[place] for place in range(len(runs))]

    def _gradients(self, wanted: dict[int, Wanted]) -> dict[int, Found]:
        alike: dict[tuple[int, ...], list[int]] = {}
        for place, one in wanted.items():
            alike.setdefault(tuple(one.inputs.shape), []).append(place)
        found: dict[int, Found] = {}
        for places in alike.values():
            found |= dict(zip(places, self._of_group([wanted[place] for place in places]), strict=True))
        return found

    def _of_group(self, group: list[Wanted]) -> list[Found]:
        if self.batched and len(group) > 1:
            try:
                return batched_gradients(group)
            except RuntimeError as error:  # an operation that vmap does not know, or too little memory
                if self._insists:
                    line = " ".join(str(error).split())[:200]
                    raise GradveilError(f"clients cannot go side by side: {line}; use side_by_side=false") from error
                self.batched = False
        return [one.gradient() for one in group]


def batched_gradients(group: list[Wanted]) -> list[Found]:
    """The gradients of equally many examples at each client's own parameters, in one call."""
    first = group[0]
    own = {
        name for one in group for name, buffer in one.model.buffers.items() if buffer is not first.model.buffers[name]
    }

    def single(params: Params, buffers: Params, inputs: Tensor, targets: Tensor) -> Found:
        model = first.model.with_buffers(buffers)
        found: Found = grad_and_value(lambda p: model.loss(first.loss, p, inputs, targets))(params)
        return found

    columns = stack([{"inputs": one.inputs, "targets": one.targets} for one in group])
    gradients, values = vmap(single, chunk_size=max(1, MOST_EXAMPLES // len(first.inputs)))(
        stack([one.params for one in group]),
        stack([{name: one.model.buffers[name] for name in own} for one in group]),
        columns["inputs"],
        columns["targets"],
    )
    return [(map_each(lambda tensor, i=place: tensor[i], gradients), values[place]) for place in range(len(group))]


def _outcome(run: Run[T]) -> T | GradveilError:
    try:
        return finished(run)
    except GradveilError as error:
        return error
