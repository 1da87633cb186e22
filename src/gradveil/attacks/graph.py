"""The function that a search evaluates, captured as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gradveil.core.graphs import Graph
from gradveil.core.types import Params

Evaluate = Callable[[Params], tuple[Params, Tensor]]


def captured(evaluate: Evaluate, unknowns: Params) -> Evaluate:
    """The same function, for unknowns of the same shapes. The gradients it returns are overwritten by the next call."""
    graph = Graph(evaluate, unknowns)

    def replayed(point: Params) -> tuple[Params, Tensor]:
        graph.load({name: point[name] for name in unknowns})
        graph.replay()
        gradients, values = graph.result
        return gradients, values.clone()

    return replayed
