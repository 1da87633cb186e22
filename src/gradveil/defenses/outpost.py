"""OUTPOST (Wang, Hugh and Li, IEEE/ACM ToN 2024): pruning and noise by layer, rarer from step to step.

``TopKPerLayer``, which finds the largest entries of each layer, serves sparsification too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from gradveil.core.trees import map_each
from gradveil.core.types import Params
from gradveil.defenses.base import DEFENSES, Defense, InRound, Step
from gradveil.defenses.clip import mean_over_examples
from gradveil.engine import CudaGraphCache, cached

Array = np.ndarray[Any, Any]
CHANCES = 64
"""Random numbers drawn at once to decide which steps are perturbed."""
WORTH_A_HISTOGRAM = 2**14
"""Entries of a layer from which on a histogram finds its largest sooner than a selection does."""


@DEFENSES.register("outpost")
@dataclass(frozen=True, kw_only=True)
class Outpost(Defense):
    """OUTPOST: prunes each layer and adds noise in proportion to the spread of its weights, less and less often."""

    scale: float = 0.8
    phi: float = 40.0
    beta: float = 0.1
    rho: float = 80.0
    fisher: Literal["batch", "example", "outputs"] = "batch"
    per: Literal["layer", "tensor"] = "layer"
    """What has a risk, and is pruned, by itself."""
    threshold: Literal["layer", "all"] = "layer"
    """Whether each of these has a threshold of Fisher information of its own."""
    first: bool = True
    """Whether the first step is always perturbed."""

    def __post_init__(self) -> None:
        self._require_kinds()
        for option in ("scale", "beta"):
            self._require(0 <= getattr(self, option) < float("inf"), option, "at least 0")
        for option in ("phi", "rho"):
            self._require(0 <= getattr(self, option) <= 100, option, "a percentage from 0 to 100")

    def for_round(self, start: Step) -> Defense:
        """Chances are drawn many at a time and the first before the run starts: a GPU would stop for each."""
        ahead = _chances(start)

        def act(gradient: Params, step: Step) -> Params:
            if not self._is_certain(step) and not ahead:
                ahead.extend(_chances(step))
            return self.perturbed(gradient, step, 0.0 if self._is_certain(step) else ahead.pop())

        return InRound(act)

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return self.perturbed(gradient, step, 0.0 if self._is_certain(step) else _chances(step)[-1])

    def _is_certain(self, step: Step) -> bool:
        return self.first and step.number <= 1

    def perturbed(self, gradient: Params, step: Step, chance: float) -> Params:
        """What is sent, if a uniform random number says that this step is perturbed."""
        acts = chance <= 1 / (1 + self.beta * step.number)
        step.log.add("perturbed", float(acts))
        if not acts:
            return gradient
        fisher = None
        if self.fisher == "example":  # the mean of squared gradients of single examples
            fisher = mean_over_examples(step, lambda each: map_each(torch.square, each))
        elif self.fisher == "outputs":
            fisher = map_each(lambda g: g.square().mean(0, keepdim=True) if g.dim() else g.square(), gradient)
        if self.threshold == "all":
            return self._above_one_threshold(gradient, step, fisher or map_each(torch.square, gradient))
        if fisher is not None:
            fisher = map_each(lambda f, g: f.expand_as(g), fisher, gradient)
        key = tuple((name, tensor.numel(), tensor.dtype, tensor.device) for name, tensor in gradient.items())
        perturbation = cached(step.model.module, (self, key), lambda: _Perturbation(self, gradient))
        noise = step.rng.normal((perturbation.draws,), next(iter(gradient.values())))
        perturb = perturbation.by_numpy if perturbation.in_numpy else perturbation.by_torch
        sent, risk = perturb(gradient, step.params, noise, fisher)
        step.log.add("risk", risk)
        step.log.add("pruned", perturbation.pruned)
        return sent

    def groups(self, tree: Iterable[str]) -> list[list[str]]:
        """Names of parameters that share a risk: those of a layer, or one alone."""
        return layers(tree) if self.per == "layer" else [[name] for name in tree]

    def _above_one_threshold(self, gradient: Params, step: Step, fisher: Params) -> Params:
        """As the authors' release has it: noise where the Fisher information is above one value for all tensors.

        An entry of ``fisher`` may stand for several of the gradient, and then counts once for the threshold.
        """
        bar = _percentile(list(fisher.values()), 100 - self.phi)
        groups, sent, pruned = self.groups(gradient), dict(gradient), 0.0
        risks = layer_risks(step.params, groups)
        for names, risk in zip(groups, risks, strict=True):
            cut = _percentile([gradient[name].abs() for name in names], self.rho)
            for name in names:
                g = gradient[name]
                small, noise = g.abs() < cut.to(g), step.rng.normal(g.shape, g)
                noise = noise * (self.scale * risk).to(g) * (fisher[name] >= bar.to(g))
                sent[name], pruned = g.masked_fill(small, 0) + noise, pruned + float(small.sum())
        step.log.add("risk", risks.mean())
        step.log.add("pruned", pruned / sum(g.numel() for g in gradient.values()))
        return sent


def _chances(step: Step) -> list[float]:
    return step.rng.uniform((CHANCES,), torch.empty(0, dtype=torch.float64)).tolist()


class _Perturbation:
    """What happens to a gradient with these sizes: so many entries of each layer are kept, and so many get noise.

    Where layers lie and how much of each is chosen is the same for all gradients of these sizes and places.
    """

    def __init__(self, options: Outpost, like: Params) -> None:
        places = {(tensor.dtype, tensor.device) for tensor in like.values()}
        self.scale, self.alike = options.scale, len(places) == 1
        self.in_numpy = places == {(torch.float32, torch.device("cpu"))}
        self.groups = options.groups(like)
        self.order = [name for names in self.groups for name in names]
        self.sizes = [like[name].numel() for name in self.order]
        self.weights = [_weights(names) for names in self.groups]
        lengths = [sum(like[name].numel() for name in names) for names in self.groups]
        kept = [length - round(options.rho / 100 * length) for length in lengths]
        self.noisy = [round(options.phi / 100 * length) for length in lengths]
        self.draws, self.pruned = sum(self.noisy), 1 - sum(kept) / sum(self.sizes)
        self.parts = dict(zip(self.order, _parts(self.sizes), strict=True))
        self.noise_parts = _parts(self.noisy)
        self.choose = TopKPerLayer(lengths, kept, self.noisy)
        self._noise_layers: Tensor | None = None
        self.replayed = CudaGraphCache(self)

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
        if self._noise_layers is None or self._noise_layers.device != noise.device:  # before a graph is captured
            layer = torch.arange(len(self.noisy)).repeat_interleave(torch.tensor(self.noisy))
            self._noise_layers = layer.to(noise.device)
        return sent.index_add_(0, noisy, noise * (self.scale * risk)[self._noise_layers]), risk.mean()

    def by_torch(
        self, gradient: Params, params: Params, noise: Tensor, fisher: Params | None
    ) -> tuple[Params, float | Tensor]:
        """What is sent, and the mean risk. On a GPU its kernels are replayed."""
        trees = (gradient, params) if fisher is None else (gradient, params, fisher)
        values, weights, *more = (_joined([tree[name] for name in self.order], self.alike) for tree in trees)
        sent, risk = self.replayed((values, weights, noise.to(values), *more))
        parts = _unflatten_dense_tensors(sent, [gradient[name] for name in self.order])  # type: ignore[no-untyped-call]
        found = dict(zip(self.order, parts, strict=True))
        return {name: found[name] if self.alike else found[name].to(g) for name, g in gradient.items()}, risk

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


def _joined(tensors: Sequence[Tensor], alike: bool = False) -> Tensor:
    """All entries side by side, [size], on the device of the first tensor; ``alike``: they are of one type there."""
    together = tensors if alike else [tensor.to(tensors[0]) for tensor in tensors]
    joined: Tensor = _flatten_dense_tensors(together)  # type: ignore[no-untyped-call]
    return joined


def _percentile(tensors: list[Tensor], percent: float) -> Tensor:
    """The smallest of all entries that at least ``percent`` of the others are not above."""
    entries = _joined(tensors)
    return entries.kthvalue(1 + math.ceil(percent / 100 * (len(entries) - 1))).values


def _parts(sizes: Sequence[int]) -> list[slice]:
    """Where stretches of these sizes lie side by side."""
    return [slice(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


class TopKPerLayer:
    """The largest entries of parts of a vector that lie side by side, such as layers: as many of each as a list says.

    Exactly so many, ties cut by position. No entry may be negative. On a GPU one sort of (part, value) ranks all parts
    at once: floats >= 0 are in the order of their bits, and NaN is the largest.
    """

    def __init__(self, sizes: Sequence[int], *counts: Sequence[int]) -> None:
        self.sizes, self.counts, self.parts = list(sizes), counts, _parts(sizes)
        self._part_of: Tensor | None = None
        self._first: list[Tensor] = []
        """By list of counts, which ranks are taken."""
        self._ranks: list[Tensor] = []

    def __call__(self, values: Tensor) -> list[Tensor]:
        """For each list of counts, a mask of the largest ``values`` [sum of sizes]."""
        if not values.is_cuda:
            return [torch.from_numpy(mask) for mask in self.of_array(values.float().numpy())]
        order = self._order(values)
        return [torch.empty_like(first).index_put_((order,), first) for first in self._first]

    def places(self, values: Tensor) -> list[Tensor]:
        """For each list of counts, where the largest are: part by part, within a part in any order."""
        if not values.is_cuda:
            return [mask.nonzero()[:, 0] for mask in self(values)]
        order = self._order(values)
        return [order[ranks] for ranks in self._ranks]

    def _order(self, values: Tensor) -> Tensor:
        device = values.device
        if self._part_of is None or self._part_of.device != device:
            lengths = torch.tensor(self.sizes, device=device)
            part = torch.arange(len(self.sizes), device=device).repeat_interleave(lengths, output_size=sum(self.sizes))
            rank = torch.arange(len(part), device=device) - (lengths.cumsum(0) - lengths)[part]
            self._first = [rank < torch.tensor(few, device=device)[part] for few in self.counts]
            self._ranks = [first.nonzero()[:, 0] for first in self._first]
            self._part_of = part << 32
        return (self._part_of | (0x7FFFFFFF - values.float().view(torch.int32))).argsort()

    def of_array(self, values: Array) -> list[Array]:
        """The same for an array of float32, by thresholds: torch's own selection takes many times as long on a CPU."""
        bits = values.view(np.uint32)
        masks = [np.zeros(len(bits), dtype=np.bool_) for _ in self.counts]
        for part, *few in zip(self.parts, *self.counts, strict=True):
            here = bits[part]
            found = _thresholds(here, [count for count in few if count])
            for mask, count in zip(masks, few, strict=True):
                if count:
                    np.greater_equal(here, found[count], out=mask[part])
        for mask, few in zip(masks, self.counts, strict=True):
            if np.count_nonzero(mask) > sum(few):  # ties: the last of those at the threshold go
                for part, count in zip(self.parts, few, strict=True):
                    inside, here = mask[part], bits[part]
                    if extra := np.count_nonzero(inside) - count:
                        inside[np.flatnonzero(inside & (here == here[inside].min()))[-extra:]] = False
        return masks


def _thresholds(values: Array, counts: list[int]) -> dict[int, int]:
    """The count-th largest value for each count.

    In a large layer a histogram over the upper halves of the values says in which bin each threshold lies, and only
    that bin is looked at closely: without it OUTPOST takes a fifth of a step of ResNet-18 longer.
    """
    places = {count: len(values) - count for count in counts}
    if len(values) < WORTH_A_HISTOGRAM:
        ranked = np.partition(values, list(places.values())) if places else values
        return {count: ranked[place] for count, place in places.items()}
    bins = (values >> 16).astype(np.uint16)
    up_to = np.bincount(bins).cumsum()
    found = {}
    for count, place in places.items():
        its_bin = int(np.searchsorted(up_to, place, side="right"))
        within = place - (up_to[its_bin - 1] if its_bin else 0)
        found[count] = np.partition(values[bins == its_bin], within)[within]
    return found
