"""L-BFGS over a batch of problems: each has its own history and its own fate, all are stepped together.

The inverse Hessian times the gradient is taken in the compact form of Byrd, Nocedal and Schnabel (1994), a few batched
products of small matrices where the usual recursion would be hundreds of tiny steps. As DLG has it there is no line
search, so a problem can get stuck or blow up: it then starts a new life elsewhere, while its best point is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.engine import Evaluate
from gradveil.attacks.search import Best, Found, Fresh, Project
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Task
from gradveil.core.types import Params

_CURVED = 1e-10
_TRACED = 60


@dataclass(frozen=True, kw_only=True)
class LBFGS:
    """L-BFGS with unit steps; ``patience`` iterations without progress, or a value that explodes, start a new life."""

    iterations: int
    lr: float = 1.0
    history: int = 40
    converged: float = 1e-7
    """A problem whose value is below this is left alone."""
    patience: int = 120
    progress: float = 0.05
    """The share by which the value must fall within ``patience`` iterations."""

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.history < 1 or self.lr <= 0:
            raise GradveilError("L-BFGS needs at least one iteration, one step of history and a rate above 0")

    def run(self, evaluate: Evaluate, start: Params, project: Project, task: Task, fresh: Fresh) -> Found:
        shapes = {name: tensor.shape for name, tensor in start.items()}
        best, x = Best(start), _flat(start)
        memory = _Memory(x, self.history)
        age, mark, marked_at = (torch.zeros(len(x), device=x.device) for _ in range(3))
        done = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        every, life = max(1, self.iterations // _TRACED), 0
        mark = mark + torch.inf
        for iteration in range(self.iterations):
            point = _unflat(x, shapes)
            gradients, values = evaluate(point)
            g = _flat(gradients)
            best.see(point, values, iteration if iteration % every == 0 else None)
            done = done | (values < self.converged)
            memory.learn(x, g)
            step = memory.direction(g)
            first = (1 / g.abs().sum(dim=1).clamp(min=1e-12)).clamp(max=1.0)
            size = self.lr * torch.where(age == 0, first, torch.ones_like(first))
            progressed = values < (1 - self.progress) * mark
            mark, marked_at = torch.where(progressed, values, mark), torch.where(progressed, age, marked_at)
            lost = ~torch.isfinite(values) | (values > 1e3 * mark) | (age - marked_at > self.patience)
            lost = lost | ((step * g).sum(dim=1) <= 0) | ~torch.isfinite(step).all(dim=1)
            lost = lost & ~done
            x = torch.where((done | lost)[:, None], x, x - size[:, None] * step)
            age = age + 1
            if bool(lost.any()):
                life += 1
                x = torch.where(lost[:, None], _flat(fresh(life)), x)
                memory.forget(lost)
                age, marked_at = age.masked_fill(lost, 0), marked_at.masked_fill(lost, 0)
                mark = mark.masked_fill(lost, torch.inf)
            x = _flat(project(_unflat(x, shapes)))
            task.advance(len(x))
            if bool(done.all()):
                break
        best.see(_unflat(x, shapes), evaluate(_unflat(x, shapes))[1], iteration + 1)
        return best.found(["converged" if d else "budget" for d in done.tolist()])


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

    def learn(self, x: Tensor, g: Tensor) -> None:
        if self.last is not None:
            self._add(x - self.last[0], g - self.last[1])
        self.last, self.fresh = (x, g), torch.zeros_like(self.fresh)

    def _add(self, s: Tensor, y: Tensor) -> None:
        product, at = (s * y).sum(dim=1), self.head
        good = (product > _CURVED) & ~self.fresh & torch.isfinite(product)
        s, y = (tensor.masked_fill(~good[:, None], 0.0) for tensor in (s, y))
        self.s[:, at], self.y[:, at] = s, y
        self.sy[:, at], self.sy[:, :, at] = _times(self.y, s), _times(self.s, y)
        self.yy[:, at] = self.yy[:, :, at] = _times(self.y, y)
        self.scale = torch.where(good, product / self.yy[:, at, at].clamp(min=1e-30), self.scale)
        self.head = (at + 1) % self.size

    def forget(self, which: Tensor) -> None:
        """Problems that start anew have no past."""
        for part in (self.s, self.y, self.sy, self.yy):
            part[which] = 0.0
        self.scale = self.scale.masked_fill(which, 1.0)
        self.fresh = self.fresh | which

    def direction(self, g: Tensor) -> Tensor:
        """The inverse Hessian times g, [N, D]: four products with the history, the rest among small matrices."""
        order = (torch.arange(self.size, device=g.device) + self.head) % self.size  # oldest first
        sy, yy = (gram[:, order][:, :, order] for gram in (self.sy, self.yy))
        sg, yg = (_times(part, g)[:, order, None] for part in (self.s, self.y))
        diagonal = sy.diagonal(dim1=1, dim2=2)
        upper = sy.triu() + torch.diag_embed((diagonal == 0).float())
        scale = self.scale[:, None, None]
        p = torch.linalg.solve_triangular(upper, sg, upper=True)
        inner = diagonal[:, :, None] * p + scale * (yy @ p - yg)
        q = torch.linalg.solve_triangular(upper.transpose(1, 2), inner, upper=False)
        back = torch.argsort(order)
        p, q = p[:, back].transpose(1, 2), q[:, back].transpose(1, 2)
        found: Tensor = self.scale[:, None] * (g - (p @ self.y)[:, 0]) + (q @ self.s)[:, 0]
        return found


def _times(history: Tensor, vector: Tensor) -> Tensor:
    """[N, m, D] times [N, D]: [N, m]."""
    return (history @ vector[:, :, None])[:, :, 0]


def _flat(tree: Params) -> Tensor:
    return torch.cat([tensor.flatten(1) for tensor in tree.values()], dim=1)


def _unflat(flat: Tensor, shapes: dict[str, torch.Size]) -> Params:
    parts = torch.split(flat, [shape[1:].numel() for shape in shapes.values()], dim=1)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
