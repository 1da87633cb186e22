"""CENSOR (Zhang et al., NDSS 2025): several random updates orthogonal to the gradient, of which the best is sent.

All candidates of a step lie side by side in flat vectors, are made orthogonal together, and are judged by their losses.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import exact_norms, map_each
from gradveil.core.types import Batch, Loss, Params
from gradveil.defenses.base import DEFENSES, Defense, InRound, Step
from gradveil.defenses.public import public_images, refuse_private
from gradveil.defenses.soteria import Pair, PlainConvolutions
from gradveil.engine import CudaGraphCache, cached, example_gradients
from gradveil.models import AddsToLoss, Functional, logits_of

POOL = 50
"""Public images to choose from, or as many as there are trials if that is more."""
CANDIDATES_AT_ONCE = {"cpu": 2**26, "cuda": 2**30}
"""Bytes that candidates under trial may take together; one of them may take more."""
FEW = 8
"""Entries of a tensor below which a random direction may well lie so near the gradient's that rounding shows."""
BATCHED = 2**20
"""Bytes of gradient up to which a GPU judges many candidates in one call: larger models keep it busy one by one."""
BATCHED_AT_ONCE = 2**32
"""Bytes that such a call may take, with ACTIVATIONS bytes for each byte of input."""
ACTIVATIONS = 32
PATCHES = 2**15
"""Numbers that an example's patches may have for a convolution to be computed as a product."""
PARALLEL = 1e-3
"""What is left of a drawn vector, as a share of it, below which it has no direction but the gradient's."""
DEPENDENT = 1e-6
"""What is left of a gradient without those before it, as a share of the longest, below which it depends on them."""
SPANS = 2**33
"""Bytes that the gradients of all examples under all labels may take together."""
NOTHING = 1e-16
"""Stands for smaller norms when one is divided by: float32 cannot tell the direction of such a gradient."""


