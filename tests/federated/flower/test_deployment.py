"""A SuperLink and SuperNodes as real processes on this machine: secured, attacked, killed and started again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flower_keys import make_keys, make_node_key
from flower_loopback import APP
from flower_network import Network, NetworkError, descendants

from gradveil.federated import read_training
from gradveil.threat import load_observations

pytestmark = pytest.mark.slow
SCRIPT = APP.parents[1] / "scripts" / "flower_loopback.py"

MISBEHAVING = """
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp
from gradveil.federated.flower import client_app

honest = client_app(data="mnist-samples", defense="none")
app = ClientApp()


@app.train()
def train(message, context):
    told = dict(context.node_config)
    behave, mark = (context.node_config.pop(key, "") for key in ("behave", "mark"))
    number = message.content["config"]["server-round"]
    reply = honest(message, context)
    context.node_config = told
    if behave == "hang" and number == 2:
        Path(mark).touch()
        time.sleep(600)
    if behave in ("nan", "shape"):
        bad = {name: array.numpy() for name, array in reply.content["arrays"].items()}
        bad["fc.bias"] = bad["fc.bias"] * np.nan if behave == "nan" else bad["fc.bias"][:3]
        reply.content["arrays"] = ArrayRecord({name: Array(array) for name, array in bad.items()})
    return reply
"""

SILENT = """
from gradveil.federated.flower import server

server.read_run = lambda run_config: run_config.pop("repeatable")
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """The example with a ClientApp that does wrong where its node is told to."""
    shutil.copytree(APP, tmp_path / "app")
    (tmp_path / "app" / "veiled" / "client_app.py").write_text(MISBEHAVING)
    return tmp_path / "app"


def config(out: Path, **fields: Any) -> str:
    said = {"out": str(out), "min-nodes": 1, "round-timeout": 30, "node-timeout": 60} | fields
    return " ".join(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in said.items())


def until(ready: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.25)


def test_a_defended_run_over_tls_with_authenticated_nodes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    taps = f'tap="*@2" out="{out}"'
    with Network(tmp_path, tls=True, auth=True) as network:
        network.start_link()
        network.start_node(0, of=2, config=f'defense="clip:bound=0.01+noise:sigma=0.0001" {taps}')
        network.start_node(1, of=2, config=f'defense="none" {taps}')
        ended = network.follow(network.submit(APP, config(out, rounds=2)), 300)
    assert ended.good, ended.log
    assert read_training(out)["complete"]
    defended, plain = (load_observations(out / "taps" / f"round-0002-client-000{c}.safetensors")[0] for c in (0, 1))
    lengths = [max(float(tensor.norm()) for tensor in seen.reply.values()) for seen in (defended, plain)]
    assert lengths[0] < 0.1 < lengths[1]
    assert descendants(network.home) == []


def test_a_run_that_asks_what_only_a_node_decides_fails(tmp_path: Path) -> None:
    """The server would refuse it too: so it runs an app whose server says nothing."""
    app = tmp_path / "app"
    shutil.copytree(APP, app)
    silent = (APP / "veiled" / "server_app.py").read_text() + SILENT
    (app / "veiled" / "server_app.py").write_text(silent)
    with (app / "pyproject.toml").open("a") as file:
        file.write("repeatable = false\n")
    with Network(tmp_path) as network:
        network.start_link()
        for place in (0, 1):
            network.start_node(place, of=2)
        hostile = config(tmp_path / "out", rounds=1, seed=11) + " repeatable=true"
        ended = network.follow(network.submit(app, hostile), 300)
        logs = network.log_of("node-0") + network.log_of("node-1")
    assert not ended.good
    line = "the run config sets 'repeatable', which only a node decides"
    assert "round 1: no reply could be used; node" in ended.log
    assert line in ended.log
    assert line in logs
    assert "Traceback" not in logs


@pytest.mark.parametrize(("behave", "words"), [("nan", "it holds NaN or infinity"), ("shape", "'fc.bias'")])
def test_a_bad_reply_is_dropped_and_training_goes_on(behave: str, words: str, app: Path, tmp_path: Path) -> None:
    with Network(tmp_path) as network:
        network.start_link()
        network.start_node(0, of=2)
        network.start_node(1, of=2, config=f'behave="{behave}"')
        ended = network.follow(network.submit(app, config(tmp_path / "out", rounds=2)), 300)
    assert ended.good, ended.log
    assert "was dropped" in ended.log
    rows = read_training(tmp_path / "out")["rows"]
    assert [row["clients"] for row in rows] == [[0], [0]]
    assert all(words in row["dropped"][0]["reason"] for row in rows)


