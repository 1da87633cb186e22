"""The ready ClientApp: it trains by the code that trains in process, with the defense inside the local run.

What it does follows from :mod:`gradveil.federated.flower.node`. Whatever is wrong becomes an error in the place of the
reply, so that an update leaves as the node said, or does not leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from logging import ERROR, INFO
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.supercore import log

from gradveil import models
from gradveil.client import finished
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import add
from gradveil.core.types import Params
from gradveil.data import ImageSet
from gradveil.defenses import DEFENSES
from gradveil.defenses.accounting import Ledger
from gradveil.federated.case import Training
from gradveil.federated.flower.mods import checked, fails_closed, inspected
from gradveil.federated.flower.node import NodeSettings, own_settings, read_node
from gradveil.federated.flower.records import (
    EXAMPLES,
    METRICS,
    place_of,
    reply_to,
    round_number,
    state_of,
    tensors_of,
)
from gradveil.federated.flower.spending import spend
from gradveil.federated.flower.tapping import Passed, tap
from gradveil.federated.local import running_statistics
from gradveil.federated.rounds import Federation
from gradveil.federated.run import data_of
from gradveil.federated.server import as_difference
from gradveil.federated.tap import Exchange, Tap, taps

ANSWERED = "gradveil.answered"
"""Where a node counts the broadcasts that it trained on."""


def client_app(mods: Sequence[Mod] = (), **node: Any) -> ClientApp:
    """A ClientApp that trains as its node says.

    Args:
        mods: mods of your own, around the training and inside the tap.
        node: what the node decides, by the keys of a node config: ``client_app(data="mnist-samples",
            defense="clip:bound=1", on_suspicion="refuse")``. The node config itself goes over these.
    """
    own_settings(node)  # a mistyped one is an error now, not when the first message comes
    app = ClientApp()

    @app.train()
    @fails_closed
    def train(message: Message, context: Context) -> Message:
        return _train(mods, Site(message, context, node), message, context)

    @app.evaluate()
    @fails_closed
    def evaluate(message: Message, context: Context) -> Message:
        return _evaluate(Site(message, context, node), message)

    return app


class Site:
    """One node before one message: its settings, which share it holds, and the federation as it sees it."""

    def __init__(self, message: Message, context: Context, code: dict[str, Any]) -> None:
        self.settings: NodeSettings = read_node(context.run_config, context.node_config, code)
        self.case, self.client = self.settings.training, place_of(context)
        known = context.node_config.get("num-partitions")
        if known != self.case.clients or self.client >= self.case.clients:
            raise GradveilError(
                f"this node holds share {self.client} of {known}, and the run is one of {self.case.clients} clients: "
                "counting from 0, partition-id must be below clients, and num-partitions equal to it"
            )
        if self.case.device == "cuda" and not torch.cuda.is_available():
            raise GradveilError("this node asks for device cuda, but torch sees no GPU on it")
        _check_size(self.case, tensors_of(message.content))
        self.federation = _federation(self.case)


@lru_cache(maxsize=1)
def _data(case: Training) -> ImageSet:
    try:
        return data_of(case)[0]
    except GradveilError as error:
        log(ERROR, "%s", error)  # it may name a folder, which the server need not know
        raise GradveilError("this node cannot read its data: its log says why") from error


@lru_cache(maxsize=1)
def _federation(case: Training) -> Federation:
    """The data and the model: in a simulation, one process answers many messages."""
    return Federation(case, _data(case))


def _check_size(case: Training, sent: Params) -> None:
    """Refuse a model that is not that of the broadcast before it is built: it takes no more memory than came in."""
    if models.is_import_path(case.model):  # only the node itself can have named it
        return
    domain = _data(case).domain
    with torch.device("meta"):
        module = DEFENSES.build(case.defense).on_model(models.build(case.model, domain, seed=0))
    own = dict(module.named_parameters()) | running_statistics(module)
    wrong = own.keys() ^ sent.keys() | {name for name in own.keys() & sent if own[name].shape != sent[name].shape}
    if wrong:
        raise GradveilError(
            f"the broadcast cannot be used: it is not of this model: {min(wrong)!r} is missing, unknown or of "
            "another shape"
        )


def _train(mods: Sequence[Mod], site: Site, message: Message, context: Context) -> Message:
    case, settings, federation = site.case, site.settings, site.federation
    number, share = round_number(message), len(federation.shares[site.client])
    # Nobody else may know which examples stood together in a step, and the server knows every seed that it was told.
    order = None if settings.repeatable else Stream.secret().permutation(share)
    batch, index = federation.examples(site.client, number, order)
    kept = _trained_on(len(batch), settings)
    batch, index = batch.take(slice(kept)), index[:kept]

    def trained(message: Message, context: Context) -> Message:
        federation.state = state_of(tensors_of(message.content), federation.state)
        rng = None if settings.repeatable else Stream.secret()
        federation.ledgers[site.client] = Ledger()  # that of the node is kept by `spend`, over processes and runs
        count = _answered(context) + 1
        answer = finished(federation.answering(site.client, number, broadcasts=count, batch=batch, rng=rng))
        spend(settings, site.client, context, answer.log.ledger)
        context.state[ANSWERED] = ConfigRecord({"count": count})  # not before: a broadcast that fails uses up no round
        if figures := answer.log.means():  # they stay here: what a defense does with private data is private
            log(INFO, "defense: %s", ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
        local = add(federation.state.params, as_difference(answer.update, case.recipe))
        statistics = answer.buffers if settings.statistics == "send" else federation.state.buffers
        if statistics and case.train_mode:
            log(INFO, "running statistics of norm layers: %s", settings.statistics)
        return reply_to(message, local | statistics, examples=answer.examples, client=site.client)

    def named(client: int, number: int) -> bool:
        return any(taps(spec, client, number) for spec in case.tap)

    def save(one: Passed) -> None:
        if settings.out is not None:
            sent, update = state_of(one.sent, federation.state), one.update(case.recipe)
            reply = {name: update[name] for name in sent.params}
            place = settings.out / "taps"
            saved = Tap(case, federation.module, federation.train.domain, place, named, overwrite=False)
            saved(Exchange(one.round_number, one.client, sent, reply, batch, index))

    look = inspected(
        federation.module,
        on_suspicion=settings.on_suspicion,
        probe=lambda _message, _context: batch,  # it does not leave by this
        recipe=case.recipe,
    )
    call: ClientAppCallable = trained
    for mod in reversed((tap(save), checked, *mods, look)):
        call = partial(_around, mod, call)
    return call(message, context)


def _trained_on(count: int, settings: NodeSettings) -> int:
    """How many of the examples are trained on: a last batch below ``min-batch`` is left out of the round.

    Whoever chooses the batch size could otherwise have one example left over, and with it the gradient of one person.
    The order is drawn anew in each round, so that no example is left out for good.
    """
    size = min(settings.training.batch_size or count, count)
    if size < settings.min_batch:
        raise GradveilError(
            f"a local batch would have fewer than {settings.min_batch} examples, the min-batch of this node: choose a "
            "larger batch-size, or set min-batch on the node if its share is that small"
        )
    rest = count % size
    return count - rest if rest < settings.min_batch else count


def _around(mod: Mod, inner: ClientAppCallable, message: Message, context: Context) -> Message:
    return mod(message, context, inner)


def _evaluate(site: Site, message: Message) -> Message:
    """How good the global model is on this node's own examples, if the node lets that leave."""
    if not site.settings.evaluate:
        raise GradveilError(
            "this node does not evaluate: a loss on private examples leaves without a defense; evaluate=true on the "
            "node's side allows it"
        )
    federation = site.federation
    federation.state = state_of(tensors_of(message.content), federation.state)
    share = federation.train.subset(federation.shares[site.client])
    quality = federation.quality(share)
    metrics = MetricRecord({EXAMPLES: len(share), "accuracy": quality.accuracy, "loss": quality.loss})
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


def _answered(context: Context) -> int:
    """How many broadcasts this node has replied to."""
    return int(str(context.state.config_records.get(ANSWERED, ConfigRecord()).get("count", 0)))
