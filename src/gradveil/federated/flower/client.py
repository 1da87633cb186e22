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
from torch import Tensor

from gradveil import models
from gradveil.client import running_statistics
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.trees import add
from gradveil.core.types import Batch, Json, Params
from gradveil.data import ImageSet
from gradveil.defenses import DEFENSES
from gradveil.federated.case import Training
from gradveil.federated.flower.mods import MessageExchange, checked, fails_closed, inspected, tap
from gradveil.federated.flower.node import own_settings, read_node
from gradveil.federated.flower.records import (
    ARRAYS,
    CONFIG,
    EXAMPLES,
    METRICS,
    packed,
    place_of,
    round_number,
    state_of,
    tensors_of,
)
from gradveil.federated.flower.spending import spend
from gradveil.federated.rounds import Federation, RoundExchange, as_delta, why_unusable
from gradveil.federated.run import data_of
from gradveil.federated.tap import Tap, taps

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
        return Node(message, context, node).train(mods, message, context)

    @app.evaluate()
    @fails_closed
    def evaluate(message: Message, context: Context) -> Message:
        return Node(message, context, node).evaluate(message)

    return app


class Node:
    """One node before one message: its settings, which share it holds, and the federation as it sees it."""

    def __init__(self, message: Message, context: Context, code: Json) -> None:
        self.settings = read_node(context.run_config, context.node_config, code)
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

    def train(self, mods: Sequence[Mod], message: Message, context: Context) -> Message:
        """Inspect the broadcast, train, and let the reply leave through the mods, a check and the tap."""
        number = round_number(message)
        batch, index = self._examples(number)
        look = inspected(
            self.federation.module,
            on_suspicion=self.settings.on_suspicion,
            probe=lambda _message, _context: batch,  # it does not leave by this
            recipe=self.case.recipe,
        )
        call: ClientAppCallable = partial(self._train, number, batch)
        for mod in reversed((tap(partial(self._save, batch, index)), checked, *mods, look)):
            call = partial(_around, mod, call)
        return call(message, context)

    def _examples(self, number: int) -> tuple[Batch, Tensor]:
        """What this round trains on, and where it stands in the data: a last batch below ``min-batch`` is left out.

        Whoever chooses the batch size could otherwise have one example left over, and with it the gradient of one
        person. The order is drawn anew in each round, so that no example is left out for good.
        """
        settings, share = self.settings, len(self.federation.shares[self.client])
        # Nobody else may know which examples stood together in a step, and the server knows every seed it was told.
        order = None if settings.repeatable else Stream.secret().permutation(share)
        batch, index = self.federation.examples(self.client, number, order)
        size = min(self.case.batch_size or len(batch), len(batch))
        if size < settings.min_batch:
            raise GradveilError(
                f"a local batch would have fewer than {settings.min_batch} examples, the min-batch of this node: "
                "choose a larger batch-size, or set min-batch on the node if its share is that small"
            )
        rest = len(batch) % size
        kept = slice(len(batch) - rest if rest < settings.min_batch else len(batch))
        return batch.take(kept), index[kept]

    def _train(self, number: int, batch: Batch, message: Message, context: Context) -> Message:
        settings, federation = self.settings, self.federation
        federation.state = state_of(tensors_of(message.content), federation.state)
        count = 1 + int(str(context.state.config_records.get(ANSWERED, ConfigRecord()).get("count", 0)))
        rng = None if settings.repeatable else Stream.secret()
        reply = federation.start(self.client, number, broadcasts=count, batch=batch, rng=rng).finish()
        spend(settings, self.client, context, reply.log.ledger)
        context.state[ANSWERED] = ConfigRecord({"count": count})  # not before: a broadcast that fails uses up no round
        if figures := reply.log.means():  # they stay here: what a defense does with private data is private
            log(INFO, "defense: %s", ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
        local = add(federation.state.params, as_delta(reply.update, self.case.recipe))
        statistics = reply.buffers if settings.statistics == "send" else federation.state.buffers
        if statistics and self.case.train_mode:
            log(INFO, "running statistics of norm layers: %s", settings.statistics)
        content = RecordDict(
            {
                ARRAYS: packed(local | statistics),
                METRICS: MetricRecord({EXAMPLES: reply.examples}),
                CONFIG: ConfigRecord({"client": self.client}),
            }
        )
        return Message(content, reply_to=message)

    def _save(self, batch: Batch, index: Tensor, one: MessageExchange) -> None:
        if self.settings.out is None or not any(taps(spec, one.client, one.round_number) for spec in self.case.tap):
            return
        sent, update = state_of(one.sent, self.federation.state), one.update(self.case.recipe)
        reply = {name: update[name] for name in sent.params}
        save = Tap.on(self.federation, self.settings.out / "taps", overwrite=False)
        save(RoundExchange(one.round_number, one.client, sent, reply, len(batch), batch, index))

    def evaluate(self, message: Message) -> Message:
        """How good the global model is on this node's own examples, if the node lets that leave."""
        if not self.settings.evaluate:
            raise GradveilError(
                "this node does not evaluate: a loss on private examples leaves without a defense; evaluate=true on "
                "the node's side allows it"
            )
        federation = self.federation
        federation.state = state_of(tensors_of(message.content), federation.state)
        share = federation.train.subset(federation.shares[self.client])
        quality = federation.quality(share)
        metrics = MetricRecord({EXAMPLES: len(share), "accuracy": quality.accuracy, "loss": quality.loss})
        return Message(RecordDict({METRICS: metrics}), reply_to=message)


def _around(mod: Mod, inner: ClientAppCallable, message: Message, context: Context) -> Message:
    return mod(message, context, inner)


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
    federation = Federation(case, _data(case))
    if frozen := [name for name, p in federation.module.named_parameters() if not p.requires_grad]:
        # every node builds its own model, and a broadcast does not hold what nobody trains
        raise GradveilError(
            f"parameter {frozen[0]!r} is frozen, and nodes would not have the same one: unfreeze it, or use "
            "gradveil.protect in an app of your own"
        )
    return federation


def _check_size(case: Training, sent: Params) -> None:
    """Refuse a model that is not that of the broadcast before it is built: it takes no more memory than came in."""
    if models.is_import_path(case.model):  # only the node itself can have named it
        return
    domain = _data(case).domain
    with torch.device("meta"):
        module = DEFENSES.build(case.defense).on_model(models.build(case.model, domain, seed=0))
    if reason := why_unusable(sent, dict(module.named_parameters()) | running_statistics(module)):
        raise GradveilError(f"the broadcast cannot be used: {reason}")
