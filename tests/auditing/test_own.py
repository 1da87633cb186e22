"""gradveil.audit: a module, a batch and a loss from somebody's own program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradveil
from gradveil.auditing import score_again
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.types import Recipe
from gradveil.data import load
from gradveil.threat import load_observations

DIGITS = load("mnist-samples").batch(range(4))


def own_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.Sigmoid(), nn.Linear(32, 10))


def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.2)


@pytest.mark.integration
def test_a_program_learns_what_its_update_gives_away(tmp_path: Path) -> None:
    model = own_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = gradveil.audit(model, DIGITS, defense=["none", "noise:sigma=1"], attack="analytic", out=tmp_path / "kept")
    identified = {row.defense: row.identified for row in found.rows if row.attack == "analytic"}
    assert identified["none"] == 1.0 > identified["noise:sigma=1.0"]
    # 100 samples, the digits among them and not counted twice. The list without the digits holds the 96 others, and
    # the one with them is as long: scores of a longer list would have a better best one by luck.
    assert {row.gallery for row in found.rows} == {100 - len(DIGITS.labels)}
    assert found.as_json() == json.loads((tmp_path / "kept" / "audit.json").read_text())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.integration
def test_attacks_match_the_loss_that_clients_minimise() -> None:
    """With another loss than the client's, the objective could not fall to zero."""
    pair = (DIGITS.inputs[2:3], DIGITS.labels[2:3])
    found = gradveil.audit(own_model(), pair, loss=smoothed, attack="idlg:iterations=200", threat="B")
    (row,) = [row for row in found.rows if row.attack.startswith("idlg")]
    assert row.per_image[0].objective < 1e-4
    assert row.identified == 1.0


@pytest.mark.integration
def test_an_update_over_several_examples_and_local_steps() -> None:
    recipe = Recipe(sends="delta", lr=0.1, epochs=1, batch_size=1)
    found = gradveil.audit(own_model(), DIGITS, recipe=recipe, batch_size=2, attack="analytic")
    assert found.case["recipe"]["sends"] == "delta"
    assert {row.record.images for row in found.rows} == {len(row.images) for row in found.rows} == {4}


@pytest.mark.integration
def test_saved_observations_ask_for_the_loss(tmp_path: Path) -> None:
    model = own_model()
    gradveil.audit(model, DIGITS, loss=smoothed, attack="analytic", out=tmp_path)
    (path,) = (tmp_path / "observations").glob("*.safetensors")
    with pytest.raises(BadFileError, match=r"'smoothed'.*loss="):
        load_observations(path, module=own_model())
    assert load_observations(path, module=own_model(), loss=smoothed)[0].loss is smoothed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": (torch.rand(1, 1, 9, 9), torch.tensor([0]))}, "1 x 9 x 9.*gallery="),
        ({"batch": (4 * DIGITS.inputs, DIGITS.labels)}, "normalization into the model"),
        ({"batch_size": 3}, "cannot be cut"),
        ({"batch": (DIGITS.inputs[:0], DIGITS.labels[:0])}, "0 examples cannot be cut"),
        ({"defense": "nose"}, "nose"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(change: dict[str, object], message: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(1, 1, 9, 9) if "9" in message else DIGITS.inputs)
    given = {"batch": DIGITS, "attack": "analytic", **change}
    with pytest.raises(GradveilError, match=message) as caught:
        gradveil.audit(model, given.pop("batch"), **given)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_folder_of_a_programs_audit_says_why_it_cannot_be_scored_again(tmp_path: Path) -> None:
    gradveil.audit(own_model(), DIGITS, attack="analytic", out=tmp_path)
    with pytest.raises(
        GradveilError, match=r"model and a batch that only your program holds.*gradveil.audit"
    ) as caught:
        score_again(tmp_path, model="torch.nn.modules.container:Sequential")
    assert "\n" not in str(caught.value)


class Scaled(nn.Module):
    """A layer with parameters of its own, for which there is no joint rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(784))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * inputs


def test_a_row_whose_strategy_does_not_fit_is_run_by_another_and_says_so() -> None:
    model = nn.Sequential(nn.Flatten(), Scaled(), nn.Linear(784, 10))
    for attack in ("ig", "informed"):
        spec = f"{attack}:iterations=2,restarts=1,strategy=joint"
        found = gradveil.audit(model, DIGITS, defenses=["none", "noise"], attacks=spec, progress=False)
        for row in found.rows:
            assert "strategy 'joint' cannot run this attack on this model" in row.strategy
            assert row.strategy.startswith(("loop", "vmap"))
