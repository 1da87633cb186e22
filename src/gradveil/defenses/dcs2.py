"""DCS2 and DCS2+ (Wu et al.): gradients of concealed samples hide those of the samples a user calls sensitive.

A concealed sample lies far from a sensitive one and has a gradient that points the same way. All are searched together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import grad, vmap

from gradveil.core.errors import GradveilError
from gradveil.core.trees import add, dot, scaled
from gradveil.core.types import Batch, Params
from gradveil.defenses.base import DEFENSES, Defense, Step
from gradveil.defenses.public import public_images
from gradveil.engine import CudaGraphCache, cuda_settings, example_pass, gradients, products

Sensitive = Callable[[Batch], Tensor] | Tensor
"""A predicate, or a mask over the client's local data: which examples are sensitive, as booleans."""
SENSITIVE = "all, first, a number, a share such as 30%, mask-0110 or label"
Cosine = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Inputs [M, ...] -> the cosines [M] of their gradients to the wanted ones, and what the model says of the inputs,
[M, classes]; both have a slope in the inputs."""

PUBLIC = 50
"""How many public images there are to choose start points from."""
NUMBERS_TOGETHER = 2**28
"""Searches run together as long as one gradient of each of them has no more entries than this in all."""
TINY, TINY_SQUARE = 1e-8, 1e-16
"""Keep lengths and squared lengths of zero out of denominators, and their slopes finite."""


@dataclass(frozen=True)
class Starts:
    """Where M concealed samples start."""

    batch: Batch
    origin: Tensor
    """[M]: the example of the step's batch that a sample starts from, or -1."""


@dataclass(frozen=True)
class Concealed:
    """M concealed samples; cosines and distances [M] are to their sensitive samples."""

    inputs: Tensor
    cosine: Tensor
    distance: Tensor
    start_cosine: Tensor
    start_distance: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@DEFENSES.register("dcs2")
