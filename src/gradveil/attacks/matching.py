"""Gradient matching: search for the inputs whose update is nearest to the observed one.

An attack of this family is a composition: labels read or searched, objective, regularisers, search, number of restarts,
and how an update of several local steps is explained. Restarts are an axis of the batch of problems; the best one is
chosen by the attack's own objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import grad_and_value

from gradveil.attacks.base import Attack, Reconstruction
from gradveil.attacks.engine import (
    Batched,
    Evaluate,
    Given,
    Plan,
    Precision,
    Strategy,
    agree,
    bound,
    plan_for,
    ways_of,
)
from gradveil.attacks.explain import Explanation, explained
from gradveil.attacks.joint import UnsupportedError
from gradveil.attacks.labels import infer_labels
from gradveil.attacks.objectives import Objective
from gradveil.attacks.priors import Pixels
from gradveil.attacks.problem import Problem
from gradveil.attacks.regularisers import Regulariser
from gradveil.attacks.search import Found, Search
from gradveil.attacks.statistics import StatisticsPrior
from gradveil.client.local import cross_entropy, mini_batches
from gradveil.core.progress import Progress
from gradveil.core.seeding import generator
from gradveil.core.trees import stack
from gradveil.core.types import Loss, Params
from gradveil.threat.model import Knowledge
from gradveil.threat.observation import Observation


@dataclass(frozen=True)
class Prepared:
    """A batch of problems that is ready to be stepped: the restarts of each observation one after the other."""

    prior: Pixels
    labels: Tensor
    """[observations * restarts, batch size]."""
    starts: Params
    plan: Plan
    evaluate: Evaluate


@dataclass(frozen=True, kw_only=True)
class Matching(Attack):
    """Search the inputs by matching updates. Without an objective it is the prior alone: the same search, no update."""

    title: str
    objective: Objective | None
    search: Search
    restarts: int
    labels: Literal["read", "searched"] = "read"
    """Read off the last layer's gradient before the search, or unknowns of it like the pixels (DLG)."""
    free: bool = False
    """Pixels may leave [0, 1] on the way."""
    regularisers: tuple[tuple[float, Regulariser], ...] = ()
    consensus: float = 0.0
    """Weight of the squared distance of each restart to the mean of all restarts (group consistency)."""
    statistics: float = 0.0
    """Weight of the batch-norm statistics, where the threat model gives them."""
    explanation: Explanation = "simulated"
    strategy: Strategy = "auto"
    precision: Precision = "float32"
    loss: Loss = cross_entropy
    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.BATCH_SIZE})

    def prior_only(self) -> Attack | None:
        return replace(self, objective=None, statistics=0.0, labels="read", title=f"{self.title} without the update")

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        with progress.task(self.title, self.search.iterations * len(seen) * self.restarts, "problem-steps") as task:
            task.note("choosing how to run")
            ready = self.prepare(seen, seeds)
            task.note(str(ready.plan))
            evaluate = _with_consensus(ready.evaluate, self.restarts, self.consensus)

            def fresh(life: int) -> Params:
                return self._starts(seen[0], ready.prior, seeds, life)

            found = self.search.run(evaluate, ready.starts, ready.prior.project, task, fresh)
        return self._best_of_restarts(found, ready)

    def prepare(self, seen: Sequence[Observation], seeds: Sequence[int]) -> Prepared:
        """Everything up to the first step: labels read, restarts drawn, and the way to step them together chosen."""
        ways, starts, given = self.problems(seen, seeds)
        plan = plan_for(ways, starts, given, strategy=self.strategy, precision=self.precision)
        evaluate = bound(plan, ways[plan.way], starts, given)
        return Prepared(self._prior(seen[0]), given["labels"], starts, plan, evaluate)

    def problems(self, seen: Sequence[Observation], seeds: Sequence[int]) -> tuple[dict[str, Batched], Params, Given]:
        """The ways to run the problems, their starting points and what is given of each, [observations * restarts]."""
        seen = [explained(one, self.explanation) for one in seen]
        prior = self._prior(seen[0])
        starts, given = self._starts(seen[0], prior, seeds, 0), self._given(seen, seeds)
        return self._ways(seen[0], prior, starts, given), starts, given

    def _prior(self, one: Observation) -> Pixels:
        return Pixels(one.domain, next(iter(one.sent.values())).device, free=self.free)

    def _starts(self, one: Observation, prior: Pixels, seeds: Sequence[int], life: int) -> Params:
        """Where the restarts of each observation begin their n-th life; each seed alone decides its own."""
        size, device = one.batch_size or 1, prior.mean.device
        rngs = [generator(seed, "restart", r, life) for seed in seeds for r in range(self.restarts)]
        starts = stack([prior.start(size, rng) for rng in rngs])
        if self.labels == "searched":
            drawn = [torch.randn((size, one.domain.classes), generator=rng) for rng in rngs]
            starts["labels"] = torch.stack(drawn).to(device)
        if self.explanation == "surrogate":
            starts["mix"] = torch.full((len(rngs),), 0.5, device=device)
        return starts

    def _given(self, seen: Sequence[Observation], seeds: Sequence[int]) -> Given:
        """What each problem is about. Mini-batches depend on the order of the labels, so restarts try several."""
        one, size = seen[0], seen[0].batch_size or 1
        device = next(iter(one.sent.values())).device
        if self.objective is None:
            rngs = [generator(seed, "labels") for seed in seeds]
            drawn = [torch.randint(one.domain.classes, (size,), generator=rng) for rng in rngs]
            return {"labels": torch.stack(drawn).to(device).repeat_interleave(self.restarts, dim=0)}
        labels = infer_labels(seen, size).repeat_interleave(self.restarts, dim=0)
        if one.recipe is not None and len(list(mini_batches(size, one.recipe))) > one.recipe.epochs:
            orders = [_order(size, generator(seed, "order", r), r) for seed in seeds for r in range(self.restarts)]
            labels = labels.gather(1, torch.stack(orders).to(device))
        given: Given = {"reply": stack([one.reply for one in seen])}
        if self.statistics and one.statistics is not None:
            given["statistics"] = stack([one.statistics or {} for one in seen])
        return {**_each_repeated(given, self.restarts), "labels": labels}

    def _ways(self, one: Observation, prior: Pixels, starts: Params, given: Given) -> dict[str, Batched]:
        """Every way to run the problems; the joint one only where it gives what double backward gives."""
        alike = StatisticsPrior(one) if "statistics" in given else None

        def penalty(unknowns: Params, about: Given) -> Tensor:
            inputs = prior.decode(unknowns)
            costs = [inputs.sum() * 0, *(weight * rule(inputs) for weight, rule in self.regularisers)]
            if alike is not None:
                costs.append(self.statistics * alike(inputs, about["statistics"]))
            return torch.stack(costs).sum()

        if self.objective is None:
            return ways_of({"reverse": lambda unknowns, about: grad_and_value(penalty)(unknowns, about)}, None)
        problem = Problem(
            seen=one,
            prior=prior,
            targets=_searched if self.labels == "searched" else _read,
            loss=self.loss,
            objective=self.objective,
            penalty=penalty,
            mixed=self.explanation == "surrogate",
        )
        singles = problem.singles()
        try:
            together = problem.joint()
            trusted = agree(together, ways_of(singles, None)["loop reverse"], starts, given)
        except UnsupportedError:
            return ways_of(singles, None)
        return ways_of(singles, together if trusted else None)

    def _best_of_restarts(self, found: Found, ready: Prepared) -> list[Reconstruction]:
        objectives = found.objectives.view(-1, self.restarts)
        chosen = objectives.argmin(dim=1) + torch.arange(len(objectives), device=objectives.device) * self.restarts
        best = {name: tensor[chosen] for name, tensor in found.unknowns.items()}
        inputs = ready.prior.decode(best).nan_to_num(0.5).clamp(0, 1).cpu()
        labels = (best["labels"].argmax(dim=-1) if self.labels == "searched" else ready.labels[chosen]).cpu()
        traces = found.trace[:, chosen].T.tolist()
        return [
            Reconstruction(
                inputs=inputs[i],
                labels=labels[i],
                objective=min(row),
                objectives=tuple(row),
                steps=found.steps,
                trace=tuple(traces[i]),
                stopped=found.stopped[int(chosen[i])],
                problem_steps=found.steps[-1] * self.restarts,
                strategy=str(ready.plan),
            )
            for i, row in enumerate(objectives.tolist())
        ]


