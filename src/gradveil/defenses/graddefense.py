"""GradDefense (Wang et al., INFOCOM 2022): noise on randomly chosen slices of the gradient, all equally sensitive.

A tensor is sensitive if its gradient moves with the input: ||d(sum of its entries)/dx||, averaged over public images.
Sensitive tensors are cut into more slices, so that noise falls on them more often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from gradveil.core.errors import GradveilError
from gradveil.core.trees import map_each
from gradveil.core.types import Batch, Params
from gradveil.defenses.base import Defense, Step
from gradveil.defenses.clip import mean_over_examples, refuse_shared_statistics, sharing_layer, shrinkage
from gradveil.defenses.public import public_images
from gradveil.defenses.registry import DEFENSES
from gradveil.models.functional import AddsToLoss


@DEFENSES.register("graddefense")
class GradDefense(Defense):
    """Gaussian noise on a random half of ten slices of the gradient, cut so that all are equally sensitive."""

    def __init__(
        self,
        *,
        sigma: float = 5e-4,
        slices: int = 10,
        perturbed: int = 5,
        bound: float | None = None,
        public: str = "samples",
        images: int = 50,
        probes: int = 4,
    ) -> None:
        if sigma < 0:
            raise GradveilError(f"defense graddefense: sigma is at least 0, not {sigma}")
        if not 1 <= slices <= 255:
            raise GradveilError(f"defense graddefense: slices is from 1 to 255, not {slices}")
        if not 0 <= perturbed <= slices:
            raise GradveilError(f"defense graddefense: perturbed is from 0 to slices ({slices}), not {perturbed}")
        if bound is not None and not bound > 0:
            raise GradveilError(f"defense graddefense: bound is none or above 0, not {bound}")
        if images < 1 or probes < 0:
            raise GradveilError("defense graddefense: images is at least 1 and probes at least 0")
        self.sigma, self.slices, self.perturbed, self.bound = sigma, slices, perturbed, bound
        self.public, self.images, self.probes = public, images, probes

    def prepared(self, start: Step) -> Defense:
        root = public_images(self.public, start.batch.inputs, self.images, defense="graddefense")
        sensitivity = sensitivities(start, root, self.probes)
        return _Run(self, equal_slices(start.params, sensitivity, self.slices))

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return self.prepared(step).on_gradient(gradient, step)


class _Run(Defense):
    """One local run: ``where`` says for every entry of every tensor in which slice it lies."""

    def __init__(self, options: GradDefense, where: Params) -> None:
        self.options, self.where = options, where

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        options, rng = self.options, step.rng
        chosen = torch.zeros(options.slices, dtype=torch.bool)
        chosen[torch.randperm(options.slices, generator=rng, device=rng.device)[: options.perturbed].cpu()] = True
        hit = map_each(lambda index: chosen.to(index.device)[index.long()], self.where)
        if options.bound is not None:
            clipped = self._clipped(step, options.bound)
            gradient = map_each(torch.where, {name: hit[name] for name in gradient}, clipped, gradient)

        def disturbed(g: Tensor, inside: Tensor) -> Tensor:
            noise = torch.randn(g.shape, generator=rng, device=rng.device, dtype=g.dtype).to(g.device)
            return torch.where(inside, g + options.sigma * noise, g)

        share = sum(int(inside.sum()) for inside in hit.values()) / sum(inside.numel() for inside in hit.values())
        step.log.add("perturbed", share)
        return map_each(disturbed, gradient, hit)

    def _clipped(self, step: Step, bound: float) -> Params:
        """The mean of the examples' gradients, the part of each in every slice scaled to at most ``bound``."""
        refuse_shared_statistics(step, "graddefense: bound")
        device = next(iter(self.where.values())).device

        def shrunk(each: Params) -> Params:
            n = len(next(iter(each.values())))
            squares = torch.zeros(n, self.options.slices, device=device)
            for name, g in each.items():
                index = self.where[name].flatten().long()
                part = torch.zeros(n, self.options.slices, device=g.device, dtype=g.dtype)
                squares = squares + part.index_add(1, index, g.flatten(1).square()).to(squares)
            factors = shrinkage(squares.sqrt(), bound)
            return map_each(lambda g, index: g * factors.to(g)[:, index.long()], each, self.where)

        return mean_over_examples(step, shrunk)


