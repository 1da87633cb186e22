"""Saved exchanges under audit: what a tap left in the middle of a training is attacked, scored and told by round."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from auditing.test_audit import comparable, killed_at_the_second_row, read
from gradveil.attacks import ATTACKS, Attack, Budget
from gradveil.auditing import ObservedCase, make_case, make_observed_case, run_case, run_observed, score_again
from gradveil.auditing.run import TOGETHER, _batches
from gradveil.auditing.saved import read_folders, saved
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.tensor_files import read_tensors, write_tensors
from gradveil.federated import Training, run_training
from gradveil.report import render
from gradveil.threat import load_observations, save_observations

MODEL = "mlp:hidden=16,depth=1"
TAPPED = ("0@1", "1@1", "0@3", "1@3")
IG = "ig:iterations=8,restarts=2"


def train(folder: Path, **fields: Any) -> Path:
    usual: dict[str, Any] = {
        "data": "mnist-samples",
        "model": MODEL,
        "clients": 4,
        "rounds": 3,
        "tap": TAPPED,
        "batch_size": 1,
    }
    run_training(Training(**({"algorithm": "fedsgd"} | usual | fields)), folder)
    return folder


@pytest.fixture(scope="module")
def tapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clients' gradients of single digits, before training and after two rounds."""
    return train(tmp_path_factory.mktemp("trained") / "plain")


@pytest.fixture
def own(tapped: Path, tmp_path: Path) -> Path:
    """A copy to tamper with."""
    return Path(shutil.copytree(tapped, tmp_path / "own"))


def case(*folders: Path, **fields: Any) -> ObservedCase:
    return make_observed_case({"observations": list(map(str, folders)), "attacks": [IG], "gallery": 10} | fields)


def truth_of(folder: Path) -> Path:
    return folder / "taps" / "round-0003-client-0001.truth.safetensors"


@pytest.mark.integration
def test_rows_say_round_and_clients_and_are_scored_against_the_truth(tapped: Path, tmp_path: Path) -> None:
    audit = run_observed(case(tapped, attacks=[IG, "analytic"]), tmp_path / "a")
    assert [(row.attack, row.round, row.clients) for row in audit.rows] == [
        (IG, 1, (0, 1)), (IG, 3, (0, 1)), ("analytic", 1, (0, 1)), ("analytic", 3, (0, 1)), ("prior-only", None, ()),
    ]  # fmt: skip
    exact, later = audit.rows[2:4]
    for row in (exact, later):
        assert row.psnr > 60, "one digit is read off the first layer exactly"
        assert row.identified == 1
        assert [image.client for image in row.per_image] == [0, 1]
    saved, _ = read_tensors(tmp_path / "a" / later.files.truth, "truth")
    first, _ = read_tensors(tapped / "taps" / "round-0003-client-0000.truth.safetensors", "truth")
    assert torch.equal(saved["inputs"][:1], first["inputs"])
    assert later.model_accuracy == read_train(tapped)["rows"][1]["accuracy"]
    assert audit.rows[-1].images == 4, "chance is over the pictures of both rounds"
    assert audit.verdicts[0].sentence.startswith("In round ")
    assert render(tmp_path / "a").is_file()


def read_train(folder: Path) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads((folder / "train.json").read_text())
    return whole


