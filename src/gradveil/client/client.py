"""A simulated client: it takes the broadcast, trains on its private batch with its defense, and replies."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from gradveil.client.inspection import Inspection, inspect
from gradveil.client.local import LocalRun, mini_batches
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import added_at_once, all_finite, detached, map_each
from gradveil.core.types import Batch, Loss, Params, Recipe, cross_entropy
from gradveil.defenses import Defense, Log, PublicData, Step, check_model, check_result, defended_step, links_of
from gradveil.engine import Request
from gradveil.models.functional import Functional

OnSuspicion = Literal["train", "warn", "refuse"]
"""What a client does about a broadcast that looks crafted; with ``train`` it does not even look."""


@dataclass(frozen=True)
class Reply:
    """What comes back from a client. Only the log stays there, and in the audit."""

    update: Params
    buffers: Params
    """Running statistics after the local run, by name; as they were broadcast if nobody trains them."""
    examples: int
    """How many are behind the update."""
    log: Log
    """What the defense reported."""


class SimulatedClient:
    """One participant. ``module`` is the architecture both sides agreed on, after ``defense.on_model``.

    Its frozen parameters are agreed on as well: they are neither broadcast nor trained nor sent.

    ``on_suspicion`` makes it inspect each broadcast, with its own batch for a probe and the last broadcast that it
    trained on to compare with, before it trains. ``public`` says which data is public, for defenses that need some.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        recipe: Recipe,
        defense: Defense | None = None,
        loss: Loss = cross_entropy,
        on_suspicion: OnSuspicion = "train",
        public: PublicData | None = None,
    ) -> None:
        if on_suspicion not in get_args(OnSuspicion):
            raise GradveilError(f"on_suspicion is one of {', '.join(get_args(OnSuspicion))}, not {on_suspicion!r}")
        self.on_suspicion, self.recipe, self.loss = on_suspicion, recipe, loss
        self.defense = defense or Defense()
        check_model(self.defense, module)
        self.model = Functional(module, train_mode=recipe.train_mode)
        if not self.model.params:
            raise GradveilError("all parameters of the model are frozen: there is nothing to train and to send")
        self.public = public
        self._module = module
        self._trained_on: Params | None = None

    @cached_property
    def statistics(self) -> StatisticsAfter:
        """How running statistics move. One for all runs of this client, so that these can be evaluated together."""
        return StatisticsAfter(self._module)

    def inspect(
        self,
        sent: Mapping[str, Tensor],
        previous: Mapping[str, Tensor] | None = None,
        *,
        probe: Batch | None = None,
    ) -> Inspection:
        """Whether a broadcast looks crafted; more can be seen with the one before it, and on a batch of any images."""
        return inspect(self.model.module, sent, previous=previous, probe=probe, recipe=self.recipe)

    def reply(self, sent: Mapping[str, Tensor], batch: Batch, rng: Stream, *, round_number: int = 1) -> Reply:
        """Train from the broadcast parameters on the private batch and return the reply."""
        return self.start(sent, batch, rng, round_number=round_number).finish()

    def replies(
        self, sent: Mapping[str, Tensor], batches: Sequence[Batch], rngs: Sequence[Stream], *, round_number: int = 1
    ) -> list[Reply]:
        """What clients alike reply to one broadcast, each for its own batch: side by side where their defense gains."""
        pairs = zip(batches, rngs, strict=True)
        if self.recipe.sends != "gradient" or not self.defense.batches_clients:
            return [self.start(sent, batch, rng, round_number=round_number).finish() for batch, rng in pairs]
        runs = [self.start(sent, batch, rng, round_number=round_number) for batch, rng in pairs]
        results = [run.request().evaluate() for run in runs]
        steps = [run.step(value) for run, (_, value) in zip(runs, results, strict=True)]
        hidden = self.defense.on_gradients([gradient for gradient, _ in results], steps)
        for run, update, (gradient, _) in zip(runs, hidden, results, strict=True):
            check_result(update, gradient, finite=False)
            run.apply(update)
        return [run.reply() for run in runs]

    def start(
        self,
        sent: Mapping[str, Tensor],
        batch: Batch,
        rng: Stream,
        *,
        round_number: int = 1,
        federation_round: int | None = None,
        buffers: Params | None = None,
        log: Log | None = None,
        distinct: bool = True,
    ) -> ClientRun:
        """Begin a run from the broadcast parameters and running statistics; examples are visited in their order.

        ``distinct``: examples at different places are known to be of different people.
        """
        if self.on_suspicion != "train":
            found = self.inspect(sent, self._trained_on, probe=batch)
            if found.suspicious and self.on_suspicion == "refuse":
                raise GradveilError(f"the client does not train: {found.summary}")
            if found.suspicious:
                warnings.warn(found.summary, stacklevel=3)
            self._trained_on = detached(dict(sent))
        own = self.model.params
        if sent.keys() != own.keys() or not all(tensor.is_floating_point() for tensor in sent.values()):
            raise GradveilError("the broadcast does not hold the parameters that this client trains")
        local = Batch(self.defense.on_inputs(batch.inputs, rng), batch.labels)
        start = Step(
            model=self.model,
            loss=self.loss,
            params={name: tensor.to(own[name].dtype) for name, tensor in sent.items()},  # some servers send half of it
            frozen=self.model.frozen,
            batch=local,
            index=torch.arange(len(local), device=local.labels.device) if distinct else None,
            number=0,
            round_number=round_number,
            federation_round=federation_round,
            lr=self.recipe.lr,
            rng=rng,
            log=Log() if log is None else log,
            public=self.public,
        )
        return ClientRun(self, start, buffers or {})