def equal_slices(tree: Params, sensitivity: dict[str, float], slices: int) -> Params:
    """For every entry the number of its slice: consecutive entries, and the same sensitivity in every slice.

    A tensor's sensitivity is spread evenly over its entries. If nothing is sensitive, slices have equal sizes.
    """
    weights = {name: max(0.0, sensitivity[name]) for name in tree}
    if not sum(weights.values()) > 0:
        weights = {name: float(tensor.numel()) for name, tensor in tree.items()}
    width, before, where = sum(weights.values()) / slices, 0.0, {}
    for name, tensor in tree.items():
        middles = (torch.arange(tensor.numel(), dtype=torch.float64) + 0.5) / max(1, tensor.numel())
        index = ((before + weights[name] * middles) / width).clamp(max=slices - 1).to(torch.uint8)
        where[name], before = index.view(tensor.shape).to(tensor.device), before + weights[name]
    return where


def sensitivities(step: Step, root: Batch, probes: int = 0) -> dict[str, float]:
    """By tensor: the mean over public examples of the norm of d(sum of the tensor's gradient)/dx.

    With ``probes``, norms are root mean squares along so many random directions of the inputs, all tensors at once.
    """
    taps = Taps(step) if probes and sharing_layer(step.model.module) is None else None
    found = taps.estimated(root, probes) if taps is not None else {}
    return found | _exact(step, root, [name for name in step.params if name not in found])


def _exact(step: Step, root: Batch, names: Sequence[str]) -> dict[str, float]:
    """One backward pass through the backward pass for each tensor: slow, and without any assumption on the model."""
    inputs = root.inputs.detach().clone().requires_grad_()
    params = {name: tensor.detach().clone().requires_grad_() for name, tensor in step.params.items()}
    with torch.enable_grad():
        wanted = [params[name] for name in names]
        slopes = torch.autograd.grad(
            step.loss_at(params, Batch(inputs, root.labels)), wanted, create_graph=True, allow_unused=True
        ) if names else ()  # fmt: skip
    found = dict.fromkeys(names, 0.0)
    for name, slope in zip(names, slopes, strict=True):
        if slope is not None and slope.requires_grad:
            (moved,) = torch.autograd.grad(slope.sum(), inputs, retain_graph=True, allow_unused=True)
            found[name] = 0.0 if moved is None else float(moved.flatten(1).norm(dim=1).mean())
    return found


class Taps:
    """The layers that hold parameters, watched in a forward pass.

    With h what goes into a layer, z what comes out and u = dz/d(all entries of a tensor together), the sum of the
    tensor's gradient is <dL/dz, u>, and the sum over one example's part of it is that example's: no gradient of a
    parameter has to be computed, let alone one for every example.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        module = step.model.module
        self.values = {**step.model.buffers, **step.frozen, **step.params}
        self.named = {id(tensor): name for name, tensor in module.named_parameters()}
        self.named |= {id(tensor): name for name, tensor in module.named_buffers()}
        self.layers = [
            layer for layer in module.modules()
            if not isinstance(layer, AddsToLoss) and any(self._own(layer))
        ]  # fmt: skip

    def _own(self, layer: nn.Module) -> list[str]:
        """Local names of the trained tensors that this layer holds itself."""
        own = layer.named_parameters(recurse=False)
        return [local for local, tensor in own if self.named[id(tensor)] in self.step.params]

    def estimated(self, root: Batch, probes: int) -> dict[str, float]:
        return {}
