"""The example as it is shipped, on Flower's simulation engine: one run on Ray, looked at from several sides."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from flower_loopback import APP, parsed, run
from flower_network import Ended, descendants

from gradveil.core.tensor_files import read_tensors
from gradveil.federated import Federation, Training, data_of, read_training
from gradveil.threat import load_observations

CASE = Training(
    data="mnist-samples", model="mlp:hidden=32,depth=1", clients=3, rounds=3, batch_size=8, epochs=2,
    partition="dirichlet:alpha=1", seed=5,
)  # fmt: skip

pytestmark = pytest.mark.integration


class Done(NamedTuple):
    """A run, where its processes lived, and what it left."""

    ended: Ended
    home: Path
    out: Path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("flower")
    node = 'partition="dirichlet:alpha=1" seed=5 repeatable=true tap="1@3" defense="none"'
    said = ["--run-config", "epochs=2 seed=5", "--node-config", node]
    given = parsed(["--supernodes", "3", "--out", str(folder / "out"), "--app", str(APP), *said])
    return Done(run(given, folder), folder / "home", folder / "out")


def test_it_equals_training_in_this_process(done: Done) -> None:
    federation = Federation(CASE, data_of(CASE)[0])
    for number in range(1, CASE.rounds + 1):
        federation.round(number)
    found, _ = read_tensors(done.out / "checkpoint.safetensors", "training")
    for name, tensor in federation.state.params.items():
        torch.testing.assert_close(found[f"params/{name}"], tensor, atol=1e-4, rtol=0)
        assert not torch.allclose(tensor, dict(federation.module.named_parameters())[name], atol=1e-3)


def test_it_completes_and_says_what_came_of_it(done: Done) -> None:
    assert done.ended.good, done.ended.log
    assert "accuracy after 3 rounds of FedAvg on mnist-samples, 0 replies dropped" in done.ended.log
    saved = read_training(done.out)
    assert saved["complete"]
    assert [row["clients"] for row in saved["rows"]] == [[0, 1, 2]] * 3


def test_its_tap_can_be_read(done: Done) -> None:
    (seen,) = load_observations(done.out / "taps" / "round-0003-client-0001.safetensors")
    assert (seen.kind, seen.model) == ("delta", CASE.model)


def test_no_process_is_left(done: Done) -> None:
    assert descendants(done.home) == []
