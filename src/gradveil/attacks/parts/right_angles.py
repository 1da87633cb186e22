"""Solving for the pictures behind replies that stand at right angles to the gradient, as CENSOR's do.

Every tensor of every reply is two equations for the private example: the candidate's gradient is as long as what was
sent, and at right angles to it. Both hold exactly. LeNet gives twenty of them in one reply, ResNet-18 a hundred and
twenty-four. Replies to the same weights hold new right angles too, because each was drawn anew. So a hundred replies of
LeNet are two thousand equations for the three thousand pixels of a small picture, and what they leave open is filled by
what pictures look like: neighbors are alike, and colors rise and fall together.

They are solved by Levenberg and Marquardt's steps (Gauss-Newton with damping) under a Gaussian prior of pictures whose
power falls with frequency. The equations begin as soft wishes and become hard as the steps go on. Adam on the sum of
the squares of the same equations needs a hundred times as many steps, and stops far away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

from gradveil.attacks.base import Reconstruction
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Task
from gradveil.core.seeding import generator
from gradveil.core.trees import stack
from gradveil.core.types import Params
from gradveil.domains import Images
from gradveil.models import Functional
from gradveil.threat.observation import Observation

STEPS = 20
"""More steps find nothing more."""
_TRIES = 5
"""How often a step that makes things worse is shortened."""
_SOFTEST, _HARDEST = 1.0, 1e-6
"""The variance that equations are given at the first and at the last step."""
_NORM_WEIGHT = 3.0
"""By how much the log of a norm counts more than a right angle in units of chance."""
_FLATTEST = 0.3
"""Deviation of the start from the mean picture, in units of the prior."""
_CHROMA = (1.0, 0.12, 0.04)
"""Power of brightness, of red against blue, and of green against both, as in photographs."""
_ROOM = {"cpu": 2**28, "cuda": 2**34}
"""Bytes that the derivatives of equations may take on the way, about."""
_LARGE = 1_000_000
"""Parameters from which on equations are differentiated tensor by tensor."""
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

    Equal broadcasts are taken together where each was answered equally often. Replies of zeros say nothing.
    """
    each = [[*one.earlier, one] for one in seen]
    alike: dict[int, list[int]] = {}
    for number, exchange in enumerate(each[0]):
        alike.setdefault(id(exchange.sent), []).append(number)
    groups = list(alike.values())
    if len({len(group) for group in groups}) > 1:
        groups = [[number] for number in range(len(each[0]))]
    rows = [
        [stack([_pieces(exchanges[number].reply, whole=whole) for number in group]) for group in groups]
        for exchanges in each
    ]
    replies = stack([stack(row) for row in rows])  # [N, T, R, n]
    norms = {name: tensor.norm(dim=-1) for name, tensor in replies.items()}
    directions = {
        name: _compressed(tensor / (norms[name][..., None] + _TINY)) * math.sqrt(tensor.shape[-1])
        for name, tensor in replies.items()
    }
    sent = stack([each[0][group[0]].sent for group in groups])
    return Exchanges(sent, directions, {name: tensor.amax(dim=-1) for name, tensor in norms.items()})


