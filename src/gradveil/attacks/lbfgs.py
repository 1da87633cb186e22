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
    """The last steps s and changes of gradient y of each problem, in a ring; a pair without curvature counts as zero."""

    def __init__(self, x: Tensor, size: int) -> None:
        count, width = x.shape
        self.s, self.y = (torch.zeros(count, size, width, device=x.device) for _ in range(2))
        self.scale = torch.ones(count, device=x.device)
        self.size, self.head = size, 0
        self.last: tuple[Tensor, Tensor] | None = None
        self.fresh = torch.ones(count, dtype=torch.bool, device=x.device)

    def learn(self, x: Tensor, g: Tensor) -> None:
        if self.last is not None:
            s, y = x - self.last[0], g - self.last[1]
            product = (s * y).sum(dim=1)
            good = (product > _CURVED) & ~self.fresh & torch.isfinite(product)
            self.s[:, self.head], self.y[:, self.head] = (t.masked_fill(~good[:, None], 0.0) for t in (s, y))
            self.scale = torch.where(good, product / (y * y).sum(dim=1).clamp(min=1e-30), self.scale)
            self.head = (self.head + 1) % self.size
        self.last, self.fresh = (x, g), torch.zeros_like(self.fresh)

    def forget(self, which: Tensor) -> None:
        """Problems that start anew have no past."""
        keep = (~which)[:, None, None]
        self.s, self.y = self.s * keep, self.y * keep
        self.scale = self.scale.masked_fill(which, 1.0)
        self.fresh = self.fresh | which

    def direction(self, g: Tensor) -> Tensor:
        """The inverse Hessian times g, [N, D]."""
        order = (torch.arange(self.size, device=g.device) + self.head) % self.size  # oldest first
        s, y = self.s[:, order], self.y[:, order]
        sy, sg, yg = s @ y.transpose(1, 2), s @ g[:, :, None], y @ g[:, :, None]
        diagonal = sy.diagonal(dim1=1, dim2=2)
        upper = sy.triu() + torch.diag_embed((diagonal == 0).float())
        scale = self.scale[:, None, None]
        p = torch.linalg.solve_triangular(upper, sg, upper=True)
        inner = diagonal[:, :, None] * p + scale * (y @ (y.transpose(1, 2) @ p)) - scale * yg
        q = torch.linalg.solve_triangular(upper.transpose(1, 2), inner, upper=False)
        found: Tensor = scale[:, :, 0] * (g - (y.transpose(1, 2) @ p)[:, :, 0]) + (s.transpose(1, 2) @ q)[:, :, 0]
        return found


def _flat(tree: Params) -> Tensor:
    return torch.cat([tensor.flatten(1) for tensor in tree.values()], dim=1)


def _unflat(flat: Tensor, shapes: dict[str, torch.Size]) -> Params:
    parts = torch.split(flat, [shape[1:].numel() for shape in shapes.values()], dim=1)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
