"""What a server does with replies that cannot be used, under strategies of Flower as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg, Result

from federated.flower.grids import DirectGrid
from gradveil.core.errors import GradveilError
from gradveil.federated.flower import CheckedGrid

Answer = Callable[[Message, Context], Message]
START = {"weight": np.zeros((2, 3), dtype=np.float32), "bias": np.zeros(2, dtype=np.float32)}


def answering(metrics: dict[str, Any] | None = None, **changed: Any) -> Answer:
    """A node that answers ones in the shapes of the broadcast, with this changed."""

    def answer(message: Message, context: Context) -> Message:
        arrays = {name: array.numpy() + 1 for name, array in message.content["arrays"].items()} | changed
        record = ArrayRecord({name: _array(value) for name, value in arrays.items() if value is not None})
        said = MetricRecord({"num-examples": 10} if metrics is None else metrics)
        place = ConfigRecord({"client": context.node_config["partition-id"]})
        return Message(RecordDict({"arrays": record, "metrics": said, "config": place}), reply_to=message)

    return answer


def _array(value: Any) -> Array:
    return value if isinstance(value, Array) else Array(np.asarray(value))


def failing(_message: Message, _context: Context) -> Message:
    raise ValueError("the disk\nis full")


def trained(*nodes: Answer, rounds: int = 2) -> tuple[Result, CheckedGrid]:
    grid = CheckedGrid(DirectGrid(nodes))
    return averaged(grid, rounds), grid


def averaged(grid: Grid, rounds: int = 1) -> Result:
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    start = ArrayRecord({name: Array(array) for name, array in START.items()})
    return strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds)


HONEST = answering()
SPOILED = {
    "nan": (answering(bias=np.array([np.nan, 1], dtype=np.float32)), "it holds NaN or infinity"),
    "infinity": (answering(bias=np.array([np.inf, 1], dtype=np.float32)), "it holds NaN or infinity"),
    "shape": (answering(bias=np.zeros(3, dtype=np.float32)), "it is not of this model: 'bias'"),
    "missing": (answering(bias=None), "it is not of this model: 'bias'"),
    "unknown": (answering(more=np.zeros(1)), "it is not of this model: 'more'"),
    "words": (answering(bias=np.array(["a", "b"])), "its arrays cannot be read"),
    "bytes": (answering(bias=Array("float32", (2,), "numpy.ndarray", b"nonsense")), "its arrays cannot be read"),
    "weightless": (answering({"loss": 1.0}), "it names no num-examples above 0"),
    "negative": (answering({"num-examples": -5}), "it names no num-examples above 0"),
    "nan examples": (answering({"num-examples": float("nan")}), "it names no num-examples above 0"),
    "error": (failing, "the disk is full"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_one_bad_reply_is_dropped_and_the_rest_averaged(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    bad, words = SPOILED[kind]
    with caplog.at_level(logging.WARNING, logger="flwr"):
        result, grid = trained(HONEST, bad, HONEST)
    for array in result.arrays.values():
        np.testing.assert_array_equal(array.numpy(), 2)
    assert f"round 2: the reply of node 11 was dropped: {words}" in caplog.text
    assert grid.last is not None
    assert grid.last.clients == [0, 2]
    assert words in grid.last.dropped[11]


def test_flower_alone_would_have_failed() -> None:
    """The reason for the check: without it, one reply ends the run or spoils everybody's model."""
    for kind, error in (("shape", ValueError), ("missing", InconsistentMessageReplies)):
        with pytest.raises(error):
            averaged(DirectGrid([HONEST, SPOILED[kind][0]]))
    assert np.isnan(averaged(DirectGrid([HONEST, SPOILED["nan"][0]])).arrays["bias"].numpy()).any()


def test_nothing_usable_ends_the_run_and_says_why() -> None:
    with pytest.raises(GradveilError, match=r"round 1: no reply could be used; node 1[01]: it holds NaN or infinity"):
        trained(SPOILED["nan"][0], SPOILED["infinity"][0])


def test_metrics_that_not_all_have_do_not_end_the_run() -> None:
    """Flower averages nothing if one node names another metric."""
    result, _ = trained(answering({"num-examples": 10, "loss": 2.0}), answering({"num-examples": 30, "mood": 1.0}))
    np.testing.assert_array_equal(result.arrays["bias"].numpy(), 2)
    both, _ = trained(answering({"num-examples": 10, "loss": 2.0}), answering({"num-examples": 30, "loss": 4.0}))
    assert both.train_metrics_clientapp[1]["loss"] == pytest.approx(3.5)


def test_a_node_that_does_not_answer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Deaf(DirectGrid):
        def pull_messages(self, message_ids: Any) -> list[Message]:
            return [m for m in super().pull_messages(message_ids) if m.metadata.src_node_id != 11]

    with caplog.at_level(logging.WARNING, logger="flwr"):
        averaged(CheckedGrid(Deaf([HONEST, HONEST])))
    assert "round 1: the reply of node 11 was dropped: it did not come in time" in caplog.text


def test_too_few_nodes_for_too_long_is_an_error() -> None:
    grid = CheckedGrid(DirectGrid([HONEST]), fewest=2, patience=0.5)
    with pytest.raises(GradveilError, match="1 nodes are connected after 0 s; 2 are needed"):
        grid.wait_for(2)
    grid.fewest = 1
    assert list(grid.get_node_ids()) == [10]
