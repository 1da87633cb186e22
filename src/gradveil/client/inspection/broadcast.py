"""What the checks look at: the broadcast layer by layer, and what its layers see of a probe."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.core.seeding import generator
from gradveil.core.trees import moved
from gradveil.core.types import Batch, Domain, Params, Recipe

PROBE = 8
"""Examples that a probe has at most: each is asked about all classes, and a ResNet takes its time."""
ROWS = 1024
"""Rows of a layer that are looked at, evenly spread, however many there are."""


@dataclass(frozen=True)
class Linear:
    """A fully connected layer: weight [rows, columns], bias [rows] or None, both in float32."""

    name: str
    weight: Tensor
    bias: Tensor | None

    @property
    def rows(self) -> int:
        return len(self.weight)


@dataclass(frozen=True)
class Broadcast:
    """A broadcast of finite numbers, with whatever else is known about the round. All is in float32, on one device."""

    module: nn.Module
    """The model agreed on, in eval mode: a copy."""
    sent: Params
    previous: Params | None
    probe: Batch | None
    recipe: Recipe | None
    hidden: tuple[Linear, ...]
    """All fully connected layers but the classifier."""
    classifier: Linear | None
    inputs: Params
    """What each fully connected layer takes in on the probe, [n, columns] by layer; empty where nothing could run."""


def look(
    module: nn.Module, sent: Params, *, domain: Domain | None, previous: Params | None, probe: Batch | None,
    recipe: Recipe | None,
) -> Broadcast:  # fmt: skip
    """Take a broadcast apart, and run the probe through it if it fits the module."""
    if probe is None and domain is not None:
        probe = synthetic(domain)
    device = next((tensor.device for tensor in sent.values()), torch.device("cpu"))
    probe = None if probe is None else _in_float32(probe.take(slice(PROBE)), device)
    previous = None if previous is None else moved(previous, device)
    module = copy.deepcopy(module).to(device, torch.float32).eval()
    linear = {layer.name: layer for layer in _linear(module, sent)}
    inputs = _inputs(module, sent, probe.inputs) if probe is not None and fits(module, sent) else {}
    order = [name for name in (inputs or linear) if name in linear]
    last = order[-1] if order else None
    return Broadcast(
        module=module,
        sent=sent,
        previous=previous,
        probe=probe,
        recipe=recipe,
        hidden=tuple(layer for name, layer in linear.items() if name != last),
        classifier=None if last is None else linear[last],
        inputs=inputs,
    )


def fits(module: nn.Module, params: Mapping[str, Tensor]) -> bool:
    """Whether these are the parameters of the module, by name, shape and kind of number."""
    return {k: form(p) for k, p in module.named_parameters()} == {k: form(p) for k, p in params.items()}


def form(tensor: Tensor) -> tuple[bool, tuple[int, ...]]:
    """What two tensors share that can stand for each other: whether they hold fractions, and their shape."""
    return tensor.is_floating_point(), tuple(tensor.shape)


def in_float32(params: Mapping[str, Tensor]) -> Params:
    """The same parameters in one precision, whatever was sent; whole numbers stay what they are."""
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in params.items()}


def synthetic(domain: Domain) -> Batch:
    """Public stand-ins for images: smooth random fields with the mean and spread of the domain, all classes in turn."""
    rng = generator(0, "inspection", "probe")
    coarse = torch.randn(PROBE, domain.channels, 4, 4, generator=rng)
    smooth = nn.functional.interpolate(coarse, size=domain.shape[1:], mode="bilinear", align_corners=False)
    fine = torch.randn(PROBE, *domain.shape, generator=rng)
    mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (domain.mean, domain.std))
    return Batch((mean + std * (smooth + 0.3 * fine)).clamp(0, 1), torch.arange(PROBE) % domain.classes)


def _in_float32(probe: Batch, device: torch.device) -> Batch:
    return Batch(probe.inputs.to(device, torch.float32), probe.labels.to(device))


def _linear(module: nn.Module, sent: Params) -> Iterator[Linear]:
    """The fully connected layers of a broadcast, those too that the module does not have.

    What cannot be a weight or the bias to it is passed over: it does not fit the module, which is a finding of its own.
    """
    layers = dict(module.named_modules())
    for parameter, tensor in sent.items():
        name, _, kind = parameter.rpartition(".")
        matrix = tensor.is_floating_point() and tensor.dim() == 2 and tensor.numel() > 0
        if kind == "weight" and matrix and isinstance(layers.get(name), nn.Linear | None):
            bias = sent.get(f"{name}.bias")
            adds = bias is not None and form(bias) == (True, (len(tensor),))
            yield Linear(name, tensor, bias if adds else None)


def _inputs(module: nn.Module, sent: Params, images: Tensor) -> Params:
    """What fully connected layers take in, [n, columns] each, in the order in which a forward pass enters them."""
    caught: Params = {}

    def catch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], dict[str, Tensor]], None]:
        def hook(_layer: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            caught[name] = (arguments[0] if arguments else named["input"]).flatten(0, -2)

        return hook

    linear = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    hooks = [layer.register_forward_pre_hook(catch(name), with_kwargs=True) for name, layer in linear.items()]
    functional_call(module, sent, (images,))
    for hook in hooks:
        hook.remove()
    return caught
