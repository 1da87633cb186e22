"""L-BFGS over a batch of problems: each has its own history and its own fate, all are stepped together.

The inverse Hessian times the gradient is taken in the compact form of Byrd, Nocedal and Schnabel (1994), a few batched
products of small matrices where the usual recursion would be hundreds of tiny steps. As DLG has it there is no line
search, so a problem can get stuck or blow up: it then starts a new life elsewhere, while its best point is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.parts.search import Best, Found, Problems, Search
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Task
from gradveil.core.types import Params

_CURVED = 1e-6


@dataclass(frozen=True, kw_only=True)
class LBFGS(Search):
    """L-BFGS with unit steps over objectives that are not negative.

    A problem whose value falls below ``converged`` is solved, and so are its other restarts. One that makes no progress
    for ``patience`` iterations, explodes or is pointed uphill starts a new life.
    """

    lr: float = 1.0
    history: int = 100
    converged: float = 1e-8
    patience: int = 120
    lives: int = 4
    """How often a problem may start; then it is given up, stuck."""
    progress: float = 0.05
    """The share by which the value must fall within ``patience`` iterations."""
    restarts: int = 1
    """How many problems one after the other are restarts of the same."""

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.history < 1 or self.lr <= 0:
            raise GradveilError("L-BFGS needs at least one iteration, one step of history and a rate above 0")

    def run(self, problems: Problems, task: Task) -> Found:
        shapes = {name: tensor.shape for name, tensor in problems.start.items()}
        best, x = Best(problems.start, self.iterations), _flat(problems.start)
        memory, lives, iteration = _Memory(x, self.history), _Lives(x), 0
        solved, dead = (torch.zeros(len(x), dtype=torch.bool, device=x.device) for _ in range(2))
        for iteration in range(self.iterations):
            point = _unflat(x, shapes)
            gradients, values = problems.evaluate(point)
            best.see(point, values, iteration)
            by_any_restart = (values < self.converged).view(-1, self.restarts).any(dim=1)
            solved = solved | by_any_restart.repeat_interleave(self.restarts)
            if bool((solved | dead).all()):
                break
            g = _flat(gradients)
            step = memory.learn(x, g)
            lost = lives.lost(values, step, g, self.patience, self.progress) & ~solved
            # in the first step of a life no more than one over the sum of the gradient's entries
            small = (1 / g.abs().sum(dim=1).clamp(min=1e-12)).clamp(max=1.0)
            size = self.lr * torch.where(lives.age <= 1, small, torch.ones_like(small))
            dead = dead | (lost & (lives.number >= self.lives))
            x = torch.where((solved | lost | dead)[:, None], x, x - size[:, None] * step)
            lost = lost & ~dead
            if bool(lost.any()):
                for life in set(lives.number[lost].tolist()):  # its own, whatever befell the problems beside it
                    fresh = problems.start if problems.fresh is None else problems.fresh(int(life))
                    x = torch.where((lost & (lives.number == life))[:, None], _flat(fresh), x)
                memory.forget(lost)
                lives.renew(lost)
            x = _flat(problems.project(_unflat(x, shapes)))
            task.advance(len(x))
        point = _unflat(x, shapes)
        best.see(point, problems.evaluate(point)[1], iteration + 1, last=True)
        ended = zip(solved.tolist(), dead.tolist(), strict=True)
        return best.found(["converged" if done else "stuck" if given_up else "budget" for done, given_up in ended])


class _Lives:
    """How old the present life of each problem is, and when it last made progress."""

    def __init__(self, x: Tensor) -> None:
        self.age, self.marked_at = (torch.zeros(len(x), device=x.device) for _ in range(2))
        self.mark = torch.full((len(x),), torch.inf, device=x.device)
        self.number = torch.ones(len(x), device=x.device)

    def lost(self, values: Tensor, step: Tensor, g: Tensor, patience: int, progress: float) -> Tensor:
        """Which problems are stuck, explode or are pointed uphill; one iteration older afterwards."""
        better = values < (1 - progress) * self.mark
        self.mark = torch.where(better, values, self.mark)
        self.marked_at = torch.where(better, self.age, self.marked_at)
        stuck = (self.age - self.marked_at > patience) | (values > 1e3 * self.mark)
        self.age = self.age + 1
        uphill = (step * g).sum(dim=1) <= 0
        return stuck | uphill | ~torch.isfinite(values) | ~torch.isfinite(step).all(dim=1)

    def renew(self, which: Tensor) -> None:
        self.number = self.number + which
        self.age, self.marked_at = self.age.masked_fill(which, 0), self.marked_at.masked_fill(which, 0)
        self.mark = self.mark.masked_fill(which, torch.inf)


class _Memory:
    """The last steps s and changes of gradient y of each problem, in a ring, with all their inner products.

    A pair without curvature is kept as zeros, which count for nothing.
    """

    def __init__(self, x: Tensor, size: int) -> None:
        count, width = x.shape
        self.s, self.y = (torch.zeros(count, size, width, device=x.device) for _ in range(2))
        self.sy, self.yy = (torch.zeros(count, size, size, device=x.device) for _ in range(2))
        self.scale = torch.ones(count, device=x.device)
        self.size, self.head = size, 0
        self.last: tuple[Tensor, Tensor] | None = None
        self.fresh = torch.ones(count, dtype=torch.bool, device=x.device)

    def learn(self, x: Tensor, g: Tensor) -> Tensor:
        """Take in the latest point and gradient, and return the inverse Hessian times the gradient, [N, D]."""
        s, y = (x - self.last[0], g - self.last[1]) if self.last is not None else (torch.zeros_like(x),) * 2
        product, at = (s * y).sum(dim=1), self.head
        curved = product > _CURVED * s.norm(dim=1) * y.norm(dim=1)
        good = curved & ~self.fresh & torch.isfinite(product)
        s, y = (tensor.masked_fill(~good[:, None], 0.0) for tensor in (s, y))
        self.s[:, at], self.y[:, at] = s, y
        with_s, with_y = self.s @ torch.stack([y, g], dim=2), self.y @ torch.stack([s, y, g], dim=2)
        self.sy[:, :, at], self.sy[:, at] = with_s[:, :, 0], with_y[:, :, 0]
        self.yy[:, at] = self.yy[:, :, at] = with_y[:, :, 1]
        self.scale = torch.where(good, product / self.yy[:, at, at].clamp(min=1e-30), self.scale)
        self.head, self.last, self.fresh = (at + 1) % self.size, (x, g), torch.zeros_like(self.fresh)
        return self._direction(g, with_s[:, :, 1:], with_y[:, :, 2:])

    def forget(self, which: Tensor) -> None:
        """Problems that start anew have no past."""
        for part in (self.s, self.y, self.sy, self.yy):
            part[which] = 0.0
        self.scale = self.scale.masked_fill(which, 1.0)
        self.fresh = self.fresh | which

    def _direction(self, g: Tensor, sg: Tensor, yg: Tensor) -> Tensor:
        """The compact form: two products with the history, the rest among small matrices, oldest entries first."""
        order = (torch.arange(self.size, device=g.device) + self.head) % self.size
        sy, yy = (gram[:, order][:, :, order] for gram in (self.sy, self.yy))
        diagonal = sy.diagonal(dim1=1, dim2=2)
        upper = sy.triu() + torch.diag_embed((diagonal == 0).float())
        scale = self.scale[:, None, None]
        p = torch.linalg.solve_triangular(upper, sg[:, order], upper=True)
        inner = diagonal[:, :, None] * p + scale * (yy @ p - yg[:, order])
        q = torch.linalg.solve_triangular(upper.transpose(1, 2), inner, upper=False)
        back = torch.argsort(order)
        p, q = p[:, back].transpose(1, 2), q[:, back].transpose(1, 2)
        found: Tensor = self.scale[:, None] * (g - (p @ self.y)[:, 0]) + (q @ self.s)[:, 0]
        return found


def _flat(tree: Params) -> Tensor:
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tree.values()], dim=1)


def _unflat(flat: Tensor, shapes: dict[str, torch.Size]) -> Params:
    parts = torch.split(flat, [shape[1:].numel() for shape in shapes.values()], dim=1)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
