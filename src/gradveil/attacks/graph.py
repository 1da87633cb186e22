"""The function that a search evaluates, captured as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

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
            found.append(at(graph.copied(), fresh))
            done = part.stop
        gradients = {name: torch.cat([gradient[name] for gradient, _ in found]) for name in found[0][0]}
        return gradients, torch.cat([values for _, values in found])

    return replayed


def at(tree: Any, index: int | slice) -> Any:
    """One or some of the problems that a nesting of tensors [N, ...] is about."""
    return tree_map(lambda tensor: tensor[index], tree)
