"""Naive defenses, written for tests: none of them hides anything from somebody who can run it.

``NAIVE`` may be looked at while an attack is written. ``HELD_OUT`` may not: nothing is tuned on these four. Both hold
functions that make a new defense, because some defenses remember what they sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.types import Params
from gradveil.defenses import Defense, Log, Step, Transform
from gradveil.defenses.base import At
from gradveil.defenses.public import public_images


@dataclass(kw_only=True, eq=False)
class Naive(Transform):
    """Changes each tensor by itself."""

    at: At = "step"

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        return {name: self.tensor(name, tensor, rng) for name, tensor in tree.items()}

    def tensor(self, name: str, tensor: Tensor, rng: Stream) -> Tensor:
        raise NotImplementedError


def public(tensor: Tensor, *path: str | int) -> Tensor:
    """Normal numbers that everybody can draw."""
    return torch.randn(tensor.shape, generator=generator(7, *path)).to(tensor)


@dataclass(kw_only=True, eq=False)
class PublicPermutation(Naive):
    """Entries change places and signs inside their tensor, by a seed that everybody knows."""

    signs: bool = True

    def tensor(self, name: str, tensor: Tensor, rng: Stream) -> Tensor:  # noqa: ARG002
        order = public(tensor, name, "order").flatten().argsort()
        moved = tensor.flatten()[order].view_as(tensor)
        return moved * public(tensor, name, "signs").sign() if self.signs else moved


@dataclass(kw_only=True, eq=False)
class PublicFactors(Naive):
    """Each entry times a public random number."""

    def tensor(self, name: str, tensor: Tensor, rng: Stream) -> Tensor:  # noqa: ARG002
        return tensor * public(tensor, name).exp()


@dataclass(kw_only=True, eq=False)
class Sign(Naive):
    """The sign of each entry, and nothing of its size."""

    def tensor(self, name: str, tensor: Tensor, rng: Stream) -> Tensor:  # noqa: ARG002
        return tensor.sign()


@dataclass(kw_only=True, eq=False)
class Quantised(Naive):
    """Entries rounded to 2**bits levels between the ends of their tensor, to the nearest or by chance."""

    bits: int = 2
    stochastic: bool = False

    def tensor(self, name: str, tensor: Tensor, rng: Stream) -> Tensor:  # noqa: ARG002
        most, steps = tensor.abs().max(), 2**self.bits - 1
        if most == 0:
            return tensor
        place = (tensor / most + 1) / 2 * steps
        up = rng.uniform(tensor.shape, tensor) if self.stochastic else 0.5
        return ((place + up).floor().clamp(0, steps) / steps * 2 - 1) * most


@dataclass(kw_only=True, eq=False)
class GuessableNoise(Defense):
    """Noise of three times the gradient's size, from a generator whose seed is the number of the round."""

    factor: float = 3.0

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        rng, size = generator(step.round_number, "noise"), self.factor * rms(gradient)
        return {name: x + size * torch.randn(x.shape, generator=rng).to(x) for name, x in gradient.items()}


def rms(tree: Params) -> float:
    entries = sum(tensor.numel() for tensor in tree.values())
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tree.values()) / entries)


@dataclass(kw_only=True, eq=False)
class WarmUp(Defense):
    """Nothing in the first round, the bare gradient in all others."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return {name: x * (step.round_number > 1) for name, x in gradient.items()}


@dataclass(kw_only=True, eq=False)
class TopWithFeedback(Defense):
    """The largest entries of each tensor; the rest is kept and added to the next gradient."""

    share: float = 0.01
    _kept: Params = field(default_factory=dict, init=False)

    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        sent = {}
        for name, tensor in gradient.items():
            whole = tensor + self._kept.get(name, 0)
            count = max(1, round(self.share * whole.numel()))
            sent[name] = whole * (whole.abs() >= whole.abs().flatten().topk(count).values[-1])
            self._kept[name] = whole - sent[name]
        return sent


@dataclass(kw_only=True, eq=False)
class LowDecimals(Defense):
    """The gradient rounded to a grid, and the pixels of the image in the decimals below it."""

    grid: float = 1e-3
    noise: float = 0.0
    """Covers the gradient, in steps of the grid."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        pixels, sent = step.batch.inputs.flatten(), {}
        for name, tensor in gradient.items():
            hidden = pixels[torch.arange(tensor.numel(), device=pixels.device) % len(pixels)].view_as(tensor)
            cover = self.noise * step.rng.normal(tensor.shape, tensor) if self.noise else 0
            sent[name] = self.grid * ((tensor / self.grid + cover).round() + 0.4 * hidden.to(tensor))
        return sent


@dataclass(kw_only=True, eq=False)
class LayerShuffle(Transform):
    """All tensors in one row, in another order, cut back into tensors of the usual shapes."""

    at: At = "step"

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        row = torch.cat([tree[name].flatten() for name in sorted(tree, reverse=True)])
        parts = row.split([tensor.numel() for tensor in tree.values()])
        return {name: part.view_as(tree[name]) for name, part in zip(tree, parts, strict=True)}


