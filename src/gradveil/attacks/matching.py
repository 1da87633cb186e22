"""Gradient matching: search for the inputs whose update is nearest to the observed one.

An attack of this family is a composition: objective, regulariser, search, number of restarts. Restarts are an axis of
the batch of problems; the best one is chosen by the attack's own objective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp

from gradveil.attacks.base import Attack, Reconstruction
from gradveil.attacks.engine import Evaluate, Given, Plan, Problem, Strategy, plan_for, run_as
from gradveil.attacks.labels import infer_labels
from gradveil.attacks.objectives import Objective
from gradveil.attacks.priors import Pixels
from gradveil.attacks.regularisers import Regulariser
from gradveil.attacks.search import Adam, Found
from gradveil.client.local import cross_entropy, local_update
from gradveil.core.progress import Progress
from gradveil.core.seeding import generator
from gradveil.core.trees import add, stack
from gradveil.core.types import Loss, Params, Recipe
from gradveil.models.functional import Functional
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
        problems = self._problems(seen[0], prior)
        plan = plan_for(problems, starts, given, strategy=self.strategy)
        return Prepared(prior, labels, starts, len(rngs), plan, run_as(plan, problems[plan.derivative], given))

    def _guessed(self, seen: Sequence[Observation], seeds: Sequence[int]) -> Tensor:
        """Labels without the update: drawn blindly."""
        one, size = seen[0], seen[0].batch_size or 1
        drawn = [torch.randint(one.domain.classes, (size,), generator=generator(seed, "labels")) for seed in seeds]
        return torch.stack(drawn).to(next(iter(one.sent.values())).device)

    def _problems(self, one: Observation, prior: Pixels) -> Mapping[str, Problem]:
        """Equal ways to derive the objective of one problem."""

        def penalty(unknowns: Params) -> Tensor:
            inputs = prior.decode(unknowns)
            return torch.stack([inputs.sum() * 0, *(w * rule(inputs) for w, rule in self.regularisers)]).sum()

        if self.objective is None:
            return {"reverse": lambda unknowns, _: grad_and_value(penalty)(unknowns)}
        objective, recipe = self.objective, one.recipe or Recipe(sends=one.kind)
        model = Functional(one.module, train_mode=recipe.train_mode)

        def update(unknowns: Params, given: Given) -> Params:
            return local_update(model, self.loss, one.sent, prior.decode(unknowns), given["labels"], recipe)

        def reverse(unknowns: Params, given: Given) -> tuple[Params, Tensor]:
            return grad_and_value(lambda u: objective(update(u, given), given["reply"]) + penalty(u))(unknowns)

        def forward(unknowns: Params, given: Given) -> tuple[Params, Tensor]:
            """Forward over reverse: the gradient of the objective is how grad_x L changes along v = dD/dG."""

            def loss(params: Params, u: Params) -> Tensor:
                return self.loss(model(params, prior.decode(u)), given["labels"])

            direction, value = grad_and_value(objective)(grad(loss)(one.sent, unknowns), given["reply"])
            slope = jvp(lambda params: grad(loss, argnums=1)(params, unknowns), (one.sent,), (direction,))[1]
            smooth, cost = grad_and_value(penalty)(unknowns)
            return add(slope, smooth), value + cost

        return {"forward": forward, "reverse": reverse} if one.kind == "gradient" else {"reverse": reverse}

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
