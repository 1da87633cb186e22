"""Where a module's classifier, representation and first layer are, found by watching one forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.core.errors import GradveilError
from gradveil.core.types import Domain, Params
from gradveil.models.building import example


def classifier(module: nn.Module, like: Domain | Tensor) -> str:
    """The name of the last linear layer that a forward pass goes through."""
    linear = [name for name in executed(module, like) if isinstance(module.get_submodule(name), nn.Linear)]
    if not linear:
        raise GradveilError(
            f"{type(module).__name__} has no torch.nn.Linear in its forward pass, so no classifier: end it with one"
        )
    if "weight" not in dict(module.get_submodule(linear[-1]).named_parameters(recurse=False)):
        raise GradveilError(
            f"the classifier {linear[-1]!r} has no weight of its own, as under weight_norm: remove what makes it"
        )
    return linear[-1]


def first_layer(module: nn.Module, domain: Domain) -> str:
    """The name of the first layer with parameters of its own that a forward pass goes through."""
    names = executed(module, domain)
    if not names:
        raise GradveilError(f"{type(module).__name__} calls no submodule that has parameters, so it has no first layer")
    return names[0]


def executed(module: nn.Module, like: Domain | Tensor) -> list[str]:
    """The names of all submodules with parameters of their own, in the order in which one forward pass enters them.

    ``like`` says what inputs look like, or is a batch of them.
    """
    seen: list[str] = []
    probe = copy.deepcopy(module).eval()
    for name, layer in probe.named_modules():
        if name and next(layer.parameters(recurse=False), None) is not None:
            layer.register_forward_pre_hook(_remember(seen, name))
    with torch.no_grad():
        probe(like[:2] if isinstance(like, Tensor) else example(probe, like))
    return seen


def _remember(seen: list[str], name: str) -> Callable[[nn.Module, Any], None]:
    def hook(_layer: nn.Module, _inputs: Any) -> None:
        seen.append(name)

    return hook


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

        def catch(_layer: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            caught.append(arguments[0] if arguments else named["input"])

        handle = self._module.get_submodule(self.layer).register_forward_pre_hook(catch, with_kwargs=True)
        try:
            functional_call(self._module, params or {}, (inputs,))
        finally:
            handle.remove()
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