class ClientRun(LocalRun):
    """A local run under a defense, and the running statistics that go with its result. It ends in a reply.

    In train mode a local run normalises by each mini-batch and keeps no running statistics, which no transform allows.
    So a client makes one more pass without gradients over its examples when it is done, at the parameters it arrived
    at, and lets each layer update its running statistics as PyTorch does in training, from those that were broadcast.
    For a single gradient (FedSGD) this is what PyTorch's own training step leaves there. In eval mode they are never
    touched. They are of the examples as the defense left them, but no defense hides them: what they give away is in
    docs/federated.md.
    """

    def __init__(self, client: SimulatedClient, start: Step, buffers: Params) -> None:
        batch, recipe = start.batch, client.recipe
        super().__init__(client.model, client.loss, start.params, batch.inputs, batch.labels, recipe)
        self._client, self._start, self._buffers = client, start, buffers
        self._defense = client.defense.for_round(start)
        observes = bool(buffers) and recipe.train_mode
        self._passes = mini_batches(len(batch), replace(recipe, epochs=1)) if observes else []
        """The examples of each forward pass that is left, for running statistics."""

    @property
    def done(self) -> bool:
        return self.trained and not self._passes

    def request(self) -> Request[Any]:
        """A gradient or, after the last step, running statistics."""
        recomputed = any(link.has_guarantee and link.recomputes_gradient for link in links_of(self._client.defense)[:1])
        if not self.trained and recomputed:
            self._evaluated = self.on_forward(len(self.inputs[self.examples]))
            return Request(_no_gradient, self.params)  # it would not be looked at
        if not self.trained:
            return super().request()
        return Request(self._client.statistics, (self._arrived, self._buffers, self.inputs[self._passes[0]]))

    def take(self, result: Any) -> None:
        if not self.trained:
            gradient, value = result
            self.apply(defended_step(self._defense, gradient, self.step(value), finite=False))
        else:
            self._buffers = result
            del self._passes[0]

    def finish(self) -> Reply:
        """Go on to the end, each request evaluated by itself."""
        while not self.done:
            self.take(self.request().evaluate())
        return self.reply()

    def reply(self) -> Reply:
        """What leaves when the run is done."""
        return Reply(self._leaving, self._buffers, len(self._start.batch), self._start.log)

    def step(self, value: Tensor | None) -> Step:
        """The next step, as a defense sees it, at a loss of ``value``."""
        start = self._start
        return replace(
            start,
            model=self._evaluated,
            params=self.params,
            batch=start.batch.take(self.examples),
            index=None if start.index is None else start.index[self.examples],
            number=self.number + 1,
            loss_value=value,
        )

    def on_forward(self, examples: int) -> Functional:
        return self._defense.on_forward(self.model, examples, self._start.rng)

    def add(self, a: Params, b: Params, scale: float) -> Params:
        return added_at_once(a, b, scale)

    @cached_property
    def _arrived(self) -> Params:
        """Where the update as it leaves brings the model."""
        return added_at_once(self.sent, self._leaving) if self.recipe.sends == "delta" else self.sent

    @cached_property
    def _leaving(self) -> Params:
        """The update as it leaves. Raises if it holds NaN or infinity, and names what is to blame."""
        start = self._start
        given = self.update()
        update = self._defense.on_update(given, start.rng, start.log)
        check_result(update, given, finite=False)
        if all_finite(update):
            return detached(update)
        for name, tensor in (start.params | start.frozen | start.model.buffers).items():
            if not all_finite({name: tensor}):
                raise GradveilError(
                    f"the model's parameters are not finite: {name!r} holds NaN or infinity, and so does the update"
                )
        if self.recipe.sends == "gradient":  # no local step was taken with the learning rate
            raise GradveilError(
                "the gradient holds NaN or infinity, the model's parameters do not: look at the inputs and the defense"
            )
        raise GradveilError("the local run diverged: the update holds NaN or infinity; lower the learning rate")


def _no_gradient(params: Params) -> tuple[Params, None]:
    """Zeros in the place of a gradient, and no loss."""
    return map_each(torch.zeros_like, params), None


class StatisticsAfter:
    """(parameters, running statistics, inputs) -> the statistics after a forward pass in train mode."""

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module).train()

    def __call__(self, arguments: tuple[Params, Params, Tensor]) -> Params:
        params, before, inputs = arguments
        after = detached(before)
        with torch.no_grad():
            functional_call(self.module, (params, after), (inputs,))  # updates ``after`` in place
        return after


def running_statistics(module: nn.Module) -> Params:
    """The buffers of all layers that keep running statistics, by name."""
    return detached(
        {
            f"{place}.{name}" if place else name: buffer
            for place, layer in module.named_modules()
            if isinstance(layer, _NormBase) and layer.track_running_stats
            for name, buffer in layer.named_buffers(recurse=False)
        }
    )
