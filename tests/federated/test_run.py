"""Trainings in folders: resumed ones equal unbroken ones, taps can be attacked, data are never tested on themselves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.attacks import ATTACKS, BUDGETS
from gradveil.auditing import read_case
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.tensor_files import read_tensors, write_tensors
from gradveil.data import load
from gradveil.defenses.accounting import guarantee
from gradveil.federated import Federation, Training, TrainingRecord, data_of, make_training, read_training, run_training
from gradveil.federated import run as runs
from gradveil.threat import load_observations

SMALL: dict[str, Any] = {
    "data": "mnist-samples", "model": "mlp:hidden=8,depth=1", "clients": 4, "per_round": 3, "rounds": 4, "epochs": 2,
    "batch_size": 8, "lr": 0.05, "momentum": 0.5, "server_momentum": 0.5, "defense": "noise:sigma=0.01",
}  # fmt: skip


def timeless(result: TrainingRecord) -> str:
    """The rows as text, without what a clock measured."""
    return json.dumps([{k: v for k, v in row.items() if k != "seconds"} for row in result["rows"]])


class KilledError(Exception):
    """The process died here."""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("model", "checkpoint_every"), [("mlp:hidden=8,depth=1", 1), ("mlp:hidden=8,depth=1", 5), ("convnet:width=1", 2)]
)
def test_a_killed_training_goes_on_to_the_same_numbers(
    model: str, checkpoint_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Training(**SMALL | {"model": model, "checkpoint_every": checkpoint_every})
    unbroken = run_training(case, tmp_path / "unbroken")
    honest = Federation.round

    def dies(self: Federation, number: int) -> Any:
        if number == 4:
            raise KilledError
        return honest(self, number)

    monkeypatch.setattr(Federation, "round", dies)
    with pytest.raises(KilledError):
        run_training(case, tmp_path / "broken")
    monkeypatch.setattr(Federation, "round", honest)
    assert not json.loads((tmp_path / "broken" / "train.json").read_text())["complete"]
    resumed = run_training(case, tmp_path / "broken", resume=True)
    assert timeless(resumed) == timeless(unbroken)
    assert resumed["complete"]
    states = [
        read_tensors(tmp_path / name / "checkpoint.safetensors", "training")[0] for name in ("unbroken", "broken")
    ]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_a_finished_training_takes_more_rounds_but_no_other_recipe(tmp_path: Path) -> None:
    run_training(Training(**SMALL | {"rounds": 2}), tmp_path)
    longer = run_training(Training(**SMALL), tmp_path, resume=True)
    assert timeless(longer) == timeless(run_training(Training(**SMALL), tmp_path / "at once"))
    with pytest.raises(GradveilError, match=r"trained with lr=0\.05, not 0\.5"):
        run_training(Training(**SMALL | {"lr": 0.5}), tmp_path, resume=True)
    with pytest.raises(GradveilError, match="add --resume"):
        run_training(Training(**SMALL), tmp_path)


def test_before_the_first_checkpoint_another_recipe_is_refused_too(tmp_path: Path) -> None:
    training = Training(**SMALL | {"checkpoint_every": 9})
    run_training(training, tmp_path)
    (tmp_path / "checkpoint.safetensors").unlink()  # as if killed before it was written
    rows = (tmp_path / "train.json").read_text()
    with pytest.raises(GradveilError, match=r"trained with lr=0\.05, not 0\.5"):
        run_training(Training(**SMALL | {"checkpoint_every": 9, "lr": 0.5}), tmp_path, resume=True)
    assert (tmp_path / "train.json").read_text() == rows


def test_what_no_defense_hides_is_said_once(tmp_path: Path) -> None:
    for model, defense, lines in (
        ("convnet:width=1", "noise", 1),
        ("convnet:width=1", "none", 0),
        ("lenet", "noise", 0),
    ):
        said: list[str] = []
        fields = SMALL | {"model": model, "defense": defense, "rounds": 1, "epochs": 1, "batch_size": 50}
        run_training(Training(**fields), tmp_path / f"{model[:4]} {defense}", say=said.append)
        assert len([line for line in said if "running statistics" in line]) == lines


PRIVATE = {
    "data": "mnist-samples", "clients": 4, "per_round": 2, "rounds": 6, "epochs": 2, "batch_size": 8, "lr": 0.05,
    "model": "mlp:hidden=8", "defense": "dp",
}  # fmt: skip


def test_more_rounds_than_dp_plans_are_refused_unless_asked_for(tmp_path: Path) -> None:
    case = make_training({**PRIVATE, "defense": "dp:sample_rate=1,steps=3"})
    with pytest.raises(GradveilError, match=r"takes part in \d+ steps, more than the 3 that are planned"):
        run_training(case, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    rows = run_training(make_training({**PRIVATE, "defense": "dp:steps=3,beyond_plan=true"}), tmp_path / "out")["rows"]
    assert rows[-1]["epsilon"] > rows[-1]["log"]["epsilon_planned"]


def test_rounds_added_to_a_training_count_against_its_plan(tmp_path: Path) -> None:
    planned = {**PRIVATE, "per_round": None, "defense": "dp:steps=4"}
    run_training(make_training({**planned, "rounds": 2}), tmp_path)
    with pytest.raises(GradveilError, match="takes part in 6 steps, more than the 4 that are planned"):
        run_training(make_training({**planned, "rounds": 3}), tmp_path, resume=True)


@pytest.mark.parametrize(("algorithm", "visits"), [("fedavg", 2), ("fedsgd", 1)])
def test_epsilon_of_every_round_is_that_of_the_client_that_took_part_most(
    algorithm: str, visits: int, tmp_path: Path
) -> None:
    """Examples are drawn by a seed that the server knows: each step counts in full, however few it takes."""
    rows = run_training(make_training({**PRIVATE, "algorithm": algorithm, "epochs": visits}), tmp_path)["rows"]
    turns: Counter[int] = Counter()
    for row in rows:
        turns.update(row["clients"])
        steps = max(turns.values()) * visits
        assert row["epsilon"] == guarantee(sigma=1.1, sample_rate=1.0, steps=steps).epsilon
        assert row["delta"] == 1e-5
    assert 1 < max(turns.values()) < len(rows)


@pytest.mark.parametrize("checkpoint_every", [1, 2])
def test_epsilon_of_a_resumed_training_is_that_of_an_unbroken_one(
    checkpoint_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_training({**PRIVATE, "checkpoint_every": checkpoint_every, "side_by_side": "true"})
    unbroken, honest = run_training(case, tmp_path / "unbroken"), Federation.round

    def dies(self: Federation, number: int) -> Any:
        if number == 4:
            raise KilledError
        return honest(self, number)

    monkeypatch.setattr(Federation, "round", dies)
    with pytest.raises(KilledError):
        run_training(case, tmp_path / "broken")
    monkeypatch.setattr(Federation, "round", honest)
    assert timeless(run_training(case, tmp_path / "broken", resume=True)) == timeless(unbroken)
    saved = [read_tensors(tmp_path / name / "checkpoint.safetensors", "training")[1] for name in ("unbroken", "broken")]
    assert saved[0]["spent"] == saved[1]["spent"]
    assert len(saved[0]["spent"]) == 4


@pytest.mark.parametrize("spent", [None, [], [[]] * 3, [[], [], [], [[1.1, 1.0, -5]]], [[], [], [], "x"], {"0": []}])
def test_a_checkpoint_without_the_privacy_spent_is_refused(spent: object, tmp_path: Path) -> None:
    run_training(make_training({**PRIVATE, "rounds": 2}), tmp_path)
    path = tmp_path / "checkpoint.safetensors"
    tensors, meta = read_tensors(path, "training")
    write_tensors(path, "training", tensors, meta | {"spent": spent})
    with pytest.raises(BadFileError, match="does not say what each client has spent"):
        run_training(make_training(PRIVATE), tmp_path, resume=True)


def test_without_noise_epsilon_is_infinite_and_without_dp_there_is_none(tmp_path: Path) -> None:
    rows = run_training(make_training({**PRIVATE, "rounds": 1, "defense": "dp:sigma=0"}), tmp_path / "dp")["rows"]
    assert rows[0]["epsilon"] is None
    rows = run_training(make_training({**PRIVATE, "rounds": 1, "defense": "clip+noise"}), tmp_path / "noise")["rows"]
    assert "epsilon" not in rows[0]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run_training(Training(**SMALL | {"rounds": 1}), tmp_path / "a")
    run_training(Training(**SMALL | {"rounds": 1, "model": "mlp:hidden=9,depth=1"}), tmp_path / "b")
    (tmp_path / "b" / "checkpoint.safetensors").rename(tmp_path / "a" / "checkpoint.safetensors")
    with pytest.raises(BadFileError, match="does not fit"):
        run_training(Training(**SMALL), tmp_path / "a", resume=True)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "\x00", "1" * 5000])
def test_a_damaged_training_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(text)
    with pytest.raises(BadFileError, match=r"train\.json is damaged") as caught:
        read_training(tmp_path)
    assert "\n" not in str(caught.value)


def test_rows_tell_the_cost_and_what_a_defense_touched(tmp_path: Path) -> None:
    case = Training(**SMALL | {"defense": "outpost", "momentum": 0.0, "evaluate_every": 3, "train_mode": False})
    rows = run_training(case, tmp_path)["rows"]
    parameters = sum(p.numel() for p in Federation(case, data_of(case)[0]).module.parameters())
    assert [row["accuracy"] is not None for row in rows] == [False, False, True, True]
    for row in rows:
        assert row["bytes_up"] == row["bytes_down"] == 3 * 4 * parameters
        assert len(row["clients"]) == 3
        assert row["seconds"] > 0
        assert 0 < row["log"]["perturbed"] <= 1


def test_a_tapped_exchange_can_be_attacked_and_the_truth_is_beside_it(tmp_path: Path) -> None:
    case = Training(
        **SMALL | {"algorithm": "fedsgd", "epochs": 1, "momentum": 0.0, "batch_size": 1, "defense": "none"},
        tap=("*@1",),
    )
    run_training(case, tmp_path)
    files = sorted(path.name for path in (tmp_path / "taps").iterdir())
    assert len(files) == 2 * 3
    (seen,) = load_observations(tmp_path / "taps" / files[0])
    truth, _ = read_tensors(tmp_path / "taps" / files[1], "truth")
    assert (seen.batch_size, seen.kind, len(truth["labels"])) == (1, "gradient", 1)
    (found,) = ATTACKS.build("analytic", BUDGETS["quick"])([seen], seeds=[0])
    torch.testing.assert_close(found.inputs, truth["inputs"], atol=1e-4, rtol=0)
    train, _ = data_of(case)
    assert torch.equal(train.batch(truth["index"]).inputs, truth["inputs"])


@pytest.mark.parametrize("side_by_side", ["true", "false"])
def test_a_tap_that_cannot_be_written_ends_the_training(side_by_side: Any, tmp_path: Path) -> None:
    """It is no client's fault: to drop the reply would train on as though the client had never been there."""
    (tmp_path / "taps").write_text("a file in the place of the folder")
    with pytest.raises(GradveilError, match=r"cannot make the folder .*taps"):
        run_training(Training(**SMALL, tap=("*@2",), side_by_side=side_by_side), tmp_path)
    assert not (tmp_path / "train.json").exists(), "it is known before the first round"


