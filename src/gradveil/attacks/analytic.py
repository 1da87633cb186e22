"""Reading the input straight off the gradient of a fully connected first layer with a bias: no search at all.

Row l of the weight gradient is the sum over the batch of d_l x, and the bias gradient the sum of d_l. For one example
their ratio is x, whichever row; for several it is a mean of the examples, weighted by how much each drives the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.attacks.base import ATTACKS, Attack, Reconstruction
from gradveil.attacks.parts.labels import infer_labels
from gradveil.attacks.parts.updates import explained
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.domains import Domain
from gradveil.models import Fronted, Normalize, first_layer
from gradveil.threat.observation import Observation


@ATTACKS.register("analytic")
@dataclass(frozen=True, kw_only=True)
class Analytic(Attack):
    """Closed form: the input off a fully connected first layer, exact for one example.

    The quotient of weight and bias gradient, from the rows that the batch drives most.
    """

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:  # noqa: ARG002
        seen = [explained(one, "averaged") for one in seen]
        name, size = readable_layer(seen[0].module, seen[0].domain, "analytic"), seen[0].batch_size or 1
        weight = torch.stack([one.reply[f"{name}.weight"] for one in seen])
        bias = torch.stack([one.reply[f"{name}.bias"] for one in seen])
        if size > bias.shape[1]:
            raise GradveilError(
                f"attack 'analytic' reads each example off a row of {name!r}, which has {bias.shape[1]} for a batch of "
                f"{size}: use a wider layer, a smaller batch or another attack"
            )
        rows = bias.abs().topk(size, dim=1).indices
        driven = bias.gather(1, rows)
        inputs = readout(weight.gather(1, rows[:, :, None].expand(-1, -1, weight.shape[2])), driven, seen[0])
        inputs, labels = seen[0].domain.valid(inputs), infer_labels(seen, size)
        return [
            Reconstruction.closed_form(x, y, 0.0 if read else float("inf"), stopped="converged" if read else "diverged")
            for x, y, read in zip(inputs, labels, (driven != 0).all(dim=1).tolist(), strict=True)
        ]


def readable_layer(module: nn.Module, domain: Domain, attack: str) -> str:
    """The name of the first layer, if inputs can be read off its gradient."""
    name = first_layer(module, domain)
    layer = module.get_submodule(name)
    frozen = not all(p.requires_grad for p in layer.parameters(recurse=False))
    if not isinstance(layer, nn.Linear) or layer.bias is None or frozen:
        kind = "Linear without bias" if isinstance(layer, nn.Linear) else type(layer).__name__
        kind = "frozen" if frozen else kind
        raise GradveilError(
            f"attack {attack!r} reads a fully connected first layer with a bias, but {name!r} is {kind}: "
            "use a model such as mlp, or another attack"
        )
    return name


def readout(weight: Tensor, bias: Tensor, one: Observation) -> Tensor:
    """Gradients of rows [..., features] over those of their biases [...] as inputs [..., *shape]; NaN where idle."""
    inputs: Tensor = entered(weight, bias).unflatten(-1, one.domain.shape)  # type: ignore[no-untyped-call]
    scaling = normalization(one.module)
    return inputs if scaling is None else inputs * scaling.std.to(inputs.device) + scaling.mean.to(inputs.device)


def normalization(module: nn.Module) -> Normalize | None:
    """What the model does to its inputs before the first layer, which the adversary can read in the model."""
    if isinstance(module, Fronted):  # the model normalises what the front passes on
        return None
    return next((layer for layer in module.modules() if isinstance(layer, Normalize)), None)


def entered(weight: Tensor, bias: Tensor) -> Tensor:
    """What entered a linear layer: gradients of rows [..., features] over those of their biases; NaN where idle."""
    return weight / torch.where(bias == 0, torch.nan, bias).unsqueeze(-1)


def filled_up(inputs: Tensor, size: int, domain: Domain) -> Tensor:
    """[size, ...]: inputs [m, ...] that were found, and blank ones for the others."""
    return torch.cat([inputs, domain.blank(size - len(inputs)).to(inputs)])
