"""OUTPOST (Wang, Hugh and Li, IEEE/ACM ToN 2024): pruning and noise by layer, rarer from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.trees import map_each
from gradveil.core.types import Params
from gradveil.defenses.base import Defense, Step
from gradveil.defenses.largest import largest
from gradveil.defenses.registry import DEFENSES

EXAMPLES_AT_ONCE = 2**28
"""Bytes that the gradients of single examples may take together; one of them may take more."""


@DEFENSES.register("outpost")
class Outpost(Defense):
    """OUTPOST: prunes each layer and adds noise in proportion to the spread of its weights, less and less often."""

    def __init__(
        self,
        *,
        scale: float = 0.8,
        phi: float = 40.0,
        beta: float = 0.1,
        rho: float = 80.0,
        fisher: Literal["batch", "example"] = "batch",
    ) -> None:
        for name, value in (("scale", scale), ("beta", beta)):
            if not 0 <= value < float("inf"):
                raise GradveilError(f"defense outpost: {name} is at least 0, not {value}")
        for name, value in (("phi", phi), ("rho", rho)):
            if not 0 <= value <= 100:
                raise GradveilError(f"defense outpost: {name} is a percentage from 0 to 100, not {value}")
        self.scale, self.phi, self.beta, self.rho, self.fisher = scale, phi, beta, rho, fisher

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        perturbed = step.number <= 1 or self._drawn(step)
        step.log.add("perturbed", float(perturbed))
        if not perturbed:
            return gradient
        fisher = _example_fisher(step) if self.fisher == "example" else None
        groups = layers(gradient)
        sizes = [sum(gradient[name].numel() for name in names) for names in groups]
        noises = self._noises(sizes, step.rng)
        sent: Params = {}
        risks = []
        for names, noise in zip(groups, noises, strict=True):
            part = {name: gradient[name] for name in names}
            risk = layer_risk({name: step.params[name] for name in names})
            information = None if fisher is None else _joined({name: fisher[name] for name in names})
            sent |= _split(self._changed(_joined(part), information, noise.to(risk) * (self.scale * risk)), part)
            risks.append(risk)
        step.log.add("risk", torch.stack([risk.to(risks[0]) for risk in risks]).mean())
        step.log.add("pruned", sum(map(self._pruned, sizes)) / sum(sizes))
        return {name: sent[name] for name in gradient}

    def _noises(self, sizes: list[int], rng: torch.Generator) -> Sequence[Tensor]:
        """N(0, 1) for the chosen entries of each layer, drawn in one call."""
        counts = [round(self.phi / 100 * size) for size in sizes]
        return torch.split(torch.randn(sum(counts), generator=rng, device=rng.device), counts)

    def _changed(self, values: Tensor, fisher: Tensor | None, noise: Tensor) -> Tensor:
        """One layer's gradient [size], pruned, and with ``noise`` on the entries where ``fisher`` [size] is highest."""
        keep = len(values) - self._pruned(len(values))
        sizes = values.abs()
        if fisher is None:
            kept, noisy = largest(sizes, keep, len(noise))  # a square is the larger the larger its root
        else:
            (kept,), (noisy,) = largest(sizes, keep), largest(fisher, len(noise))
        added = torch.zeros_like(values).masked_scatter_(noisy, noise.to(values))
        return added.add_(values * kept)

    def _pruned(self, size: int) -> int:
        return round(self.rho / 100 * size)

    def _drawn(self, step: Step) -> bool:
        chance = 1 / (1 + self.beta * step.number)
        return float(torch.rand((), generator=step.rng, device=step.rng.device)) <= chance


def layers(tree: Params) -> list[list[str]]:
    """Names of parameters that one module holds, such as its weight and its bias; each list is a layer."""
    found: dict[str, list[str]] = {}
    for name in tree:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return list(found.values())


def layer_risk(params: Params) -> Tensor:
    """The variance of a layer's weights, at most 1; of its biases where it has nothing else."""
    weights = {name: tensor for name, tensor in params.items() if not name.endswith("bias")} or params
    return _joined(weights).var(correction=0).clamp(max=1)


def _example_fisher(step: Step) -> Params:
    """The mean of squared gradients of single examples, [size] by name."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in step.params.values())
    chunk = max(1, EXAMPLES_AT_ONCE // size)
    total = map_each(torch.zeros_like, step.params)
    for start in range(0, len(step.batch), chunk):
        alone = step.example_gradients(step.batch.take(slice(start, start + chunk)))
        total = map_each(lambda sum_, each: sum_ + each.square().sum(0) / len(step.batch), total, alone)
    return total


def _joined(tree: Params) -> Tensor:
    """All entries side by side, [size], on the device of the first tensor."""
    first, *others = tree.values()
    return (
        torch.cat([first.flatten(), *(tensor.flatten().to(first) for tensor in others)]) if others else first.flatten()
    )


def _split(values: Tensor, like: Params) -> Params:
    """What :func:`_joined` put side by side, in its own shapes, types and places."""
    found, start = {}, 0
    for name, tensor in like.items():
        stop = start + tensor.numel()
        found[name] = values[start:stop].view(tensor.shape).to(tensor)
        start = stop
    return found