def test_a_node_that_dies_in_a_round_is_missed_and_training_goes_on(app: Path, tmp_path: Path) -> None:
    mark = tmp_path / "hangs"
    with Network(tmp_path) as network:
        network.start_link()
        network.start_node(0, of=2)
        network.start_node(1, of=2, config=f'behave="hang" mark="{mark}"')
        run = network.submit(app, config(tmp_path / "out"))
        until(mark.exists)
        network.kill("node-1")
        ended = network.follow(run, 300)
    assert ended.good, ended.log
    rows = read_training(tmp_path / "out")["rows"]
    assert [row["clients"] for row in rows] == [[0, 1], [0], [0]]
    assert len(rows[1]["dropped"]) == 1
    assert "round 2: the reply of node" in ended.log
    assert descendants(network.home) == []


def test_too_few_nodes_end_the_run_with_one_line(tmp_path: Path) -> None:
    with Network(tmp_path) as network:
        network.start_link()
        network.start_node(0, of=2)
        ended = network.follow(network.submit(APP, config(tmp_path / "out", **{"node-timeout": 5})), 120)
    assert not ended.good
    assert re.search("[01] nodes are connected after 5 s; 2 are needed", ended.log), ended.log


def test_a_superlink_that_is_started_again(app: Path, tmp_path: Path) -> None:
    """Nodes come back by themselves; the run that was under way has failed, and the next one completes."""
    mark = tmp_path / "hangs"
    with Network(tmp_path) as network:
        network.start_link()
        network.start_node(0, of=2)
        network.start_node(1, of=2, config=f'behave="hang" mark="{mark}"')
        broken = network.submit(app, config(tmp_path / "broken"))
        until(mark.exists)
        network.kill("superlink")
        network.start_link()
        ended = network.follow(network.submit(APP, config(tmp_path / "out", rounds=1)), 300)
        assert network.status(broken) == "finished:failed"
    assert ended.good, ended.log
    assert [row["round"] for row in read_training(tmp_path / "broken")["rows"]] == [1]


def assert_refused(network: Network, name: str, words: str) -> None:
    """A node that was turned away has ended and says why; it never got an app, let alone a model."""
    assert network.processes[name].poll() not in (None, 0)
    assert words in network.log_of(name)
    assert "flwr-clientapp" not in network.log_of(name)


def test_a_node_without_a_registered_key_gets_nothing(tmp_path: Path) -> None:
    with Network(tmp_path, tls=True, auth=True) as network:
        network.start_link()
        network.start_node(0, of=2)
        network.start_node(1, of=2, key=make_node_key(tmp_path / "keys" / "stranger"), registered=False)
        ended = network.follow(network.submit(APP, config(tmp_path / "out", **{"node-timeout": 15})), 120)
        assert_refused(network, "node-1", "Failed to activate SuperNode")
    assert not ended.good
    assert re.search("[01] nodes are connected after 15 s; 2 are needed", ended.log), ended.log


def test_a_node_that_trusts_another_authority_talks_to_nobody(tmp_path: Path) -> None:
    other = make_keys(tmp_path / "other")
    with Network(tmp_path, tls=True, auth=True) as network:
        network.start_link()
        network.start_node(0, of=2)
        network.start_node(1, of=2, root=other.authority)
        ended = network.follow(network.submit(APP, config(tmp_path / "out", **{"node-timeout": 15})), 120)
        assert_refused(network, "node-1", "CERTIFICATE_VERIFY_FAILED")
    assert not ended.good
    assert re.search("[01] nodes are connected after 15 s; 2 are needed", ended.log), ended.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_script_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--engine", "deployment", "--keep", str(tmp_path / "kept")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as script:
        home = (tmp_path / "kept" / "home").resolve()
        until(lambda: len(descendants(home)) >= 4)  # superlink, two nodes, and what they start
        os.kill(script.pid, number)
        _, said = script.communicate(timeout=60)
    assert script.returncode == 130
    assert said.strip().splitlines()[-1] == "interrupted: everything that was started has ended"
    assert descendants(home) == []


def test_a_run_that_takes_too_long_is_stopped(app: Path, tmp_path: Path) -> None:
    with Network(tmp_path) as network:
        network.start_link()
        network.start_node(0, of=2)
        network.start_node(1, of=2, config=f'behave="hang" mark="{tmp_path / "hangs"}"')
        run = network.submit(app, config(tmp_path / "out", **{"round-timeout": 600}))
        with pytest.raises(NetworkError, match="did not end within 40 s"):
            network.follow(run, 40)
    assert descendants(network.home) == []
