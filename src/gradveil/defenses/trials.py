"""Many candidates for one gradient: side by side in flat vectors, made orthogonal to it, and judged by their losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gradveil.core.graphs import Replayed
from gradveil.core.streams import Stream
from gradveil.core.trees import exact_norms, map_each
from gradveil.core.types import Params
from gradveil.defenses.base import Step
from gradveil.models.functional import AddsToLoss

Pair = tuple[int, int]
BATCHED = 2**20
"""Bytes of gradient up to which a GPU judges many candidates in one call: larger models keep it busy one by one."""
BATCHED_AT_ONCE = 2**32
"""Bytes that such a call may take, with ACTIVATIONS bytes for each byte of input."""
ACTIVATIONS = 32
PATCHES = 2**15
"""Numbers that an example's patches may have for a convolution to be computed as a product."""
PARALLEL = 1e-3
"""What is left of a drawn vector, as a share of it, below which it has no direction but the gradient's."""
NOTHING = 1e-16
"""Stands for smaller norms when one is divided by: float32 cannot tell the direction of such a gradient."""


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

    def one_vector(self) -> list[int] | None:
        """The sizes of the tensors, if all of them lie side by side in one vector on a GPU, and few."""
        (device, _), *others = self._names
        together = not others and device.type == "cuda" and self.bytes <= BATCHED
        return self._sizes[0] if together else None

    def gaussian(self, count: int, rng: Stream) -> list[Tensor]:
        """Independent N(0, 1) entries in vectors [count, size]."""
        return [
            rng.normal((count, sum(sizes)), torch.empty(0, dtype=dtype, device=device))
            for (device, dtype), sizes in zip(self._names, self._sizes, strict=True)
        ]


def project(
    drawn: list[list[Tensor]], gradient: list[list[Tensor]], norms: Tensor, targets: Tensor, *, released: bool
) -> None:
    """Take the gradient's direction out of the pieces of ``drawn`` [t, size], and scale each piece to its target norm.

    The release takes out norm times as much. A piece without any other direction becomes zero. Pythagoras gives the
    norms of what is left, so that two passes over ``drawn`` suffice.
    """
    pairs = [list(zip(*both, strict=True)) for both in zip(drawn, gradient, strict=True)]
    along = torch.stack([_total([r @ g for r, g in pair]).to(norms) for pair in pairs])
    length = torch.stack([_norm([exact_norms(r) for r, _ in pair]).to(norms) for pair in pairs])
    norm = norms[:, None].clamp(min=NOTHING)
    along = along / norm
    taken = along * norm if released else along
    left = (length.square() - along.square() + (along - taken).square()).clamp(min=0).sqrt()
    factor = torch.where(left > PARALLEL * length, targets[:, None] / left, 0)
    multiple = factor * taken / norm
    for pair, scale, back in zip(pairs, factor.unbind(), multiple.unbind(), strict=True):
        for r, g in pair:
            r.mul_(scale.to(r)[:, None]).addcmul_(back.to(r)[:, None], g, value=-1)


def project_together(drawn: Tensor, gradient: Tensor, sizes: list[int], targets: Tensor, *, released: bool) -> None:
    """The same for pieces of these sizes side by side in ``drawn`` [t, size], in a dozen calls however many they are.

    A matrix of ones and zeros adds the entries of each piece up, and spreads its factor over them again.
    """
    count = torch.arange(len(sizes), device=drawn.device)
    member = count.repeat_interleave(torch.tensor(sizes, device=drawn.device), output_size=sum(sizes))
    pieces = (member[:, None] == count).to(drawn)
    norm = (gradient.square() @ pieces).sqrt().clamp(min=NOTHING)
    along, length = ((drawn * gradient) @ pieces) / norm, (drawn.square() @ pieces).sqrt()
    taken = along * norm if released else along
    left = (length.square() - along.square() + (along - taken).square()).clamp(min=0).sqrt()
    factor = torch.where(left > PARALLEL * length, targets / left, 0)
    drawn.mul_(factor @ pieces.T).addcmul_((factor * taken / norm) @ pieces.T, gradient, value=-1)


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


class LossAt:
    """(parameters, buffers, inputs, labels) -> the loss of one model; on a GPU, all but the first calls are replays."""

    def __init__(self, step: Step) -> None:
        self.model, self.loss = step.model, step.loss
        self._replayed = Replayed(self._evaluated)

    def fits(self, step: Step) -> bool:
        return self.model.module is step.model.module and self.loss is step.loss

    def __call__(self, step: Step, params: Params) -> Tensor:
        given = ({**step.frozen, **step.params, **params}, step.model.buffers, step.batch.inputs, step.batch.labels)
        return self._replayed(given)

    def _evaluated(self, given: tuple[Params, Params, Tensor, Tensor]) -> Tensor:
        params, buffers, inputs, labels = given
        with torch.no_grad():
            return self.model.with_buffers(buffers).loss(self.loss, params, inputs, labels)


class LossAfter:
    """The losses of one local step's batch after steps along candidates."""

    def __init__(self, step: Step, flat: Flat, lr: float, loss_at: LossAt | None = None) -> None:
        self.step, self.flat, self.lr = step, flat, lr
        self.loss_at = loss_at or LossAt(step)
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

    def replayed(self, candidates: list[Tensor], start_too: bool) -> Tensor:
        """[t] or [1 + t], one after another: a large model keeps a GPU busy, if its kernels start all at once."""
        losses = [self.loss_at(self.step, {})] if start_too else []
        for trial in range(len(candidates[0])):
            there = [torch.sub(at, part[trial], alpha=self.lr) for at, part in zip(self.start, candidates, strict=True)]
            losses.append(self.loss_at(self.step, self.flat.named(there)))
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
            losses: Tensor = vmap(self._loss_at, chunk_size=chunk)(self.flat.named(moved))
        return losses

    def _loss_at(self, params: Params) -> Tensor:
        return self.step.loss_at({**self.step.params, **params})

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
            return sum((layer.pop_term() for layer in adding), start=step.loss(module(batch.inputs), batch.labels))

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


class _While(nn.Module):
    """Calls a function: what is exchanged in the module for this call is exchanged for all that the function does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], Tensor]) -> Tensor:
        return function()


class ConvolutionsAsProducts(TorchFunctionMode):
    """Plain small convolutions of images as products of weights and patches.

    Batched over weights, a convolution becomes a grouped one, which takes cuDNN longer to begin than to do if it is
    small.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.conv2d and not kwargs and args[5:] == ((1, 1), 1) and not isinstance(args[4], str):
            inputs, weight, bias, stride, padding = args[:5]
            patches = _patches(inputs, weight.shape[2:], stride, padding)
            if patches[0].numel() <= PATCHES:
                rows = patches.flatten(3) @ weight.flatten(1).T
                return (rows if bias is None else rows + bias).permute(0, 3, 1, 2)
        return func(*args, **(kwargs or {}))


def _patches(inputs: Tensor, size: Sequence[int], stride: Pair, padding: Pair) -> Tensor:
    """A view [n, H, W, C, down, across]. Tensor.unfold is an operation that vmap knows; im2col it would take apart."""
    padded = F.pad(inputs, (padding[1], padding[1], padding[0], padding[0]))
    return padded.unfold(2, size[0], stride[0]).unfold(3, size[1], stride[1]).permute(0, 2, 3, 1, 4, 5)
