"""The ready apps against the same training in this process, message by message and without a network."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict

from broadcasts import crafted
from federated.flower.grids import DirectGrid
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.tensor_files import read_tensors
from gradveil.data import load
from gradveil.federated import Federation, Training, data_of, read_training, run_training
from gradveil.federated.flower import (
    NODE_KEYS,
    OF_THE_SERVER,
    RUN_MAY_SET,
    Settings,
    client_app,
    read_settings,
    server_app,
)
from gradveil.federated.flower.records import packed
from gradveil.federated.flower.spending import SPENT
from gradveil.threat import load_observations

ROOT = Path(__file__).parents[3]
CONFIG: dict[str, Any] = {
    "data": "mnist-samples", "model": "mlp:hidden=16,depth=1", "clients": 3, "rounds": 2, "batch-size": 8,
}  # fmt: skip
NODE: dict[str, Any] = {"data": "mnist-samples", "defense": "none", "repeatable": True}
"""Nodes of a simulation: what they draw follows from their seed."""


def served(folder: Path, node: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The parameters after a run of both apps, by name, from the checkpoint of the server."""
    config = CONFIG | {"out": str(folder)} | {key.replace("_", "-"): value for key, value in fields.items()}
    grid = DirectGrid([client_app()] * config["clients"], config, NODE | (node or {}))
    server_app()(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config))
    tensors, meta = read_tensors(folder / "checkpoint.safetensors", "training")
    assert meta["round"] == config["rounds"]
    return {name.partition("/")[2]: tensor for name, tensor in tensors.items()}


def in_process(**fields: Any) -> Federation:
    case = Training(**({key.replace("-", "_"): value for key, value in CONFIG.items()} | fields))
    federation = Federation(case, data_of(case)[0])
    for number in range(1, case.rounds + 1):
        federation.round(number)
    return federation


@pytest.mark.parametrize(
    ("fields", "node"),
    [
        ({"epochs": 2, "momentum": 0.9}, {"partition": "dirichlet:alpha=2"}),
        ({"algorithm": "fedsgd", "lr": 0.5}, {}),
        ({"model": "convnet:width=1", "batch_size": None}, {"statistics": "send"}),
        ({}, {"defense": "clip:bound=0.5+noise:sigma=0.01"}),
        ({"defense": "precode:size=4"}, {"defense": "precode:size=4"}),
        ({"strategy": "FedAvgM", "server_lr": 0.7, "server_momentum": 0.5}, {}),
    ],
    ids=["fedavg", "fedsgd", "batch norm", "defense", "reshaped", "server momentum"],
)
def test_flower_trains_as_this_process_does(fields: dict[str, Any], node: dict[str, Any], tmp_path: Path) -> None:
    spelled = {key: "none" if value is None else value for key, value in fields.items()}
    found = served(tmp_path, node, **spelled)
    case = {key: value for key, value in (fields | node).items() if key not in ("strategy", "statistics")}
    expected = in_process(**case)
    for name, tensor in (expected.state.params | expected.state.buffers).items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4)


def test_statistics_stay_on_a_node_that_does_not_say_otherwise(tmp_path: Path) -> None:
    found = served(tmp_path, model="convnet:width=1", rounds=1)
    started = Federation(Training(data="mnist-samples", model="convnet:width=1"), load("mnist-samples")).state.buffers
    assert started
    assert all(torch.equal(found[name], tensor) for name, tensor in started.items())


def test_the_folder_is_that_of_a_training(tmp_path: Path) -> None:
    served(tmp_path / "flower")
    run_training(in_process().case, tmp_path / "here")
    there, here = (read_training(tmp_path / name) for name in ("flower", "here"))
    assert there["complete"]
    assert [row["accuracy"] for row in there["rows"]] == [row["accuracy"] for row in here["rows"]]
    assert [row["clients"] for row in there["rows"]] == [[0, 1, 2]] * 2
    assert there["rows"][0]["bytes_up"] == pytest.approx(here["rows"][0]["bytes_up"], rel=0.05)


