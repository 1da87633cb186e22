"""The ready ClientApp: it trains by the code that trains in process, with the defense inside the local run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from logging import INFO

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.supercore import log

from gradveil.client import finished
from gradveil.core.errors import GradveilError
from gradveil.core.seeding import secret
from gradveil.core.trees import add
from gradveil.federated.case import Training
from gradveil.federated.flower.mods import checked, inspected, of_training
from gradveil.federated.flower.records import EXAMPLES, METRICS, place_of, reply_to, round_number, state_of
from gradveil.federated.flower.settings import Settings, read_settings
from gradveil.federated.flower.tapping import Passed, tap
from gradveil.federated.rounds import Federation
from gradveil.federated.run import data_of
from gradveil.federated.server import State, as_difference
from gradveil.federated.tap import Exchange, Tap

ANSWERED = "gradveil.answered"
"""Where a node counts the broadcasts that it trained on."""


def client_app(mods: Sequence[Mod] = ()) -> ClientApp:
    """A ClientApp that does what its run config says; ``mods`` of your own go around the training, inside the tap."""
    app = ClientApp()
    app.train(mods=[_tapping, checked, *mods, _inspecting])(_train)
    app.evaluate()(_evaluate)
    return app


class Site:
    """What one node is in a run: its settings, which share it holds, and the federation as it sees it."""

    def __init__(self, context: Context) -> None:
        self.settings: Settings = read_settings(context.run_config, context.node_config)
        self.case, self.client = self.settings.training, place_of(context)
        known = context.node_config.get("num-partitions", self.case.clients)
        if known != self.case.clients or self.client >= self.case.clients:
            raise GradveilError(
                f"this node holds share {self.client} of {known}, and the run is one of {self.case.clients} clients: "
                "counting from 0, partition-id must be below clients, and num-partitions equal to it"
            )
        self.federation = _federation(self.case)

    def sent(self, message: Message) -> State:
        return state_of(message.content, self.federation.state)


@lru_cache(maxsize=1)
def _federation(case: Training) -> Federation:
    """The data and the model: in a simulation, one process answers many messages."""
    return Federation(case, data_of(case)[0])


def _train(message: Message, context: Context) -> Message:
    site = Site(context)
    federation, case = site.federation, site.case
    federation.state = site.sent(message)
    run = federation.answering(
        site.client,
        round_number(message),
        broadcasts=_counted(context),
        rng=None if site.settings.repeatable else secret(case.device),
    )
    answer = finished(run)
    local = add(federation.state.params, as_difference(answer.update, case.recipe))
    if figures := answer.log.means():  # they stay here: what a defense does with private data is private
        log(INFO, "defense: %s", ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    return reply_to(message, local | answer.buffers, examples=answer.examples, client=site.client)


def _evaluate(message: Message, context: Context) -> Message:
    """How good the global model is on this node's own examples."""
    site = Site(context)
    federation = site.federation
    federation.state = site.sent(message)
    share = federation.train.subset(federation.shares[site.client])
    quality = federation.quality(share)
    metrics = MetricRecord({EXAMPLES: len(share), "accuracy": quality.accuracy, "loss": quality.loss})
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


@of_training
def _inspecting(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Inspection with the node's own examples for a probe; they do not leave by it."""
    site = Site(context)
    batch, _ = site.federation.examples(site.client, round_number(message))
    look = inspected(
        site.federation.module,
        on_suspicion=site.settings.on_suspicion,
        probe=lambda _message, _context: batch,
        recipe=site.case.recipe,
    )
    return look(message, context, call_next)


@of_training
def _tapping(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The tap that the case names; beside each observation lie the private examples, as in process."""
    site = Site(context)
    if not site.case.tap:
        return call_next(message, context)
    if site.settings.out is None:
        raise GradveilError("a tap needs a folder: set out to one, by its absolute path")
    federation = site.federation
    # Flower chooses who takes part: whoever is asked and named is tapped.
    saved = Tap(
        replace(site.case, per_round=None), federation.module, federation.train.domain, site.settings.out / "taps"
    )
    sent = site.sent(message)

    def save(one: Passed) -> None:
        update = one.update(site.case.recipe)
        batch, index = federation.examples(one.client, one.round_number)
        reply = {name: update[name] for name in sent.params}
        saved(Exchange(one.round_number, one.client, sent, reply, batch, index))

    return tap(save)(message, context, call_next)


def _counted(context: Context) -> int:
    """How many broadcasts this node has trained on, with this one."""
    before = context.state.config_records.get(ANSWERED, ConfigRecord())
    count = int(str(before.get("count", 0))) + 1
    context.state[ANSWERED] = ConfigRecord({"count": count})
    return count