@pytest.mark.integration
def test_all_rounds_step_as_one_batch(tapped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, run = [], type(ATTACKS.build(IG, Budget(2, 8))).run

    def counted(self: Attack, seen: Any, **rest: Any) -> Any:
        sizes.append(len(seen))
        return run(self, seen, **rest)

    monkeypatch.setattr(type(ATTACKS.build(IG, Budget(2, 8))), "run", counted)
    run_observed(case(tapped), tmp_path / "a")
    assert sizes == [4, 4], "the exchanges of both rounds together, then the same without the updates"


def test_a_batch_of_rounds_gives_what_each_round_gives_alone(tapped: Path) -> None:
    (folder,) = read_folders(case(tapped))
    seen = [one for file in folder.files for one in file.seen]
    assert seen[0].sent is seen[1].sent
    assert seen[0].sent is not seen[2].sent
    attack = ATTACKS.build("ig:iterations=3,restarts=1,strategy=vmap", Budget(1, 3))
    together = attack(seen, seeds=[1, 2, 3, 4])
    alone = [attack([one], seeds=[seed])[0] for seed, one in enumerate(seen, start=1)]
    for one, other in zip(together, alone, strict=True):
        assert one.labels.equal(other.labels)
        assert one.objective == pytest.approx(other.objective, rel=1e-3)
    swapped = attack([replace(one, sent=seen[0].sent) for one in seen], seeds=[1, 2, 3, 4])
    assert swapped[3].objective != pytest.approx(together[3].objective, rel=1e-3), "each its own broadcast"


def test_a_batch_is_as_large_as_the_problems_of_its_attack_allow(tapped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack's own restarts count, not those of the budget."""
    monkeypatch.setitem(TOGETHER, "cpu", 16)
    for spec, sizes in (("ig:restarts=2", [2, 1]), ("ig:restarts=4", [2, 1]), ("ig:restarts=8", [1, 1, 1])):
        cells = saved(case(tapped, attacks=[spec], budget="quick")).cells
        assert [len(batch) for batch in _batches(cells, "cpu")] == sizes, "two exchanges a round, then chance"


@pytest.mark.integration
def test_mse_r_goes_through_one_model_whoever_audits(tmp_path: Path) -> None:
    """Through the honest one, although clients were sent one behind a crafted front."""
    fields = {"model": "mlp", "attacks": ["imprint:bins=8"], "threat": "F", "images": 2, "batch_size": 2, "gallery": 10}
    made = run_case(make_case({**fields, "defenses": ["noise:sigma=0.001"]}), tmp_path / "made")
    again = score_again(tmp_path / "made")
    (tmp_path / "loose").mkdir()
    shutil.copy(tmp_path / "made" / made.rows[0].files.observation, tmp_path / "loose" / "a.safetensors")
    shutil.copy(tmp_path / "made" / "truth.safetensors", tmp_path / "loose" / "a.truth.safetensors")
    taken = run_observed(case(tmp_path / "loose", attacks=["imprint:bins=8"]), tmp_path / "taken")
    assert made.rows[0].mse_r > 0
    assert made.rows[0].mse_r == again.rows[0].mse_r == taken.rows[0].mse_r


@pytest.mark.integration
def test_the_client_of_a_batch_is_in_every_image(tmp_path: Path) -> None:
    """FedAvg over unequal shares: batches of different sizes in one row, the same pictures in every round."""
    folder = train(
        tmp_path / "t", algorithm="fedavg", batch_size=None, partition="dirichlet:alpha=2", clients=20, rounds=2,
        tap=("0@1", "3@1", "0@2", "3@2"),
    )  # fmt: skip
    audit = run_observed(case(folder, attacks=["ig:iterations=2,restarts=1"]), tmp_path / "a")
    first, second, prior = audit.rows
    held = {c: len(read_tensors(folder / "taps" / f"round-0001-client-{c:04d}.truth.safetensors", "truth")[0]["labels"])
            for c in (0, 3)}  # fmt: skip
    assert held[0] != held[3]
    assert [image.client for image in first.per_image] == [0] * held[0] + [3] * held[3]
    assert [i.index for i in first.per_image] == [i.index for i in second.per_image]
    assert prior.images == sum(held.values()), "the same pictures only once"


@pytest.mark.integration
def test_resumed_and_interrupted_it_comes_to_the_same(
    tapped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_observed(case(tapped), whole)
    killed_at_the_second_row(lambda: run_observed(case(tapped), parts), monkeypatch)
    with pytest.raises(GradveilError, match="--resume"):
        run_observed(case(tapped), parts)
    run_observed(case(tapped), parts, resume=True)
    assert comparable(parts) == comparable(whole)
    kept = {path: path.stat().st_mtime_ns for path in parts.glob("rows/*/row.json")}
    run_observed(case(tapped, attacks=[IG, "analytic"]), parts, resume=True)
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items())
    assert len(read(parts)["rows"]) == len(kept) + 2


@pytest.mark.integration
def test_other_exchanges_are_other_rows(own: Path, tmp_path: Path) -> None:
    run_observed(case(own, attacks=["analytic"]), tmp_path / "a")
    shutil.copy(
        own / "taps" / "round-0003-client-0000.safetensors", own / "taps" / "round-0001-client-0000.safetensors"
    )
    audit = run_observed(case(own, attacks=["analytic"]), tmp_path / "a", resume=True)
    psnr = [image.psnr for image in audit.rows[0].per_image]
    assert psnr[0] < 30 < psnr[1], "the reply of another round is attacked, not the saved row taken"
    (own / "taps" / "round-0003-client-0000.safetensors").unlink()
    with pytest.raises(GradveilError, match="have changed"):
        score_again(tmp_path / "a")


@pytest.mark.integration
def test_scoring_again_keeps_what_was_found(tapped: Path, tmp_path: Path) -> None:
    before = run_observed(case(tapped), tmp_path / "a")
    after = score_again(tmp_path / "a")
    assert after.rows == before.rows


@pytest.mark.integration
def test_without_a_truth_only_the_objective_is_known(own: Path, tmp_path: Path) -> None:
    truth_of(own).unlink()
    audit = run_observed(case(own), tmp_path / "a")
    rows = {(row.round, row.clients): row for row in audit.rows if not row.prior_of}
    assert set(rows) == {(1, (0, 1)), (3, (0,)), (3, (1,))}
    bare = rows[3, (1,)]
    assert bare.objective is not None
    assert (bare.identified, bare.psnr, bare.files.truth) == (None, None, None)
    assert "no truth" in bare.not_available["psnr"]
    assert rows[3, (0,)].psnr > 0
    assert "no truth" in render(tmp_path / "a").read_text()
    for path in own.glob("taps/*.truth.safetensors"):
        path.unlink()
    (verdict,) = run_observed(case(own), tmp_path / "b").verdicts
    assert verdict.identified is None
    assert "nothing could be scored" in verdict.sentence
    assert "no verdict" in render(tmp_path / "b").read_text()


@pytest.mark.integration
def test_several_trainings_have_a_line_each(tapped: Path, tmp_path: Path) -> None:
    noisy = train(tmp_path / "noisy", defense="noise:sigma=0.1")
    audit = run_observed(case(tapped, noisy, attacks=["analytic"]), tmp_path / "a")
    assert [(row.training, row.defense, row.round) for row in audit.rows] == [
        ("plain", "none", 1), ("plain", "none", 3), ("noisy", "noise:sigma=0.1", 1), ("noisy", "noise:sigma=0.1", 3),
    ]  # fmt: skip
    page = render(tmp_path / "a").read_text()
    assert "<strong>analytic, no defense</strong>" in page
    assert "<strong>analytic, noise:sigma=0.1</strong>" in page


@pytest.mark.integration
def test_any_folder_of_observations_will_do(own: Path, tmp_path: Path) -> None:
    """No round in the names, no train.json beside them: a row per file, and distractors among the exchanges."""
    loose = tmp_path / "loose"
    loose.mkdir()
    for number, path in enumerate(sorted(own.glob("taps/round-*-client-000?.safetensors"))):
        shutil.copy(path, loose / f"seen{number}.safetensors")
        shutil.copy(path.with_name(f"{path.stem}.truth.safetensors"), loose / f"seen{number}.truth.safetensors")
    audit = run_observed(case(loose, attacks=["analytic"]), tmp_path / "a")
    assert [(row.stage, row.round) for row in audit.rows] == [(f"seen{n}", None) for n in range(4)]
    assert {row.gallery for row in audit.rows} == {4}
    assert "Leakage over training" not in render(tmp_path / "a").read_text()


def test_files_may_have_any_name(own: Path, tmp_path: Path) -> None:
    """Such as one with a number that is too long for one."""
    loose, names = tmp_path / "loose", (f"round-{10**30}-client-0", "café")
    loose.mkdir()
    for name, path in zip(names, sorted(own.glob("taps/round-*-client-000?.safetensors")), strict=False):
        shutil.copy(path, loose / f"{name}.safetensors")
        shutil.copy(path.with_name(f"{path.stem}.truth.safetensors"), loose / f"{name}.truth.safetensors")
    audit = run_observed(case(loose, attacks=["analytic"]), tmp_path / "a")
    assert sorted((row.stage, row.round) for row in audit.rows) == [("café", None), (names[0], None)]
    assert "café" in render(tmp_path / "a").read_text()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"inputs": torch.zeros(2, 1, 28, 28), "labels": torch.zeros(2).long()}, "other shapes"),
        ({"inputs": torch.zeros(1, 3, 28, 28), "labels": torch.zeros(1).long()}, "other shapes"),
        ({"inputs": torch.zeros(1, 1, 28, 28), "labels": torch.tensor([10])}, "classes below 10"),
        ({"inputs": torch.full((1, 1, 28, 28), 1.5), "labels": torch.tensor([1])}, r"in \[0, 1\]"),
        ({"inputs": torch.full((1, 1, 28, 28), torch.nan), "labels": torch.tensor([1])}, "NaN"),
        ({"inputs": torch.zeros(1, 1, 28, 28).long(), "labels": torch.tensor([1])}, "float32"),
    ],
)
def test_a_hostile_truth_is_one_line(own: Path, tmp_path: Path, tensors: dict[str, Any], words: str) -> None:
    index = torch.zeros(len(tensors["labels"])).long()
    write_tensors(truth_of(own), "truth", {**tensors, "index": index}, {})
    with pytest.raises(BadFileError, match=words):
        run_observed(case(own), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_hostile_folder_is_one_line(own: Path, tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match="is no folder"):
        run_observed(case(tmp_path / "nowhere"), tmp_path / "a")
    with pytest.raises(GradveilError, match="no saved exchanges"):
        run_observed(case(tmp_path), tmp_path / "a")
    with pytest.raises(GradveilError, match="stands twice"):
        run_observed(case(own, own), tmp_path / "a")
    whole = read_train(own)
    (own / "train.json").write_text(json.dumps(whole | {"case": {"data": "cifar10-samples"}}))
    with pytest.raises(BadFileError, match="other pictures"):
        run_observed(case(own), tmp_path / "a")
    (own / "train.json").write_text(json.dumps(whole))
    good = truth_of(own).with_name("round-0003-client-0001.safetensors")
    good.write_bytes(good.read_bytes()[:-8])
    with pytest.raises(BadFileError, match="damaged"):
        run_observed(case(own), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_an_attack_must_fit_what_was_saved(own: Path, tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match="needs craft"):
        run_observed(case(own, attacks=["trap"]), tmp_path / "a")
    path = own / "taps" / "round-0001-client-0000.safetensors"
    save_observations(path, [replace(one, threat="F") for one in load_observations(path)])
    for other in own.glob("taps/*client-000?.safetensors"):
        if other != path:
            other.unlink()
    with pytest.raises(GradveilError, match="honest broadcast"):
        run_observed(case(own, attacks=["trap"]), tmp_path / "a")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data": "mnist"}, "fix --data:"),
        ({"defenses": ["none"], "threat": "C"}, "fix --defense, --threat:"),
        ({"recipe": {"lr": 1}}, r"--lr"),
        ({"model": "lenet"}, "fix the model"),
        ({"attacks": ["igg"]}, "did you mean ig"),
        ({"observations": []}, "observations"),
    ],
)
def test_what_the_exchanges_fix_is_no_option(tapped: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(GradveilError, match=words) as caught:
        case(tapped, **fields)
    assert "\n" not in str(caught.value)
