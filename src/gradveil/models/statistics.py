"""What batch-norm layers see of a batch: the statistics that some threat models give away."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.core.types import Params


def batch_norm_statistics(module: nn.Module, params: Params, inputs: Tensor) -> Params:
    """Mean and variance per channel before every batch norm, as ``LAYER.mean`` and ``LAYER.variance``, each [C].

    Differentiable in the inputs, and safe under vmap. Empty for a model without batch norm.
    """
    found: Params = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            x = arguments[0]
            over = [0, *range(2, x.dim())]
            mean = x.mean(dim=over)
            found[f"{name}.mean"], found[f"{name}.variance"] = mean, x.square().mean(dim=over) - mean.square()

        return hook

    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)]
    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers]
    try:
        functional_call(module, params, (inputs,))
    finally:
        for handle in handles:
            handle.remove()
    return found
