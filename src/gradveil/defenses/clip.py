"""Clipping: nothing that is sent is longer than a bound, per tensor, over all tensors, or per example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import add, exact_norms, map_each, norm, scaled
from gradveil.core.types import Params, cross_entropy
from gradveil.defenses.base import DEFENSES, At, Defense, Log, Step, Transform
from gradveil.engine import example_gradients, example_pass, products, rules, trained_gradients, without_tf32
from gradveil.models import FeatureHead

ENTRIES_AT_ONCE = 2**26
"""So many entries of gradients of single examples are held together, at least one example's: 256 MB in float32."""
EXAMPLES_AT_ONCE = 64
"""So many go through a large model together where no gradients of single examples are held."""


@DEFENSES.register("clip")
def clip(*, bound: float = 4.0, per: Literal["layer", "global", "example"] = "layer", at: At = "step") -> Defense:
    """Scale what is longer than ``bound`` down to it: each tensor, the whole gradient, or each example's gradient."""
    if per != "example":
        return Clip(bound=bound, per=per, at=at)
    return ClipExamples(bound=bound, at=at)


@dataclass(frozen=True, kw_only=True)
class Clip(Transform):
    """Each tensor, or all of them together, scaled to a norm of at most ``bound``."""

    name: ClassVar[str] = "clip"

    bound: float
    per: Literal["layer", "global"]
    at: At

    def __post_init__(self) -> None:
        self._require_kinds()
        self._require(self.bound > 0, "bound", "above 0")

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        if self.per == "global":
            length = norm(tree)
            log.add("clipped", (length > self.bound).float())
            factor = shrinkage(length, self.bound)
            return map_each(lambda g: g * factor.to(g.device), tree)
        lengths = map_each(lambda g: exact_norms(g.flatten()), tree)
        log.add("clipped", sum(float(length > self.bound) for length in lengths.values()) / len(lengths))
        return map_each(lambda g, length: g * shrinkage(length, self.bound), tree, lengths)


@dataclass(frozen=True, kw_only=True)
class ClipExamples(Defense):
    """The mean of the gradients of single examples, each scaled to a norm of at most ``bound``."""

    name: ClassVar[str] = "clip"
    several_inputs: ClassVar[bool] = True

    bound: float
    per: Literal["example"] = "example"
    at: At = "step"

    def __post_init__(self) -> None:
        self._require_kinds()
        self._require(self.bound > 0, "bound", "above 0")
        if self.at == "update":
            raise GradveilError("defense clip: per=example needs at=step, because an update is not a sum over examples")

    @property
    def recomputes_gradient(self) -> bool:
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
        mean, clipped = _of_head(step, bound) or _unformed(step, bound) or _formed(step, bound)
    step.log.add("clipped", clipped / len(step.batch))
    return mean if step.expected is None else scaled(mean, len(step.batch) / step.expected)


def _of_head(step: Step, bound: float) -> tuple[Params, float] | None:
    """The same for a head on features under cross-entropy, and how many were clipped; None for anything else.

    The gradient of an example is the product of its error and its features, and each row is computed by itself.
    """
    if type(step.model.module) is not FeatureHead or step.loss is not cross_entropy:
        return None
    seen, labels, weight = step.batch.inputs, step.batch.labels, step.params["head.weight"]
    with torch.no_grad(), without_tf32():
        scores = F.linear(seen, weight, step.params.get("head.bias"))
        wanted = labels if labels.is_floating_point() else F.one_hot(labels, scores.shape[1])
        errors = scores.softmax(dim=1) * wanted.sum(dim=1, keepdim=True) - wanted
        lengths = errors.norm(dim=1) * (seen.square().sum(dim=1) + ("head.bias" in step.params)).sqrt()
        kept = shrinkage(lengths, bound)
        errors, seen = _times(errors, kept), _times(seen, (kept > 0).to(seen))
        total = {"head.weight": errors.T @ seen, "head.bias": errors.sum(dim=0)}
    mean = {name: total[name].to(parameter) / len(step.batch) for name, parameter in step.params.items()}
    return mean, float((lengths > bound).sum())


