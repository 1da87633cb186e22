"""One matching problem and the ways to differentiate its objective: reverse, forward over reverse, or all jointly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vmap

from gradveil import engine
from gradveil.attacks.parts.channel import Adjustment
from gradveil.attacks.parts.counter import Averaged
from gradveil.attacks.parts.objectives import Objective, OfMoments, Regulariser, per_problem
from gradveil.attacks.parts.priors import Prior
from gradveil.attacks.parts.updates import between
from gradveil.client.local import local_update
from gradveil.core.trees import add, map_each
from gradveil.core.types import Params, Recipe
from gradveil.engine import Batched, Given, Single, products
from gradveil.models import Functional, batch_norm_statistics
from gradveil.threat.observation import Observation

_TINY = 1e-20


@dataclass(frozen=True)
class UpdateDistance:
    """How far a candidate's update is from the observed one, under what is known or estimated of the defense."""

    objective: Objective
    adjustment: Adjustment
    averaged: Averaged | None = None
    """The mean over draws of a random defense."""

    def __call__(self, update: Params, given: Given) -> Tensor:
        """The distance of one candidate, in the tensors that the reply holds."""

        def away(candidate: Params) -> Tensor:
            own, reply = self.adjustment.pair(candidate, given["reply"], given)
            if "weights" in given:
                own, reply = (map_each(torch.mul, tree, given["weights"]) for tree in (own, reply))
            found = self.objective(own, reply)
            return given["confidence"] * found if "confidence" in given else found

        shown = {name: update[name] for name in given["reply"]}
        return away(shown) if self.averaged is None else self.averaged(shown, away)

    def slopes(self, updates: Params, given: Given) -> tuple[Params, Tensor]:
        """Its derivative in updates [N, ...] and its values [N].

        In full precision, whatever precision made the updates: its sums are long.
        """
        reply, weights, sure = given["reply"], given.get("weights"), given.get("confidence")
        with torch.autocast(next(iter(reply.values())).device.type, enabled=False):
            exact = map_each(lambda update, like: update.to(like.dtype), updates, reply)
            if self.averaged is not None or not self.adjustment.data_only:
                found: tuple[Params, Tensor] = vmap(grad_and_value(self))(exact, given)
                return found
            if weights is not None:
                exact, reply = (map_each(torch.mul, tree, weights) for tree in (exact, reply))
            slopes, away = self.objective.slopes(exact, reply)
            if weights is not None:
                slopes = map_each(torch.mul, slopes, weights)
            if sure is not None:
                slopes, away = map_each(lambda slope: slope * per_problem(sure, slope), slopes), sure * away
            return slopes, away

    def by_moments(self, passed: engine.LayerPass, given: Given) -> Tensor | None:
        """The values [N], differentiable, without a gradient; None where it has to be formed, or that is quicker.

        Only in full precision: the parts of the slope along the update and the observed one nearly cancel out.
        """
        observed: Params = given["reply"]
        kind = next(iter(observed.values())).device.type
        rounded = torch.is_autocast_enabled(kind) or torch.backends.cuda.matmul.allow_tf32
        adjusted = self.adjustment.of_moments(given)
        if rounded or adjusted is None or self.averaged is not None or not isinstance(self.objective, OfMoments):
            return None
        if not products.pays_off(passed, observed.keys()):
            return None
        squared = given["squares"] if "squares" in given else products.squares(observed)
        found = products.moments(passed, observed, squared)
        return self.objective.of_moments(*products.total(adjusted(found).values()))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Find unknowns whose update, from the broadcast on, is nearest to the observed one. Written for one problem."""

    seen: Observation
    prior: Prior
    distance: UpdateDistance | None
    """None: the prior alone, no update is compared."""
    regularisers: tuple[tuple[float, Regulariser], ...] = ()
    statistics: Callable[[Tensor, Params], Tensor] | None = None
    """What the inputs cost where the batch-norm statistics of the private ones are given."""
    searches_labels: bool = False
    mixed: bool = False
    """Take the gradient between the first and the last parameters, as far along as the unknown ``mix`` says."""

    @property
    def recipe(self) -> Recipe:
        """The client's recipe as the adversary knows or assumes it."""
        return self.seen.recipe or Recipe(sends=self.seen.kind)

    @property
    def one_gradient(self) -> bool:
        """Whether the update is one gradient at the broadcast."""
        return self.distance is not None and self.recipe.sends == "gradient" and not self.mixed

    def targets(self, unknowns: Params, given: Given) -> Tensor:
        """Labels [B] or probabilities [B, classes]."""
        if self.searches_labels:
            return unknowns["labels"].softmax(dim=-1)
        labels: Tensor = given["targets"] if "targets" in given else given["labels"]
        return labels

    def penalty(self, unknowns: Params, given: Given) -> Tensor:
        """What the unknowns cost apart from the update, a scalar."""
        inputs, own = self.prior.decode(unknowns, given), self.prior.cost(unknowns)
        costs = [inputs.sum() * 0, *(weight * rule(self.seen.domain, inputs) for weight, rule in self.regularisers)]
        if own is not None:
            costs.append(own)
        if self.statistics is not None:
            costs.append(self.statistics(inputs, given["statistics"]))
        return torch.stack(costs).sum()

    def singles(self, *, values_only: bool) -> dict[str, Single]:
        """Equal ways to differentiate one problem, by name; forward over reverse needs that the update is one gradient.

        With ``values_only`` the one way to its objective, without gradients.
        """
        model, distance = Functional(self.seen.module, train_mode=self.recipe.train_mode), self.distance

        def drawn(given: Given) -> Functional:
            """The model with those buffers that are known of one problem, such as what its client drew."""
            return model.with_buffers(given["buffers"]) if "buffers" in given else model

        def value(unknowns: Params, given: Given) -> Tensor:
            """Run the local steps on the candidate, and compare the updates."""
            if distance is None:
                return self.penalty(unknowns, given)
            inputs, targets = self.prior.decode(unknowns, given), self.targets(unknowns, given)
            start = given.get("sent", self.seen.sent)
            if self.mixed:
                start = between(start, given["reply"], self.recipe.lr, unknowns["mix"])
            update = local_update(drawn(given), self.seen.loss, start, inputs, targets, self.recipe)
            return distance(update, given) + self.penalty(unknowns, given)

        def reverse(unknowns: Params, given: Given) -> tuple[Params, Tensor]:
            gradient, found = grad_and_value(value)(unknowns, given)
            return gradient, found

        def forward(unknowns: Params, given: Given) -> tuple[Params, Tensor]:
            """The gradient of the objective is how that of the loss in the unknowns changes along v = dD/dG."""

            def loss(params: Params, u: Params) -> Tensor:
                inputs, targets = self.prior.decode(u, given), self.targets(u, given)
                return drawn(given).loss(self.seen.loss, params, inputs, targets)

            assert distance is not None
            sent = given.get("sent", self.seen.sent)
            direction, value = grad_and_value(distance)(grad(loss)(sent, unknowns), given)
            slope = jvp(lambda params: grad(loss, argnums=1)(params, unknowns), (sent,), (direction,))[1]
            smooth, cost = grad_and_value(self.penalty)(unknowns, given)
            return add(slope, smooth), value + cost

        if values_only:
            return {"value": lambda unknowns, given: ({}, value(unknowns, given))}
        return {"forward": forward, "reverse": reverse} if self.one_gradient else {"reverse": reverse}

    def joint(self, *, values_only: bool) -> Batched:
        """All problems in one batch through the broadcast; raises UnsupportedError where the model forbids it."""
        network = engine.SharedNetwork(self.seen.module, self.seen.sent, train_mode=self.recipe.train_mode)
        distance = self.distance
        assert distance is not None

        def evaluate(unknowns: Params, given: Given) -> tuple[Params, Tensor]:
            with torch.set_grad_enabled(not values_only):
                leaves = {name: tensor.detach().requires_grad_(not values_only) for name, tensor in unknowns.items()}
                inputs, targets = vmap(self.prior.decode)(leaves, given), vmap(self.targets)(leaves, given)
            with torch.enable_grad():
                inputs = inputs.requires_grad_() if values_only else inputs
                passed = network.differentiate(
                    self.seen.loss, inputs, targets, given.get("buffers"), again=not values_only
                )
            with torch.set_grad_enabled(not values_only):
                values = distance.by_moments(passed, given)
                if values is not None:
                    away = values.sum()
                else:
                    with torch.no_grad():
                        gradients = engine.gradients(passed, given["reply"].keys())
                        direction, values = distance.slopes(gradients, given)
                    away = values.sum() if values_only else engine.along(passed, direction)
                costs = vmap(self.penalty)(leaves, given)
                if values_only:
                    return {}, values + costs
                found = torch.autograd.grad(away + costs.sum(), list(leaves.values()))
            return dict(zip(leaves, found, strict=True)), (values + costs).detach()

        return evaluate


StatisticsRule = Literal["squared", "norm"]
"""Of the differences of means and of variances, layer by layer: their squares, or their norms with ten times the weight
on the first layer, as published attacks have it."""


def batch_norm_distance(
    one: Observation, weight: float, rule: StatisticsRule = "squared"
) -> Callable[[Tensor, Params], Tensor]:
    """The batch-norm prior of GradInversion: inputs should have the statistics that the private ones had.

    The weighted distance of the mean and variance at the inputs of every batch norm, for one problem. Only for threat
    models that give those statistics away; real systems send running means of them at most.
    """
    module = Functional(one.module, train_mode=(one.recipe or Recipe()).train_mode).module.requires_grad_(False)

    def distance(inputs: Tensor, wanted: Params) -> Tensor:
        found = batch_norm_statistics(module, one.sent, inputs)
        squares = torch.stack([(value - wanted[name]).square().sum() for name, value in found.items()])
        if rule == "squared":
            return weight * squares.sum()
        norms = (squares + _TINY).sqrt()  # in the order of the layers, mean and variance of each
        return weight * (norms.sum() + 9 * norms[:2].sum())

    return distance
