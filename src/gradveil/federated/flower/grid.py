"""A grid that looks at replies before a strategy does: what cannot be used is dropped with a line that says why.

Flower's strategies average what they get. One NaN spoils the model of everybody, a single reply of another shape ends
the run, and a node that answers with an error is left out without a word. So this stands between them and the network,
and they stay as they are. A run in which replies are dropped fails, unless it was told how few replies are enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from logging import INFO, WARNING

import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore import log
from flwr.supercore.run import Run

from gradveil.core.errors import GradveilError
from gradveil.core.types import Params
from gradveil.defenses import Log
from gradveil.federated.flower.records import (
    ARRAYS,
    EXAMPLES,
    METRICS,
    arrays_of,
    is_train,
    repacked,
    round_number,
    tensors_of,
)
from gradveil.federated.rounds import Round


class CheckedGrid(Grid):
    """Another grid with its replies checked. ``last`` is what came of the last round of training.

    While fewer than ``min_nodes`` are connected strategies wait; after ``patience`` seconds of that it is an error.
    So is a round of training with fewer usable replies than that. None: every node that was asked has to reply.
    """

    def __init__(self, grid: Grid, *, min_nodes: int | None = None, patience: float = math.inf) -> None:
        self._grid, self.min_nodes, self._patience = grid, min_nodes, patience
        self._short_since: float | None = None
        self._types: dict[str, torch.dtype] = {}
        self.last: Round | None = None

    def wait_for(self, nodes: int) -> None:
        """Until so many are connected."""
        self.min_nodes = nodes
        while len(list(self.get_node_ids())) < nodes:
            time.sleep(1)

    def get_node_ids(self) -> Iterable[int]:
        nodes, now = list(self._grid.get_node_ids()), time.monotonic()
        if len(nodes) >= (needed := self.min_nodes or 1):
            self._short_since = None
            return nodes
        if self._short_since is None:
            self._short_since = now
            log(INFO, "%d nodes are connected; waiting for %d", len(nodes), needed)
        if now - self._short_since > self._patience:
            raise GradveilError(f"{len(nodes)} nodes are connected after {self._patience:.0f} s; {needed} are needed")
        return nodes

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        if not messages or not is_train(messages[0]):
            return self._grid.send_and_receive(messages, timeout=timeout)
        number, started = round_number(messages[0]), time.perf_counter()
        # replies have to be like the broadcast, in the types of the first one, for some strategies widen them
        sent = tensors_of(messages[0].content)
        like = {name: tensor.to(self._types.setdefault(name, tensor.dtype)) for name, tensor in sent.items()}
        bytes_down = _bytes(messages[0].content) * len(messages)
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        usable, dropped, bytes_up = [], {}, 0
        asked = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        for reply in replies:
            node = asked.pop(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
            try:
                content = usable_content(reply, like)
            except GradveilError as error:
                dropped[node] = str(error)
                continue
            bytes_up += _bytes(reply.content)  # as it came, before its types are changed
            reply.content = content
            usable.append(reply)
        dropped |= dict.fromkeys(asked.values(), "it did not come in time")
        for node, reason in dropped.items():
            log(WARNING, "round %d: the reply of node %d was dropped: %s", number, node, reason)
        needed = len(messages) if self.min_nodes is None else min(self.min_nodes, len(messages))
        if len(usable) < max(1, needed):
            node, reason = next(iter(dropped.items()))
            count = f"only {len(usable)} of {len(messages)} replies" if usable else "no reply"
            hint = f", and {needed} are needed" if usable else ""
            raise GradveilError(f"round {number}: {count} could be used{hint}; node {node}: {reason}")
        self.last = Round(
            number=number,
            clients=sorted(_client(reply) for reply in usable),
            dropped=dropped,
            log=Log(),
            seconds=time.perf_counter() - started,
            bytes_down=bytes_down,
            bytes_up=bytes_up,
            side_by_side=False,
        )
        return _alike(usable)

    def set_run(self, run: Run) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)


def usable_content(reply: Message, like: Params) -> RecordDict:
    """What a reply carries, in the names and types that all share, or an error that says why it cannot be averaged."""
    if reply.has_error():
        raise GradveilError(" ".join(str(reply.error.reason).split())[:300])
    if not reply.has_content():
        raise GradveilError("it carries nothing")
    metrics = list(reply.content.metric_records.values())
    if len(metrics) != 1:
        raise GradveilError(f"it carries {len(metrics)} MetricRecords instead of one")
    examples = metrics[0].get(EXAMPLES)
    if not isinstance(examples, int | float) or not 0 < examples < math.inf:
        raise GradveilError(f"it names no {EXAMPLES} above 0")
    arrays = repacked(arrays_of(reply.content), like)
    return RecordDict({**reply.content.config_records, ARRAYS: arrays, METRICS: metrics[0]})


def _alike(replies: list[Message]) -> list[Message]:
    """The replies with the metrics that are a number in all: for any other, strategies refuse to average anything."""
    records = [reply.content.metric_records[METRICS] for reply in replies]
    numbers = [{key for key, value in record.items() if isinstance(value, int | float)} for record in records]
    common = set.intersection(*numbers)
    for reply, record in zip(replies, records, strict=True):
        reply.content[METRICS] = MetricRecord({key: value for key, value in record.items() if key in common})
    return replies


def _client(reply: Message) -> int:
    """The number that a client gives itself, for the record; of another's ClientApp the node's."""
    said = [record.get("client") for record in reply.content.config_records.values()]
    return next((number for number in said if isinstance(number, int)), reply.metadata.src_node_id)


def _bytes(content: RecordDict) -> int:
    return sum(record.count_bytes() for record in content.array_records.values())
