"""Solving for the pictures behind replies that stand at right angles to the gradient, as CENSOR's do.

Every tensor of every reply is two equations for the private example: the candidate's gradient is as long as what was
sent, and at right angles to it. Both hold exactly. LeNet gives twenty of them in one reply, ResNet-18 a hundred and
twenty-four. Replies to the same weights hold new right angles too, because each was drawn anew. So a hundred replies of
LeNet are two thousand equations for the three thousand pixels of a small picture, and what they leave open is filled by
what pictures look like: neighbors are alike, and colors rise and fall together.

They are solved by Levenberg and Marquardt's steps (Gauss-Newton with damping) under a Gaussian prior of pictures whose
power falls with frequency. The equations begin as soft wishes and become hard as they come to hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from gradveil.attacks.base import Reconstruction
from gradveil.attacks.parts.gradient_rows import SlopedSwitches, gradient_rows
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Task
from gradveil.core.seeding import generator
from gradveil.core.trees import stack
from gradveil.core.types import Params
from gradveil.domains import Images
from gradveil.engine import rules, shared_gradients
from gradveil.engine.network import SharedNetwork
from gradveil.models import Functional
from gradveil.threat.observation import Observation

STEPS = 20
"""More steps find nothing more."""
_TRIES = 5
"""How often a step that makes things worse is shortened."""
_UNFORESEEN, _SOFTEST, _HARDEST = 0.1, 1.0, 1e-8
"""The variance of equations as a share of their mean square, and its bounds."""
_NARROWEST = 1e-3
"""The least width of a switch that has a slope."""
_NORM_WEIGHT = 3.0
"""By how much the log of a norm counts more than a right angle in units of chance."""
_FLATTEST = 0.3
"""Deviation of the start from the mean picture, in units of the prior."""
_CHROMA = (1.0, 0.12, 0.04)
"""Power of brightness, of red against blue, and of green against both, as in photographs."""
_ROOM = {"cpu": 2**28, "cuda": 2**34}
"""Bytes that the derivatives of equations may take on the way, about."""
_ROOM_OF_ALL = {"cpu": 2**31, "cuda": 2**35}
"""Bytes that the derivatives of all equations of all clients may take."""
_ROWS = {"cpu": 64, "cuda": 1024}
"""Rows times examples that go back through a large model at once."""
_LARGE = 1_000_000
"""Parameters from which on equations are differentiated layer by layer, in plain batches."""
_ROUNDING = 1e-6
"""The share of a reply's length up to which a tensor of it is nothing but rounding."""
_TINY = 1e-30


class Exchanges(NamedTuple):
    """What several clients were sent and replied, all to the same broadcasts.

    A piece is what was made orthogonal together: a tensor, or all of them.
    """

    sent: Params
    """[T, ...]: the broadcasts, each once."""
    directions: dict[str, Tensor]
    """By piece [N, T, R, n]: the replies to each broadcast, unit vectors times the root of n."""
    norms: dict[str, Tensor]
    """By piece [N, T]: of the replies that are not zero."""


def exchanges_of(seen: Sequence[Observation], *, whole: bool) -> Exchanges:
    """All exchanges behind observations of clients that got the same broadcasts.

    Equal broadcasts are taken together where each was answered equally often. Replies of zeros say nothing, nor do
    tensors of numbers that are not finite, or so short beside the whole reply that they are what rounding left: a bias
    before a batch norm has no gradient.
    """
    each, names = [comparable(one) for one in seen], list(seen[0].reply)
    alike: dict[int, list[int]] = {}
    for number, exchange in enumerate(each[0]):
        alike.setdefault(id(exchange.sent), []).append(number)
    groups = list(alike.values())
    if len({len(group) for group in groups}) > 1:
        groups = [[number] for number in range(len(each[0]))]
    rows = [[_pieces(exchange.reply, names, whole=whole) for exchange in exchanges] for exchanges in each]
    directions, norms = dict[str, Tensor](), dict[str, Tensor]()
    for name in rows[0][0]:  # one by one: all replies of a large model fit into memory twice, hardly more often
        replies = torch.stack(
            [torch.stack([torch.stack([row[number][name] for number in group]) for group in groups]) for row in rows]
        )
        lengths = replies.norm(dim=-1)
        broken = ~lengths.isfinite()
        replies[broken], lengths[broken] = 0, 0
        units = _compressed(replies.div_(lengths[..., None] + _TINY))
        directions[name] = units.mul_(math.sqrt(replies.shape[-1]))
        norms[name] = lengths.amax(dim=-1)
    least = _ROUNDING * torch.stack(list(norms.values())).norm(dim=0)
    norms = {name: norm.where(norm > least, 0) for name, norm in norms.items()}
    return Exchanges(stack([each[0][group[0]].sent for group in groups]), directions, norms)


