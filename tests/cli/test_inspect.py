"""``gradveil inspect`` on specs, state dicts and observation files, honest, crafted and hostile."""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from broadcasts import CIFAR, crafted
from exchanges import observed, private_batches
from gradveil import models
from gradveil.attacks import ATTACKS, BUDGETS
from gradveil.client import CHECKS
from gradveil.threat import save_observations
from interrogation import interrogated

Command = Callable[..., tuple[int, str, str]]
"""Exit code, standard output and standard error of a command line."""


@pytest.fixture
def gradveil(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of typer, about what it imports
        from gradveil.cli.main import run

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gradveil", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            run()
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return call


def saved(path: Path, params: dict[str, torch.Tensor]) -> Path:
    save_file({name: tensor.detach().contiguous() for name, tensor in params.items()}, path)
    return path


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    """A state dict with buffers, as a server would send it."""
    module = models.build("convnet:width=8", CIFAR.domain, seed=0)
    return saved(tmp_path / "honest.safetensors", module.state_dict())


@pytest.mark.parametrize("spec", ["lenet:init=wide", "mlp", "imprint:bins=16 > lenet"])
def test_a_model_as_it_is_built_is_clean(spec: str, gradveil: Command) -> None:
    code, out, _ = gradveil("inspect", spec, "--data", "mnist-samples")
    assert (code, out.splitlines()[-1]) == (0, "nothing suspicious was found")


def test_a_state_dict_and_the_one_before(honest: Path, gradveil: Command) -> None:
    code, out, _ = gradveil("inspect", honest, "--model", "convnet:width=8", "--previous", honest)
    assert code == 0
    assert out.startswith("note: unchanged in ")
    assert "not checked" not in out


def test_a_crafted_state_dict(tmp_path: Path, gradveil: Command) -> None:
    sent = crafted("imprint:bins=32", "lenet", CIFAR)
    path = saved(tmp_path / "crafted.safetensors", sent.params)
    code, out, _ = gradveil("inspect", path, "--model", "imprint:bins=32 > lenet")
    assert code == 3
    assert "alarm: copied rows in front.query: 100% of its 32 rows are multiples of another row" in out
    assert out.splitlines()[-1] == "suspicious: do not train on this"
    code, out, _ = gradveil("inspect", path, "--model", "lenet", "--json")
    found = json.loads(out)
    assert (code, found["suspicious"]) == (3, True)
    assert "other layers" in {finding["check"] for finding in found["findings"]} <= set(CHECKS)


def test_nan_is_a_finding(tmp_path: Path, gradveil: Command) -> None:
    module = models.build("lenet", CIFAR.domain, seed=0)
    path = saved(tmp_path / "nan.safetensors", module.state_dict() | {"fc.bias": torch.full((10,), torch.nan)})
    code, out, _ = gradveil("inspect", path, "--model", "lenet")
    assert code == 3
    assert "alarm: not finite in fc.bias: 10 of its numbers" in out


def test_observation_files(tmp_path: Path, gradveil: Command) -> None:
    plain, fished = tmp_path / "plain.safetensors", tmp_path / "fished.safetensors"
    save_observations(plain, observed(private_batches(1), model="lenet"))
    attack = ATTACKS.build("fishing:strategy=class", BUDGETS["quick"])
    save_observations(fished, [interrogated(attack, private_batches(1, 4)[0], model="lenet")])
    assert gradveil("inspect", plain)[0] == 0
    code, out, _ = gradveil("inspect", fished, "--previous", plain, "--data", "cifar10-samples")
    assert code == 3
    assert "alarm: decisive bias in fc.bias" in out
    assert gradveil("inspect", fished, "--model", "lenet")[0] == 3


def test_statistics_that_were_sent_are_used(honest: Path, tmp_path: Path, gradveil: Command) -> None:
    """Running variances that blow the activations up, under honest weights."""
    module = models.build("convnet:width=8", CIFAR.domain, seed=0)
    wild = {name: -torch.ones_like(t) if "running_var" in name else t for name, t in module.state_dict().items()}
    path = saved(tmp_path / "wild.safetensors", wild)
    assert gradveil("inspect", honest, "--model", "convnet:width=8")[0] == 0
    code, out, _ = gradveil("inspect", path, "--model", "convnet:width=8")
    assert code == 3
    assert "NaN or infinity" in out


def refused(tmp_path: Path) -> dict[str, tuple[list[object], str]]:
    """Arguments by what is wrong with them, and what is said about it."""
    pickled, cut, wrong = (tmp_path / f"{name}.safetensors" for name in ("pickled", "cut", "wrong"))
    pickled.write_bytes(pickle.dumps({"fc.weight": [1.0]}))
    whole = saved(tmp_path / "whole.safetensors", models.build("lenet", CIFAR.domain, seed=0).state_dict())
    cut.write_bytes(whole.read_bytes()[:-100])
    module = models.build("convnet:width=8", CIFAR.domain, seed=0)
    saved(wrong, module.state_dict() | {"body.bn0.running_mean": torch.zeros(9)})
    observation = tmp_path / "observation.safetensors"
    save_observations(observation, observed(private_batches(1), model="lenet"))
    return {
        "pickle": ([pickled, "--model", "lenet"], "damaged or not a safetensors file"),
        "cut": ([cut, "--model", "lenet"], "damaged or not a safetensors file"),
        "absent": (["nothing.safetensors"], "there is no file nothing.safetensors"),
        "no model": ([whole], "add --model"),
        "bad previous": (["lenet", "--previous", pickled], "damaged or not a safetensors file"),
        "bad buffer": ([wrong, "--model", "convnet:width=8"], "body.bn0.running_mean"),
        "other images": ([observation, "--data", "mnist-samples"], "leave it out"),
        "unknown": (["lennet"], "did you mean lenet"),
    }


@pytest.mark.parametrize(
    "wrong", ["pickle", "cut", "absent", "no model", "bad previous", "bad buffer", "other images", "unknown"]
)
def test_bad_input_is_one_line(wrong: str, tmp_path: Path, gradveil: Command) -> None:
    arguments, words = refused(tmp_path)[wrong]
    code, out, err = gradveil("inspect", *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
