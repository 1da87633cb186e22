"""Clipping: nothing that is sent is longer than a bound, per tensor, over all tensors, or per example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil import joint
from gradveil.core.errors import GradveilError
from gradveil.core.precise import without_tf32
from gradveil.core.streams import Stream
from gradveil.core.trees import add, exact_norms, map_each, norm, scaled
from gradveil.core.types import Params
from gradveil.defenses.base import Defense, Log, Step, Transform
from gradveil.defenses.registry import DEFENSES
from gradveil.defenses.shared import Examples, gradients, network_of, passed
from gradveil.joint import moments, rules

ENTRIES_AT_ONCE = 2**26
"""So many entries of gradients of single examples are held together, at least one example's: 256 MB in float32."""
EXAMPLES_AT_ONCE = 64
"""So many go through a large model together where no gradients of single examples are held."""


@DEFENSES.register("clip")
def clip(
    *,
    bound: float = 4.0,
    per: Literal["layer", "global", "example"] = "layer",
    at: Literal["step", "update"] = "step",
) -> Defense:
    """Scale what is longer than ``bound`` down to it: each tensor, the whole gradient, or each example's gradient."""
    if not bound > 0:
        raise GradveilError(f"defense clip: bound is above 0, not {bound}")
    if per != "example":
        return Clip(bound=bound, per=per, at=at)
    if at == "update":
        raise GradveilError("defense clip: per=example needs at=step, because an update is not a sum over examples")
    return ClipExamples(bound=bound)


class Clip(Transform):
    """Each tensor, or all of them together, scaled to a norm of at most ``bound``."""

    def __init__(self, *, bound: float, per: Literal["layer", "global"], at: Literal["step", "update"]) -> None:
        super().__init__(at=at)
        self.bound, self.per = bound, per

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        if self.per == "global":
            length = norm(tree)
            log.add("clipped", (length > self.bound).float())
            factor = shrinkage(length, self.bound)
            return map_each(lambda g: g * factor.to(g.device), tree)
        lengths = map_each(lambda g: exact_norms(g.flatten()), tree)
        log.add("clipped", sum(float(length > self.bound) for length in lengths.values()) / len(lengths))
        return map_each(lambda g, length: g * shrinkage(length, self.bound), tree, lengths)


class ClipExamples(Defense):
    """The mean of the gradients of single examples, each scaled to a norm of at most ``bound``."""

    def __init__(self, *, bound: float) -> None:
        self.bound = bound

    @property
    def starts_over(self) -> bool:
        return True

    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        refuse_shared_statistics(step, "clip: per=example")
        return clipped_mean(step, self.bound)


def clipped_mean(step: Step, bound: float) -> Params:
    """The mean over the batch of each example's whole gradient, scaled to at most ``bound``; logs the share clipped.

    With an expected number of examples the sum is divided by that: one example more or less then changes it by at most
    ``bound`` / expected, and nothing in it depends on how many there are.
    """
    if len(step.batch) == 0:
        return map_each(torch.zeros_like, step.params)
    # Under autocast, sums over examples would be rounded to so few bits that one example moves many entries.
    with torch.autocast(step.batch.inputs.device.type, enabled=False), torch.autocast("cpu", enabled=False):
        try:
            mean, clipped = _unformed(step, bound)
        except joint.UnsupportedError:
            mean, clipped = _formed(step, bound)
    step.log.add("clipped", clipped / len(step.batch))
    return mean if step.expected is None else scaled(mean, len(step.batch) / step.expected)


