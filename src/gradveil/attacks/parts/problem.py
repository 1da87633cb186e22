"""One matching problem and the ways to derive its objective: reverse, forward over reverse, or all jointly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vmap

from gradveil import joint
from gradveil.attacks.engine import Batched, Given, Single
from gradveil.attacks.parts.objectives import Objective, OfMoments
from gradveil.attacks.parts.priors import Prior
from gradveil.attacks.parts.updates import between
from gradveil.client.local import local_update
from gradveil.core.trees import add, map_each
from gradveil.core.types import Loss, Params, Recipe
from gradveil.joint import moments
from gradveil.models import Functional
from gradveil.threat.observation import Observation

Targets = Callable[[Params, Given], Tensor]
"""(unknowns, given) -> labels [B] or probabilities [B, classes] of one problem."""


class Treated(Protocol):
    """What an adversary does to updates before it compares them, as a change of their moments."""

    def fits(self, given: Given) -> bool:
        """Whether moments tell enough for these problems."""

    def __call__(self, found: dict[str, moments.Moments], given: Given) -> dict[str, moments.Moments]:
        """The moments of what is compared."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Find unknowns whose update, from the broadcast on, is nearest to the observed one. Written for one problem."""

    seen: Observation
    prior: Prior
    targets: Targets
    loss: Loss
    objective: Objective
    penalty: Callable[[Params, Given], Tensor]
    distance: Callable[[Params, Given], Tensor] | None = None
    """How far a candidate's update is, where the plain objective does not say it; from (update, given)."""
    slopes: Callable[[Params, Given], tuple[Params, Tensor]] | None = None
    """The slope of that distance and the distance for updates [N, ...], where there is a quicker way than deriving."""
    treated: Treated | None = None
    """What that distance does to an update, where it can be told from the moments of its tensors."""
    mixed: bool = False
    """Take the gradient between the first and the last parameters, as far along as the unknown ``mix`` says."""
    own_broadcasts: bool = False
    """Each problem starts from parameters of its own, which are given as ``sent``."""

    @property
    def recipe(self) -> Recipe:
        """The client's recipe as the adversary knows or assumes it."""
        return self.seen.recipe or Recipe(sends=self.seen.kind)

    def away(self, update: Params, given: Given) -> Tensor:
        """The distance of one candidate's update from what was seen, in the tensors that the reply holds."""
        shown = {name: update[name] for name in given["reply"]}
        return self.objective(shown, given["reply"]) if self.distance is None else self.distance(shown, given)

    def value(self) -> Callable[[Params, Given], Tensor]:
        """The objective of one problem: run the local step on the candidate, and compare the updates."""
        model = Functional(self.seen.module, train_mode=self.recipe.train_mode)

        def value(unknowns: Params, given: Given) -> Tensor:
            inputs, targets = self.prior.decode(unknowns, given), self.targets(unknowns, given)
            sent = self._sent(given)
            start = between(sent, given["reply"], self.recipe.lr, unknowns["mix"]) if self.mixed else sent
            update = local_update(_with_draw(model, given), self.loss, start, inputs, targets, self.recipe)
            return self.away(update, given) + self.penalty(unknowns, given)

        return value

    def values(self) -> dict[str, Single]:
        """The objective of one problem without any slope in the unknowns."""
        value = self.value()
        return {"value": lambda unknowns, given: ({}, value(unknowns, given))}

    def singles(self) -> dict[str, Single]:
        """Equal ways to derive one problem, by name. Forward over reverse needs that the update is one gradient."""
        model = Functional(self.seen.module, train_mode=self.recipe.train_mode)
        value = self.value()

        def reverse(unknowns: Params, given: Given) -> tuple[Params, Tensor]:
            gradient, found = grad_and_value(value)(unknowns, given)
            return gradient, found

        def forward(unknowns: Params, given: Given) -> tuple[Params, Tensor]:
            """The slope of the objective is how the slope of the loss in the unknowns changes along v = dD/dG."""

            def loss(params: Params, u: Params) -> Tensor:
                inputs, targets = self.prior.decode(u, given), self.targets(u, given)
                return _with_draw(model, given).loss(self.loss, params, inputs, targets)

            sent = self._sent(given)
            direction, value = grad_and_value(self.away)(grad(loss)(sent, unknowns), given)
            slope = jvp(lambda params: grad(loss, argnums=1)(params, unknowns), (sent,), (direction,))[1]
            smooth, cost = grad_and_value(self.penalty)(unknowns, given)
            return add(slope, smooth), value + cost

        return {"forward": forward, "reverse": reverse} if self._one_gradient() else {"reverse": reverse}

    def _sent(self, given: Given) -> Params:
        """The parameters that a problem starts from."""
        sent: Params = given["sent"] if self.own_broadcasts else self.seen.sent
        return sent

    def _one_gradient(self) -> bool:
        """Whether the update is one gradient at the broadcast."""
        return self.recipe.sends == "gradient" and not self.mixed

    def _compared(self, gradients: Params, given: Given) -> tuple[Params, Tensor]:
        """The objective in full precision, whatever precision made the gradients: its sums are long."""
        observed: Params = given["reply"]
        with torch.autocast(next(iter(observed.values())).device.type, enabled=False):
            exact = map_each(lambda gradient, like: gradient.to(like.dtype), gradients, observed)
            if self.distance is None:
                return self.objective.slopes(exact, observed)
            if self.slopes is not None:
                return self.slopes(exact, given)
            direction, values = vmap(grad_and_value(self.distance))(exact, given)
            return direction, values

    def _by_moments(
        self, calls: list[joint.Call], slopes: tuple[Tensor, ...], problems: int, given: Given
    ) -> Tensor | None:
        """The distances [N], differentiable, without a gradient; None where it has to be formed, or that is quicker.

        Only in full precision: the parts of the slope along the update and the observed one nearly cancel out.
        """
        observed: Params = given["reply"]
        kind = next(iter(observed.values())).device.type
        rounded = torch.is_autocast_enabled(kind) or torch.backends.cuda.matmul.allow_tf32
        known = self.distance is None or (self.treated is not None and self.treated.fits(given))
        if rounded or not known or not isinstance(self.objective, OfMoments):
            return None
        if not moments.worth(calls, problems, observed.keys()):
            return None
        squared = given["squares"] if "squares" in given else moments.squares(observed)
        found = moments.moments(calls, slopes, problems, observed, squared)
        parts = found if self.treated is None else self.treated(found, given)
        return self.objective.of_moments(*moments.total(parts.values()))

    def _shared(self) -> joint.SharedNetwork:
        """The network that all problems go through; raises UnsupportedError where they cannot share one."""
        if self.own_broadcasts or not self._one_gradient():
            raise joint.UnsupportedError("each problem has weights of its own")
        return joint.SharedNetwork(self.seen.module, self.seen.sent, train_mode=self.recipe.train_mode)

    def joint_values(self) -> Batched:
        """The objectives of all problems in one batch, without any slope in the unknowns."""
        network = self._shared()

        def evaluate(unknowns: Params, given: Given) -> tuple[Params, Tensor]:
            problems = len(next(iter(unknowns.values())))
            with torch.no_grad():
                inputs, targets = vmap(self.prior.decode)(unknowns, given), vmap(self.targets)(unknowns, given)
            with torch.enable_grad():
                _, calls, slopes = network.derived(self.loss, inputs.requires_grad_(), targets, given.get("buffers"))
            with torch.no_grad():
                values = self._by_moments(calls, slopes, problems, given)
                if values is None:
                    _, values = self._compared(joint.gradients(calls, slopes, problems, given["reply"].keys()), given)
                return {}, values + vmap(self.penalty)(unknowns, given)

        return evaluate

    def joint(self) -> Batched:
        """All problems in one batch through the shared weights; raises UnsupportedError where the model forbids it."""
        network = self._shared()

        def evaluate(unknowns: Params, given: Given) -> tuple[Params, Tensor]:
            problems = len(next(iter(unknowns.values())))
            with torch.enable_grad():
                leaves = {name: tensor.detach().requires_grad_() for name, tensor in unknowns.items()}
                inputs, targets = vmap(self.prior.decode)(leaves, given), vmap(self.targets)(leaves, given)
                _, calls, slopes = network.derived(self.loss, inputs, targets, given.get("buffers"), again=True)
                values = self._by_moments(calls, slopes, problems, given)
                if values is None:
                    with torch.no_grad():
                        gradients = joint.gradients(calls, slopes, problems, given["reply"].keys())
                        direction, values = self._compared(gradients, given)
                    away = joint.along(calls, slopes, problems, direction)
                else:
                    away = values.sum()
                costs = vmap(self.penalty)(leaves, given)
                found = torch.autograd.grad(away + costs.sum(), list(leaves.values()))
            return dict(zip(leaves, found, strict=True)), (values + costs).detach()

        return evaluate


def _with_draw(model: Functional, given: Given) -> Functional:
    """The model with those buffers that are known of one problem, such as what its client drew."""
    return model.with_buffers(given["buffers"]) if "buffers" in given else model
