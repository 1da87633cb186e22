"""GradDefense (Wang et al., INFOCOM 2022): noise on randomly chosen slices of the gradient, all equally sensitive.

A tensor is sensitive if its gradient moves with the input: ||d(sum of its entries)/dx||, averaged over public images.
A sensitive tensor lies in many slices, so that hardly any draw leaves all of it alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import map_each
from gradveil.core.types import Batch, Params
from gradveil.defenses.base import DEFENSES, Defense, InRound, Step
from gradveil.defenses.clip import mean_over_examples, refuse_shared_statistics, sharing_layer, shrinkage
from gradveil.defenses.public import public_images, refuse_private
from gradveil.defenses.soteria import mean_of_root
from gradveil.engine import CudaGraphCache, cached, forward_mode, is_rounding, without_tf32

INPUTS_AT_ONCE = {"cpu": 2**17, "cuda": 2**20}
"""So many input entries are differentiated twice together, by kind of device, at least one example: it takes memory."""


@DEFENSES.register("graddefense")
@dataclass(frozen=True, kw_only=True)
class GradDefense(Defense):
    """Gaussian noise on a random half of ten slices of the gradient, cut so that all are equally sensitive."""

    sigma: float = 5e-4
    slices: int = 10
    perturbed: int = 5
    bound: float | None = None
    public: str = "samples"
    images: int = 50
    probes: int = 4

    def __post_init__(self) -> None:
        self._require_kinds()
        self._require(0 <= self.sigma < math.inf, "sigma", "at least 0")
        self._require(1 <= self.slices <= 255, "slices", "from 1 to 255")
        self._require(0 <= self.perturbed <= self.slices, "perturbed", f"from 0 to slices ({self.slices})")
        self._require(self.bound is None or self.bound > 0, "bound", "none or above 0")
        if self.images < 1 or self.probes < 0:
            raise GradveilError("defense graddefense: images is at least 1 and probes at least 0")

    @property
    def recomputes_gradient(self) -> bool:
        return self.bound is not None

    def for_round(self, start: Step) -> Defense:
        return InRound(partial(self.perturb, root=self._estimate(start).root, where=self.slices_of(start)))

    def slices_of(self, start: Step) -> Params:
        """For every entry the number of its slice.

        It follows from the broadcast and public images alone, whatever the client's own are: anybody can compute it.
        """
        estimate = self._estimate(start)
        return equal_slices(start.params, sensitivities(start, estimate.root, estimate), self.slices)

    def _estimate(self, start: Step) -> Estimate:
        """Made once for a model and loss, and inputs like these: parameters may differ."""

        def made() -> Estimate:
            root = public_images(self.public, inputs, self.images, public=start.public, defense="graddefense")
            if int(root.labels.max()) >= (classes := start.classes(root)):
                raise GradveilError(
                    f"defense graddefense: public images have labels up to {int(root.labels.max())}, but the model has "
                    f"{classes} classes: write graddefense:public=DATA with a set of the same classes"
                )
            few = len(start.params) <= 4 * self.probes  # then exact passes take no longer than random directions
            return Estimate(start, root, 0 if few else self.probes)

        inputs = start.batch.inputs
        kind = (tuple(start.params), id(start.loss), start.public, inputs.shape[1:], inputs.device, inputs.dtype)
        return cached(start.model.module, (self, *kind), made)

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return self.for_round(step).on_gradient(gradient, step)

    def perturb(self, gradient: Params, step: Step, root: Batch, where: Params) -> Params:
        """What is sent; ``where`` says for every entry of every tensor in which slice it lies."""
        refuse_private(root, step.batch.inputs, "graddefense")
        chosen = torch.zeros(self.slices, dtype=torch.bool)
        chosen[step.rng.permutation(self.slices)[: self.perturbed]] = True
        hit = map_each(lambda index: chosen.to(index.device)[index.long()], where)
        if self.bound is not None:
            clipped = self._clipped(step, where, self.bound)
            gradient = map_each(torch.where, {name: hit[name] for name in gradient}, clipped, gradient)
        share = sum(int(inside.sum()) for inside in hit.values()) / sum(inside.numel() for inside in hit.values())
        step.log.add("perturbed", share)
        return map_each(torch.where, hit, step.rng.noised(gradient, self.sigma), gradient)

    def _clipped(self, step: Step, where: Params, bound: float) -> Params:
        """The mean of the examples' gradients, the part of each in every slice scaled to at most ``bound``."""
        refuse_shared_statistics(step, "graddefense: bound")
        device = next(iter(where.values())).device

        def shrunk(each: Params) -> Params:
            n = len(next(iter(each.values())))
            squares = torch.zeros(n, self.slices, device=device)
            for name, g in each.items():
                index = where[name].flatten().long()
                part = torch.zeros(n, self.slices, device=g.device, dtype=g.dtype)
                squares = squares + part.index_add(1, index, g.flatten(1).square()).to(squares)
            factors = shrinkage(squares.sqrt(), bound)
            return map_each(lambda g, index: g * factors.to(g)[:, index.long()], each, where)

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
        middles = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device).add_(0.5)
        reached = middles.mul_(weights[name] / max(1, tensor.numel()) / width).add_(before / width)
        where[name] = reached.clamp_(max=slices - 1).to(torch.uint8).view(tensor.shape)
        before += weights[name]
    return where


