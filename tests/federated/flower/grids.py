"""A grid without a network: real ClientApps and real strategies, each message answered by a call.

Messages are serialised on their way, as they would be on a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

Answers = Callable[[Message, Context], Message]


class DirectGrid(Grid):
    """Nodes with the numbers 10, 11, ... that hold the shares 0, 1, ..., each with an app of its own."""

    def __init__(
        self,
        apps: Iterable[ClientApp | Answers],
        run_config: dict[str, Any] | None = None,
        node_config: dict[str, Any] | None = None,
    ) -> None:
        self.apps = {10 + place: app for place, app in enumerate(apps)}
        self.contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": node - 10, "num-partitions": len(self.apps)} | (node_config or {}),
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for node in self.apps
        }
        self._waiting: dict[str, Message] = {}
        self._run = Run.create_empty(run_id=1)

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        return Message(*arguments, **named)

    def get_node_ids(self) -> list[int]:
        return list(self.apps)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        numbers = []
        for message in messages:
            number, node = f"message {len(self._waiting)} of {id(message)}", message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = number
            arrived = Message(_copied(message.content), node, message.metadata.message_type)
            arrived.metadata.__dict__["_message_id"] = number
            try:
                self._waiting[number] = self.apps[node](arrived, self.contexts[node])
            except Exception as error:  # a SuperNode too answers for an app that fails
                self._waiting[number] = Message(Error(2, str(error)), reply_to=message)
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._waiting.pop(number) for number in list(message_ids)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:  # noqa: ARG002
        return self.pull_messages(self.push_messages(messages))


def _copied(content: RecordDict) -> RecordDict:
    arrays = {
        name: ArrayRecord({key: Array(a.dtype, tuple(a.shape), a.stype, bytes(a.data)) for key, a in record.items()})
        for name, record in content.array_records.items()
    }
    return RecordDict({**arrays, **content.config_records, **content.metric_records})
