"""Concealed samples of DCS2: inputs far from a sensitive one whose gradient points the same way, searched together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradveil.core.graphs import Replayed
from gradveil.core.precise import kernels_tried, without_tf32
from gradveil.core.types import Batch
from gradveil.defenses.alike import alike_to
from gradveil.defenses.base import Step
from gradveil.defenses.public import public_images

_PUBLIC = 50
"""How many public images there are to choose start points from."""
_NUMBERS_TOGETHER = 2**28
"""Searches run together as long as one gradient of each of them has no more entries than this in all."""
_TINY = 1e-8
"""Keeps lengths of zero out of denominators."""


@dataclass(frozen=True)
class Starts:
    """Where M concealed samples start."""

    batch: Batch
    origin: Tensor
    """[M]: the example of the step's batch that a sample starts from, or -1."""


@dataclass(frozen=True)
class Concealed:
    """M concealed samples with the labels of their starts. Cosines and distances [M] are to their sensitive samples."""

    batch: Batch
    cosine: Tensor
    distance: Tensor
    start_cosine: Tensor
    start_distance: Tensor


def classes(step: Step) -> int:
    """How many classes the model tells apart."""
    return int(step.model({**step.frozen, **step.params}, step.batch.inputs[:2]).shape[-1])


def start_points(
    step: Step,
    sensitive: Tensor,
    *,
    each: int,
    kind: Literal["batch", "public", "noise"],
    public: str = "samples",
    defense: str = "dcs2",
) -> Starts:
    """``each`` starts for every sensitive example, those of one example in a row; ``sensitive`` is a mask [n].

    Other examples come in this order: of another label and not sensitive, of another label, the rest; chance decides
    among equals. What they do not supply is noise with another label.
    """
    targets = step.batch.take(sensitive)
    noise = _noise(step, targets, each)
    if kind == "noise":
        return noise
    from_batch = kind == "batch"
    offered = step.batch if from_batch else public_images(public, targets.inputs, _PUBLIC, defense=defense)
    other = offered.labels != targets.labels[:, None]
    worth = 2.0 * other + (~sensitive if from_batch else 0) + step.rng.uniform(other.shape, targets.inputs)
    if from_batch:  # no example is a start for itself
        worth = worth.masked_fill(torch.eye(len(offered), dtype=torch.bool, device=worth.device)[sensitive], -1.0)
    count = min(each, len(offered) - from_batch)
    best = worth.topk(count, dim=1).indices
    origin = torch.cat([best, best.new_full((len(targets), each - count), -1)], dim=1).flatten()
    chosen, found = offered.take(origin), origin >= 0
    known = found & (chosen.labels < classes(step))  # public images may be of other classes than the client's
    inputs = torch.where(found[:, None, None, None], chosen.inputs, noise.batch.inputs)
    labels = torch.where(known, chosen.labels, noise.batch.labels)
    return Starts(Batch(inputs, labels), origin if from_batch else torch.full_like(origin, -1))


@dataclass(frozen=True, kw_only=True)
class Search:
    """How concealed samples are looked for: Adam on equation (6) of the paper, all samples in one batch."""

    iterations: int
    lr: float
    alpha: float
    """Weight of the distance to the sensitive input."""
    beta: float
    """Weight of the distance to what the model says of the sensitive input."""
    box: bool
    """Keep inputs in [0, 1]."""

    def run_each(self, steps: Sequence[Step], targets: Sequence[Batch], starts: Sequence[Batch]) -> Sequence[Concealed]:
        """:meth:`run` for several clients at the same parameters, all their samples in one batch."""
        if len(steps) < 2:
            return [self.run(*each) for each in zip(steps, targets, starts, strict=True)]
        sizes = [len(batch) for batch in targets]
        return _parted(self.run(steps[0], _one_batch(targets), _one_batch(starts)), sizes)

    def run(self, step: Step, targets: Batch, starts: Batch) -> Concealed:
        """One concealed sample for each of M targets and starts: stepped together, or as many as memory takes."""
        size = sum(parameter.numel() for parameter in step.params.values())
        together = max(1, _NUMBERS_TOGETHER // size)
        groups = [slice(first, first + together) for first in range(0, len(targets), together)]
        with kernels_tried(), without_tf32():
            parts = [self._together(step, targets.take(group), starts.take(group)) for group in groups]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _together(self, step: Step, targets: Batch, starts: Batch) -> Concealed:
        alike, says = alike_to(step, targets, starts.labels)

        def objective(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Of every sample, [M]; and the cosine and the distance in it."""
            cosine, said = alike(x)
            distance = torch.linalg.vector_norm((x - targets.inputs).flatten(1), dim=1)
            apart = torch.linalg.vector_norm(said - says, dim=1)
            return -cosine + self.alpha / (distance + _TINY) + self.beta * apart, cosine, distance

        def slope(x: Tensor) -> Tensor:
            with torch.enable_grad():
                point = x.detach().requires_grad_()
                return torch.autograd.grad(objective(point)[0].sum(), point)[0]

        found = self._descend(Replayed(slope), starts.inputs)
        (_, *before), (_, *after) = (_figures(objective, x) for x in (starts.inputs, found))
        return Concealed(Batch(found, starts.labels), *after, *before)

    def _descend(self, slope: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
        """Adam, its rate cut by ten at 3/8, 5/8 and 7/8 of the iterations."""
        point, mean, square = start, torch.zeros_like(start), torch.zeros_like(start)
        for i in range(self.iterations):
            gradient = slope(point)
            mean, square = torch.lerp(mean, gradient, 0.1), torch.lerp(square, gradient * gradient, 0.001)
            move = (mean / (1 - 0.9 ** (i + 1))) / ((square / (1 - 0.999 ** (i + 1))).sqrt() + _TINY)
            rate = self.lr * 0.1 ** sum(8 * i >= eighths * self.iterations for eighths in (3, 5, 7))
            point = point - rate * move
            point = point.clamp(0, 1) if self.box else point
        return point


def _figures(objective: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> list[Tensor]:
    """What an objective that derives inside gives, without its slope."""
    with torch.enable_grad():
        return [figure.detach() for figure in objective(x.detach().requires_grad_())]


_FIGURES = ("cosine", "distance", "start_cosine", "start_distance")


def _one_batch(parts: Sequence[Batch]) -> Batch:
    return Batch(torch.cat([part.inputs for part in parts]), torch.cat([part.labels for part in parts]))


def _joined(parts: list[Concealed]) -> Concealed:
    figures = (torch.cat([getattr(part, name) for part in parts]) for name in _FIGURES)
    return Concealed(_one_batch([part.batch for part in parts]), *figures)


def _parted(whole: Concealed, sizes: list[int]) -> list[Concealed]:
    """The opposite of ``_joined``, by how many samples each part has."""
    tensors = (whole.batch.inputs, whole.batch.labels, *(getattr(whole, name) for name in _FIGURES))
    parts = zip(*(torch.split(tensor, sizes) for tensor in tensors), strict=True)
    return [Concealed(Batch(inputs, labels), *figures) for inputs, labels, *figures in parts]


def _noise(step: Step, targets: Batch, each: int) -> Starts:
    """Uniform pixels, and a random label that is not the sensitive one."""
    labels = targets.labels.repeat_interleave(each)
    inputs = step.rng.uniform((len(labels), *targets.inputs.shape[1:]), targets.inputs)
    count = classes(step)
    shift = 1 + step.rng.integers(max(1, count - 1), labels.shape, labels.device)
    return Starts(Batch(inputs, (labels + shift) % count), torch.full_like(labels, -1))