def sensitivities(step: Step, root: Batch, estimate: Estimate | None = None) -> dict[str, float]:
    """By tensor: the mean over public examples of the norm of d(sum of the tensor's gradient)/dx.

    With an estimate, tensors that it knows are left to it.
    """
    shared = sharing_layer(step.model.module) is not None
    found = {} if shared or estimate is None else estimate(step)
    left = [name for name in step.params if name not in found]
    if not left:
        return found
    parts = [root] if shared else [root.take(part) for part in _parts(root)]
    norms = [_exact_norms(step, part, left, len(part) / len(root)) for part in parts]
    return found | {name: float(torch.cat([part[name] for part in norms]).mean()) for name in left}


def _parts(batch: Batch) -> list[slice]:
    size = max(1, INPUTS_AT_ONCE.get(batch.inputs.device.type, 2**17) // batch.inputs[0].numel())
    return [slice(start, min(start + size, len(batch))) for start in range(0, len(batch), size)]


def _exact_norms(step: Step, part: Batch, names: list[str], weight: float) -> Params:
    """[n] by name: one backward pass through the backward pass for each tensor. Slow, but assumes nothing."""
    inputs = part.inputs.detach().requires_grad_()
    params = {name: tensor.detach().requires_grad_() for name, tensor in step.params.items()}
    found = {name: torch.zeros(len(part), device=inputs.device) for name in names}
    with torch.enable_grad():
        loss = weight * step.loss_at(params, Batch(inputs, part.labels))
        slopes = torch.autograd.grad(loss, [params[name] for name in names], create_graph=True, allow_unused=True)
    for name, slope in zip(names, slopes, strict=True):
        if slope is not None and slope.requires_grad:
            (moved,) = torch.autograd.grad(slope.sum(), inputs, retain_graph=True, allow_unused=True)
            found[name] = found[name] if moved is None else torch.linalg.vector_norm(moved.flatten(1), dim=1)
    return found


class Estimate:
    """Sensitivities from random directions of the inputs, of all tensors whose sums ``sums_by_example`` gets right.

    The square of d(sum)/dx v has the mean ||d(sum)/dx||^2, and one forward derivative along v gives it for all tensors.
    """

    def __init__(self, step: Step, root: Batch, probes: int) -> None:
        self.root, self.probes = root, probes
        self.loss = step.loss  # kept, so that no other loss gets its id
        self._repeated = Batch(root.inputs.repeat(probes, *[1] * (root.inputs.dim() - 1)), root.labels.repeat(probes))
        self._right: list[str] = []
        """Tensors whose sums are those of the gradient: what a layer lends to another would be missed."""
        if probes:
            with without_tf32():  # else sums differ by rounding alone
                sums = sums_by_example(step, Batch(root.inputs.detach().requires_grad_(), root.labels))
                gradient = step.gradient(root)
            for name, each in map_each(torch.Tensor.detach, sums).items():
                total, size = (part.to(each.device) for part in (gradient[name].sum(), gradient[name].abs().sum()))
                # sums cancel out: a part that is missing may be small beside them
                if is_rounding(10 * (each.sum() - total).abs(), each.abs().sum(), 10 * size):
                    self._right.append(name)
        self._norms = CudaGraphCache(self._norms_along)
        self._step: Step | None = None

    def __call__(self, step: Step) -> dict[str, float]:
        if not self._right:
            return {}
        # Everybody's: slices are to follow from what is public, so that an adversary who knows them learns nothing.
        directions = Stream.seeded(0, "graddefense").normal(self._repeated.inputs.shape, self._repeated.inputs)
        self._step = replace(step, batch=self.root)  # for this call alone: a memory of the model must not hold it
        try:
            norms = self._norms((step.params, step.frozen, step.model.buffers, directions))
        finally:
            self._step = None
        return dict(zip(self._right, norms.tolist(), strict=True))

    def _norms_along(self, given: tuple[Params, Params, Params, Tensor]) -> Tensor:
        """[tensors]: the sensitivity of each."""
        params, frozen, buffers, directions = given
        assert self._step is not None
        step = replace(self._step, params=params, frozen=frozen, model=self._step.model.with_buffers(buffers))
        found = []
        for part in _parts(self._repeated):
            some, weight = self._repeated.take(part), (part.stop - part.start) / len(self.root)
            still = torch.zeros(len(some), device=some.inputs.device, dtype=some.inputs.dtype)
            with forward_mode, forward_ad.dual_level():
                inputs = forward_ad.make_dual(some.inputs.detach().requires_grad_(), directions[part])  # type: ignore[no-untyped-call]
                sums = sums_by_example(step, Batch(inputs, some.labels))
                moved = [forward_ad.unpack_dual(weight * sums[name]).tangent for name in self._right]  # type: ignore[no-untyped-call]
                found.append(torch.stack([still if tangent is None else tangent.detach() for tangent in moved]))
        slopes = torch.cat(found, dim=1)
        return slopes.view(len(slopes), self.probes, -1).square().mean(1).sqrt().mean(1) / mean_of_root(self.probes)


def sums_by_example(step: Step, batch: Batch) -> Params:
    """[n] by tensor: the sum of each example's gradient of the mean loss, where the layer is affine in its tensors.

    With h what goes into a layer, z what comes out, and u(h) how z answers when all entries of a tensor move together,
    the sum is <dL/dz, u(h)> over the example's part: no gradient of a parameter is computed, let alone one per example.
    """
    module, calls = step.model.module, cast(list[tuple[nn.Module, Tensor, Tensor]], [])

    def watch(layer: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        calls.append((layer, arguments[0], output))
        return output.clone()  # what comes next may work in place

    handles = [layer.register_forward_hook(watch) for layer in module.modules() if isinstance(layer, AFFINE)]
    try:
        with torch.enable_grad():
            loss = step.loss_at(step.params, batch)
    finally:
        for handle in handles:
            handle.remove()
    calls = [call for call in calls if len(call[1]) == len(call[2]) == len(batch)]
    slopes = torch.autograd.grad(loss, [output for _, _, output in calls], allow_unused=True)
    named = {id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    found: Params = {}
    with torch.no_grad():
        for (layer, entering, output), slope in zip(calls, slopes, strict=True):
            slope = torch.zeros_like(output) if slope is None else slope
            for local, tensor in layer.named_parameters(recurse=False):
                name = named[id(tensor)]
                if name in step.params:
                    total = _product(slope, layer, local, entering, step, named).to(batch.inputs.device)
                    found[name] = found[name] + total if name in found else total
    return found


AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, _BatchNorm, nn.LayerNorm, nn.GroupNorm)
"""Layers whose output is weight times something of the input, plus bias."""


def _product(
    slope: Tensor, layer: nn.Module, local: str, entering: Tensor, step: Step, named: dict[int, str]
) -> Tensor:
    """[n]: what comes back to a layer times how its output moves when all entries of one tensor move together."""
    if local == "bias":
        return slope.flatten(1).sum(1)
    own = {key: torch.zeros_like(tensor) for key, tensor in layer.named_parameters(recurse=False)}
    own["weight"] = torch.ones_like(own["weight"])
    if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and getattr(layer, "groups", 1) == 1:
        own = {key: tensor[:1] for key, tensor in own.items()}  # all outputs move alike: one is enough
        slope = slope.sum(-1 if isinstance(layer, nn.Linear) else 1, keepdim=True)
    buffers = {key: step.model.buffers[named[id(tensor)]] for key, tensor in layer.named_buffers(recurse=False)}
    moved: Tensor = functional_call(layer, {**own, **buffers}, (entering,))
    return (slope * moved).flatten(1).sum(1)