def test_what_flower_began_this_process_can_finish(tmp_path: Path) -> None:
    served(tmp_path)
    unbroken = in_process(rounds=3)
    assert len(run_training(unbroken.case, tmp_path, resume=True)["rows"]) == 3
    tensors, _ = read_tensors(tmp_path / "checkpoint.safetensors", "training")
    for name, tensor in unbroken.state.params.items():
        torch.testing.assert_close(tensors[f"params/{name}"], tensor, atol=1e-5, rtol=1e-4)


def test_a_node_keeps_what_its_defense_has_spent(tmp_path: Path) -> None:
    config = CONFIG | {"out": str(tmp_path), "defense": "dp:sigma=2,steps=4", "epochs": 2, "rounds": 2}
    grid = DirectGrid([client_app()] * 3, config, NODE | {"defense": "dp:sigma=2,steps=4"})
    server_app()(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config))
    for context in grid.contexts.values():
        assert dict(context.state.config_records[SPENT]) == {"sigma": [2.0], "rate": [1.0], "steps": [4]}
    again = CONFIG | {"out": str(tmp_path / "again"), "defense": "dp:sigma=2,steps=4", "epochs": 2, "rounds": 1}
    with pytest.raises(GradveilError, match="takes part in 6 steps, more than the 4 that are planned"):
        server_app()(grid, Context(run_id=2, node_id=0, node_config={}, state=RecordDict(), run_config=again))
    case = Training(**read_training(tmp_path)["case"])
    with pytest.raises(BadFileError, match="does not say what each client has spent"):  # only the nodes know
        run_training(case, tmp_path, resume=True)


def test_a_training_is_not_overwritten(tmp_path: Path) -> None:
    served(tmp_path, rounds=1)
    with pytest.raises(GradveilError, match="holds a training already: set out to another folder"):
        served(tmp_path, rounds=1)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedsgd"])
def test_the_tap_of_a_run_is_the_tap_of_this_process(algorithm: str, tmp_path: Path) -> None:
    node = {"tap": "1@2 *@1", "defense": "clip:bound=0.1", "out": str(tmp_path / "flower")}
    served(tmp_path / "flower", node, algorithm=algorithm)
    case = in_process(algorithm=algorithm, defense="clip:bound=0.1", tap=("1@2", "*@1")).case
    run_training(case, tmp_path / "here")
    files = [sorted(path.name for path in (tmp_path / where / "taps").iterdir()) for where in ("flower", "here")]
    assert files[0] == files[1]
    assert len(files[0]) == 8
    for name in files[0]:
        there, here = (tmp_path / where / "taps" / name for where in ("flower", "here"))
        if ".truth." in name:
            assert there.read_bytes() == here.read_bytes()
            continue
        (seen,), (expected,) = load_observations(there), load_observations(here)
        assert (seen.kind, seen.batch_size, seen.recipe, seen.defense, seen.model) == (
            expected.kind, expected.batch_size, expected.recipe, expected.defense, expected.model
        )  # fmt: skip
        for part in ("sent", "reply"):
            for key, tensor in getattr(expected, part).items():
                torch.testing.assert_close(getattr(seen, part)[key], tensor, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lr": 0.1, "round": 3}, "unknown key 'round'"),
        ({"tap": "0@1"}, "the run config sets 'tap', which only a node decides"),
        ({"strategy": "FedProx"}, "no strategy here is called 'FedProx'; there are: FedAvg,"),
        ({"strategy": "FedTrimmedAvg:gamma=1"}, "gamma"),
        ({"server-momentum": 0.9}, "use strategy FedAvgM"),
        ({"min-nodes": 4}, "from 1 to the 3 clients"),
        ({"round-timeout": 0}, "round-timeout is a number of seconds"),
    ],
)
def test_bad_settings_are_one_clear_line(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(GradveilError, match=words):
        read_settings(CONFIG | fields).build_strategy()


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({}, "--node-config"),
        ({"partition-id": 3, "num-partitions": 3}, "holds share 3 of 3"),
        ({"partition-id": 0, "num-partitions": 2}, "share 0 of 2, and the run is one of 3 clients"),
    ],
)
def test_a_node_that_does_not_fit_the_run_says_so(node: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = CONFIG | {"out": str(tmp_path), "min-nodes": 1}
    grid = DirectGrid([client_app(**NODE)] * 3, config)
    grid.contexts[12].node_config = node
    server_app()(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config))
    for row in read_training(tmp_path)["rows"]:
        assert row["clients"] == [0, 1]
        assert [one["client"] for one in row["dropped"]] == [12]
        assert words in row["dropped"][0]["reason"]