def comparable(one: Observation) -> list[Observation]:
    """All exchanges with a client that are like the last one: of one step, and of tensors of the same shapes."""

    def shapes(exchange: Observation) -> tuple[object, ...]:
        trees = ({name: tensor.shape for name, tensor in tree.items()} for tree in (exchange.sent, exchange.reply))
        return (exchange.kind, exchange.batch_size, *trees)

    return [exchange for exchange in (*one.earlier, one) if shapes(exchange) == shapes(one)]


def _pieces(update: Params, names: Sequence[str], *, whole: bool) -> Params:
    """In the order of the names: what is one vector must not depend on who wrote it down."""
    flat = {name: update[name].flatten() for name in names}
    return {"all": torch.cat(list(flat.values()))} if whole else flat


def _compressed(rows: Tensor) -> Tensor:
    """As few rows [..., min(R, n), n] as have the same products with everything: more replies than entries repeat."""
    return rows if rows.shape[-2] <= rows.shape[-1] else torch.linalg.qr(rows, mode="r").R


class SmoothPictures:
    """A Gaussian prior of pictures: x = mean + A z with z of N(0, 1) entries, whose power falls with frequency."""

    def __init__(self, domain: Images, device: torch.device) -> None:
        mean, std = domain.moments(device=device)
        if float(std.max()) >= 1:  # nothing is known of these pictures
            mean, std = torch.full_like(mean, 0.5), torch.full_like(std, 0.25)
        self.mean = mean
        self.down, self.across = (_cosines(side).to(device) for side in (domain.height, domain.width))
        places = [torch.arange(side, device=device) / side * 32 for side in (domain.height, domain.width)]
        power = 1 / (places[0][:, None].square() + places[1].square() + 1)
        self.colors = torch.eye(domain.channels, device=device)
        shares = torch.ones(domain.channels, device=device)
        if domain.channels == 3:
            opponent = torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]], device=device)
            self.colors, shares = opponent / opponent.norm(dim=1, keepdim=True), torch.tensor(_CHROMA, device=device)
        spectrum = shares[:, None, None] * power
        self.amplitudes = (spectrum / spectrum.mean()).sqrt() * std.square().mean().sqrt()

    def decode(self, code: Tensor) -> Tensor:
        """Pictures [B, C, H, W] of codes of the same shape, linear but for the mean; they may leave [0, 1]."""
        waves = torch.einsum("bcij,ia,jd->bcad", code * self.amplitudes, self.down, self.across)
        return self.mean + torch.einsum("bcad,ce->bead", waves, self.colors)


def _cosines(side: int) -> Tensor:
    """[side, side]: the orthonormal cosine transform, a frequency in each row."""
    place = torch.arange(side, dtype=torch.get_default_dtype())
    waves = torch.cos(math.pi * (place + 0.5) * place[:, None] / side) * math.sqrt(2 / side)
    return torch.cat([waves[:1] / math.sqrt(2), waves[1:]])


