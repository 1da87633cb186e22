"""Soteria (Sun et al., CVPR 2021): the classifier's weight gradient loses the columns that tell most about the input.

The score of an entry r_i of the representation is |r_i| / ||dr_i/dx||: how far the input has to move for that entry to
vanish. Those with the largest scores are pruned.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import jvp, vjp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Params
from gradveil.defenses.base import DEFENSES, Defense, InRound, Step
from gradveil.defenses.clip import sharing_layer
from gradveil.engine import CudaGraphCache, cached, forward_mode
from gradveil.models import Representation, classifier

INPUTS_AT_ONCE = {"cpu": 2**20, "cuda": 2**24}
"""So many input entries are differentiated together, by kind of device: more gains nothing and costs memory."""
PROBES = 8
"""Random directions of one look at all entries."""
LEAST_PROBES = 16
"""Fewer make estimates whose errors have longer tails than the margin counts on."""
MARGIN = 3.5
"""Standard errors between an estimate and the threshold from which on the entry counts as settled."""
ROWS = 64
"""Entries whose exact norms a GPU computes in one call."""
PARTS = 4
"""Exact norms are computed for so many parts of the batch, one after the other, while they are needed."""
WORTH_SCREENING = 1000
"""Entries times examples from which on random probes settle more than they cost: see docs/defenses/soteria.md."""
SMALL_WORK = 10**10
"""Entries times examples times parameters up to which an accelerator gets all exact norms before probes are started."""

Pull = Callable[[Tensor], tuple[Tensor]]
Pair = tuple[int, int]


@DEFENSES.register("soteria")
@dataclass(frozen=True, kw_only=True)
class Soteria(Defense):
    """Zero those columns of the classifier's weight gradient whose representation tells most about the input."""

    rate: float = 0.8
    layer: str = "classifier"
    score: Literal["paper", "released"] = "paper"
    offset: float = 0.0
    probes: int = 0
    screen: bool = True

    def __post_init__(self) -> None:
        self._require_kinds()
        self._require(0 <= self.rate <= 1, "rate", "from 0 to 1")
        self._require(self.probes == 0 or self.probes >= 4, "probes", "0 (exact norms) or at least 4")
        if self.offset != 0 and self.score != "released":
            raise GradveilError("defense soteria: offset belongs to score=released")

    def check(self, model: nn.Module) -> None:
        if self.layer == "classifier":
            if not any(isinstance(layer, nn.Linear) for layer in model.modules()):
                raise GradveilError(
                    f"defense soteria prunes a torch.nn.Linear, and {type(model).__name__} has none: end it with one"
                )
        elif not isinstance(dict(model.named_modules()).get(self.layer), nn.Linear):
            linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
            raise GradveilError(f"defense soteria: layer is one of {', '.join(['classifier', *linear])}")

    def for_round(self, start: Step) -> Defense:
        module = start.model.module
        layout = cached(module, ("soteria", self.layer), lambda: Layout(module, self.layer, start))
        if layout.sharing is not None and self.probes:
            raise GradveilError(
                f"defense soteria: probes need examples that do not influence each other, but layer {layout.sharing!r} "
                "takes statistics over the batch: use eval mode, or leave probes out"
            )
        return InRound(partial(self.prune, layout=layout))

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return self.for_round(step).on_gradient(gradient, step)

    def prune(self, gradient: Params, step: Step, layout: Layout) -> Params:
        """What is sent."""
        if layout.weight not in gradient:  # a frozen layer sends nothing that could be pruned
            step.log.add("pruned", 0.0)
            return gradient
        columns, sent = self._columns(step, layout), gradient[layout.weight]
        step.log.add("pruned", len(columns) / sent.shape[1])
        return {**gradient, layout.weight: sent.index_fill(1, columns.to(sent.device), 0.0)}

    def _columns(self, step: Step, layout: Layout) -> Tensor:
        """The columns to zero."""
        rows = RowNorms(layout, {**step.model.buffers, **step.frozen, **step.params}, step.batch.inputs)
        values, score = rows.values, Score(self.score == "paper", self.offset)
        features, width = values.shape[1], step.params[layout.weight].shape[1]
        if features != width:
            raise GradveilError(
                f"defense soteria: {layout.layer!r} takes {features // width} vectors per example, not "
                "one; choose a layer= behind the pooling"
            )
        count = round(self.rate * features)
        if not self.probes and 0 < count < features and self.screen:
            # probes and parts of a batch need examples that stand alone, and enough work to save
            shapes = {name: buffer.shape for name, buffer in step.model.module.named_buffers()}
            drawn = any(buffer.shape != shapes[name] for name, buffer in step.model.buffers.items())
            work = values.numel() * sum(tensor.numel() for tensor in step.params.values())
            small = values.device.type != "cpu" and work < SMALL_WORK
            if layout.sharing is None and not drawn and values.numel() >= WORTH_SCREENING and not small:
                return screened(rows, score, count, step.rng)
        norms = rows.estimated(self.probes, step.rng) if self.probes else rows.exact()
        return score.first(score(values, norms).sum(0), count)


