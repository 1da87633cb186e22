"""A client: it takes the broadcast, trains on its private batch with its defense, and replies."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import nn

from gradveil.client.inspection import Inspection, inspect
from gradveil.client.local import Gradient, LocalRun, Run, Taken, cross_entropy, finished
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import all_finite, detached
from gradveil.core.types import Batch, Loss, Params, Recipe
from gradveil.defenses.base import Defense, Log, Step
from gradveil.models.functional import Functional

OnSuspicion = Literal["train", "warn", "refuse"]
"""What a client does about a broadcast that looks crafted; with ``train`` it does not even look."""


@dataclass(frozen=True)
class Reply:
    """What leaves the client; what its defense logged and the examples as it left them stay there, and in the audit."""

    update: Params
    log: Log
    batch: Batch


class SimulatedClient:
    """One participant. ``module`` is the architecture both sides agreed on, after ``defense.on_model``.

    ``on_suspicion`` makes it inspect each broadcast, with its own batch for a probe and the last broadcast that it
    trained on to compare with, before it trains.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        recipe: Recipe,
        defense: Defense | None = None,
        loss: Loss = cross_entropy,
        on_suspicion: OnSuspicion = "train",
    ) -> None:
        if on_suspicion not in get_args(OnSuspicion):
            raise GradveilError(f"on_suspicion is one of {', '.join(get_args(OnSuspicion))}, not {on_suspicion!r}")
        self.on_suspicion = on_suspicion
        self._trained_on: Params | None = None
        self.defense = defense or Defense()
        _refuse_frozen(module)
        self.defense.check(module)
        self.model = Functional(module, train_mode=recipe.train_mode)
        self.recipe = recipe
        self.loss = loss

    def inspect(
        self,
        sent: Mapping[str, torch.Tensor],
        previous: Mapping[str, torch.Tensor] | None = None,
        *,
        probe: Batch | None = None,
    ) -> Inspection:
        """Whether a broadcast looks crafted; more can be seen with the one before it, and on a batch of any images."""
        return inspect(self.model.module, sent, previous=previous, probe=probe, recipe=self.recipe)

    def reply(self, sent: Mapping[str, torch.Tensor], batch: Batch, rng: Stream, *, round_number: int = 1) -> Reply:
        """Train from the broadcast parameters on the private batch and return the update that would be sent."""
        return finished(self.run(sent, batch, rng, round_number=round_number))

    def replies(
        self, sent: Mapping[str, torch.Tensor], batches: Sequence[Batch], rngs: Sequence[Stream]
    ) -> list[Reply]:
        """What clients alike reply to one broadcast, each for its own batch: side by side where their defense gains."""
        if self.recipe.sends != "gradient" or not self.defense.gains_together:
            return [self.reply(sent, batch, rng) for batch, rng in zip(batches, rngs, strict=True)]
        steps, gradients = [], []
        for batch, rng in zip(batches, rngs, strict=True):
            start = self._start(sent, batch, rng)
            self.defense.prepared(start)
            model = self.defense.on_forward(self.model, len(batch), rng)
            gradient, value = Gradient(model, self.loss)(
                (start.params, model.buffers, start.batch.inputs, start.batch.labels)
            )
            steps.append(replace(start, model=model, number=1, value=value))
            gradients.append(gradient)
        hidden = self.defense.on_gradients(gradients, steps)
        return [_sent(self.defense, update, step, self.recipe) for update, step in zip(hidden, steps, strict=True)]

    def run(self, sent: Mapping[str, torch.Tensor], batch: Batch, rng: Stream, *, round_number: int = 1) -> Run[Reply]:
        """:meth:`reply` that leaves each gradient to whoever runs it."""
        start = self._start(sent, batch, rng, round_number)
        local, defense = start.batch, self.defense.prepared(start)
        places = torch.arange(len(local), device=local.labels.device)

        def defended(gradient: Params, taken: Taken) -> Params:
            step = replace(
                start,
                model=taken.model,
                params=taken.params,
                batch=local.take(taken.examples),
                index=places[taken.examples],
                number=taken.number,
                value=taken.value,
            )
            return defense.on_gradient(gradient, step)

        local_run = LocalRun(
            self.model,
            self.loss,
            start.params,
            local.inputs,
            local.labels,
            self.recipe,
            on_gradient=defended,
            on_forward=lambda model, examples: defense.on_forward(model, examples, rng),
        )
        update = yield from local_run.asking()
        return _sent(defense, update, start, self.recipe)

    def _start(self, sent: Mapping[str, torch.Tensor], batch: Batch, rng: Stream, round_number: int = 1) -> Step:
        """The state before the first local step."""
        self._beware(sent, batch)
        own = self.model.params
        if sent.keys() != own.keys() or not all(tensor.is_floating_point() for tensor in sent.values()):
            raise GradveilError("the broadcast does not hold the parameters of this client's model")
        params = {name: tensor.to(own[name].dtype) for name, tensor in sent.items()}  # some servers send half of it
        local = Batch(self.defense.on_inputs(batch.inputs, rng), batch.labels)
        return Step(
            model=self.model,
            loss=self.loss,
            params=params,
            batch=local,
            index=torch.arange(len(local), device=local.labels.device),
            number=0,
            round_number=round_number,
            lr=self.recipe.lr,
            rng=rng,
            log=Log(),
        )

    def _beware(self, sent: Mapping[str, torch.Tensor], batch: Batch) -> None:
        if self.on_suspicion == "train":
            return
        found = self.inspect(sent, self._trained_on, probe=batch)
        if found.suspicious and self.on_suspicion == "refuse":
            raise GradveilError(f"the client does not train: {found.summary}")
        if found.suspicious:
            warnings.warn(found.summary, stacklevel=6)
        self._trained_on = detached(dict(sent))


def _refuse_frozen(module: nn.Module) -> None:
    """Training what its owner does not train would show leaks that are not there."""
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    if frozen:
        raise GradveilError(
            f"parameter {frozen[0]!r} is frozen, but clients here train and send all of them: unfreeze it, or make it "
            "a buffer (gradveil.protect leaves frozen parameters alone in your own loop)"
        )


def _sent(defense: Defense, update: Params, step: Step, recipe: Recipe) -> Reply:
    """What leaves the client."""
    update = defense.on_update(update, step.rng, step.log)
    if not all_finite(update):
        raise GradveilError(_not_finite(step, recipe))
    return Reply(detached(update), step.log, step.batch)


def _not_finite(step: Step, recipe: Recipe) -> str:
    """Why an update holds NaN or infinity. The learning rate is to blame only where local steps were taken with it."""
    spoiled = [name for name, tensor in (step.params | step.model.buffers).items() if not all_finite({name: tensor})]
    if spoiled:
        return f"the model's parameters are not finite: {spoiled[0]!r} holds NaN or infinity, and so does the update"
    if recipe.sends == "gradient":
        return "the gradient holds NaN or infinity, the model's parameters do not: look at the inputs and the defense"
    return "the local run diverged: the update holds NaN or infinity; lower the learning rate"
