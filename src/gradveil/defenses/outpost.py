"""OUTPOST (Wang, Hugh and Li, IEEE/ACM ToN 2024): pruning and noise by layer, rarer from step to step."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.trees import map_each
from gradveil.core.types import Params
from gradveil.defenses.base import Defense, Step
from gradveil.defenses.largest import LargestOfEach
from gradveil.defenses.registry import DEFENSES

EXAMPLES_AT_ONCE = 2**28
"""Bytes that the gradients of single examples may take together; one of them may take more."""


@dataclass(frozen=True)
class _Layout:
    """Layers side by side: their parameters, how many entries of each are kept and get noise, and which."""

    names: set[str]
    groups: list[list[str]]
    kept: list[int]
    noisy: list[int]
    choose: LargestOfEach

    def ordered(self, tree: Params) -> Params:
        """The same tensors, those of a layer next to each other."""
        return {name: tree[name] for names in self.groups for name in names}


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
        self._layout: _Layout | None = None

    def prepared(self, start: Step) -> Defense:
        """Where layers lie and how much of each is chosen is the same in every step of a local run."""
        ready = copy.copy(self)
        ready._layout = self._laid_out(start.params)
        return ready

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        perturbed = step.number <= 1 or self._drawn(step)
        step.log.add("perturbed", float(perturbed))
        if not perturbed:
            return gradient
        layout = self._layout
        if layout is None or layout.names != gradient.keys():
            layout = self._laid_out(gradient)
        side_by_side = layout.ordered(gradient)
        values = _joined(side_by_side)
        fisher = _joined(layout.ordered(_example_fisher(step))) if self.fisher == "example" else None
        risk = layer_risks(step.params, layout.groups).to(values)
        sent = self._changed(values, fisher, layout, risk, step.rng)
        step.log.add("risk", risk.mean())
        step.log.add("pruned", 1 - sum(layout.kept) / len(values))
        parts = _split(sent, side_by_side)
        return {name: parts[name] for name in gradient}

    def _changed(
        self, values: Tensor, fisher: Tensor | None, layout: _Layout, risk: Tensor, rng: torch.Generator
    ) -> Tensor:
        """Layers side by side, each pruned, and with noise on the entries where ``fisher`` is highest."""
        kept, noisy = layout.choose(values.abs())  # a square is the larger the larger its root
        if fisher is not None:
            _, noisy = layout.choose(fisher)
        noise = torch.randn(sum(layout.noisy), generator=rng, device=rng.device).to(values)
        for drawn, spread in zip(torch.split(noise, layout.noisy), self.scale * risk, strict=True):
            drawn.mul_(spread)
        added = torch.zeros_like(values).masked_scatter_(noisy, noise)
        return added.add_(values * kept)

    def _laid_out(self, tree: Params) -> _Layout:
        groups = layers(tree)
        sizes = [sum(tree[name].numel() for name in names) for names in groups]
        kept = [size - self._pruned(size) for size in sizes]
        noisy = [round(self.phi / 100 * size) for size in sizes]
        return _Layout(set(tree), groups, kept, noisy, LargestOfEach(sizes, kept, noisy))

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


def layer_risks(params: Params, groups: list[list[str]]) -> Tensor:
    """The variance of each layer's weights, at most 1, [layers]; of its biases where it has nothing else."""
    risks = []
    for names in groups:
        weights = [name for name in names if not name.endswith("bias")] or names
        risks.append(_joined({name: params[name] for name in weights}).var(correction=0))
    return torch.stack([risk.to(risks[0]) for risk in risks]).clamp(max=1)


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
    parts = torch.split(values, [tensor.numel() for tensor in like.values()])
    return {name: part.view(like[name].shape).to(like[name]) for name, part in zip(like, parts, strict=True)}