class Layout:
    """What is known of a model: which function gives the representation, and which gradient loses columns."""

    def __init__(self, module: nn.Module, layer: str, start: Step) -> None:
        self.layer = classifier(module, start.batch.inputs) if layer == "classifier" else layer
        weight = module.get_submodule(self.layer).weight
        names = [name for name, parameter in module.named_parameters() if parameter is weight]
        if not names:
            raise GradveilError(
                f"defense soteria: the weight of {self.layer!r} is computed, not a parameter; set layer="
            )
        self.weight, self.sharing = names[0], sharing_layer(module)
        self.representation = Representation(module, self.layer)
        self.squares = CudaGraphCache(self._squares)
        self.norms = CudaGraphCache(self._norms)

    def _squares(self, given: tuple[Tensor, Params, Tensor]) -> Tensor:
        """[n, l]: the sum of (dr_i/dx v)^2 over the directions v of (inputs, parameters, directions [k, n, ...])."""
        inputs, at, directions = given

        def square(direction: Tensor) -> Tensor:
            slope: Tensor = jvp(lambda x: self.representation(x, at), (inputs,), (direction,))[1]
            return slope.square()

        with forward_mode:
            return vmap(square, chunk_size=2 * _at_once(inputs))(directions).sum(0)

    def _norms(self, given: tuple[Tensor, Params, Tensor]) -> Tensor:
        """[n, k]: ||dr_i/dx|| of the k entries of (inputs, parameters, entries)."""
        inputs, at, entries = given
        return row_norms(*self.differentiated(inputs, at), entries, _at_once(inputs))

    def differentiated(self, inputs: Tensor, at: Params) -> tuple[Tensor, Pull]:
        """The representation, and how a change of it comes back to the inputs."""
        unfolded = StridesUnfolded() if inputs.device.type == "cpu" else contextlib.nullcontext()
        with unfolded:
            values, pull = vjp(lambda x: self.representation(x, at), inputs)  # type: ignore[misc]  # three with has_aux alone
        return values, pull


@dataclass(frozen=True)
class Score:
    """What each example adds to an entry's score, and which sums mean that the entry is pruned first."""

    paper: bool
    offset: float = 0.0

    def __call__(self, values: Tensor, norms: Tensor) -> Tensor:
        """[n, l] from the representation and the norms of its derivatives; 0 for an entry that is off."""
        over, under = (values.abs(), norms) if self.paper else (norms, values + self.offset)
        return torch.where(over == 0, 0.0, over / under)

    def priority(self, total: Tensor) -> Tensor:
        """The larger, the sooner pruned: the released score is an inverse one, with the sign of the entry."""
        return total if self.paper else -total.abs()

    def first(self, total: Tensor, count: int) -> Tensor:
        """The ``count`` entries that are pruned first."""
        return self.priority(total).sort(descending=True, stable=True).indices[:count]

    def bias_and_variance(self, probes: int) -> tuple[float, float]:
        """Mean of estimate / truth, and the relative variance of the estimate, when norms come from so many probes."""
        bias = mean_of_root(probes, -1 if self.paper else 1)
        second = probes / (probes - 2) if self.paper else 1.0
        return bias, second / bias**2 - 1