@pytest.mark.parametrize("on_suspicion", ["refuse", "train"])
def test_a_ready_node_looks_before_it_trains(on_suspicion: str) -> None:
    grid = DirectGrid([client_app(on_suspicion=on_suspicion)] * 3, CONFIG, NODE)
    content = RecordDict({"arrays": packed(crafted("trap", CONFIG["model"], load("mnist-samples")).params)})
    content["config"] = ConfigRecord({"server-round": 1})
    (reply,) = grid.send_and_receive([Message(content, 10, "train")])
    assert reply.has_error() == (on_suspicion == "refuse")
    if reply.has_error():
        assert "this node does not train: the broadcast looks crafted" in str(reply.error.reason)


def test_evaluation_on_the_nodes_is_of_their_own_examples() -> None:
    grid, federation = DirectGrid([client_app(evaluate=True)] * 3, CONFIG, NODE), in_process(rounds=1)
    content = RecordDict({"arrays": packed(federation.state.params)})
    (reply,) = grid.send_and_receive([Message(content, 11, "evaluate")])
    share = federation.train.subset(federation.shares[1])
    (metrics,) = reply.content.metric_records.values()
    assert metrics["num-examples"] == len(share)
    assert metrics["accuracy"] == federation.quality(share).accuracy


def test_a_node_evaluates_for_nobody_unless_it_says_so() -> None:
    """A server that may ask for the loss of any model on private examples needs no update."""
    grid = DirectGrid([client_app()] * 3, CONFIG, NODE)
    content = RecordDict({"arrays": packed(in_process(rounds=1).state.params)})
    (reply,) = grid.send_and_receive([Message(content, 11, "evaluate")])
    assert "this node does not evaluate" in str(reply.error.reason)


def keys_below(title: str) -> set[str]:
    """The keys of the table that stands below a title of the page."""
    page = (ROOT / "docs" / "flower.md").read_text().partition(f"\n{title}\n")[2]
    table = page[page.index("\n| ") :].partition("\n\n")[0]
    rows = re.findall(r"^\| (`[a-z-]+`(?:, `[a-z-]+`)*) \|", table, flags=re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`([a-z-]+)`", row)}


def test_the_keys_on_the_page_and_in_the_example_are_the_real_ones() -> None:
    assert keys_below("### What a run config may set") == set(RUN_MAY_SET)
    assert keys_below("### What the server reads") == set(OF_THE_SERVER)
    assert keys_below("### What only a node decides") == NODE_KEYS - RUN_MAY_SET.keys() | {"defense"}
    own = {name.replace("_", "-") for name in Settings.model_fields} - {"training"}
    training = {name.replace("_", "-") for name in Training.model_fields} - {"side-by-side", "average-from"}
    assert set(RUN_MAY_SET) | OF_THE_SERVER == own | training - (NODE_KEYS - RUN_MAY_SET.keys()) | {
        "data", "test", "seed"
    }  # fmt: skip
    example = tomllib.loads((ROOT / "examples" / "flower" / "pyproject.toml").read_text())
    keys = example["tool"]["flwr"]["app"]["config"]
    assert read_settings(keys).build_strategy()
    assert set(keys) == set(RUN_MAY_SET) | OF_THE_SERVER


def test_without_flower_only_the_adapter_is_missing() -> None:
    """In a process where flwr cannot be found."""
    program = (
        "import sys\n"
        "sys.modules['flwr'] = None\n"
        "import gradveil.federated\n"
        "from gradveil.core.errors import GradveilError\n"
        "try:\n"
        "    import gradveil.federated.flower\n"
        "except GradveilError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "Flower is not installed: pip install 'gradveil[flower]'\n"
