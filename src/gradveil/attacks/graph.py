"""A function of tensors captured as one CUDA graph: later calls replay its kernels without starting them one by one."""

from __future__ import annotations

from collections.abc import Callable

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

    def replay(point: Params) -> tuple[Params, Tensor]:
        for name, tensor in point.items():
            held[name].copy_(tensor)
        graph.replay()
        return gradients, values.clone()

    return replay
