"""Looking into one forward pass: which layers it enters, in which order and with what.

So a module's classifier, first layer and representation are found by what runs, not by the order of definition.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.core.errors import GradveilError
from gradveil.core.types import Params
from gradveil.domains import Domain
from gradveil.models.building import example
from gradveil.models.calls import twice_differentiable


@contextmanager
def watched(layers: Mapping[str, nn.Module], see: Callable[[str, Any], None]) -> Iterator[None]:
    """Call ``see(name, inputs)`` whenever a forward pass enters one of the layers.

    ``inputs`` is the layer's first argument, by position or by name; it can be differentiated, also under vmap.
    """

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        return lambda _layer, given, named: see(name, next(iter((*given, *named.values())), None))

    handles = [layer.register_forward_pre_hook(hook(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layers_in_order(module: nn.Module, like: Domain | Tensor) -> list[str]:
    """The names of all submodules with parameters of their own, in the order in which one forward pass enters them.

    ``like`` says what inputs look like, or is a batch of them.
    """
    order: list[str] = []
    probe = copy.deepcopy(module).eval()
    own = {n: layer for n, layer in probe.named_modules() if n and any(True for _ in layer.parameters(recurse=False))}
    with torch.no_grad(), watched(own, lambda name, _inputs: order.append(name)):
        probe(like[:2] if isinstance(like, Tensor) else example(probe, like))
    return order


def first_layer(module: nn.Module, domain: Domain) -> str:
    """The name of the first layer with parameters of its own that a forward pass goes through."""
    names = layers_in_order(module, domain)
    if not names:
        raise GradveilError(f"{type(module).__name__} calls no submodule that has parameters, so it has no first layer")
    return names[0]


def classifier(module: nn.Module, like: Domain | Tensor) -> str:
    """The name of the last linear layer that a forward pass goes through."""
    linear = [name for name in layers_in_order(module, like) if isinstance(module.get_submodule(name), nn.Linear)]
    if not linear:
        raise GradveilError(
            f"{type(module).__name__} has no torch.nn.Linear in its forward pass, so no classifier: end it with one"
        )
    if "weight" not in dict(module.get_submodule(linear[-1]).named_parameters(recurse=False)):
        raise GradveilError(
            f"the classifier {linear[-1]!r} has no weight of its own, as under weight_norm: remove what makes it"
        )
    return linear[-1]


class Representation:
    """What a module makes of inputs [n, C, H, W] just before its classifier: [n, features], differentiable.

    Works on a deep copy in eval mode. ``params`` evaluates it at other parameters than the module's.
    """

    def __init__(self, module: nn.Module, layer: str) -> None:
        self.layer = layer
        self._module = copy.deepcopy(module).eval().requires_grad_(False)
        for part in self._module.modules():
            if isinstance(part, nn.BatchNorm2d) and part.track_running_stats and part.affine:
                part.__class__ = _ScaleAndShift

    def __call__(self, inputs: Tensor, params: Params | None = None) -> Tensor:
        caught: list[Tensor] = []
        layer = self._module.get_submodule(self.layer)
        with watched({self.layer: layer}, lambda _name, x: caught.append(x)), twice_differentiable():
            functional_call(self._module, params or {}, (inputs,))
        if len(caught[-1]) != len(inputs) or caught[-1].dim() < 2:
            raise GradveilError(
                f"the classifier {self.layer!r} is called on single examples: let the model call it on the batch"
            )
        return caught[-1].flatten(1)


class _ScaleAndShift(nn.BatchNorm2d):
    """Batch norm in eval mode as what it is: transforms take PyTorch's own apart into a dozen operations."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        assert self.running_mean is not None
        assert self.running_var is not None
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return torch.addcmul(shift[:, None, None], input, scale[:, None, None])


def representation(module: nn.Module, like: Domain | Tensor) -> Representation:
    """The function from inputs to the flattened input of the classifier."""
    return Representation(module, classifier(module, like))


def batch_norm_statistics(module: nn.Module, params: Params, inputs: Tensor) -> Params:
    """Mean and variance per channel before every batch norm, as ``LAYER.mean`` and ``LAYER.variance``, each [C].

    Differentiable in the inputs, and safe under vmap. Empty for a model without batch norm.
    """
    found: Params = {}

    def see(name: str, x: Tensor) -> None:
        over = [0, *range(2, x.dim())]
        mean = x.mean(dim=over)
        found[f"{name}.mean"], found[f"{name}.variance"] = mean, x.square().mean(dim=over) - mean.square()

    norms = {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
    with watched(norms, see), twice_differentiable():
        functional_call(module, params, (inputs,))
    return found
