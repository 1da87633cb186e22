"""What a server does with replies that cannot be used, under strategies of Flower as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAdam, FedAvg, Result

from federated.flower.grids import DirectGrid
from gradveil.core.errors import GradveilError
from gradveil.federated.flower import CheckedGrid
from gradveil.federated.flower.records import fitted

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


def emptied(message: Message, _context: Context) -> Message:
    """Neither content nor an error: a line carries this too."""
    reply = Message(RecordDict(), reply_to=message)
    reply.__dict__["_content"] = None
    return reply


def renamed(arrays: str, metrics: str) -> Answer:
    """An honest node whose records have other names."""

    def answer(message: Message, context: Context) -> Message:
        content = HONEST(message, context).content
        records = {arrays: content["arrays"], metrics: content["metrics"], "config": content["config"]}
        return Message(RecordDict(records), reply_to=message)

    return answer


def trained(*nodes: Answer, rounds: int = 2) -> tuple[Result, CheckedGrid]:
    grid = CheckedGrid(DirectGrid(nodes), min_nodes=1)
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
    "zip": (
        answering(bias=Array("float32", (2,), "numpy.ndarray", b"PK\x03\x04nonsense")),
        "its arrays cannot be read",
    ),
    "header": (
        answering(bias=Array("float32", (2,), "numpy.ndarray", b"\x93NUMPY\x01\x00\x06\x00{'(((\n")),
        "its arrays cannot be read",
    ),
    "complex": (answering(bias=np.array([1 + 1j, np.nan], dtype=np.complex64)), "it holds complex numbers"),
    "too large": (answering(bias=np.array([1e300, 1])), "it holds numbers too large for the model"),
    "weightless": (answering({"loss": 1.0}), "it names no num-examples above 0"),
    "negative": (answering({"num-examples": -5}), "it names no num-examples above 0"),
    "nan examples": (answering({"num-examples": float("nan")}), "it names no num-examples above 0"),
    "error": (failing, "the disk is full"),
    "bare": (lambda message, _context: Message(RecordDict(), reply_to=message), "it carries 0 MetricRecords"),
    "without arrays": (
        lambda message, _context: Message(
            RecordDict({"metrics": MetricRecord({"num-examples": 10})}), reply_to=message
        ),
        "a message carries one ArrayRecord, and this one has 0",
    ),
    "without content": (emptied, "it carries nothing"),
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


@pytest.mark.parametrize("kind", ["nan", "error", "missing"])
def test_a_dropped_reply_ends_a_run_that_was_not_told_to_go_on(kind: str) -> None:
    """Otherwise training would go on as though that client had never been there."""
    bad, words = SPOILED[kind]
    said = rf"round 1: only 2 of 3 replies could be used, and 3 are needed; node 11: .*{words}"
    with pytest.raises(GradveilError, match=said):
        averaged(CheckedGrid(DirectGrid([HONEST, bad, HONEST])))
    with pytest.raises(GradveilError, match=said):
        averaged(CheckedGrid(DirectGrid([HONEST, bad, HONEST]), min_nodes=3))


def test_metrics_that_not_all_have_do_not_end_the_run() -> None:
    """Flower averages nothing if one node names another metric."""
    result, _ = trained(answering({"num-examples": 10, "loss": 2.0}), answering({"num-examples": 30, "mood": 1.0}))
    np.testing.assert_array_equal(result.arrays["bias"].numpy(), 2)
    both, _ = trained(answering({"num-examples": 10, "loss": 2.0}), answering({"num-examples": 30, "loss": 4.0}))
    assert both.train_metrics_clientapp[1]["loss"] == pytest.approx(3.5)


def test_a_metric_that_is_a_list_in_one_reply_does_not_end_the_run() -> None:
    said = answering({"num-examples": 10, "loss": 2.0})
    result, _ = trained(said, answering({"num-examples": 10, "loss": [2.0, 3.0]}), said)
    np.testing.assert_array_equal(result.arrays["bias"].numpy(), 2)
    assert "loss" not in result.train_metrics_clientapp[1]


@pytest.mark.parametrize("names", [("arrays", "other"), ("other", "metrics"), ("metrics", "arrays")])
def test_records_under_other_names_do_not_end_the_run(names: tuple[str, str]) -> None:
    result, grid = trained(HONEST, renamed(*names), HONEST)
    np.testing.assert_array_equal(result.arrays["bias"].numpy(), 2)
    assert grid.last is not None
    assert grid.last.clients == [0, 1, 2]


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int64, np.uint64, np.bool_])
def test_a_reply_in_another_type_is_averaged_in_that_of_the_model(dtype: type[np.generic]) -> None:
    """Of Flower's average it is the first reply that says in which type to add up."""
    result, grid = trained(answering(bias=np.ones(2, dtype=dtype)), HONEST, rounds=1)
    assert result.arrays["bias"].numpy().dtype == np.float32
    np.testing.assert_array_equal(result.arrays["bias"].numpy(), 1)
    assert grid.last is not None
    assert not grid.last.dropped


def test_counters_that_an_average_made_floats_take_whole_numbers_and_flags() -> None:
    like = {"count": torch.tensor(4), "seen": torch.tensor(True)}
    found = fitted({"count": torch.tensor(3.7), "seen": torch.tensor(1)}, like)
    assert found == {"count": torch.tensor(4), "seen": torch.tensor(True)}
    assert fitted({"count": torch.tensor(True), "seen": torch.tensor(True)}, like)["count"] == 1


def test_a_strategy_that_widens_the_model_does_not_let_larger_numbers_in() -> None:
    """Under FedAdam broadcasts are of float64 from the second on; the model of the nodes stays what it is."""
    grid = CheckedGrid(DirectGrid([HONEST, answering(bias=np.array([1e300, 1])), HONEST]), min_nodes=2)
    strategy = FedAdam(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    start = ArrayRecord({name: Array(array) for name, array in START.items()})
    strategy.start(grid=grid, initial_arrays=start, num_rounds=3)
    assert grid.last is not None
    assert grid.last.dropped == {11: "it holds numbers too large for the model"}


def test_a_node_that_does_not_answer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Deaf(DirectGrid):
        def pull_messages(self, message_ids: Any) -> list[Message]:
            return [m for m in super().pull_messages(message_ids) if m.metadata.src_node_id != 11]

    with caplog.at_level(logging.WARNING, logger="flwr"):
        averaged(CheckedGrid(Deaf([HONEST, HONEST]), min_nodes=1))
    assert "round 1: the reply of node 11 was dropped: it did not come in time" in caplog.text


def test_too_few_nodes_for_too_long_is_an_error() -> None:
    grid = CheckedGrid(DirectGrid([HONEST]), min_nodes=2, patience=0.5)
    with pytest.raises(GradveilError, match="1 nodes are connected after 0 s; 2 are needed"):
        grid.wait_for(2)
    grid.min_nodes = 1
    assert list(grid.get_node_ids()) == [10]