def test_a_tap_on_batch_norm_carries_the_statistics_of_its_round(tmp_path: Path) -> None:
    case = Training(**SMALL | {"model": "convnet:width=1", "rounds": 2, "per_round": None}, tap=("1@2",))
    run_training(case, tmp_path)
    (seen,) = load_observations(tmp_path / "taps" / "round-0002-client-0001.safetensors")
    means = seen.module.get_buffer("body.bn0.running_mean")
    assert means.abs().sum() > 0, "the first round has moved them"
    assert len(read_tensors(tmp_path / "taps" / "round-0002-client-0001.truth.safetensors", "truth")[0]["labels"]) == 20


@pytest.mark.parametrize(
    ("spec", "words"), [("9@1", "in round 1 there are"), ("0@9", "rounds from 1"), ("first", "CLIENT@ROUND")]
)
def test_a_tap_that_would_see_nothing_is_refused(spec: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match=words):
        run_training(Training(**SMALL, tap=(spec,)), tmp_path)


def test_nothing_is_tested_on_what_it_was_trained_on() -> None:
    train, test = data_of(Training(**SMALL))
    assert (len(train), len(test)) == (80, 20)
    known = {inputs.numpy().tobytes() for inputs in train.batch(range(80)).inputs}
    assert not any(inputs.numpy().tobytes() in known for inputs in test.batch(range(20)).inputs)
    with pytest.raises(GradveilError, match="other images or classes"):
        data_of(Training(**SMALL, test="cifar10-samples"))