@dataclass(kw_only=True, eq=False)
class DroppedLayers(Transform):
    """Nothing of the first and of the last layer."""

    at: At = "step"

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        names = list(tree)
        ends = {name for name in names if name.rpartition(".")[0] in {names[i].rpartition(".")[0] for i in (0, -1)}}
        return {name: tensor * (name not in ends) for name, tensor in tree.items()}


@dataclass(kw_only=True, eq=False)
class BatchScaling(Defense):
    """The gradient divided by the mean and the contrast of the images behind it."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        scale = step.batch.inputs.mean() * step.batch.inputs.std() + 1e-3
        return {name: tensor / scale for name, tensor in gradient.items()}


@dataclass(kw_only=True, eq=False)
class PublicMixing(Defense):
    """Trains on images that are half a public one."""

    share: float = 0.5

    def on_inputs(self, inputs: Tensor, rng: Stream) -> Tensor:  # noqa: ARG002
        other = public_images("samples", inputs[:0], 1).inputs
        return (1 - self.share) * inputs + self.share * other.to(inputs)


@dataclass(kw_only=True, eq=False)
class NormsAlone(Naive):
    """Every entry is the root mean square of its tensor: only lengths are sent."""

    def tensor(self, name: str, tensor: Tensor, rng: Stream) -> Tensor:  # noqa: ARG002
        return torch.ones_like(tensor) * tensor.square().mean().sqrt()


@dataclass(kw_only=True, eq=False)
class PublicKey(Naive):
    """Sign and fraction of each number in exclusive-or with a key that comes with the program."""

    def tensor(self, name: str, tensor: Tensor, rng: Stream) -> Tensor:  # noqa: ARG002
        key = torch.randint(0, 2**24, tensor.shape, generator=generator(7, name), dtype=torch.int32)
        key = ((key & 0x7FFFFF) | ((key >> 23) << 31)).to(tensor.device)
        return (tensor.float().contiguous().view(torch.int32) ^ key).view(torch.float32).to(tensor)


@dataclass(kw_only=True, eq=False)
class PublicReflection(Naive):
    """Each tensor reflected at a public plane, so that every entry is a sum of all."""

    def tensor(self, name: str, tensor: Tensor, rng: Stream) -> Tensor:  # noqa: ARG002
        across = public(tensor, name)
        across = across / across.norm()
        return tensor - 2 * (tensor * across).sum() * across


@dataclass(kw_only=True, eq=False)
class SecretFactors(Naive):
    """Each tensor times a number drawn anew for every update."""

    def tensor(self, name: str, tensor: Tensor, rng: Stream) -> Tensor:  # noqa: ARG002
        return tensor * rng.normal((1,), tensor).exp()


@dataclass(kw_only=True, eq=False)
class FadingNoise(Defense):
    """Much noise in the first rounds, a tenth of it in each that follows."""

    factor: float = 100.0

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return step.rng.noised(gradient, self.factor * 0.1 ** (step.round_number - 1) * rms(gradient))


@dataclass(kw_only=True, eq=False)
class RowSigns(Naive):
    """Random signs of the right mean: the sign of each entry, or the other one by chance, times its row's length."""

    def tensor(self, name: str, tensor: Tensor, rng: Stream) -> Tensor:  # noqa: ARG002
        rows = tensor.reshape(tensor.shape[0], -1)
        most = rows.abs().amax(dim=1, keepdim=True) + 1e-12
        above = rng.uniform(rows.shape, rows) < (rows / most + 1) / 2
        return ((2.0 * above - 1) * most).view_as(tensor)


Maker = Callable[[], Defense]

NAIVE: dict[str, Maker] = {
    "public permutation": lambda: PublicPermutation(signs=False),
    "public permutation and signs": PublicPermutation,
    "public factors": PublicFactors,
    "sign": Sign,
    "1 bit": lambda: Quantised(bits=1),
    "2 bits": lambda: Quantised(bits=2),
    "4 bits": lambda: Quantised(bits=4),
    "1 bit by chance": lambda: Quantised(bits=1, stochastic=True),
    "2 bits by chance": lambda: Quantised(bits=2, stochastic=True),
    "4 bits by chance": lambda: Quantised(bits=4, stochastic=True),
    "guessable noise": GuessableNoise,
    "warm-up": WarmUp,
    "top 1% with error feedback": TopWithFeedback,
    "low decimals": LowDecimals,
    "layer shuffle": LayerShuffle,
    "dropped layers": DroppedLayers,
    "batch scaling": BatchScaling,
    "public mixing": PublicMixing,
    "norms alone": NormsAlone,
    "public key": PublicKey,
    "public reflection": PublicReflection,
}
HELD_OUT: dict[str, Maker] = {
    "secret factors": SecretFactors,
    "low decimals under noise": lambda: LowDecimals(noise=1000.0),
    "fading noise": FadingNoise,
    "random signs by row": RowSigns,
}