def _read(_unknowns: Params, given: Given) -> Tensor:
    labels: Tensor = given["labels"]
    return labels


def _searched(unknowns: Params, _given: Given) -> Tensor:
    return unknowns["labels"].softmax(dim=-1)


def _order(size: int, rng: torch.Generator, restart: int) -> Tensor:
    """The order in which a restart puts the labels: as they were found in every second one, shuffled in the others."""
    return torch.arange(size) if restart % 2 == 0 else torch.randperm(size, generator=rng)


def _with_consensus(evaluate: Evaluate, restarts: int, weight: float) -> Evaluate:
    """Pull the restarts of each observation toward their mean."""
    if weight == 0 or restarts == 1:
        return evaluate

    def pulled(point: Params) -> tuple[Params, Tensor]:
        gradients, values = evaluate(point)
        each = point["pixels"].view(-1, restarts, *point["pixels"].shape[1:])
        away = (each - each.mean(dim=1, keepdim=True)).flatten(0, 1)
        cost = weight * away.square().flatten(1).sum(dim=1)
        return {**gradients, "pixels": gradients["pixels"] + 2 * weight * away}, values + cost

    return pulled


def _each_repeated(tree: Given, times: int) -> Given:
    repeated: Given = torch.utils._pytree.tree_map(lambda t: t.repeat_interleave(times, dim=0), tree)
    return repeated