def _unformed(step: Step, bound: float) -> tuple[Params, float]:
    """The same for a large model, and how many were clipped, without the gradient of any one example.

    Of each only its length is found. What is kept of it scales the slopes at the outputs of a layer, and these give the
    sum over all examples at once. Where a layer's gradients had to be formed for the length, these are summed: slopes
    of one example that cancel would swallow others in a sum over all. An example whose length nobody can tell is left
    out, and formed by itself.
    """
    count = len(step.batch)
    total: Params = {}
    clipped = 0.0
    for start in range(0, count, EXAMPLES_AT_ONCE):
        some = step.batch.take(slice(start, start + EXAMPLES_AT_ONCE))
        _, calls, slopes = passed(network_of(step), step, some)  # a copy for each: a model may remember examples
        with torch.no_grad(), without_tf32():
            lengths, formed = moments.lengths(calls, slopes, len(some), step.params.keys())
            known = lengths.isfinite()
            clipped += float((known & (lengths > bound)).sum())
            kept = shrinkage(lengths, bound)
            if not known.all():  # NaN times nothing is NaN: what came into a layer has to go as well
                inputs = [None if call.inputs is None else _only(call.inputs, known) for call in calls]
                calls = [replace(call, inputs=x) for call, x in zip(calls, inputs, strict=True)]
                slopes = tuple(_only(slope, known) for slope in slopes)
                formed = {name: _only(each, known) for name, each in formed.items()}
            slim = [place for place, call in enumerate(calls) if not set(call.parameters.values()) <= formed.keys()]
            found = gradients(step, [calls[i] for i in slim], tuple(_kept(slopes[i], kept) for i in slim), 1)
            part = map_each(lambda g: g[0], found)
            part |= {name: torch.tensordot(kept.to(each), each, dims=1) for name, each in formed.items()}
        total = add(total, part) if total else part
        if not known.all():  # of these alone: one example must not decide how others are treated
            odd = some.take(~known)
            part, more = _formed(replace(step, batch=odd), bound)
            total, clipped = add(total, part, len(odd)), clipped + more
    return scaled(total, 1 / count), clipped


def _kept(rows: Tensor, shares: Tensor) -> Tensor:
    """So much of each example; a layer may have seen several rows of each, [n * rows, ...]."""
    each = rules.apart(rows, len(shares))
    return (each * shares.view(-1, *[1] * (each.dim() - 1))).reshape(rows.shape)


def _only(rows: Tensor, known: Tensor) -> Tensor:
    """Zeros for the others, even in the place of NaN."""
    each = rules.apart(rows, len(known))
    return torch.where(known.view(-1, *[1] * (each.dim() - 1)), each, 0.0).reshape(rows.shape)


def _formed(step: Step, bound: float) -> tuple[Params, float]:
    """The same for any model, with the gradients of some examples at a time."""
    clipped = 0.0

    def shrunk(each: Params) -> Params:
        nonlocal clipped
        lengths = example_norms(each)
        clipped += float((lengths > bound).sum())
        return scale_examples(each, shrinkage(lengths, bound))

    return mean_over_examples(step, shrunk), clipped


def mean_over_examples(step: Step, change: Callable[[Params], Params]) -> Params:
    """The mean of the examples' gradients [n, ...] after ``change``, a bounded number of examples at a time."""
    total: Params = {}
    for each in _in_chunks(step):
        part = map_each(lambda g: g.sum(0), change(each))
        total = map_each(torch.add, total, part) if total else part
    return scaled(total, 1 / len(step.batch))


def _in_chunks(step: Step) -> Iterator[Params]:
    size = max(1, ENTRIES_AT_ONCE // max(1, sum(p.numel() for p in step.params.values())))
    examples = Examples(step)
    for start in range(0, len(step.batch), size):
        yield examples.gradients(step.batch.take(slice(start, start + size)))


def example_norms(each: Params) -> Tensor:
    """[n]: the l2 norm of every example's gradient over all tensors."""
    device = next(iter(each.values())).device  # a model may be spread over several
    return torch.stack([g.flatten(1).square().sum(1).to(device) for g in each.values()]).sum(0).sqrt()


def scale_examples(each: Params, factors: Tensor) -> Params:
    """Every example's gradient times its own factor [n]; nothing of one whose factor is 0, not even NaN."""

    def times(g: Tensor) -> Tensor:
        own = factors.to(g.device).view(-1, *[1] * (g.dim() - 1))
        return torch.where(own > 0, g * own, 0.0)

    return map_each(times, each)


def shrinkage(lengths: Tensor, bound: float) -> Tensor:
    """min(1, bound / length), 1 for length 0, and 0 where the length is not finite.

    A crafted broadcast can make one example's gradient infinite. To send NaN, or an error, would tell that it is there.
    """
    return torch.where(lengths.isfinite(), (bound / lengths).clamp(max=1.0), 0.0)


def refuse_shared_statistics(step: Step, what: str) -> None:
    """Raise if batch norm mixes the examples of this step, so that no example has a gradient of its own."""
    name = sharing_layer(step.model.module)
    if name is not None:
        raise GradveilError(
            f"defense {what} needs gradients of single examples, but layer {name!r} is batch norm in train mode: "
            "use eval mode, or replace it by torch.nn.GroupNorm"
        )


def sharing_layer(module: nn.Module) -> str | None:
    """The name of a layer that takes statistics over the batch, so that examples influence each other."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            return str(name)
    return None