def test_an_unknown_field_is_named_with_the_near_one() -> None:
    with pytest.raises(GradveilError, match="'round'; did you mean rounds"):
        make_training({"round": 3})
    assert make_training({"side_by_side": False}).side_by_side == "false"


@pytest.mark.network
def test_a_few_rounds_learn_a_few_thousand_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits, other = load("mnist"), load("mnist:split=test")
    few = digits.subset(range(6000)), other.subset(range(1000))
    monkeypatch.setattr(runs, "data_of", lambda _case, _progress: few)
    rows = run_training(Training(rounds=3, momentum=0.9, lr=0.05), tmp_path)["rows"]
    assert rows[-1]["accuracy"] > 0.8


@pytest.mark.slow
@pytest.mark.network
def test_lenet_learns_mnist_among_ten_clients(tmp_path: Path) -> None:
    case = Training(model="lenet:init=wide,normalize=true", momentum=0.9, rounds=30, evaluate_every=5)
    result = run_training(case, tmp_path)
    assert result["rows"][-1]["accuracy"] > 0.95


def test_the_settings_in_the_docs_are_the_real_ones() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "federated.md").read_text().splitlines()
    start = lines.index("| field | default | meaning |")
    table = [line.strip("|").split("|") for line in lines[start + 2 : lines.index("", start)]]
    written = {row[0].strip(" `"): row[1].strip().lower() for row in table}
    assert written == {name: str(field.default).lower() for name, field in Training.model_fields.items()}


