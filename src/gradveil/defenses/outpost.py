"""OUTPOST (Wang, Hugh and Li, IEEE/ACM ToN 2024): pruning and noise by layer, rarer from step to step."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from gradveil.core.errors import GradveilError
from gradveil.core.graphs import Replayed
from gradveil.core.trees import map_each
from gradveil.core.types import Params
from gradveil.defenses.base import Defense, Step
from gradveil.defenses.largest import LargestOfEach
from gradveil.defenses.registry import DEFENSES

CHANCES = 64
"""Random numbers drawn at once to decide which steps are perturbed."""
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
        self._perturbations: dict[Hashable, _Perturbation] = {}
        self._uniform: list[float] | None = None

    def prepared(self, start: Step) -> Defense:
        """A run draws its own chances, many at a time and the first before it starts: a GPU would stop for each."""
        ready = copy.copy(self)
        ready._uniform = _chances(start)
        return ready

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        perturbed = step.number <= 1 or self._drawn(step)
        step.log.add("perturbed", float(perturbed))
        if not perturbed:
            return gradient
        perturbation = self._perturbation_of(gradient)
        values, weights = perturbation.joined(gradient), perturbation.joined(step.params)
        fisher = perturbation.joined(_example_fisher(step)) if self.fisher == "example" else None
        noise = torch.randn(perturbation.draws, generator=step.rng, device=step.rng.device).to(values)
        given = (values, weights, noise) if fisher is None else (values, weights, noise, fisher)
        sent, risk = perturbation.replayed(given)
        step.log.add("risk", risk)
        step.log.add("pruned", perturbation.pruned)
        return perturbation.apart(sent, gradient)

    def _perturbation_of(self, tree: Params) -> _Perturbation:
        """Where layers lie and how much of each is chosen is the same for all gradients of these sizes and places."""
        key = tuple((name, tensor.numel(), tensor.dtype, tensor.device) for name, tensor in tree.items())
        if key not in self._perturbations:
            sizes = {name: size for name, size, _, _ in key}
            lengths = [sum(sizes[name] for name in names) for names in layers(tree)]
            kept = [length - self._pruned(length) for length in lengths]
            noisy = [round(self.phi / 100 * length) for length in lengths]
            alike = len({(kind, place) for _, _, kind, place in key}) == 1
            self._perturbations[key] = _Perturbation(self.scale, sizes, kept, noisy, alike)
        return self._perturbations[key]

    def _pruned(self, size: int) -> int:
        return round(self.rho / 100 * size)

    def _drawn(self, step: Step) -> bool:
        ahead = [] if self._uniform is None else self._uniform
        if not ahead:
            ahead += _chances(step)
        return ahead.pop() <= 1 / (1 + self.beta * step.number)


def _chances(step: Step) -> list[float]:
    return torch.rand(CHANCES, generator=step.rng, device=step.rng.device).tolist()


class _Perturbation:
    """What happens to a gradient with these sizes: so many entries of each layer are kept, and so many get noise."""

    def __init__(self, scale: float, sizes: dict[str, int], kept: list[int], noisy: list[int], alike: bool) -> None:
        self.scale, self.groups, self.alike = scale, layers(sizes), alike
        self.order = [name for names in self.groups for name in names]
        self.sizes = [sizes[name] for name in self.order]
        self.noisy, self.draws = noisy, sum(noisy)
        self.pruned = 1 - sum(kept) / sum(self.sizes)
        self.choose = LargestOfEach([sum(sizes[name] for name in names) for names in self.groups], kept, noisy)
        self.replayed = Replayed(self)

    def __call__(self, given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """What is sent, and the mean risk. ``given``: gradient, weights, N(0, 1) for the noise, maybe the Fisher.

        Without a Fisher, the squared gradient stands for it: the larger the entry, the larger its square.
        """
        values, weights, noise, *fisher = given
        risk = layer_risks(dict(zip(self.order, torch.split(weights, self.sizes), strict=True)), self.groups).to(values)
        kept, noisy = self.choose(values.abs())
        if fisher:
            _, noisy = self.choose(fisher[0])
        parts = torch.split(noise, self.noisy)
        spread = torch.cat([drawn * by for drawn, by in zip(parts, self.scale * risk, strict=True)])
        added = torch.zeros_like(values).masked_scatter_(noisy, spread)
        return added.add_(values * kept), risk.mean()

    def joined(self, tree: Params) -> Tensor:
        """All entries side by side, layer by layer, [size], on the device of the first tensor."""
        return _joined([tree[name] for name in self.order], self.alike)

    def apart(self, values: Tensor, like: Params) -> Params:
        """What :meth:`joined` put side by side, in its own shapes, types, places and order."""
        parts = _unflatten_dense_tensors(values, [like[name] for name in self.order])  # type: ignore[no-untyped-call]
        found = dict(zip(self.order, parts, strict=True))
        return {name: found[name] if self.alike else found[name].to(tensor) for name, tensor in like.items()}


def layers(tree: Iterable[str]) -> list[list[str]]:
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
        risks.append(_joined([params[name] for name in weights]).var(correction=0))
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


def _joined(tensors: Sequence[Tensor], alike: bool = False) -> Tensor:
    """All entries side by side, [size], on the device of the first tensor; ``alike``: they are of one type there."""
    together = tensors if alike else [tensor.to(tensors[0]) for tensor in tensors]
    joined: Tensor = _flatten_dense_tensors(together)  # type: ignore[no-untyped-call]
    return joined
