"""OUTPOST (Wang, Hugh and Li, IEEE/ACM ToN 2024): pruning and noise by layer, rarer from step to step."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from gradveil.core.errors import GradveilError
from gradveil.core.graphs import Replayed
from gradveil.core.trees import map_each
from gradveil.core.types import Params
from gradveil.defenses.base import Defense, Step
from gradveil.defenses.largest import Array, LargestOfEach, parts_of
from gradveil.defenses.registry import DEFENSES
from gradveil.defenses.shared import Examples

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
        fisher = _example_fisher(step) if self.fisher == "example" else None
        like = next(iter(gradient.values()))
        noise = step.rng.normal((perturbation.draws,), like)
        perturb = perturbation.by_numpy if perturbation.in_numpy else perturbation.by_torch
        sent, risk = perturb(gradient, step.params, noise, fisher)
        step.log.add("risk", risk)
        step.log.add("pruned", perturbation.pruned)
        return sent

    def _perturbation_of(self, tree: Params) -> _Perturbation:
        """Where layers lie and how much of each is chosen is the same for all gradients of these sizes and places."""
        key = tuple((name, tensor.numel(), tensor.dtype, tensor.device) for name, tensor in tree.items())
        if key not in self._perturbations:
            sizes = {name: size for name, size, _, _ in key}
            lengths = [sum(sizes[name] for name in names) for names in layers(tree)]
            kept = [length - self._pruned(length) for length in lengths]
            noisy = [round(self.phi / 100 * length) for length in lengths]
            places = {(kind, place) for _, _, kind, place in key}
            alike = len(places) == 1
            in_numpy = places == {(torch.float32, torch.device("cpu"))}
            self._perturbations[key] = _Perturbation(self.scale, sizes, kept, noisy, alike=alike, in_numpy=in_numpy)
        return self._perturbations[key]

    def _pruned(self, size: int) -> int:
        return round(self.rho / 100 * size)

    def _drawn(self, step: Step) -> bool:
        ahead = [] if self._uniform is None else self._uniform
        if not ahead:
            ahead += _chances(step)
        return ahead.pop() <= 1 / (1 + self.beta * step.number)


def _chances(step: Step) -> list[float]:
    return step.rng.uniform((CHANCES,), torch.empty(0, dtype=torch.float64)).tolist()


class _Perturbation:
    """What happens to a gradient with these sizes: so many entries of each layer are kept, and so many get noise."""

    def __init__(
        self, scale: float, sizes: dict[str, int], kept: list[int], noisy: list[int], *, alike: bool, in_numpy: bool
    ) -> None:
        self.scale, self.groups, self.alike, self.in_numpy = scale, layers(sizes), alike, in_numpy
        self.order = [name for names in self.groups for name in names]
        self.sizes = [sizes[name] for name in self.order]
        self.weights = [_weights(names) for names in self.groups]
        self.noisy, self.draws = noisy, sum(noisy)
        self.parts, self.noise_parts = dict(zip(self.order, parts_of(self.sizes), strict=True)), parts_of(noisy)
        self.pruned = 1 - sum(kept) / sum(self.sizes)
        self.choose = LargestOfEach([sum(sizes[name] for name in names) for names in self.groups], kept, noisy)
        self._noise_layers: Tensor | None = None
        self.replayed = Replayed(self)

    def __call__(self, given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """What is sent, and the mean risk. ``given``: gradient, weights, N(0, 1) for the noise, maybe the Fisher.

        Without a Fisher, the squared gradient stands for it: the larger the entry, the larger its square.
        """
        values, weights, noise, *fisher = given
        risk = layer_risks(dict(zip(self.order, torch.split(weights, self.sizes), strict=True)), self.groups).to(values)
        kept, noisy = self.choose.places(values.abs())
        if fisher:
            _, noisy = self.choose.places(fisher[0])
        sent = torch.zeros_like(values).index_copy_(0, kept, values[kept])
        return sent.index_add_(0, noisy, noise * (self.scale * risk)[self._layer_of_noise(noise.device)]), risk.mean()

    def _layer_of_noise(self, device: torch.device) -> Tensor:
        """Which layer each number of the noise is for; made once, before a graph of the work is captured."""
        if self._noise_layers is None or self._noise_layers.device != device:
            layer = torch.arange(len(self.noisy)).repeat_interleave(torch.tensor(self.noisy))
            self._noise_layers = layer.to(device)
        return self._noise_layers

    def by_torch(
        self, gradient: Params, params: Params, noise: Tensor, fisher: Params | None
    ) -> tuple[Params, float | Tensor]:
        """What is sent, and the mean risk. On a GPU its kernels are replayed."""
        values, weights = self.joined(gradient), self.joined(params)
        given = (values, weights, noise.to(values))
        sent, risk = self.replayed(given if fisher is None else (*given, self.joined(fisher)))
        return self.apart(sent, gradient), risk

    def by_numpy(
        self, gradient: Params, params: Params, noise: Tensor, fisher: Params | None
    ) -> tuple[Params, float | Tensor]:
        """The same for floats on a CPU, where a call of torch takes longer to start. Scales ``noise`` in place."""
        values, added = self._in_one_array(gradient), noise.numpy()
        risks = [min(1.0, _variance([params[name].detach().numpy() for name in names])) for names in self.weights]
        for part, risk in zip(self.noise_parts, risks, strict=True):
            added[part] *= self.scale * risk
        kept, noisy = self.choose.of_array(np.abs(values))
        if fisher is not None:
            _, noisy = self.choose.of_array(self._in_one_array(fisher))
        sent = values * kept
        sent[noisy.nonzero()[0]] += added
        apart = {name: torch.from_numpy(sent[self.parts[name]].reshape(g.shape)) for name, g in gradient.items()}
        return apart, sum(risks) / len(risks)

    def _in_one_array(self, tree: Params) -> Array:
        return np.concatenate([tree[name].numpy().ravel() for name in self.order])

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
    """The variance of each layer's weights, at most 1, [layers]."""
    risks = [_joined([params[name] for name in _weights(names)]).var(correction=0) for names in groups]
    return torch.stack([risk.to(risks[0]) for risk in risks]).clamp(max=1)


def _weights(names: list[str]) -> list[str]:
    """Those of a layer whose spread is its risk: its biases only where it has nothing else."""
    return [name for name in names if not name.endswith("bias")] or names


def _variance(arrays: list[Array]) -> float:
    """The variance of all entries. ``np.var`` does as much, and takes twice as long to start."""
    entries = arrays[0].ravel() if len(arrays) == 1 else np.concatenate([array.ravel() for array in arrays])
    centred = entries - np.add.reduce(entries) / len(entries)
    return float(np.add.reduce(np.square(centred, out=centred)) / len(entries))


def _example_fisher(step: Step) -> Params:
    """The mean of squared gradients of single examples, [size] by name."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in step.params.values())
    chunk = max(1, EXAMPLES_AT_ONCE // size)
    total, examples = map_each(torch.zeros_like, step.params), Examples(step)
    for start in range(0, len(step.batch), chunk):
        alone = examples.gradients(step.batch.take(slice(start, start + chunk)))
        total = map_each(lambda sum_, each: sum_ + each.square().sum(0) / len(step.batch), total, alone)
    return total


def _joined(tensors: Sequence[Tensor], alike: bool = False) -> Tensor:
    """All entries side by side, [size], on the device of the first tensor; ``alike``: they are of one type there."""
    together = tensors if alike else [tensor.to(tensors[0]) for tensor in tensors]
    joined: Tensor = _flatten_dense_tensors(together)  # type: ignore[no-untyped-call]
    return joined