def _pieces(update: Params, *, whole: bool) -> Params:
    flat = {name: tensor.flatten() for name, tensor in update.items()}
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
    place = torch.arange(side, dtype=torch.float32)
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

    def of_one(self, code: Tensor, labels: Tensor, sent: Params, directions: Params, norms: Params) -> Tensor:
        """The residuals of one problem at one broadcast, a vector."""
        inputs = self.pictures.decode(code)
        gradient = grad(lambda params: self.model.loss(self.one.loss, params, inputs, labels))(sent)
        found = []
        for name, piece in _pieces({name: gradient[name] for name in self.one.reply}, whole=self.whole).items():
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
        some = 1 if self._large else some  # large layers of several models at once are slow
        return [slice(start, start + some) for start in range(0, total, some)]

    def residuals(self, codes: Tensor) -> Tensor:
        """[N, equations]."""
        with torch.no_grad():
            parts = [self._over_all(self.of_one, codes, some) for some in self._chunks(4 * self._bytes)]
            return torch.cat(parts, dim=1).flatten(1)

    def linearised(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Residuals [N, equations] and their derivatives [N, equations, unknowns]."""
        if self._large and not self.whole:
            parts = [self.by_tensor(codes, number) for number in range(len(next(iter(self.exchanges.sent.values()))))]
            values, slopes = (torch.cat(both, dim=1) for both in zip(*parts, strict=True))
            return values, slopes

        def both(code: Tensor, *given: object) -> tuple[Tensor, Tensor]:
            residual = self.of_one(code, *given)  # type: ignore[arg-type]
            return residual, residual

        rows = max(1, _ROOM[codes.device.type] // (4 * self._bytes * len(codes)))
        slope = jacrev(both, has_aux=True, chunk_size=min(rows, self.count))
        parts = [self._over_all(slope, codes, some) for some in self._chunks(4 * self.count * self._bytes)]
        slopes, values = (torch.cat(both, dim=1) for both in zip(*parts, strict=True))
        return values.flatten(1), slopes.reshape(len(codes), -1, codes[0].numel())

    def by_tensor(self, codes: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """The same for one broadcast, tensor by tensor: quicker for large models.

        How the product of a gradient and a direction changes with the unknowns is how their own gradient of the loss
        changes along that direction. If one tensor alone moves, all other layers keep the same weights for all rows.
        """
        sent = {name: part[number] for name, part in self.exchanges.sent.items()}

        def loss(params: Params, code: Tensor, labels: Tensor) -> Tensor:
            inputs = self.pictures.decode(code)
            return self.model.loss(self.one.loss, {**sent, **params}, inputs, labels)

        gradients = vmap(grad(loss), in_dims=(None, 0, 0))(sent, codes, self.labels)
        values, slopes = list[Tensor](), list[Tensor]()
        at_once = max(1, _ROOM[codes.device.type] // (4 * self._bytes * len(codes)))
        for name in self.one.reply:
            weight, gradient = sent[name], gradients[name].flatten(1)
            length = (gradient.square().sum(dim=1, keepdim=True) + _TINY).sqrt()
            rows, norm = self.exchanges.directions[name][:, number], self.exchanges.norms[name][:, number, None]
            there = norm > 0

            def change(
                code: Tensor, labels: Tensor, along: Tensor, name: str = name, weight: Tensor = weight
            ) -> Tensor:
                def moved(tensor: Tensor) -> Tensor:
                    slope: Tensor = grad(loss, argnums=1)({name: tensor}, code, labels)
                    return slope

                found: Tensor = jvp(moved, (weight,), (along.view_as(weight),))[1]
                return found

            along = torch.cat([rows, (gradient / length)[:, None]], dim=1)
            of_rows = vmap(change, in_dims=(None, None, 0), chunk_size=at_once)
            moves = vmap(of_rows)(codes, self.labels, along).flatten(2)
            angles = (rows @ gradient[..., None])[..., 0] / length
            turned = (moves[:, :-1] - angles[..., None] * moves[:, -1:]) / length[..., None]
            values.append(torch.where(there, angles, 0))
            slopes.append(torch.where(there[..., None], turned, 0))
            if self.with_norms:
                ratio = length / torch.where(there, norm, 1)
                values.append(torch.where(there, _NORM_WEIGHT * ratio.log(), 0))
                slopes.append(torch.where(there[..., None], _NORM_WEIGHT * moves[:, -1:] / length[..., None], 0))
        return torch.cat(values, dim=1), torch.cat(slopes, dim=1)

    @property
    def _large(self) -> bool:
        return sum(part[0].numel() for part in self.exchanges.sent.values()) >= _LARGE

    @property
    def _bytes(self) -> int:
        """Of one gradient and of what a small network remembers of one pass."""
        return 4 * (sum(part[0].numel() for part in self.exchanges.sent.values()) + 16 * self.labels.shape[1] * 3072)


class Solved(NamedTuple):
    """Codes [N, ...], the cost of each [N], and costs at first and after every step [1 + steps, N], all hard ones."""

    codes: Tensor
    costs: Tensor
    trace: Tensor


def solve(equations: Equations, codes: Tensor, steps: int, task: Task) -> Solved:
    """Levenberg and Marquardt's steps towards the most likely codes, all problems together.

    With residuals r and derivatives J it minimises |r|^2 / s + |z|^2; s falls from step to step. Each problem has a
    damping of its own, which grows where a step made things worse and falls where it did not.
    """
    damping = codes.new_ones(len(codes))
    trace = list[Tensor]()
    for step in range(steps):
        softness = _SOFTEST * (_HARDEST / _SOFTEST) ** (step / max(1, steps - 1))
        residuals, slopes = equations.linearised(codes)
        costs, hard = _costs(residuals, codes, softness), _costs(residuals, codes, _HARDEST)
        trace += [] if trace else [hard]
        waiting = torch.ones_like(costs, dtype=torch.bool)
        for _ in range(_TRIES):
            moved = codes + _step(residuals, slopes, codes, softness, damping).view_as(codes)
            there = equations.residuals(moved)
            after = _costs(there, moved, softness)
            better = waiting & (after < costs)
            codes = torch.where(better.view(-1, *[1] * (codes.dim() - 1)), moved, codes)
            costs = torch.where(better, after, costs)
            hard = torch.where(better, _costs(there, moved, _HARDEST), hard)
            damping = torch.where(better, (damping / 3).clamp(min=1e-3), torch.where(waiting, damping * 4, damping))
            waiting = waiting & ~better
            if not bool(waiting.any()):
                break
        damping = damping.clamp(max=1e3)
        trace.append(hard)
        task.advance(len(codes))
        task.note(f"step {step + 1} of {steps}, cost {float(costs.mean()):.3g}")
    return Solved(codes, _costs(equations.residuals(codes), codes, _HARDEST), torch.stack(trace))


def _costs(residuals: Tensor, codes: Tensor, softness: float) -> Tensor:
    """[N]; infinity where something is not finite."""
    found = residuals.double().square().sum(dim=1) / softness + codes.double().flatten(1).square().sum(dim=1)
    return found.nan_to_num(nan=math.inf)


def _step(residuals: Tensor, slopes: Tensor, codes: Tensor, softness: float, damping: Tensor) -> Tensor:
    """[N, unknowns]: the step of (J'J / s + (1 + damping) I) d = -(J'r / s + z), in the smaller of the two forms."""
    found = []
    for residual, slope, code, more in zip(residuals, slopes, codes.flatten(1), damping, strict=True):
        wide, weight = slope.double(), 1 + more.double()
        right = -(wide.T @ residual.double() / softness + code.double())
        few = min(wide.shape)
        product = wide @ wide.T if len(wide) == few else wide.T @ wide
        product.diagonal().add_(weight * softness)
        factor, _ = torch.linalg.cholesky_ex(product)
        if len(wide) == few:
            inner = torch.cholesky_solve((wide @ right)[:, None], factor)[:, 0]
            step = (right - wide.T @ inner) / weight
        else:
            step = torch.cholesky_solve(softness * right[:, None], factor)[:, 0]
        found.append(step.to(slope.dtype))
    return torch.stack(found)


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
    exchanges = exchanges_of(seen, whole=whole)
    repeated = exchanges._replace(
        directions={name: part.repeat_interleave(restarts, dim=0) for name, part in exchanges.directions.items()},
        norms={name: part.repeat_interleave(restarts, dim=0) for name, part in exchanges.norms.items()},
    )
    model = Functional(one.module, train_mode=one.recipe.train_mode if one.recipe is not None else False)
    equations = Equations(
        model, one, repeated, labels.repeat_interleave(restarts, dim=0), pictures, with_norms=with_norms, whole=whole
    )
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