@dataclass(frozen=True, kw_only=True, eq=False)
class DCS2(Defense):
    """DCS2 (Wu et al. 2022): adds gradients of samples that look unlike the sensitive ones but have like gradients."""

    batches_clients: ClassVar[bool] = True

    iterations: int = 1000
    lr: float = 0.1
    alpha: float = 0.1
    """Weight of the distance to the sensitive input."""
    beta: float = 0.001
    """Weight of the distance to what the model says of the sensitive input."""
    mix: float = 0.3
    k: int = 1
    sensitive: str | Sensitive = "all"
    label: int | None = None
    start: Literal["batch", "public", "noise"] = "batch"
    start_label: Literal["other", "same", "any"] = "other"
    """The label that a start should have, seen from its sensitive example."""
    public: str = "samples"
    combine: Literal["add", "literal", "average", "replace"] = "add"
    box: bool = True
    """Keep inputs in [0, 1]."""

    def __post_init__(self) -> None:
        self._require_kinds()
        for option, low in (("iterations", 1), ("k", 1), ("alpha", 0), ("beta", 0)):
            self._require(low <= getattr(self, option) < math.inf, option, f"at least {low}")
        self._require(0 < self.lr < math.inf, "lr", "above 0")
        self._require(0 <= self.mix <= 1, "mix", "from 0 to 1")
        told = isinstance(self.sensitive, Tensor) or callable(self.sensitive)
        named = r"all|first|label|[1-9]\d*|(100|[1-9]?\d)(\.\d+)?%|mask-[01]+"
        self._require(told or bool(re.fullmatch(named, str(self.sensitive))), "sensitive", SENSITIVE)
        if (self.label is not None) != (not told and self.sensitive == "label"):
            raise GradveilError(f"defense {self.name}: sensitive=label and label=NUMBER go together")
        if self.label is not None:
            self._require(self.label >= 0, "label", "at least 0")
        if self.combine == "replace" and self.start != "batch":
            raise GradveilError(f"defense {self.name}: combine=replace replaces examples, so it needs start=batch")

    def for_round(self, start: Step) -> Defense:
        """Refuse what would silently protect nobody: a label that no example can have, a mask of other data, a share
        of so few examples that none is in it.
        """
        if self.label is not None and self.label >= (classes := start.classes()):
            raise GradveilError(f"defense {self.name}: label is below the model's {classes}, not {self.label}")
        count, mask = len(start.batch), self.mask
        named = self.by_place(torch.arange(count))
        if count and named is not None and not named.any():
            raise GradveilError(
                f"defense {self.name}: {self.sensitive} of {count} examples is nobody: call a number of them sensitive"
            )
        if mask is not None and len(mask) != count:
            raise GradveilError(
                f"defense {self.name}: the mask of sensitive examples has {len(mask)} entries, "
                f"the client has {count} examples"
            )
        return self

    @property
    def mask(self) -> Tensor | None:
        """Over the client's local data, where one was given."""
        if isinstance(self.sensitive, str) and self.sensitive.startswith("mask-"):
            return torch.tensor([digit == "1" for digit in self.sensitive.removeprefix("mask-")])
        return self.sensitive if isinstance(self.sensitive, Tensor) else None

    def by_place(self, places: Tensor) -> Tensor | None:
        """Which of these places [n] of the local data are sensitive; None if places do not tell.

        A share is spread evenly: with 30%, those places at which three tenths of the count reach the next number.
        """
        if not isinstance(self.sensitive, str) or self.sensitive == "label" or self.mask is not None:
            return None
        if self.sensitive.endswith("%"):
            share = float(self.sensitive.removesuffix("%")) / 100
            reached = [((places.double() + after) * share + 1e-9).floor() for after in (0, 1)]
            return reached[1] > reached[0]
        first = {"all": math.inf, "first": 1}.get(self.sensitive)
        return places < (int(self.sensitive) if first is None else first)

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return self.on_gradients([gradient], [step])[0]

    def on_gradients(self, gradients: Sequence[Params], steps: Sequence[Step]) -> list[Params]:
        """The concealed samples of all clients are searched as one batch."""
        masks = [self.sensitive_in(step) for step in steps]
        for step, mask in zip(steps, masks, strict=True):
            step.log.add("sensitive", float(mask.sum()))
        acting = [i for i, mask in enumerate(masks) if mask.any()]
        shared = list(gradients)
        if not acting:
            return shared
        starts = [self.start_points(steps[i], masks[i]) for i in acting]
        targets = [steps[i].batch.take(masks[i].nonzero()[:, 0].repeat_interleave(self.k)) for i in acting]
        found = self.conceal(steps[acting[0]], _one_batch(targets), _one_batch([start.batch for start in starts]))
        sizes = [len(batch) for batch in targets]
        parts = zip(*(torch.split(tensor, sizes) for tensor in found.tensors.values()), strict=True)
        for i, start, target, part in zip(acting, starts, targets, parts, strict=True):
            shared[i] = self._hidden_in(gradients[i], steps[i], masks[i], start, target.labels, Concealed(*part))
        return shared

    def sensitive_in(self, step: Step) -> Tensor:
        """Which examples of the step are sensitive: a mask [n]."""
        labels = step.batch.labels
        places = torch.arange(len(labels)) if step.index is None else step.index
        if (mask := self.mask) is not None:
            if mask.dtype != torch.bool or mask.dim() != 1 or len(mask) <= int(places.max()):
                raise GradveilError(
                    f"defense {self.name}: sensitive is a mask of booleans, one for each of the client's local examples"
                )
            found = mask[places.to(mask.device)]
        elif callable(self.sensitive):
            found = self.sensitive(step.batch)
            if found.dtype != torch.bool or found.shape != labels.shape:
                raise GradveilError(f"defense {self.name}: sensitive(batch) returns booleans, one for each example")
        elif (named := self.by_place(places)) is not None:
            found = named
        else:
            found = labels.eq(-1 if self.label is None else self.label)
        return found.to(labels.device)

    def start_points(self, step: Step, sensitive: Tensor) -> Starts:
        """``k`` starts for every sensitive example, those of one example in a row; ``sensitive`` is a mask [n].

        Other examples come in this order: of another label and not sensitive, of another label, the rest; chance
        decides among equals. What they do not supply is noise: uniform pixels, and a random other label. With
        ``start_label`` the sensitive example's own label, or any, is wanted instead of another.
        """
        targets, each = step.batch.take(sensitive), self.k
        labels, classes = targets.labels.repeat_interleave(each), step.classes()
        noise = step.rng.uniform((len(labels), *targets.inputs.shape[1:]), targets.inputs)
        shift = 1 + step.rng.integers(max(1, classes - 1), labels.shape, labels.device)
        others, nowhere = (labels + shift * (self.start_label != "same")) % classes, torch.full_like(labels, -1)
        if self.start == "noise":
            return Starts(Batch(noise, others), nowhere)
        from_batch = self.start == "batch"
        offered = step.batch
        if not from_batch:
            offered = public_images(self.public, step.batch.inputs, PUBLIC, public=step.public, defense=self.name)
        other = offered.labels != targets.labels[:, None]
        wanted = {"other": other, "same": ~other, "any": torch.zeros_like(other)}[self.start_label]
        worth = 2.0 * wanted + (~sensitive if from_batch else 0) + step.rng.uniform(other.shape, targets.inputs)
        if from_batch:  # no example is a start for itself
            worth = worth.masked_fill(torch.eye(len(offered), dtype=torch.bool, device=worth.device)[sensitive], -1.0)
        count = min(each, len(offered) - from_batch)
        best = worth.topk(count, dim=1).indices
        origin = torch.cat([best, best.new_full((len(targets), each - count), -1)], dim=1).flatten()
        chosen, found = offered.take(origin), origin >= 0
        known = found & (chosen.labels < classes)  # public images may be of other classes than the client's
        inputs = torch.where(found.view(-1, *[1] * (noise.dim() - 1)), chosen.inputs, noise)
        return Starts(Batch(inputs, torch.where(known, chosen.labels, others)), origin if from_batch else nowhere)

    def conceal(self, step: Step, targets: Batch, starts: Batch) -> Concealed:
        """One concealed sample for each of M targets and starts: stepped together, or as many as memory takes."""
        together = max(1, NUMBERS_TOGETHER // sum(parameter.numel() for parameter in step.params.values()))
        groups = [slice(first, first + together) for first in range(0, len(targets), together)]
        with cuda_settings(tf32=False, benchmark=True):
            parts = [self._searched(step, targets.take(group), starts.take(group)).tensors for group in groups]
        return Concealed(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def _searched(self, step: Step, targets: Batch, starts: Batch) -> Concealed:
        """Adam on equation (6) of the paper, its rate cut by ten at 3/8, 5/8 and 7/8 of the iterations."""
        cosine_of, says = gradient_cosine(step, targets, starts.labels)

        def objective(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Of every sample, [M]; and the cosine and the distance in it."""
            cosine, said = cosine_of(x)
            distance = torch.linalg.vector_norm((x - targets.inputs).flatten(1), dim=1)
            apart = torch.linalg.vector_norm(said - says, dim=1)
            return -cosine + self.alpha / (distance + TINY) + self.beta * apart, cosine, distance

        def input_gradient(x: Tensor) -> Tensor:
            with torch.enable_grad():
                point = x.detach().requires_grad_()
                return torch.autograd.grad(objective(point)[0].sum(), point)[0]

        def figures(x: Tensor) -> list[Tensor]:
            with torch.enable_grad():  # cosines differentiate inside
                return [figure.detach() for figure in objective(x.detach().requires_grad_())[1:]]

        replayed, point = CudaGraphCache(input_gradient), starts.inputs
        mean, square = torch.zeros_like(point), torch.zeros_like(point)
        for i in range(self.iterations):
            gradient = replayed(point)
            mean, square = torch.lerp(mean, gradient, 0.1), torch.lerp(square, gradient * gradient, 0.001)
            move = (mean / (1 - 0.9 ** (i + 1))) / ((square / (1 - 0.999 ** (i + 1))).sqrt() + TINY)
            rate = self.lr * 0.1 ** sum(8 * i >= eighths * self.iterations for eighths in (3, 5, 7))
            point = point - rate * move
            point = point.clamp(0, 1) if self.box else point
        before, after = figures(starts.inputs), figures(point)
        return Concealed(point, *after, *before)

    def _hidden_in(
        self, gradient: Params, step: Step, sensitive: Tensor, starts: Starts, labels: Tensor, found: Concealed
    ) -> Params:
        """What one client sends, once its concealed samples are found; ``labels`` [M] are the sensitive ones.

        Equation (7): the gradient and those of the concealed samples, under their own and the sensitive label.
        """
        for name, figure in found.tensors.items():
            if name != "inputs":
                step.log.add(name, figure.mean())
        examples, added = len(step.batch), len(labels)
        own = step.gradient(Batch(found.inputs, starts.batch.labels))
        mean = add(scaled(own, self.mix), step.gradient(Batch(found.inputs, labels)), 1 - self.mix)
        shared = add(gradient, mean, added if self.combine == "literal" else added / examples)
        if self.combine == "average":
            shared = scaled(shared, examples / (examples + added))
        if self.combine == "replace":  # less what those examples gave whose places the concealed samples take
            gone = torch.zeros_like(sensitive)
            gone[starts.origin[starts.origin >= 0]] = True
            gone &= ~sensitive
            if gone.any():
                shared = add(shared, step.gradient(step.batch.take(gone)), -int(gone.sum()) / examples)
        step.log.add("opposed", float(product(shared, gradient) < 0))
        return shared


@DEFENSES.register("dcs2plus")
@dataclass(frozen=True, kw_only=True, eq=False)
class DCS2Plus(DCS2):
    """DCS2+ (Wu et al. 2022): DCS2, and what is sent never points against the gradient of the batch."""

    margin: float = 0.0
    strict: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 <= self.margin < math.inf, "margin", "at least 0")

    def on_gradients(self, gradients: Sequence[Params], steps: Sequence[Step]) -> list[Params]:
        sent = super().on_gradients(gradients, steps)
        for i, (shared, gradient, step) in enumerate(zip(list(sent), gradients, steps, strict=True)):
            if shared is not gradient:
                opposed = self.strict and any(bool((tensor * gradient[n] < 0).any()) for n, tensor in shared.items())
                acts = product(shared, gradient) < 0 or opposed
                step.log.add("projected", float(acts))
                sent[i] = project(shared, gradient, margin=self.margin) if acts else shared
        return sent


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


def product(a: Params, b: Params) -> float:
    """The inner product over all entries, in double precision."""
    return sum(float((a[name].double() * b[name].double()).sum()) for name in a)


def _one_batch(parts: Sequence[Batch]) -> Batch:
    return Batch(torch.cat([part.inputs for part in parts]), torch.cat([part.labels for part in parts]))


def gradient_cosine(step: Step, targets: Batch, labels: Tensor) -> tuple[Cosine, Tensor]:
    """How alike the gradients of inputs under labels [M] are to those of M targets, and what the model says of these.

    One pass of a batch serves all where the model's layers allow that and it is large; else every example is
    differentiated alone, which for few weights is quicker.
    """
    return _shared(step, targets, labels) or _each_alone(step, targets, labels)


def _shared(step: Step, targets: Batch, labels: Tensor) -> tuple[Cosine, Tensor] | None:
    passed = example_pass(step, targets)
    if passed is None:
        return None
    with torch.no_grad():
        wanted = gradients(passed, step.params.keys())
        squared = products.squares(wanted)

    def cosine(inputs: Tensor) -> tuple[Tensor, Tensor]:
        tried = passed.network.differentiate(step.loss, inputs.unsqueeze(1), labels.unsqueeze(1), again=True)
        found = products.total(products.moments(tried, wanted, squared).values())
        return _cosine(found.product, found.square, found.observed), tried.outputs[:, 0]

    return cosine, passed.outputs[:, 0].detach()


def _each_alone(step: Step, targets: Batch, labels: Tensor) -> tuple[Cosine, Tensor]:
    def example(x: Tensor, label: Tensor) -> tuple[Params, Tensor]:
        """The gradient of one example and what the model says of it, from one pass."""

        def loss(params: Params) -> tuple[Tensor, Tensor]:
            said: list[Tensor] = []

            def noted(outputs: Tensor, targets: Tensor) -> Tensor:
                said.append(outputs)
                return step.loss(outputs, targets)

            value = step.model.loss(noted, {**step.frozen, **params}, x[None], label[None])
            return value, said[0][0]

        gradient, outputs = grad(loss, has_aux=True)(step.params)
        return gradient, outputs

    wanted, says = vmap(example)(targets.inputs, targets.labels)

    def one(x: Tensor, label: Tensor, wanted: Params) -> tuple[Tensor, Tensor]:
        gradient, said = example(x, label)
        # A model may be spread over several devices: everything comes back to that of the inputs.
        cosine = _cosine(dot(gradient, wanted), dot(gradient, gradient), dot(wanted, wanted))
        return cosine.to(x.device), said.to(x.device)

    return lambda inputs: vmap(one)(inputs, labels, wanted), says.to(targets.inputs.device)


def _cosine(product: Tensor, square: Tensor, other: Tensor) -> Tensor:
    """From the product of two vectors and their squared lengths."""
    return product / ((square + TINY_SQUARE).sqrt() * (other + TINY_SQUARE).sqrt())
