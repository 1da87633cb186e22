"""A broadcast whose rectifiers all stay open: the gradient of such a network changes smoothly with its inputs.

Where a rectifier switches, the gradient jumps, and equations for the inputs cannot be followed from a distance. A
server that sends weights of its own making need not put up with it: shifts of normalisation layers that lift what
leaves them above zero turn the network into one without switches, for any input like those it was lifted for.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.core.seeding import generator
from gradveil.core.types import Params
from gradveil.domains import Domain

_DEVIATIONS = 4.0
"""How far above zero the mean of a channel is lifted, in its own deviations."""
_STAND_INS = 64


def with_open_switches(module: nn.Module, sent: Params, domain: Domain) -> Params:
    """The same parameters but for the shifts of normalisation layers, which are lifted one after the other.

    The mean and the deviation of each channel are those of stand-ins for private inputs.
    """
    device = next(iter(sent.values())).device
    inputs = domain.stand_ins(_STAND_INS, generator(0, "stand-ins for open switches")).to(device)
    lifted, passed = dict(sent), copy.deepcopy(module).eval()

    def lift(name: str) -> Any:
        def hook(_layer: nn.Module, _inputs: Any, outputs: Tensor) -> Tensor:
            shift = sent[name].view(-1, *[1] * (outputs.dim() - 2))
            plain = (outputs - shift).transpose(0, 1).flatten(1)
            lifted[name] = _DEVIATIONS * plain.std(dim=1) - plain.mean(dim=1)
            return outputs - shift + lifted[name].view_as(shift)

        return hook

    for name, layer in passed.named_modules():
        if isinstance(layer, (_BatchNorm, nn.GroupNorm)) and f"{name}.bias" in sent:
            layer.register_forward_hook(lift(f"{name}.bias"))
    with torch.no_grad():
        functional_call(passed, dict(sent), (inputs,))
    return lifted
