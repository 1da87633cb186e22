"""DCS2 and DCS2+ (Wu et al.): gradients of concealed samples hide those of the samples a user calls sensitive."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.trees import add, scaled
from gradveil.core.types import Batch, Params
from gradveil.defenses.base import Defense, Step
from gradveil.defenses.concealed import Concealed, Search, Starts, classes, start_points
from gradveil.defenses.registry import DEFENSES

Sensitive = Callable[[Batch], Tensor] | Tensor
"""A predicate, or a mask over the client's local data: which examples are sensitive, as booleans."""


@DEFENSES.register("dcs2")
@dataclass(frozen=True, kw_only=True, eq=False)
class DCS2(Defense):
    """DCS2 (Wu et al. 2022): adds gradients of samples that look unlike the sensitive ones but have like gradients."""

    name: ClassVar[str] = "dcs2"
    gains_together: ClassVar[bool] = True

    iterations: int = 1000
    lr: float = 0.1
    alpha: float = 0.1
    beta: float = 0.001
    mix: float = 0.3
    k: int = 1
    sensitive: str | Sensitive = "all"
    label: int | None = None
    start: Literal["batch", "public", "noise"] = "batch"
    public: str = "samples"
    combine: Literal["add", "literal", "average", "replace"] = "add"
    box: bool = True

    def __post_init__(self) -> None:
        for option, low in (("iterations", 1), ("k", 1), ("alpha", 0), ("beta", 0)):
            self._require(low <= getattr(self, option) < math.inf, option, f"at least {low}")
        self._require(0 < self.lr < math.inf, "lr", "above 0")
        self._require(0 <= self.mix <= 1, "mix", "from 0 to 1")
        self._require(self.start in ("batch", "public", "noise"), "start", "batch, public or noise")
        modes = ("add", "literal", "average", "replace")
        self._require(self.combine in modes, "combine", "add, literal, average or replace")
        told = isinstance(self.sensitive, Tensor) or callable(self.sensitive)
        self._require(told or self.sensitive in ("all", "first", "label"), "sensitive", "all, first or label")
        if (self.label is not None) != (not told and self.sensitive == "label"):
            raise GradveilError(f"defense {self.name}: sensitive=label and label=NUMBER go together")
        if self.label is not None:
            self._require(self.label >= 0, "label", "at least 0")
        if self.combine == "replace" and self.start != "batch":
            raise GradveilError(f"defense {self.name}: combine=replace replaces examples, so it needs start=batch")

    def _require(self, good: bool, option: str, allowed: str) -> None:
        if not good:
            raise GradveilError(f"defense {self.name}: {option} is {allowed}, not {getattr(self, option)}")

    def prepared(self, start: Step) -> Defense:
        """Refuse what would silently protect nobody: a label that no example can have, a mask of other data."""
        if self.label is not None and self.label >= classes(start):
            raise GradveilError(f"defense {self.name}: label is below the model's {classes(start)}, not {self.label}")
        if isinstance(self.sensitive, Tensor) and len(self.sensitive) != len(start.batch):
            raise GradveilError(
                f"defense {self.name}: the mask of sensitive examples has {len(self.sensitive)} entries, "
                f"the client has {len(start.batch)} examples"
            )
        return self

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return self.on_gradients([gradient], [step])[0]

    def on_gradients(self, gradients: Sequence[Params], steps: Sequence[Step]) -> list[Params]:
        """The concealed samples of all clients are searched as one batch."""
        masks = [self.sensitive_in(step) for step in steps]
        for step, mask in zip(steps, masks, strict=True):
            step.log.add("sensitive", float(mask.sum()))
        acting = [i for i, mask in enumerate(masks) if mask.any()]
        starts = [self._starts(steps[i], masks[i]) for i in acting]
        targets = [steps[i].batch.take(masks[i].nonzero()[:, 0].repeat_interleave(self.k)) for i in acting]
        search = Search(iterations=self.iterations, lr=self.lr, alpha=self.alpha, beta=self.beta, box=self.box)
        hidden = search.run_each([steps[i] for i in acting], targets, [start.batch for start in starts])
        shared = list(gradients)
        for i, start, target, found in zip(acting, starts, targets, hidden, strict=True):
            shared[i] = self._hidden_in(gradients[i], steps[i], masks[i], start, target, found)
        return shared

    def _starts(self, step: Step, sensitive: Tensor) -> Starts:
        return start_points(step, sensitive, each=self.k, kind=self.start, public=self.public, defense=self.name)

    def _hidden_in(
        self, gradient: Params, step: Step, sensitive: Tensor, starts: Starts, targets: Batch, found: Concealed
    ) -> Params:
        """What one client sends, once its concealed samples are found."""
        for name in ("cosine", "distance", "start_cosine", "start_distance"):
            step.log.add(name, getattr(found, name).mean())
        shared = self._combined(gradient, step, found.batch, targets.labels)
        if self.combine == "replace":
            shared = _without(shared, step, starts.origin, sensitive)
        step.log.add("opposed", float(product(shared, gradient) < 0))
        return shared

    def sensitive_in(self, step: Step) -> Tensor:
        """Which examples of the step are sensitive: a mask [n]."""
        labels = step.batch.labels
        places = torch.arange(len(labels)) if step.index is None else step.index
        if isinstance(self.sensitive, Tensor):
            found = self._masked(self.sensitive, places)
        elif callable(self.sensitive):
            found = self.sensitive(step.batch)
            if found.dtype != torch.bool or found.shape != labels.shape:
                raise GradveilError(f"defense {self.name}: sensitive(batch) returns booleans, one for each example")
        elif self.sensitive == "label":
            found = labels.eq(-1 if self.label is None else self.label)
        else:
            found = places == 0 if self.sensitive == "first" else places >= 0
        return found.to(labels.device)

    def _masked(self, mask: Tensor, places: Tensor) -> Tensor:
        if mask.dtype != torch.bool or mask.dim() != 1 or len(mask) <= int(places.max()):
            raise GradveilError(
                f"defense {self.name}: sensitive is a mask of booleans, one for each of the client's local examples"
            )
        return mask[places.to(mask.device)]

    def _combined(self, gradient: Params, step: Step, hidden: Batch, sensitive_labels: Tensor) -> Params:
        """Equation (7): the gradient and those of the concealed samples, under their own and the sensitive label."""
        examples, added = len(step.batch), len(hidden)
        own, as_sensitive = step.gradient(hidden), step.gradient(Batch(hidden.inputs, sensitive_labels))
        mean = add(scaled(own, self.mix), as_sensitive, 1 - self.mix)
        shared = add(gradient, mean, added if self.combine == "literal" else added / examples)
        return scaled(shared, examples / (examples + added)) if self.combine == "average" else shared


