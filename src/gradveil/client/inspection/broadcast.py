"""What the checks look at, the broadcast layer by layer with what its layers see of a probe, and what they find."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.core.seeding import generator
from gradveil.core.trees import all_finite, moved
from gradveil.core.types import Batch, Json, Params, Recipe
from gradveil.domains import Domain

PROBE = 8
"""The most examples of a probe: each is tried with all classes, and a ResNet takes its time."""

Severity = Literal["alarm", "note"]
"""An alarm makes a broadcast suspicious; a note is worth knowing and has honest explanations."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that an honest server would not send, where it stands, and how far it is beyond its bound."""

    check: str
    severity: Severity = "alarm"
    where: tuple[str, ...]
    """Names of the layers or parameters."""
    sentence: str
    """What was found and why it is suspicious."""
    figure: float
    bound: float
    """What ``figure`` would have to stay below."""

    def __str__(self) -> str:
        more = f" and {len(self.where) - 3} more" if len(self.where) > 3 else ""
        return f"{self.severity}: {self.check} in {', '.join(self.where[:3])}{more}: {self.sentence}"


@dataclass(frozen=True)
class Inspection:
    """All findings about one broadcast. ``left_out`` says which checks could not be made, and what they need."""

    findings: tuple[Finding, ...]
    left_out: tuple[str, ...] = ()

    @property
    def suspicious(self) -> bool:
        return any(finding.severity == "alarm" for finding in self.findings)

    @property
    def summary(self) -> str:
        """One line, for a warning or an error."""
        alarms = [str(finding).removeprefix("alarm: ") for finding in self.findings if finding.severity == "alarm"]
        if not alarms:
            return "nothing suspicious was found in the broadcast"
        more = f" (and {len(alarms) - 1} more)" if len(alarms) > 1 else ""
        return f"the broadcast looks crafted: {alarms[0]}{more}"

    def as_dict(self) -> Json:
        return {"suspicious": self.suspicious, **asdict(self)}

    def __str__(self) -> str:
        left_out = (f"not checked: {reason}" for reason in self.left_out)
        return "\n".join([*map(str, self.findings), *left_out] or [self.summary])


@dataclass(frozen=True)
class LinearLayer:
    """A fully connected layer: weight [rows, columns], bias [rows] or None, both in float32."""

    name: str
    weight: Tensor
    bias: Tensor | None

    @property
    def rows(self) -> int:
        return len(self.weight)


@dataclass(frozen=True)
class InspectedBroadcast:
    """A broadcast with whatever else is known about the round. All is in float32, on one device."""

    module: nn.Module
    """The model agreed on, in eval mode: a copy."""
    sent: Params
    previous: Params | None
    probe: Batch | None
    recipe: Recipe | None
    hidden: tuple[LinearLayer, ...]
    """All fully connected layers but the classifier."""
    classifier: LinearLayer | None
    inputs: Params
    """What each fully connected layer takes in on the probe, [n, columns] by layer; empty where nothing could run."""

    def fits(self, params: Params | None) -> bool:
        """Whether these are the parameters of the model agreed on, by name, shape and kind of number."""
        return params is not None and fits(self.module, params)


def look(
    module: nn.Module, sent: Mapping[str, Tensor], *, domain: Domain | None, previous: Mapping[str, Tensor] | None,
    probe: Batch | None, recipe: Recipe | None,
) -> InspectedBroadcast:  # fmt: skip
    """Take a broadcast apart, and run the probe through it if that is possible."""
    params = _in_float32(sent)
    device = next((tensor.device for tensor in params.values()), torch.device("cpu"))
    module = copy.deepcopy(module).to(device, torch.float32).eval()
    if probe is None and domain is not None:
        probe = synthetic(domain)
    if probe is not None:
        few = probe.take(slice(PROBE))
        probe = Batch(few.inputs.to(device, torch.float32), few.labels.to(device))

    # Layers that the module does not have count too. What cannot be a weight or the bias to it is passed over: it does
    # not fit the module, which is a finding of its own.
    modules, layers = dict(module.named_modules()), dict[str, LinearLayer]()
    for parameter, tensor in params.items():
        name, _, kind = parameter.rpartition(".")
        matrix = tensor.is_floating_point() and tensor.dim() == 2 and tensor.numel() > 0
        if kind == "weight" and matrix and isinstance(modules.get(name), nn.Linear | None):
            bias = params.get(f"{name}.bias")
            adds = bias is not None and form(bias) == (True, (len(tensor),))
            layers[name] = LinearLayer(name, tensor, bias if adds else None)

    inputs: Params = {}  # by layer, in the order in which a forward pass enters them
    if probe is not None and fits(module, params) and all_finite(params):

        def hook(layer: nn.Module, arguments: tuple[Tensor, ...], named: Params) -> None:
            inputs[names[layer]] = (arguments[0] if arguments else named["input"]).flatten(0, -2)

        names: dict[nn.Module, str] = {layer: name for name, layer in modules.items() if isinstance(layer, nn.Linear)}
        hooks = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in names]
        functional_call(module, params, (probe.inputs,))
        for one in hooks:
            one.remove()
    order = [name for name in (inputs or layers) if name in layers]
    return InspectedBroadcast(
        module=module,
        sent=params,
        previous=None if previous is None else moved(_in_float32(previous), device),
        probe=probe,
        recipe=recipe,
        hidden=tuple(layer for name, layer in layers.items() if name not in order[-1:]),
        classifier=layers[order[-1]] if order else None,
        inputs=inputs,
    )


def _in_float32(params: Mapping[str, Tensor]) -> Params:
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in params.items()}


def fits(module: nn.Module, params: Mapping[str, Tensor]) -> bool:
    return agreed(module, params) == {name: form(tensor) for name, tensor in params.items()}


def agreed(module: nn.Module, params: Mapping[str, Tensor]) -> dict[str, tuple[bool, tuple[int, ...]]]:
    """What a broadcast like ``params`` has to hold: all that is trained, and what is frozen at will."""
    return {name: form(p) for name, p in module.named_parameters() if p.requires_grad or name in params}


def form(tensor: Tensor) -> tuple[bool, tuple[int, ...]]:
    """What two tensors share that can stand for each other: whether they hold fractions, and their shape."""
    return tensor.is_floating_point(), tuple(tensor.shape)


def synthetic(domain: Domain) -> Batch:
    """Public stand-ins for private examples, all classes in turn."""
    inputs = domain.stand_ins(PROBE, generator(0, "inspection", "probe"))
    return Batch(inputs, torch.arange(PROBE) % domain.classes)