def mean_of_root(probes: int, power: Literal[-1, 1] = 1) -> float:
    """The mean of the root of the mean square of so many standard normal numbers, or of its inverse.

    The sum of squares is chi-square distributed, so that this is known. Slopes along random signs are nearly normal.

    >>> round(mean_of_root(4), 4), round(mean_of_root(1000), 4), round(mean_of_root(4, -1), 4)
    (0.94, 0.9998, 1.2533)
    """
    half = probes / 2
    return math.exp(math.lgamma(half + power / 2) - math.lgamma(half) - power / 2 * math.log(half))


class RowNorms:
    """||dr_i/dx|| of every example and entry of a representation: [n, l].

    The derivative is that of the sum of r_i over the batch by one example, which in eval mode is its own r_i.
    """

    def __init__(self, layout: Layout, at: Params, inputs: Tensor) -> None:
        self._layout, self._at, self._inputs = layout, at, inputs

    @cached_property
    def _differentiated(self) -> tuple[Tensor, Pull]:
        return self._layout.differentiated(self._inputs, self._at)

    @property
    def values(self) -> Tensor:
        """The representation, [n, l]."""
        return self._differentiated[0]

    def of(self, examples: Tensor) -> RowNorms:
        """The same of some examples."""
        return RowNorms(self._layout, self._at, self._inputs[examples])

    def exact(self, rows: Tensor | None = None) -> Tensor:
        """[n, rows]: batched backward passes by the inputs alone, without gradients of parameters."""
        rows = torch.arange(self.values.shape[1], device=self.values.device) if rows is None else rows
        if not self._inputs.is_cuda:
            return row_norms(*self._differentiated, rows, _at_once(self._inputs))
        padded = torch.cat([rows, rows[:1].expand(-len(rows) % ROWS)])  # so that one graph serves any number of rows
        found = [self._layout.norms((self._inputs, self._at, some)) for some in torch.split(padded, ROWS)]
        return torch.cat(found, dim=1)[:, : len(rows)]

    def squares(self, probes: int, rng: Stream) -> Tensor:
        """[n, l]: the sum over random directions v of (dr_i/dx v)^2, of which each has the mean ||dr_i/dx||^2."""
        directions = rng.signs((probes, *self._inputs.shape), self._inputs)
        try:
            return self._layout.squares((self._inputs, self._at, directions))
        except NotImplementedError as error:  # PyTorch names the operation
            raise GradveilError(
                "defense soteria: this model has an operation without a forward derivative: write "
                "soteria:screen=false and leave probes out"
            ) from error

    def estimated(self, probes: int, rng: Stream) -> Tensor:
        return (self.squares(probes, rng) / probes).sqrt()


def row_norms(values: Tensor, pull: Pull, rows: Tensor, at_once: int) -> Tensor:
    """[n, rows]: the norm of what comes back to each example from one entry of the representation at a time."""

    def norms(row: Tensor) -> Tensor:
        slopes = pull(torch.zeros_like(values).index_fill(1, row[None], 1.0))[0]
        return cast(Tensor, torch.linalg.vector_norm(slopes.flatten(1), dim=1))

    return vmap(norms, chunk_size=at_once)(rows).T