@dataclass(frozen=True)
class Equations:
    """The equations of N problems: residuals that are zero at the private example."""

    model: Functional
    one: Observation
    exchanges: Exchanges
    labels: Tensor
    """[N, B]."""
    pictures: SmoothPictures
    with_norms: bool
    whole: bool
    networks: tuple[SharedNetwork, ...] = ()
    """Of a large model, one for each broadcast."""

    def of_one(self, code: Tensor, labels: Tensor, sent: Params, directions: Params, norms: Params) -> Tensor:
        """The residuals of one problem at one broadcast, a vector."""
        inputs = self.pictures.decode(code)
        gradient = grad(lambda params: self.model.loss(self.one.loss, params, inputs, labels))(sent)
        found = []
        for name, piece in _pieces(gradient, list(self.one.reply), whole=self.whole).items():
            length, sent_length = (piece.square().sum() + _TINY).sqrt(), norms[name]
            there = sent_length > 0
            found.append(torch.where(there, directions[name] @ piece / length, 0))
            if self.with_norms:
                ratio = length / torch.where(there, sent_length, 1)
                found.append(torch.where(there, _NORM_WEIGHT * ratio.log(), 0)[None])
        return torch.cat(found)

    def _over_all(self, function: Callable[..., Any], codes: Tensor, some: slice) -> Any:
        """A function of one problem and one broadcast, for all problems and some of the broadcasts."""
        _, directions, norms = ({name: part[:, some] for name, part in tree.items()} for tree in self.exchanges)
        sent = {name: part[some] for name, part in self.exchanges.sent.items()}
        of_broadcasts = vmap(function, in_dims=(None, None, 0, 0, 0))
        return vmap(of_broadcasts, in_dims=(0, 0, None, 0, 0))(codes, self.labels, sent, directions, norms)

    @property
    def count(self) -> int:
        """Equations of one broadcast."""
        angles = sum(rows.shape[2] for rows in self.exchanges.directions.values())
        return angles + self.with_norms * len(self.exchanges.norms)

    @property
    def total(self) -> int:
        """Equations of all broadcasts."""
        return self.count * len(next(iter(self.exchanges.sent.values())))

    def _chunks(self, each: int) -> list[slice]:
        """So many broadcasts at once that ``each`` bytes of them fit; of large models one."""
        total = len(next(iter(self.exchanges.sent.values())))
        some = max(1, _ROOM[self.labels.device.type] // max(1, each * len(self.labels)))
        some = 1 if self.large else some  # large layers of several models at once are slow
        return [slice(start, start + some) for start in range(0, total, some)]

    def residuals(self, codes: Tensor) -> Tensor:
        """[N, equations]."""
        with torch.no_grad():
            if self.networks:
                return torch.cat([self.through(codes, number)[0] for number in range(len(self.networks))], dim=1)
            parts = [self._over_all(self.of_one, codes, some) for some in self._chunks(4 * self._bytes)]
            return torch.cat(parts, dim=1).flatten(1)

    def linearised(self, codes: Tensor, widths: Tensor) -> tuple[Tensor, Tensor]:
        """Residuals [N, equations] and their derivatives [N, equations, unknowns], at these widths [N] of switches."""
        if self.networks:
            each = [self.through(codes, number, widths) for number in range(len(self.networks))]
            values, slopes = (torch.cat(both, dim=1) for both in zip(*each, strict=True))
            return values, slopes

        def both(code: Tensor, *given: object) -> tuple[Tensor, Tensor]:
            residual = self.of_one(code, *given)  # type: ignore[arg-type]
            return residual, residual

        rows = max(1, _ROOM[codes.device.type] // (4 * self._bytes * len(codes)))
        slope = jacrev(both, has_aux=True, chunk_size=min(rows, self.count))
        parts = [self._over_all(slope, codes, some) for some in self._chunks(4 * self.count * self._bytes)]
        slopes, values = (torch.cat(both, dim=1) for both in zip(*parts, strict=True))
        return values.flatten(1), slopes.reshape(len(codes), -1, codes[0].numel())

    def through(self, codes: Tensor, number: int, widths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same for one broadcast, layer by layer; derivatives only if the ``widths`` of switches are given."""
        codes = codes.detach().requires_grad_()
        with torch.enable_grad(), nullcontext() if widths is None else SlopedSwitches(widths):
            inputs = self.pictures.decode(codes.flatten(0, 1)).view_as(codes)
            passed = self.networks[number].differentiate(self.one.loss, inputs, self.labels, again=widths is not None)
        values, directions = list[Tensor](), list[Params]()
        for call in passed.calls:
            along = Params()
            assert call.layer is not None
            assert call.inputs is not None
            with torch.no_grad():
                own = rules.gradients(call.layer, call.inputs, call.output_gradient, passed.problems)
            for name, path in call.parameters.items():
                if path not in self.one.reply:
                    continue
                gradient = own[name].flatten(1)
                length = (gradient.square().sum(dim=1, keepdim=True) + _TINY).sqrt()
                rows, norm = self.exchanges.directions[path][:, number], self.exchanges.norms[path][:, number, None]
                there, unit = norm > 0, gradient / length
                # a matrix product of one row and one column would leave most of a GPU idle
                angles = torch.where(there, (rows * unit[:, None]).sum(dim=2), 0)
                values.append(angles)
                if self.with_norms:
                    values.append(torch.where(there, _NORM_WEIGHT * (length / torch.where(there, norm, 1)).log(), 0))
                if widths is not None:
                    turns = (rows - angles[..., None] * unit[:, None]) / length[..., None]
                    grows = _NORM_WEIGHT * (unit / length)[:, None]
                    both = torch.cat([turns, grows], dim=1) if self.with_norms else turns
                    along[name] = torch.where(there[..., None], both, 0).transpose(0, 1).reshape(-1, *own[name].shape)
            directions.append(along)
        if widths is None:
            return torch.cat(values, dim=1), codes.new_empty(0)
        at_once = max(1, _ROWS[codes.device.type] // self.labels.numel())
        return torch.cat(values, dim=1), gradient_rows(passed, directions, codes, at_once).flatten(2)

    @property
    def large(self) -> bool:
        return sum(part[0].numel() for part in self.exchanges.sent.values()) >= _LARGE

    @property
    def _bytes(self) -> int:
        """Of one gradient and of what a small network remembers of one pass."""
        inputs = self.labels.shape[1] * math.prod(self.one.domain.shape)
        return 4 * (sum(part[0].numel() for part in self.exchanges.sent.values()) + 16 * inputs)


def networks_of(equations: Equations) -> tuple[SharedNetwork, ...]:
    """For each broadcast of a large model; none where its layers forbid that, or one of them is passed twice."""
    one, sent = equations.one, equations.exchanges.sent
    trained = one.recipe is not None and one.recipe.train_mode
    if not equations.large or equations.whole or trained:
        return ()
    shape, classes = one.domain.shape, one.domain.classes
    if shared_gradients(one.module, one.sent, one.loss, train_mode=False, shape=shape, classes=classes) is None:
        return ()
    count = len(next(iter(sent.values())))
    each = [{name: part[number] for name, part in sent.items()} for number in range(count)]
    networks = tuple(SharedNetwork(one.module, own, train_mode=False) for own in each)
    labels = equations.labels[:1, :1]
    inputs = torch.zeros((1, 1, *shape), device=labels.device, requires_grad=True)
    calls = networks[0].differentiate(one.loss, inputs, labels).calls
    used = [name for call in calls for name in call.parameters.values()]
    plain = len(set(used)) == len(used) and all(call.layer is not None for call in calls)
    return networks if plain else ()


class Solved(NamedTuple):
    """Codes [N, ...], the cost of each [N], and costs at first and after every step [1 + steps, N], all hard ones."""

    codes: Tensor
    costs: Tensor
    trace: Tensor


def solve(equations: Equations, codes: Tensor, steps: int, task: Task) -> Solved:
    """Levenberg and Marquardt's steps towards the most likely codes, all problems together.

    With residuals r and derivatives J it minimises |r|^2 / s + |z|^2. The variance s is a share of what the residuals
    are at present: that much of them straight lines do not foresee. Each problem has a damping of its own, which grows
    where a step made things worse and falls where it did not. Where none was better, the switches of rectifiers get
    slopes at the next one, or lose them.
    """
    damping, sloped = codes.new_zeros(len(codes)), torch.zeros(len(codes), dtype=torch.bool, device=codes.device)
    there = equations.residuals(codes)
    trace = [_costs(there, codes, _HARDEST)]
    for step in range(steps):
        misfit = there.square().mean(dim=1)
        softness = (_UNFORESEEN * misfit).clamp(_HARDEST, _SOFTEST)
        residuals, slopes = equations.linearised(codes, torch.where(sloped, misfit.clamp(_NARROWEST, 1), 0))
        costs = _costs(residuals, codes, softness)
        waiting = torch.ones_like(costs, dtype=torch.bool)
        for _ in range(_TRIES):
            moved = codes + _step(residuals, slopes, codes, softness, damping).view_as(codes)
            found = equations.residuals(moved)
            better = waiting & (_costs(found, moved, softness) < costs)
            codes = torch.where(better.view(-1, *[1] * (codes.dim() - 1)), moved, codes)
            there = torch.where(better[:, None], found, there)
            damping = torch.where(better, damping / 4, torch.where(waiting, damping * 4 + 1, damping))
            waiting = waiting & ~better
            if not bool(waiting.any()):
                break
        damping, sloped = torch.where(waiting, 1, damping), sloped ^ waiting
        trace.append(_costs(there, codes, _HARDEST))
        task.advance(len(codes))
        task.note(f"step {step + 1} of {steps}, misfit {float(there.square().mean()):.3g}")
    return Solved(codes, trace[-1], torch.stack(trace))


def _costs(residuals: Tensor, codes: Tensor, softness: Tensor | float) -> Tensor:
    """[N]; infinity where something is not finite."""
    found = residuals.double().square().sum(dim=1) / softness + codes.double().flatten(1).square().sum(dim=1)
    return found.nan_to_num(nan=math.inf, posinf=math.inf)


def _step(residuals: Tensor, slopes: Tensor, codes: Tensor, softness: Tensor, damping: Tensor) -> Tensor:
    """[N, unknowns]: the step of (J'J / s + (1 + damping) I) d = -(J'r / s + z), in the smaller of the two forms."""
    found = []
    for residual, slope, code, soft, more in zip(residuals, slopes, codes.flatten(1), softness, damping, strict=True):
        wide, weight, variance = slope.double(), 1 + more.double(), soft.double()
        right = -(wide.T @ residual.double() / variance + code.double())
        few = min(wide.shape)
        product = wide @ wide.T if len(wide) == few else wide.T @ wide
        product.diagonal().add_(weight * variance)
        factor, _ = torch.linalg.cholesky_ex(product)
        if len(wide) == few:
            inner = torch.cholesky_solve((wide @ right)[:, None], factor)[:, 0]
            step = (right - wide.T @ inner) / weight
        else:
            step = torch.cholesky_solve(variance * right[:, None], factor)[:, 0]
        found.append(step.to(slope.dtype))
    return torch.stack(found)


def clients_at_once(one: Observation, labels: Tensor, restarts: int) -> int:
    """How many clients like this one are solved together: the derivatives of all their equations have to fit."""
    equations = 2 * len(one.reply) * (len(one.earlier) + 1)
    unknowns = labels.shape[1] * math.prod(one.domain.shape)
    return max(1, _ROOM_OF_ALL[labels.device.type] // (4 * equations * unknowns * restarts))


def rebuild(
    seen: Sequence[Observation],
    labels: Tensor,
    *,
    with_norms: bool,
    whole: bool,
    restarts: int,
    steps: int,
    seeds: Sequence[int],
    task: Task,
) -> list[Reconstruction]:
    """The pictures behind all replies of each client; the restart of the lowest cost is kept."""
    one, count = seen[0], labels.shape[1]
    if not isinstance(one.domain, Images):
        raise GradveilError("right angles are solved for images alone")
    pictures = SmoothPictures(one.domain, labels.device)
    equations = Equations(
        Functional(one.module, train_mode=one.recipe.train_mode if one.recipe is not None else False),
        one,
        exchanges_of([each for each in seen for _ in range(restarts)], whole=whole),
        labels.repeat_interleave(restarts, dim=0),
        pictures,
        with_norms=with_norms,
        whole=whole,
    )
    equations = replace(equations, networks=networks_of(equations))
    rngs = [generator(seed, "right angles", restart) for seed in seeds for restart in range(restarts)]
    shape = (count, *one.domain.shape)
    starts = torch.stack([_FLATTEST * torch.randn(shape, generator=rng) for rng in rngs]).to(labels.device)
    solved = solve(equations, starts, steps, task)
    costs = (solved.costs / equations.total).view(-1, restarts)
    best = costs.argmin(dim=1)
    found = []
    for i, place in enumerate(best.tolist()):
        row = i * restarts + place
        inputs = one.domain.valid(pictures.decode(solved.codes[row]).detach()).cpu()
        trace = tuple((solved.trace[:, row] / equations.total).tolist())
        found.append(
            Reconstruction(
                inputs=inputs,
                labels=labels[i].cpu(),
                objective=float(costs[i, place]),
                objectives=tuple(costs[i].tolist()),
                steps=tuple(range(steps + 1)),
                trace=trace,
                stopped="budget" if math.isfinite(float(costs[i, place])) else "diverged",
                problem_steps=steps * restarts,
                strategy=f"gauss-newton, {len(rngs)} together",
            )
        )
    return found