@DEFENSES.register("dcs2plus")
@dataclass(frozen=True, kw_only=True, eq=False)
class DCS2Plus(DCS2):
    """DCS2+ (Wu et al. 2022): DCS2, and what is sent never points against the gradient of the batch."""

    name: ClassVar[str] = "dcs2plus"

    margin: float = 0.0
    strict: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 <= self.margin < math.inf, "margin", "at least 0")

    def on_gradients(self, gradients: Sequence[Params], steps: Sequence[Step]) -> list[Params]:
        shared = super().on_gradients(gradients, steps)
        return [self._projected(*each) for each in zip(shared, gradients, steps, strict=True)]

    def _projected(self, shared: Params, gradient: Params, step: Step) -> Params:
        if shared is gradient:
            return gradient
        acts = product(shared, gradient) < 0 or (self.strict and _any_entry_opposed(shared, gradient))
        step.log.add("projected", float(acts))
        return project(shared, gradient, margin=self.margin) if acts else shared


def project(shared: Params, gradient: Params, *, margin: float = 0.0) -> Params:
    """The nearest point to ``shared`` that does not point against ``gradient``: shared + v gradient, v >= ``margin``.

    The quadratic program of equation (9) has one unknown, v = max(0, -<shared, gradient> / <gradient, gradient>).
    """
    along, square = product(shared, gradient), product(gradient, gradient)
    if square == 0:
        return shared
    v = -along / square
    if v > 0:  # a hair more, so that rounding cannot leave the product below zero
        widest = max(torch.finfo(tensor.dtype).eps for tensor in shared.values())
        v += 32 * widest * math.sqrt(product(shared, shared) / square)
    return add(shared, gradient, max(margin, v))


def _without(shared: Params, step: Step, origin: Tensor, sensitive: Tensor) -> Params:
    """``shared`` less what those examples gave to it whose places the concealed samples take."""
    gone = torch.zeros_like(sensitive)
    gone[origin[origin >= 0]] = True
    gone &= ~sensitive
    if not gone.any():
        return shared
    return add(shared, step.gradient(step.batch.take(gone)), -int(gone.sum()) / len(step.batch))


def product(a: Params, b: Params) -> float:
    """The inner product over all entries, in double precision."""
    return sum(float((a[name].double() * b[name].double()).sum()) for name in a)


def _any_entry_opposed(a: Params, b: Params) -> bool:
    return any(bool((tensor * b[name] < 0).any()) for name, tensor in a.items())
