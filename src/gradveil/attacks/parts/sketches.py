"""Sketches of updates, and ways to compare those of a defense that is a black box.

Each way learns from replies about candidates and from the candidates' updates without a defense, and tells how badly
each candidate explains a reply that was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gradveil.attacks.parts.candidate_updates import groups
from gradveil.core.seeding import generator
from gradveil.core.types import Params

LEAST = 64
"""Entries of each tensor that are compared at least, or all."""
INPUTS = 2**10
"""Entries of the input of each linear layer that are compared."""
BINS = 64
"""Into so many parts the entries of a tensor are sorted by size, to read what becomes of each part."""
ROUNDING = 1e-4
"""How far, as a share, two numbers may differ that are meant to be equal: rounding, other kernels."""
TINY = 1e-30
TOGETHER = 300
"""Candidates that are scored at a time, for the memory that they take."""


@dataclass(frozen=True)
class Sketch:
    """What is compared of updates [...], by the name of a tensor."""

    entries: Params
    """[..., entries]: some of them."""
    lengths: Params
    """[...]: the length of the whole tensor."""
    inputs: Params
    """[..., entries]: of a matrix, the direction of what entered its layer, if its gradient is that of one example."""

    def __len__(self) -> int:
        return len(next(iter(self.lengths.values())))

    def take(self, where: Tensor | slice | tuple[slice, slice | int]) -> Sketch:
        return self.changed(lambda part: part[where])

    def changed(self, change: Callable[[Tensor], Tensor]) -> Sketch:
        return Sketch(*({k: change(part) for k, part in getattr(self, own.name).items()} for own in fields(Sketch)))

    @staticmethod
    def combined(parts: Sequence[Sketch], combine: Callable[[list[Tensor]], Tensor]) -> Sketch:
        trees = ([getattr(part, own.name) for part in parts] for own in fields(Sketch))
        return Sketch(*({name: combine([one[name] for one in tree]) for name in tree[0]} for tree in trees))


Unit = Literal["one", "update", "tensor"]
Way = Callable[[Sketch, Sketch, Sketch], Tensor]
"""(N replies, n draws of m candidates [m, n], their updates without a defense [m]) -> how badly each fits, [N, m]."""


class Sketcher:
    """The same entries of every update, drawn once."""

    def __init__(self, like: Params, entries: int) -> None:
        share = entries / sum(tensor.numel() for tensor in like.values())
        rng = generator(0, "replay")
        self._places, self._probes = {}, {}
        for name, tensor in sorted(like.items()):
            count = min(tensor.numel(), max(LEAST, round(share * tensor.numel())))
            places = torch.randperm(tensor.numel(), generator=rng)[:count]
            self._places[name] = places.sort().values.to(tensor.device)
        for name, tensor in sorted(like.items()):
            if tensor.dim() == 2:
                self._probes[name] = torch.randn(tensor.shape[1], generator=rng, dtype=torch.float64).to(tensor.device)

    def __call__(self, updates: Params) -> Sketch:
        """Of updates [n, ...] by name."""
        flat = {name: updates[name].flatten(1).double() for name in self._places}
        entries = {name: flat[name][:, places].cpu() for name, places in self._places.items()}
        lengths, inputs = {name: tensor.norm(dim=1).cpu() for name, tensor in flat.items()}, {}
        for name, probe in self._probes.items():
            # The gradient of one example is errors times inputs: this is a multiple of the inputs, whatever the errors.
            matrix = updates[name].double()
            found = torch.einsum("noi,no->ni", matrix, matrix @ probe)
            inputs[name] = (found / (found.norm(dim=1, keepdim=True) + TINY))[:, :INPUTS].cpu()
        return Sketch(entries, lengths, inputs)


def by_distance(seen: Sketch, replies: Sketch) -> Tensor:
    """[N, m]: squared distances to one reply of each candidate, each tensor in units of its own length."""
    total = torch.zeros(())
    for name, own in seen.entries.items():
        away = torch.cdist(own, replies.entries[name], compute_mode="donot_use_mm_for_euclid_dist").square()
        total = total + away / (own.square().sum(dim=1, keepdim=True) + TINY)
    return total


def _by_draws(seen: Sketch, draws: Sketch, plain: Sketch, *, apart: bool) -> Tensor:  # noqa: ARG001
    """A Gaussian for each tensor of each candidate, with one spread for all its entries; lengths ``apart`` or not."""
    total = torch.zeros(())
    for name, own in seen.entries.items():
        each, count = draws.entries[name], draws.entries[name].shape[1]
        if apart:
            length, lengths = ((tree.lengths[name] + TINY).log() for tree in (seen, draws))
            varies = lengths.var(dim=1) * (1 + 1 / count) + ROUNDING**2
            total = total + (length[:, None] - lengths.mean(dim=1)).square() / varies + varies.log()
            own, each = (part / (part.norm(dim=-1, keepdim=True) + TINY) for part in (own, each))
        mean, size = each.mean(dim=1), own.shape[1]
        spread = (each - mean[:, None]).square().sum(dim=(1, 2)) / ((count - 1) * size)
        variance = spread + ROUNDING**2 * each.square().mean(dim=(1, 2)) + TINY
        # what the mean of a few draws is off adds to its distance from everybody, by its own spread
        away = own.square().sum(dim=1)[:, None] - 2 * own @ mean.T + mean.square().sum(dim=1) - spread * size / count
        total = total + away / variance + size * variance.log()
    return total


def _by_inputs(seen: Sketch, draws: Sketch, plain: Sketch) -> Tensor:
    """What entered linear layers: it stays the same if a defense changes by chance only what comes behind them."""
    if not seen.inputs:
        return torch.zeros(len(seen), len(plain))
    return _by_draws(replace(seen, entries=seen.inputs), replace(draws, entries=draws.inputs), plain, apart=False)


@dataclass(frozen=True)
class EntryModel:
    """What becomes of an entry, by the entry that there was without the defense: a line and a spread for each range."""

    unit: Unit
    tensors: dict[str, tuple[Tensor, ...]]
    """By name: edges of the ranges; then, for each of them, middle before and after, slope and spread."""

    @classmethod
    def fitted(cls, draws: Sketch, plain: Sketch, unit: Unit) -> EntryModel:
        tensors: dict[str, tuple[Tensor, ...]] = {}
        for name, before in plain.entries.items():
            units = _units(plain, name, unit)
            x, y = before / units, draws.entries[name] / units[:, None]
            some = x.flatten()[:: max(1, x.numel() // 100_000)]
            edges = torch.unique(torch.quantile(some, torch.linspace(0, 1, BINS + 1, dtype=x.dtype)[1:-1]))
            sent = draws.lengths[name] > 0  # a defense may leave out whole tensors, at random
            ranges = torch.bucketize(x, edges)[:, None].expand_as(y)[sent].flatten()
            xs, ys, count = x[:, None].expand_as(y)[sent].flatten(), y[sent].flatten(), len(edges) + 1
            number = torch.bincount(ranges, minlength=count).clamp(min=1)
            mean_x, mean_y, squares_x, squares_y, products = (
                torch.zeros(count, dtype=x.dtype).index_add_(0, ranges, values) / number
                for values in (xs, ys, xs * xs, ys * ys, xs * ys)
            )
            varies, along = squares_x - mean_x**2, products - mean_x * mean_y
            slope = torch.where(varies > 1e-12 * mean_x**2 + TINY, along / varies.clamp(min=TINY), 0.0)
            spread = (squares_y - mean_y**2 - slope * along).clamp(min=0)
            spread = spread + ROUNDING**2 * (ys.square().sum() / max(1, len(ys))) + TINY
            tensors[name] = edges, mean_x, mean_y, slope, spread
        return cls(unit, tensors)

    def scores(self, seen: Sketch, plain: Sketch, often: Params) -> Tensor:
        """[N, m]: how badly updates without a defense, [m], explain replies, [N]; ``often`` [m] each tensor is sent."""
        total = torch.zeros(())
        for name, (edges, mean_x, mean_y, slope, spread) in self.tensors.items():
            own, units = seen.entries[name], _units(plain, name, self.unit)
            x = plain.entries[name] / units
            part = torch.bucketize(x, edges)
            expected, variance = (mean_y[part] + slope[part] * (x - mean_x[part])) * units, spread[part] * units**2
            away = own.square() @ (1 / variance).T - 2 * own @ (expected / variance).T
            away = away + (expected.square() / variance + variance.log()).sum(dim=1)
            missing = (seen.lengths[name] == 0)[:, None]
            total = total + torch.where(missing, -2 * (1 - often[name]).log(), away - 2 * often[name].log())
        return total


@dataclass(frozen=True)
class LengthModel:
    """What becomes of the length of each tensor, by its length without the defense: a line through their logarithms."""

    lines: dict[str, tuple[Tensor, ...]]
    """By name: middle before and after, slope and spread."""

    @classmethod
    def fitted(cls, draws: Sketch, plain: Sketch) -> LengthModel:
        lines: dict[str, tuple[Tensor, ...]] = {}
        for name, own in draws.lengths.items():
            y, x = (own + TINY).log(), (plain.lengths[name] + TINY).log()[:, None].expand_as(own)
            along, varies = ((x - x.mean()) * (y - y.mean())).mean(), x.var(correction=0)
            slope = along / varies if varies > TINY else torch.zeros_like(along)
            spread = (y.var(correction=0) - slope * along).clamp(min=0) + ROUNDING**2
            lines[name] = x.mean(), y.mean(), slope, spread
        return cls(lines)

    def scores(self, seen: Sketch, plain: Sketch) -> Tensor:
        """[N, m]: how badly the lengths of updates without a defense, [m], explain those of replies, [N]."""
        total = torch.zeros(())
        for name, (mean_x, mean_y, slope, spread) in self.lines.items():
            expected = mean_y + slope * ((plain.lengths[name] + TINY).log() - mean_x)
            total = total + ((seen.lengths[name] + TINY).log()[:, None] - expected).square() / spread
        return total


def _units(plain: Sketch, name: str, unit: Unit) -> Tensor:
    """[m, 1]: what an entry of each update is measured in."""
    if unit == "tensor":
        length: Tensor = plain.entries[name].norm(dim=1, keepdim=True)
        return length + TINY
    whole: Tensor = torch.stack([own.square().sum(dim=1) for own in plain.entries.values()]).sum(dim=0).sqrt()[:, None]
    return whole + TINY if unit == "update" else torch.ones_like(whole)


def _by_entries(seen: Sketch, draws: Sketch, plain: Sketch, *, unit: Unit) -> Tensor:
    return EntryModel.fitted(draws, plain, unit).scores(seen, plain, often_sent(draws))


def _by_lengths(seen: Sketch, draws: Sketch, plain: Sketch) -> Tensor:
    return LengthModel.fitted(draws, plain).scores(seen, plain)


def often_sent(draws: Sketch) -> Params:
    """By name, [m]: the share of draws in which a tensor is sent; never quite none or all."""
    return {name: ((own > 0).sum(dim=1) + 0.5).double() / (own.shape[1] + 1) for name, own in draws.lengths.items()}


UNITS: tuple[Unit, ...] = ("one", "update", "tensor")
WAYS: dict[str, Way] = {
    "draws": partial(_by_draws, apart=False),
    "draws, lengths apart": partial(_by_draws, apart=True),
    **{f"entries by {unit}": partial(_by_entries, unit=unit) for unit in UNITS},
    "lengths": _by_lengths,
    "inputs of layers": _by_inputs,
}
LEARNT = (*(f"entries by {unit}" for unit in UNITS), "lengths")
"""Ways that rank a candidate without a reply of its own."""


def fitting(draws: Sketch, plain: Sketch) -> str:
    """The way that names most candidates by a reply of theirs that was kept back, in doubt the surest."""
    kept, rest = draws.take((slice(None), 0)), draws.take((slice(None), slice(1, None)))
    found = {}
    for name, way in WAYS.items():
        scores = way(kept, rest, plain)
        places = (scores <= scores.diagonal()[:, None]).sum(dim=1)
        found[name] = (float((places == 1).double().mean()), -float(places.double().log().mean()))
    return max(found, key=lambda name: found[name])


def learnt(way: str, seen: Sketch, draws: Sketch, some: Sketch, plain: Sketch) -> Tensor:
    """[N, m]: scores of all by their updates ``plain`` [m], learnt from draws [n, times] about ``some`` [n] of them."""
    if way == "lengths":
        return LengthModel.fitted(draws, some).scores(seen, plain)
    model = next(EntryModel.fitted(draws, some, unit) for unit in UNITS if way == f"entries by {unit}")
    often = {name: own.mean(dim=0, keepdim=True) for name, own in often_sent(draws).items()}
    parts = [model.scores(seen, plain.take(group), often) for group in groups(len(plain), TOGETHER)]
    return torch.cat(parts, dim=1)