def test_the_shipped_case_is_one() -> None:
    case = make_training(read_case(Path(__file__).parents[2] / "cases" / "federated.yaml"))
    assert (case.algorithm, case.clients, case.momentum) == ("fedavg", 10, 0.9)


def test_few_examples_are_dealt_out_and_the_test_set_stays() -> None:
    few, tested = data_of(Training(data="mnist-samples", examples=30))
    everything, same = data_of(Training(data="mnist-samples"))
    assert (len(few), len(everything)) == (30, 80)
    assert torch.equal(tested.labels, same.labels)
    again, _ = data_of(Training(data="mnist-samples", examples=30))
    assert torch.equal(few.batch(range(30)).inputs, again.batch(range(30)).inputs)
    with pytest.raises(GradveilError, match="81 examples are more than the 80"):
        data_of(Training(data="mnist-samples", examples=81))


@pytest.mark.parametrize("side_by_side", ["false", "true"])
@pytest.mark.parametrize(
    "taken",
    ["taps/round-0002-client-0001.safetensors", "taps/round-0002-client-0001.truth.safetensors", runs.CHECKPOINT],
)
def test_what_cannot_be_written_stops_the_run_and_drops_no_reply(taken: str, side_by_side: str, tmp_path: Path) -> None:
    """A folder stands in the place of a file: not even root can write there."""
    told: list[str] = []
    case = Training(**SMALL | {"per_round": None, "tap": ("1@2",), "rounds": 3, "side_by_side": side_by_side})
    (tmp_path / taken).mkdir(parents=True)
    with pytest.raises(GradveilError, match=f"^cannot write .*{Path(taken).name}: Is a directory$"):
        run_training(case, tmp_path, say=told.append)
    assert told == []
    rows = read_training(tmp_path)["rows"]
    assert len(rows) == 1
    assert all(row["dropped"] == [] for row in rows)


def test_a_folder_that_cannot_be_made_is_refused_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taps").touch()
    monkeypatch.setattr(Federation, "round", lambda *_: pytest.fail("a round began"))
    with pytest.raises(GradveilError, match=r"cannot make the folder .*taps: File exists"):
        run_training(Training(**SMALL | {"tap": ("*@1",)}), tmp_path)