def _at_once(inputs: Tensor) -> int:
    """Entries that are differentiated together."""
    return max(1, INPUTS_AT_ONCE.get(inputs.device.type, 2**20) // inputs.numel())


def screened(rows: RowNorms, score: Score, count: int, rng: Stream) -> Tensor:
    """The ``count`` columns to prune: random probes settle the clear cases, exact norms the others.

    Probes are drawn while they settle more entries than they cost. Doubtful entries fall as probes ** -0.5, and one
    costs about two probes: the sum of both costs is least where there are as many of each. Entries that are still in
    doubt get exact norms, of some examples at a time, since what is exact makes the sum surer.
    """
    squares, probes, settled = torch.zeros_like(rows.values), 0, False
    while not settled:
        squares, probes = squares + rows.squares(PROBES, rng), probes + PROBES
        bias, variance = score.bias_and_variance(probes)
        terms = score(rows.values, (squares / probes).sqrt()) / bias  # what each example adds to an entry's score
        unsure = variance * terms.square()
        settled = probes >= LEAST_PROBES and int(_doubtful(terms, unsure, score, count).sum()) <= probes
    parts = torch.arange(len(terms), device=terms.device).chunk(PARTS)
    done = torch.zeros(terms.shape[1], dtype=torch.int64, device=terms.device)
    while bool((doubtful := _doubtful(terms, unsure, score, count) & (done < len(parts))).any()):
        part = int(done[doubtful].min())
        entries, examples = (doubtful & (done == part)).nonzero().squeeze(1), parts[part]
        exact = score(rows.values[examples][:, entries], rows.of(examples).exact(entries))
        terms[examples[:, None], entries] = exact
        unsure[examples[:, None], entries] = 0.0
        done[entries] += 1
    return score.first(terms.sum(0), count)


def _doubtful(terms: Tensor, unsure: Tensor, score: Score, count: int) -> Tensor:
    """[l]: the entries whose score is too close to the threshold to say on which side it is."""
    priority = score.priority(terms.sum(0))
    threshold = priority.topk(count).values[-1]
    return (priority - threshold).abs() <= MARGIN * unsure.sum(0).sqrt()


class PlainConvolutions(TorchFunctionMode, ABC):
    """While it lasts, convolutions of images in one group and without dilation may be computed in another way."""

    @abstractmethod
    def convolved(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
    ) -> Tensor | None:
        """The same result in another way; None: as usual."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.conv2d and not kwargs and args[5:] == ((1, 1), 1) and not isinstance(args[4], str):
            found = self.convolved(*args[:5])
            if found is not None:
                return found
        return func(*args, **(kwargs or {}))


class StridesUnfolded(PlainConvolutions):
    """Each convolution with an equal stride s becomes one of stride 1 on blocks of s x s pixels.

    A CPU takes seven times as long for the slope in the inputs of LeNet's first layer as for the layer itself; through
    the plain convolution it takes as long.

    With a = s A + i and b = s B + j, out(y, x) sums pixel (i, j) of block (y + A, x + B) by weight (a, b). Weights are
    filled up with zeros to whole blocks, and inputs as far as these reach.
    """

    def convolved(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
    ) -> Tensor | None:
        step = stride[0]
        if inputs.dim() != 4 or not stride[1] == step > 1:
            return None

        def blocks(images: Tensor) -> Tensor:
            """[n, C s s, H / s, W / s]; torch's pixel_unshuffle takes six times as long back."""
            count, channels, height, width = images.shape
            apart = images.view(count, channels, height // step, step, width // step, step).permute(0, 1, 3, 5, 2, 4)
            return apart.reshape(count, channels * step * step, height // step, width // step)

        counts = [-(-side // step) for side in weight.shape[2:]]
        filled = [count * step - side for count, side in zip(counts, weight.shape[2:], strict=True)]
        sides = zip(inputs.shape[2:], weight.shape[2:], padding, counts, strict=True)
        after = [((side + 2 * pad - kernel) // step + count) * step - side - pad for side, kernel, pad, count in sides]
        padded = F.pad(inputs, (padding[1], after[1], padding[0], after[0]))
        return F.conv2d(blocks(padded), blocks(F.pad(weight, (0, filled[1], 0, filled[0]))), bias)
