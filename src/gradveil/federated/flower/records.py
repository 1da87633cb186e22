"""Named tensors in Flower's messages, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import ERROR

import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.supercore import log
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.trees import all_finite
from gradveil.core.types import Params
from gradveil.federated.rounds import State, why_unusable

ARRAYS, METRICS, CONFIG = "arrays", "metrics", "config"
EXAMPLES = "num-examples"


def packed(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    return ArrayRecord(dict(tensors))


def tensors_of(content: RecordDict) -> Params:
    """The tensors of the one ArrayRecord that a message carries."""
    return unpacked(arrays_of(content))


def arrays_of(content: RecordDict) -> ArrayRecord:
    """That record, under whatever name."""
    records = list(content.array_records.values())
    if len(records) != 1:
        raise GradveilError(f"a message carries one ArrayRecord, and this one has {len(records)}")
    return records[0]


def unpacked(record: ArrayRecord) -> Params:
    """Tensors of their own: Flower keeps arrays serialised. What cannot be read is said in one line.

    Flower has numpy read them, without pickles. What that raises for the bytes of strangers depends on where in them it
    stumbles, from ``BadZipFile`` to ``TokenError``: whatever it is, it is about these bytes.
    """
    try:
        return {name: torch.from_numpy(array.numpy()) for name, array in record.items()}
    except Exception as error:
        raise GradveilError(f"its arrays cannot be read: {' '.join(str(error).split())[:200]}") from None


def fitted(found: Params, like: Params) -> Params:
    """The tensors as they fit others, in their order and types, or an error that says why they do not."""
    if any(tensor.is_complex() for tensor in found.values()):
        raise GradveilError("it holds complex numbers")
    if (reason := why_unusable(found, like)) is not None:
        raise GradveilError(reason)
    cast = {}
    for name, tensor in like.items():
        rounds = found[name].is_floating_point() and not tensor.is_floating_point()
        cast[name] = (found[name].round() if rounds else found[name]).to(tensor)  # averages make floats of counters
    if not all_finite(cast):
        raise GradveilError("it holds numbers too large for the model")
    return cast


def repacked(record: ArrayRecord, like: Params) -> ArrayRecord:
    """A record in the types of others: arrays are added up as they come, and one of another type can end that."""
    found = unpacked(record)
    cast = fitted(found, like)
    changed = {name for name in cast if cast[name].dtype != found[name].dtype}
    return ArrayRecord({name: Array(cast[name].numpy()) if name in changed else record[name] for name in cast})


def state_of(found: Params, like: State) -> State:
    """What a server sent, as it fits the model agreed on."""
    try:
        fitting = fitted(found, like.params | like.buffers)
    except GradveilError as error:
        raise GradveilError(f"the broadcast cannot be used: {error}") from None
    return State({name: fitting[name] for name in like.params}, {name: fitting[name] for name in like.buffers})


@contextmanager
def writing(what: str) -> Iterator[None]:
    """A file that cannot be written is an error that tells the server what, and the log of the node where."""
    try:
        yield
    except (GradveilError, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        log(ERROR, "%s", error)
        raise GradveilError(f"this node cannot write {what} ({cause.strerror}): its reply does not leave") from error


def round_number(message: Message) -> int:
    """The round that a message is of, as Flower's strategies write it."""
    for record in message.content.config_records.values():
        if isinstance(number := record.get("server-round"), int):
            return number
    raise GradveilError("the message names no 'server-round', which Flower's strategies put into its config")


def is_train(message: Message) -> bool:
    return message.metadata.message_type.partition(".")[0] == "train"


def place_of(context: Context) -> int:
    """Which share a node holds: the simulation says so, and elsewhere whoever starts the node."""
    place = context.node_config.get("partition-id")
    if type(place) is not int or place < 0:
        raise GradveilError(
            'this node does not say which share it holds: start it with --node-config "partition-id=0 num-partitions=2"'
        )
    return place
