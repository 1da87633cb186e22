"""A function of tensors captured as one CUDA graph: later calls replay its kernels without starting them one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.core.types import Params

Evaluate = Callable[[Params], tuple[Params, Tensor]]


def captured(evaluate: Evaluate, unknowns: Params) -> Evaluate:
    """The same function, for unknowns of the same shapes. The gradients it returns are overwritten by the next call."""
    held = {name: tensor.clone() for name, tensor in unknowns.items()}
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # before capture, so that libraries have chosen their kernels and made their workspaces
            evaluate(held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients, values = evaluate(held)

    return _Replay(evaluate, held, graph, gradients, values)


@dataclass(frozen=True)
class _Replay:
    """Holds on to the function too: the graph reads the memory of every tensor that it closes over."""

    evaluate: Evaluate
    held: Params
    graph: torch.cuda.CUDAGraph
    gradients: Params
    values: Tensor

    def __call__(self, point: Params) -> tuple[Params, Tensor]:
        for name, tensor in point.items():
            self.held[name].copy_(tensor)
        self.graph.replay()
        return self.gradients, self.values.clone()
