from __future__ import annotations

import torch

from gradveil.attacks.parts.lbfgs import LBFGS
from gradveil.attacks.parts.search import Found, Problems
from gradveil.core.progress import SILENT
from gradveil.core.seeding import generator
from gradveil.core.types import Params


def run(search: LBFGS, evaluate, start: torch.Tensor, fresh: torch.Tensor | None = None) -> Found:  # type: ignore[no-untyped-def]
    with SILENT.task("", None) as task:
        return search.run(
            Problems(evaluate, {"x": start}, fresh=lambda _: {"x": start if fresh is None else fresh}), task
        )


def bowls(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = generator(3)
    root = torch.randn(count, width, width, generator=rng, dtype=torch.float64)
    return root @ root.transpose(1, 2) + torch.eye(width), torch.randn(count, width, generator=rng, dtype=torch.float64)


def test_it_walks_as_torchs_lbfgs_does() -> None:
    """Problem by problem the points of the batched form are those of torch's two-loop recursion."""
    curvature, lowest = bowls(4, 10)

    def evaluate(point: Params) -> tuple[Params, torch.Tensor]:
        away = point["x"] - lowest.float()
        slope = (curvature.float() @ away[:, :, None])[:, :, 0]
        return {"x": slope}, 0.5 * (away * slope).sum(dim=1)

    for steps in (1, 2, 5, 12):
        found = run(LBFGS(iterations=steps, converged=-1, patience=10**6, history=6), evaluate, torch.zeros(4, 10))
        for i in range(4):
            x = torch.zeros(10, requires_grad=True)
            torchs = torch.optim.LBFGS(
                [x], lr=1, max_iter=steps, history_size=6, tolerance_grad=0, tolerance_change=0, max_eval=10**6
            )

            def closure(i: int = i, x: torch.Tensor = x, torchs: torch.optim.LBFGS = torchs) -> torch.Tensor:
                torchs.zero_grad()
                away = x - lowest[i].float()
                value = 0.5 * away @ curvature[i].float() @ away
                value.backward()  # type: ignore[no-untyped-call]
                return value

            torchs.step(closure)  # type: ignore[arg-type]
            value = 0.5 * (x.detach() - lowest[i].float()) @ curvature[i].float() @ (x.detach() - lowest[i].float())
            torch.testing.assert_close(found.trace[-1, i], value, rtol=2e-2, atol=1e-5)


def test_a_stuck_problem_starts_a_new_life_and_a_solved_one_stops_its_restarts() -> None:
    """Problem 0 starts where the slope is zero and the value is not; its new start lies in the bowl."""

    def evaluate(point: Params) -> tuple[Params, torch.Tensor]:
        x = point["x"]
        inside = x.abs().sum(dim=1, keepdim=True) < 100
        return {"x": torch.where(inside, 2 * x, torch.zeros_like(x))}, torch.where(
            inside[:, 0], x.square().sum(dim=1), 50.0
        )

    start = torch.tensor([[900.0, 900.0], [3.0, 1.0], [900.0, 0.0], [900.0, 1.0]])
    fresh = torch.tensor([[2.0, 2.0], [2.0, 2.0], [900.0, 2.0], [900.0, 3.0]])
    found = run(LBFGS(iterations=60, patience=5, lives=3, restarts=2), evaluate, start, fresh)
    assert found.stopped == ("converged", "converged", "stuck", "stuck")
    assert found.objectives[1] < 1e-8
    assert found.objectives[2] == 50


def test_a_value_that_is_not_finite_is_never_the_answer() -> None:
    def evaluate(point: Params) -> tuple[Params, torch.Tensor]:
        x = point["x"]
        return {"x": -torch.ones_like(x)}, torch.where(x[:, 0] > 2, torch.nan, 10 - x[:, 0])

    found = run(LBFGS(iterations=30, lives=1), evaluate, torch.zeros(1, 1))
    assert torch.isfinite(found.objectives).all()
    assert found.unknowns["x"][0, 0] <= 2


def test_the_lives_of_a_problem_are_the_same_alone_and_in_company() -> None:
    """A bowl with many dents, in which searches get stuck: where each starts anew is decided by its own seed."""

    def evaluate(point: Params) -> tuple[Params, torch.Tensor]:
        x = point["x"].detach().requires_grad_()
        values = ((5 * x).sin().square() + 0.05 * x.abs()).mean(dim=1) + 0.01
        (slope,) = torch.autograd.grad(values.sum(), x)
        return {"x": slope}, values.detach()

    begun: list[tuple[int, int]] = []

    def found(seeds: list[int]) -> Found:
        def fresh(life: int) -> Params:
            begun.append((len(seeds), life))
            return {"x": torch.stack([torch.randn(6, generator=generator(seed, life)) for seed in seeds])}

        search = LBFGS(iterations=150, history=10, patience=10)
        with SILENT.task("", None) as task:
            return search.run(Problems(evaluate, fresh(0), fresh=fresh), task)

    together = found([1, 2, 3])
    for i, seed in enumerate([1, 2, 3]):
        alone = found([seed])
        torch.testing.assert_close(together.unknowns["x"][i], alone.unknowns["x"][0])
        torch.testing.assert_close(together.objectives[i], alone.objectives[0])
    assert max(life for size, life in begun if size == 1) > 1, "lives do end"


def test_an_unknown_that_is_one_number_is_searched_too() -> None:
    def evaluate(point: Params) -> tuple[Params, torch.Tensor]:
        away = {"x": point["x"] - 2, "mix": point["mix"] - 1}
        return {name: 2 * tensor for name, tensor in away.items()}, away["x"].square().sum(1) + away["mix"].square()

    start = {"x": torch.zeros(2, 3), "mix": torch.zeros(2)}
    with SILENT.task("", None) as task:
        found = LBFGS(iterations=20).run(Problems(evaluate, start), task)
    torch.testing.assert_close(found.unknowns["mix"], torch.ones(2), atol=1e-3, rtol=0)
