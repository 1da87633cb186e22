"""The client's side of a round: the local run, and the running statistics that go with its result.

In train mode a local run normalises by each mini-batch and keeps no running statistics, which no transform allows. So
a client makes one more pass without gradients over its examples when it is done, at the parameters it arrived at, and
lets each layer update its running statistics as PyTorch does in training, from those that were broadcast. For a single
gradient (FedSGD) this is what PyTorch's own training step leaves there. The server takes the mean by examples, as for
parameters. In eval mode running statistics are never touched.

They are of the examples as the defense left them, but no defense hides them: what they give away is in
docs/federated.md.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from gradveil.client import Run, SimulatedClient, Wanted
from gradveil.client.local import mini_batches
from gradveil.core.streams import Stream
from gradveil.core.trees import added_at_once, detached
from gradveil.core.types import Batch, Params, Recipe
from gradveil.defenses import Log
from gradveil.federated.server import State


@dataclass(frozen=True)
class Answer:
    """What a client sends back, how many examples are behind it, and what its defense logged."""

    update: Params
    buffers: Params
    examples: int
    log: Log


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


class StatisticsAfter:
    """(parameters, running statistics, inputs) -> the statistics after a forward pass in train mode."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module if module.training else copy.deepcopy(module).train()

    def __call__(self, given: tuple[Params, Params, Tensor]) -> Params:
        params, before, inputs = given
        after = detached(before)
        with torch.no_grad():
            functional_call(self.module, (params, after), (inputs,))  # updates ``after`` in place
        return after

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StatisticsAfter) and self.module is other.module

    def __hash__(self) -> int:
        return hash(self.module)


def statistics_after(module: nn.Module, params: Params, before: Params, batch: Batch, recipe: Recipe) -> Run[Params]:
    """Running statistics after one pass in train mode over a batch, in the recipe's mini-batches."""
    if before and recipe.train_mode:
        once, step = Recipe(sends="delta", batch_size=recipe.batch_size), StatisticsAfter(module)
        for examples in mini_batches(len(batch), once):
            before = yield Wanted(step, (params, before, batch.inputs[examples]))
    return before


def local_training(
    client: SimulatedClient, module: nn.Module, state: State, batch: Batch, rng: Stream, *, round_number: int
) -> Run[Answer]:
    """One client's answer to the broadcast ``state``; examples are visited in the order of ``batch`` in every epoch.

    Clients that share a ``module`` in train mode can have their running statistics computed together.
    """
    reply = yield from client.run(state.params, batch, rng, round_number=round_number)
    arrived = added_at_once(state.params, reply.update) if client.recipe.sends == "delta" else state.params
    buffers = yield from statistics_after(module, arrived, state.buffers, reply.batch, client.recipe)
    return Answer(reply.update, buffers, len(batch), reply.log)
