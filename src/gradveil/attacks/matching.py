"""Gradient matching: search for the inputs whose update is nearest to the observed one.

An attack of this family is a composition: objective, regulariser, search, number of restarts. Restarts are an axis of
the batch of problems; the best one is chosen by the attack's own objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad_and_value

from gradveil.attacks.base import Attack, Reconstruction
from gradveil.attacks.engine import Batched, Evaluate, Given, Plan, Precision, Strategy, agree, bound, plan_for, ways_of
from gradveil.attacks.joint import UnsupportedError
from gradveil.attacks.labels import infer_labels
from gradveil.attacks.objectives import Objective
from gradveil.attacks.priors import Pixels
from gradveil.attacks.problem import Problem
from gradveil.attacks.regularisers import Regulariser
from gradveil.attacks.search import Adam, Found
from gradveil.client.local import cross_entropy
from gradveil.core.progress import Progress
from gradveil.core.seeding import generator
from gradveil.core.trees import stack
from gradveil.core.types import Loss, Params, Recipe
from gradveil.threat.model import Knowledge
from gradveil.threat.observation import Observation


@dataclass(frozen=True)
class Prepared:
    """A batch of problems that is ready to be stepped."""

    prior: Pixels
    labels: Tensor
    """[observations, batch size]."""
    starts: Params
    """[count, ...], the restarts of each observation one after the other."""
    count: int
    plan: Plan
    evaluate: Evaluate


@dataclass(frozen=True, kw_only=True)
class Matching(Attack):
    """Search the inputs by matching updates. Without an objective it is the prior alone: the same search, no update."""

    objective: Objective | None
    search: Adam
    restarts: int
    regularisers: tuple[tuple[float, Regulariser], ...] = ()
    strategy: Strategy = "auto"
    precision: Precision = "float32"
    loss: Loss = cross_entropy
    title: str = "matching"
    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.BATCH_SIZE})

    def prior_only(self) -> Attack | None:
        return replace(self, objective=None, title=f"{self.title} without the update")

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        ready = self.prepare(seen, seeds)
        with progress.task(self.title, self.search.iterations * ready.count, "problem-steps") as task:
            task.note(str(ready.plan))
            found = self.search.run(ready.evaluate, ready.starts, ready.prior.project, task)
        return self._best_of_restarts(found, ready)

    def prepare(self, seen: Sequence[Observation], seeds: Sequence[int]) -> Prepared:
        """Everything up to the first step: labels read, restarts drawn, and the way to step them together chosen."""
        batch_size = seen[0].batch_size or 1
        prior = Pixels(seen[0].domain, next(iter(seen[0].sent.values())).device)
        labels = infer_labels(seen, batch_size) if self.objective is not None else self._guessed(seen, seeds)
        rngs = [generator(seed, "restart", r) for seed in seeds for r in range(self.restarts)]
        starts = stack([prior.start(batch_size, rng) for rng in rngs])
        given: Given = {"labels": labels}
        if self.objective is not None:
            given["reply"] = stack([one.reply for one in seen])
        given = _each_repeated(given, self.restarts)
        ways = self._ways(seen[0], prior, starts, given)
        plan = plan_for(ways, starts, given, strategy=self.strategy, precision=self.precision)
        return Prepared(prior, labels, starts, len(rngs), plan, bound(plan, ways[plan.way], starts, given))

    def _guessed(self, seen: Sequence[Observation], seeds: Sequence[int]) -> Tensor:
        """Labels without the update: drawn blindly."""
        one, size = seen[0], seen[0].batch_size or 1
        drawn = [torch.randint(one.domain.classes, (size,), generator=generator(seed, "labels")) for seed in seeds]
        return torch.stack(drawn).to(next(iter(one.sent.values())).device)

    def _ways(self, one: Observation, prior: Pixels, starts: Params, given: Given) -> dict[str, Batched]:
        """Every way to run the problems; the joint one only where it gives what double backward gives."""

        def penalty(unknowns: Params) -> Tensor:
            inputs = prior.decode(unknowns)
            return torch.stack([inputs.sum() * 0, *(w * rule(inputs) for w, rule in self.regularisers)]).sum()

        if self.objective is None:
            return ways_of({"reverse": lambda unknowns, _: grad_and_value(penalty)(unknowns)}, None)
        problem = Problem(
            seen=one,
            recipe=one.recipe or Recipe(sends=one.kind),
            prior=prior,
            targets=lambda _, about: about["labels"],
            loss=self.loss,
            objective=self.objective,
            penalty=penalty,
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
        inputs = ready.prior.decode(best).clamp(0, 1).cpu()
        traces, diverged = found.trace[:, chosen].T.tolist(), found.diverged[chosen].tolist()
        return [
            Reconstruction(
                inputs=inputs[i],
                labels=ready.labels[i].cpu(),
                objective=min(row),
                objectives=tuple(row),
                steps=found.steps,
                trace=tuple(traces[i]),
                stopped="diverged" if diverged[i] else "budget",
                problem_steps=self.search.iterations * self.restarts,
                strategy=str(ready.plan),
            )
            for i, row in enumerate(objectives.tolist())
        ]


def _each_repeated(tree: Given, times: int) -> Given:
    repeated: Given = torch.utils._pytree.tree_map(lambda t: t.repeat_interleave(times, dim=0), tree)
    return repeated