@DEFENSES.register("censor")
@dataclass(frozen=True, kw_only=True)
class Censor(Defense):
    """CENSOR: the best of several random updates orthogonal to the gradient."""

    trials: int = 20
    layerwise: bool = True
    fallback: Literal["best", "skip", "original"] = "best"
    norms: Literal["preserve", "public", "random"] = "preserve"
    spread: float = 1.0
    projection: Literal["exact", "released", "none"] = "exact"
    orthogonal: Literal["gradient", "examples"] = "gradient"
    source: Literal["normal", "public"] = "normal"
    public: str = "samples"
    public_class: int | None = None
    temperature: float = 0.0
    acceptance: Literal["cold", "printed"] = "cold"
    rounds: int | None = None
    lr: float | None = None

    def __post_init__(self) -> None:
        self._require_kinds()
        bounds = {"trials": 1, "rounds": 1, "spread": 0, "temperature": 0, "lr": 0, "public_class": 0}
        for option, least in bounds.items():
            value = getattr(self, option)
            self._require(value is None or least <= value < math.inf, option, f"at least {least}")
        exact = self.orthogonal == "gradient" or self.projection == "exact"
        self._require(exact, "projection", "exact under orthogonal=examples")

    def for_round(self, start: Step) -> Defense:
        """Public images, where some are needed, are read once for a local run."""
        pool = self._public_pool(start)
        return self if pool is None else InRound(partial(self.censored, pool=pool))

    def schedule(self) -> tuple[int, ...]:
        return () if self.rounds is None else (self.rounds + 1,)

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return self.censored(gradient, step, self._public_pool(step))

    def _is_active(self, step: Step) -> bool:
        number = step.round_number if step.federation_round is None else step.federation_round
        return self.rounds is None or number <= self.rounds

    def _public_pool(self, step: Step) -> Batch | None:
        if "public" not in (self.source, self.norms) or not self._is_active(step):
            return None
        own, count, label = step.batch.inputs, max(POOL, self.trials), self.public_class
        pool = public_images(self.public, own, count, public=step.public, label=label, defense="censor")
        return Batch(pool.inputs, pool.labels % step.classes(pool))

    def censored(self, gradient: Params, step: Step, pool: Batch | None) -> Params:
        """What is sent instead of the gradient; ``pool`` holds the public images that options ask for."""
        active = self._is_active(step)
        step.log.add("active", float(active))
        if not active:
            step.log.add("cosine", 1.0)
            return gradient
        if pool is not None:
            refuse_private(pool, step.batch.inputs, "censor")
        with torch.no_grad():
            flat = Flat(gradient)
            original = flat.joined(gradient)
            best, accepted = self._best(flat, original, step, pool)
        step.log.add("fallback_rate", float(not accepted))
        if accepted or self.fallback == "best":
            step.log.add("cosine", cosine(best, original))
            return flat.named(best)
        step.log.add("cosine", float(self.fallback == "original"))
        return gradient if self.fallback == "original" else map_each(torch.zeros_like, gradient)

    def _best(self, flat: Flat, original: list[Tensor], step: Step, pool: Batch | None) -> tuple[list[Tensor], bool]:
        """The candidate that is chosen, and whether it is accepted: it lowers the loss, or is lucky."""
        pieces = flat.pieces(original, self.layerwise)
        norms = norms_of(pieces)
        targets = self._targets(norms, flat, step, pool)
        judge = LossAfter(step, flat, step.lr if self.lr is None else self.lr)
        if self.orthogonal == "examples":
            make = partial(take_out, spans=example_spans(flat, step, self.layerwise), targets=targets)
        else:
            make = partial(project, gradient=pieces, norms=norms, targets=targets, projection=self.projection)
        best, lowest, accepted = original, math.inf, False
        here = math.nan if step.loss_value is None else float(step.loss_value)
        for drawn in self._draws(flat, step, pool):
            make(flat.pieces(drawn, self.layerwise))
            losses = judge(drawn, start_too=math.isnan(here) and best is original)
            if len(losses) > len(drawn[0]):
                here = losses.pop(0)
            scores = self._scores(losses, step) if self.acceptance == "cold" else losses
            row = min(range(len(scores)), key=scores.__getitem__)
            if self.acceptance == "printed":
                lucky = self._as_printed(losses, here, judge.priors(drawn), step)
                accepted, row = bool(lucky), lucky[0] if lucky else row
            if best is original or scores[row] < lowest or accepted:
                best, lowest = [part[row].clone() for part in drawn], scores[row]
            if accepted:
                break
        if self.projection == "exact" and (self.source == "public" or flat.smallest < FEW):  # what rounding left
            make(flat.pieces([part[None] for part in best], self.layerwise))
        return best, accepted or (self.acceptance == "cold" and lowest < here)

    def _as_printed(self, losses: list[float], here: float, priors: list[float], step: Step) -> list[int]:
        """Which trials the rule accepts that the paper prints, in their order; the first of them is sent.

        Its probability is min(1, (P(data | candidate) / P(data | current)) ** M P(candidate) / P(current)), where
        ``priors`` has the logarithms of the last ratio: M is an exponent there, so that M near 0 accepts everything.
        """
        luck = step.rng.exponential((len(losses),), torch.empty(0)).tolist()
        exponent = self.temperature * len(step.batch)
        rises = [exponent * (loss - here) - prior for loss, prior in zip(losses, priors, strict=True)]
        return [place for place, rise in enumerate(rises) if rise <= luck[place]]  # a rise of NaN is never accepted

    def _scores(self, losses: list[float], step: Step) -> list[float]:
        """Below the loss at the current parameters with the probability of Metropolis's rule.

        That is min(1, (P(data | candidate) / P(data | current)) ** (1 / M)), with P = exp(-n loss) for n examples.
        """
        losses = [math.inf if math.isnan(loss) else loss for loss in losses]
        if self.temperature == 0:
            return losses
        luck = step.rng.exponential((len(losses),), torch.empty(0)).tolist()
        return [loss - self.temperature / len(step.batch) * draw for loss, draw in zip(losses, luck, strict=True)]

    def _targets(self, own: Tensor, flat: Flat, step: Step, pool: Batch | None) -> Tensor:
        """The norm that each piece of a candidate gets, the same for all trials of a step."""
        if self.norms == "preserve":
            return own
        if self.norms == "random":
            return own * (self.spread * step.rng.normal((len(own),), own)).exp()
        assert pool is not None
        public = step.gradient(pool.take(slice(len(step.batch))))
        return norms_of(flat.pieces(flat.joined(public), self.layerwise))

    def _draws(self, flat: Flat, step: Step, pool: Batch | None) -> Iterator[list[Tensor]]:
        """What candidates are made from: one [t, size] for each vector of ``flat``, as many trials as fit at once."""
        room = CANDIDATES_AT_ONCE["cuda" if step.batch.inputs.is_cuda else "cpu"]
        chunk = max(1, min(self.trials, room // flat.bytes))
        ranges = [slice(start, min(start + chunk, self.trials)) for start in range(0, self.trials, chunk)]
        if self.source == "normal":
            for some in ranges:
                yield flat.gaussian(some.stop - some.start, step.rng)
            return
        assert pool is not None
        order = step.rng.permutation(len(pool), pool.labels.device)
        for some in ranges[: math.ceil(len(pool) / chunk)]:  # one class may have fewer images than there are trials
            yield flat.joined(example_gradients(step, pool.take(order[some])), leading=1)


class Flat:
    """Named tensors side by side, in one vector for each device and type: one call then works on all of them."""

    def __init__(self, like: Params) -> None:
        self.shapes = {name: tensor.shape for name, tensor in like.items()}
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in like.values())
        self._names: dict[tuple[torch.device, torch.dtype], list[str]] = defaultdict(list)
        for name, tensor in like.items():
            self._names[tensor.device, tensor.dtype].append(name)
        self._sizes = [[self.shapes[name].numel() for name in names] for names in self._names.values()]
        self.smallest = min(map(min, self._sizes))

    def joined(self, tree: Params, *, leading: int = 0) -> list[Tensor]:
        """The vectors [..., size] of a tree whose tensors have so many dimensions in front."""
        flattened = map_each(lambda x: x.reshape(*x.shape[:leading], -1), tree)
        return [torch.cat([flattened[name] for name in names], dim=-1) for names in self._names.values()]

    def named(self, vectors: Sequence[Tensor]) -> Params:
        """Views into vectors [..., size], by name and in shape."""
        found: Params = {}
        for names, sizes, vector in zip(self._names.values(), self._sizes, vectors, strict=True):
            parts = zip(names, torch.split(vector, sizes, dim=-1), strict=True)
            found |= {name: part.view(part.shape[:-1] + self.shapes[name]) for name, part in parts}
        return {name: found[name] for name in self.shapes}

    def pieces(self, vectors: Sequence[Tensor], layerwise: bool) -> list[list[Tensor]]:
        """Views of what is made orthogonal together: each tensor by itself, or everything."""
        if not layerwise:
            return [list(vectors)]
        return [[p] for s, v in zip(self._sizes, vectors, strict=True) for p in torch.split(v, s, dim=-1)]

    def gaussian(self, count: int, rng: Stream) -> list[Tensor]:
        """Independent N(0, 1) entries in vectors [count, size]."""
        return [
            rng.normal((count, sum(sizes)), torch.empty(0, dtype=dtype, device=device))
            for (device, dtype), sizes in zip(self._names, self._sizes, strict=True)
        ]


def project(
    drawn: list[list[Tensor]], *, gradient: list[list[Tensor]], norms: Tensor, targets: Tensor, projection: str
) -> None:
    """Take the gradient's direction out of the pieces of ``drawn`` [t, size], and scale each piece to its target norm.

    The release takes out norm times as much, ``none`` nothing. A piece without any other direction becomes zero.
    Pythagoras gives the norms of what is left, so that two passes over ``drawn`` suffice.
    """
    pairs = [list(zip(*both, strict=True)) for both in zip(drawn, gradient, strict=True)]
    along = torch.stack([_total([r @ g for r, g in pair]).to(norms) for pair in pairs])
    length = torch.stack([_norm([exact_norms(r) for r, _ in pair]).to(norms) for pair in pairs])
    norm = norms[:, None].clamp(min=NOTHING)
    along = along / norm
    taken = along * {"exact": torch.ones_like(norm), "released": norm, "none": torch.zeros_like(norm)}[projection]
    left = (length.square() - along.square() + (along - taken).square()).clamp(min=0).sqrt()
    factor = torch.where(left > PARALLEL * length, targets[:, None] / left, 0)
    multiple = factor * taken / norm
    for pair, scale, back in zip(pairs, factor.unbind(), multiple.unbind(), strict=True):
        for r, g in pair:
            r.mul_(scale.to(r)[:, None]).addcmul_(back.to(r)[:, None], g, value=-1)


def example_spans(flat: Flat, step: Step, layerwise: bool) -> list[Tensor]:
    """For each piece, orthonormal rows [r, size] that span its gradients of every example under every label (eq. 11).

    Gram and Schmidt's algorithm, each vector twice against rounding; what depends on the others before it is left out.
    """
    classes, batch = step.classes(), step.batch
    labels = torch.arange(classes, device=batch.labels.device).repeat(len(batch))
    if len(labels) * flat.bytes > SPANS:
        raise GradveilError(
            f"censor:orthogonal=examples would hold {len(labels)} gradients of {flat.bytes} bytes at once: "
            "use a smaller batch or model, or orthogonal=gradient"
        )
    each = example_gradients(step, Batch(batch.inputs.repeat_interleave(classes, dim=0), labels))
    spans = []
    for piece in flat.pieces(flat.joined(each, leading=1), layerwise):
        vectors = torch.cat([part.to(piece[0].device, torch.float64) for part in piece], dim=-1)
        span = vectors.new_zeros(0, vectors.shape[-1])
        for vector in vectors:
            left = vector
            for _ in range(2):
                left = left - (span @ left) @ span
            if left.norm() > DEPENDENT * vectors.norm(dim=1).max():
                span = torch.cat([span, left[None] / left.norm()])
        spans.append(span.to(piece[0].dtype))
    return spans


def take_out(drawn: list[list[Tensor]], *, spans: list[Tensor], targets: Tensor) -> None:
    """Take what lies in the spans out of the pieces of ``drawn`` [t, size], and scale each to its target norm."""
    for piece, span, target in zip(drawn, spans, targets, strict=True):
        vectors = torch.cat([part.to(span) for part in piece], dim=-1)
        length, left = vectors.norm(dim=1, keepdim=True), vectors
        for _ in range(2):
            left = left - (left @ span.T) @ span
        norm = left.norm(dim=1, keepdim=True)
        left = torch.where(norm > PARALLEL * length, left / norm * target.to(left), 0)
        sizes = [part.shape[-1] for part in piece]
        for part, values in zip(piece, torch.split(left, sizes, dim=-1), strict=True):
            part.copy_(values)


def norms_of(pieces: list[list[Tensor]]) -> Tensor:
    """[pieces]: their norms, on the device of the first."""
    norms = [_norm([exact_norms(part.flatten()) for part in piece]) for piece in pieces]
    return torch.stack([norm.to(norms[0]) for norm in norms])


def _total(values: list[Tensor]) -> Tensor:
    """Their sum, on the device of the first: a model may be spread over several."""
    return values[0] if len(values) == 1 else torch.stack([value.to(values[0]) for value in values]).sum(0)


def _norm(norms: list[Tensor]) -> Tensor:
    """The norm of vectors side by side, from the norm of each."""
    return norms[0] if len(norms) == 1 else _total([norm.square() for norm in norms]).sqrt()


def cosine(a: list[Tensor], b: list[Tensor]) -> float:
    """Between two gradients; 0 where one of them is zero."""
    first, second = norms_of([a, b]).tolist()
    return float(_total([x @ y for x, y in zip(a, b, strict=True)])) / first / second if first and second else 0.0


class LossAfter:
    """The losses of one local step's batch after steps along candidates."""

    def __init__(self, step: Step, flat: Flat, lr: float) -> None:
        self.step, self.flat, self.lr = step, flat, lr
        self.start = flat.joined({name: step.params[name] for name in flat.shapes})

    def __call__(self, candidates: list[Tensor], *, start_too: bool = False) -> list[float]:
        """The loss after a step along each of ``candidates`` [t, size], and first, if asked, without a step."""
        if not self.step.batch.inputs.is_cuda:
            losses = self.in_turn(candidates, start_too)
        elif self.flat.bytes <= BATCHED:
            losses = self.at_once(candidates, start_too)
        else:
            losses = self.replayed(candidates, start_too)
        return [float(loss) for loss in losses.tolist()]

    def priors(self, candidates: list[Tensor]) -> list[float]:
        """[t]: by how much a step changes the logarithm of the prior, N(0, 1) for every parameter."""
        changed = []
        for at, part in zip(self.start, candidates, strict=True):
            changed.append(self.lr * (part @ at) - self.lr**2 / 2 * part.square().sum(dim=1))
        return [float(change) for change in _total(changed).tolist()]

    def replayed(self, candidates: list[Tensor], start_too: bool) -> Tensor:
        """[t] or [1 + t], one after another: a large model keeps a GPU busy, if its kernels start all at once."""
        key = ("loss", id(self.step.loss))
        loss_at = cached(self.step.model.module, key, lambda: LossAt(self.step.loss))
        losses = [loss_at(self.step, {})] if start_too else []
        for trial in range(len(candidates[0])):
            there = [torch.sub(at, part[trial], alpha=self.lr) for at, part in zip(self.start, candidates, strict=True)]
            losses.append(loss_at(self.step, self.flat.named(there)))
        return torch.stack(losses)

    def at_once(self, candidates: list[Tensor], start_too: bool) -> Tensor:
        """[t] or [1 + t], in one batched call or, where that would not fit, a few: what a GPU is good at."""
        moved = [torch.sub(at, part, alpha=self.lr) for at, part in zip(self.start, candidates, strict=True)]
        if start_too:
            moved = [torch.cat([at[None], part]) for at, part in zip(self.start, moved, strict=True)]
        inputs = self.step.batch.inputs
        room = BATCHED_AT_ONCE // (self.flat.bytes + ACTIVATIONS * inputs.numel() * inputs.element_size())
        chunk = None if room >= len(moved[0]) else max(1, room)
        with ConvolutionsAsProducts():
            losses: Tensor = vmap(lambda some: self.step.loss_at({**self.step.params, **some}), chunk_size=chunk)(
                self.flat.named(moved)
            )
        return losses

    def in_turn(self, candidates: list[Tensor], start_too: bool) -> Tensor:
        """[t] or [1 + t], one after another: on a CPU, convolutions with many weights at once are slower than this.

        The module's parameters are exchanged once, for vectors into which each candidate is then written: to exchange
        them for every candidate would take a tenth of the time of a small model.
        """
        step, slots = self.step, [at.clone() for at in self.start]
        module, batch = step.model.module, step.batch
        adding = [layer for layer in module.modules() if isinstance(layer, AddsToLoss)]
        used = {**step.model.buffers, **step.frozen, **step.params, **self.flat.named(slots)}

        def loss() -> Tensor:
            return sum(
                (layer.pop_term() for layer in adding), start=step.loss(logits_of(module(batch.inputs)), batch.labels)
            )

        def run() -> Tensor:
            losses = [loss()] if start_too else []
            for trial in range(len(candidates[0])):
                for slot, at, part in zip(slots, self.start, candidates, strict=True):
                    torch.sub(at, part[trial], alpha=self.lr, out=slot)
                losses.append(loss())
            return torch.stack(losses)

        exchanged = {f"module.{name}": tensor for name, tensor in used.items()}
        with torch.inference_mode():
            losses: Tensor = functional_call(_While(module), exchanged, (run,), strict=True)
        return losses


class LossAt:
    """(parameters, buffers, inputs, labels) -> the loss of one model; on a GPU, all but the first calls are replays."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss  # kept, so that no other loss gets its id
        self._replayed = CudaGraphCache(self._evaluated)
        self._model: Functional | None = None

    def __call__(self, step: Step, params: Params) -> Tensor:
        given = ({**step.frozen, **step.params, **params}, step.model.buffers, step.batch.inputs, step.batch.labels)
        self._model = step.model  # for this call alone: a memory of the model must not hold it
        try:
            return self._replayed(given)
        finally:
            self._model = None

    def _evaluated(self, given: tuple[Params, Params, Tensor, Tensor]) -> Tensor:
        params, buffers, inputs, labels = given
        assert self._model is not None
        with torch.no_grad():
            return self._model.with_buffers(buffers).loss(self.loss, params, inputs, labels)


class _While(nn.Module):
    """Calls a function: what is exchanged in the module for this call is exchanged for all that the function does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], Tensor]) -> Tensor:
        return function()


class ConvolutionsAsProducts(PlainConvolutions):
    """Small convolutions as products of weights and patches.

    Batched over weights, a convolution becomes a grouped one, which takes cuDNN longer to begin than to do if it is
    small.
    """

    def convolved(
        self, inputs: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair
    ) -> Tensor | None:
        padded = F.pad(inputs, (padding[1], padding[1], padding[0], padding[0]))
        # a view [n, H, W, C, down, across]: vmap knows Tensor.unfold, and would take im2col apart
        patches = padded.unfold(2, weight.shape[2], stride[0]).unfold(3, weight.shape[3], stride[1])
        patches = patches.permute(0, 2, 3, 1, 4, 5)
        if patches[0].numel() > PATCHES:
            return None
        rows = patches.flatten(3) @ weight.flatten(1).T
        return (rows if bias is None else rows + bias).permute(0, 3, 1, 2)