def _unformed(step: Step, bound: float) -> tuple[Params, float] | None:
    """The same for a large model, and how many were clipped, without the gradient of any one example; None for others.

    Of each only its length is found. What is kept of it scales the gradients at the outputs of a layer, and these give
    the sum over all examples at once. Where a layer's gradients had to be formed for the length, these are summed:
    those of one example that cancel would swallow others in a sum over all. An example whose length nobody can tell
    is left out, and formed by itself.
    """
    count = len(step.batch)
    total: Params = {}
    clipped = 0.0
    for start in range(0, count, EXAMPLES_AT_ONCE):
        some = step.batch.take(slice(start, start + EXAMPLES_AT_ONCE))
        passed = example_pass(step, some)
        if passed is None:
            return None
        with torch.no_grad(), without_tf32():
            lengths, formed = products.lengths(passed, step.params.keys())
            known = lengths.isfinite()
            clipped += float((known & (lengths > bound)).sum())
            kept = shrinkage(lengths, bound)
            slim = [call for call in passed.calls if not set(call.parameters.values()) <= formed.keys()]
            if not known.all():  # NaN times nothing is NaN: what came into a layer has to go as well
                inputs = [None if call.inputs is None else _times(call.inputs, known) for call in slim]
                slim = [replace(call, inputs=x) for call, x in zip(slim, inputs, strict=True)]
                formed = {name: _times(each, known) for name, each in formed.items()}
            slim = [replace(call, output_gradient=_times(call.output_gradient, kept)) for call in slim]
            part = map_each(lambda g: g[0], trained_gradients(step, replace(passed, calls=slim, problems=1)))
            part |= {name: torch.tensordot(kept.to(each), each, dims=1) for name, each in formed.items()}
        total = add(total, part) if total else part
        if not known.all():  # of these alone: one example must not decide how others are treated
            odd = some.take(~known)
            part, more = _formed(replace(step, batch=odd), bound)
            total, clipped = add(total, part, len(odd)), clipped + more
    return scaled(total, 1 / count), clipped


def _times(rows: Tensor, shares: Tensor) -> Tensor:
    """So much of each example, and zeros where that is nothing, even in the place of NaN.

    A layer may have seen several rows of each example, [n * rows, ...].
    """
    each = rules.split_problems(rows, len(shares))
    own = shares.view(-1, *[1] * (each.dim() - 1))
    return torch.where(own > 0, each * own, 0.0).reshape(rows.shape)


def _formed(step: Step, bound: float) -> tuple[Params, float]:
    """The same for any model, with the gradients of some examples at a time."""
    clipped = 0.0

    def shrunk(each: Params) -> Params:
        nonlocal clipped
        lengths = example_norms(each)
        clipped += float((lengths > bound).sum())
        kept = shrinkage(lengths, bound)
        return map_each(lambda g: _times(g, kept.to(g.device)), each)

    return mean_over_examples(step, shrunk), clipped


def mean_over_examples(step: Step, change: Callable[[Params], Params]) -> Params:
    """The mean of the examples' gradients [n, ...] after ``change``, a bounded number of examples at a time."""
    total: Params = {}
    size = max(1, ENTRIES_AT_ONCE // max(1, sum(p.numel() for p in step.params.values())))
    for start in range(0, len(step.batch), size):
        each = example_gradients(step, step.batch.take(slice(start, start + size)))
        part = map_each(lambda g: g.sum(0), change(each))
        total = map_each(torch.add, total, part) if total else part
    return scaled(total, 1 / len(step.batch))


def example_norms(each: Params) -> Tensor:
    """[n]: the l2 norm of every example's gradient over all tensors."""
    device = next(iter(each.values())).device  # a model may be spread over several
    return torch.stack([g.flatten(1).square().sum(1).to(device) for g in each.values()]).sum(0).sqrt()


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
