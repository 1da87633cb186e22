"""The whole way of the data, on real pictures: what an undefended client leaks, and what a first defense changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from gradveil.attacks import BUDGETS, load_reconstructions
from gradveil.auditing import Case, Row, make_case, run_case, score_again
from gradveil.auditing.store import Store
from gradveil.core.errors import GradveilError
from gradveil.core.locks import claimed
from gradveil.core.tensor_files import read_tensors
from gradveil.data import load
from gradveil.threat import load_observations

METRICS = ("mse", "psnr", "ssim", "lpips", "mse_r", "identified", "label_accuracy", "objective", "per_image", "trace")
TINY = {"attacks": ["ig:iterations=8,restarts=2"], "images": 2, "gallery": 10}


def read(folder: Path) -> dict[str, Any]:
    audit: dict[str, Any] = json.loads((folder / "audit.json").read_text())
    return audit


def comparable(folder: Path) -> list[dict[str, Any]]:
    return [{key: row[key] for key in (*METRICS, "defense", "attack", "digest")} for row in read(folder)["rows"]]


@pytest.mark.integration
def test_an_undefended_client_leaks_and_noise_helps(audited: Path) -> None:
    rows = {(row["defense"], row["attack"]): row for row in read(audited)["rows"]}
    bare, noisy = rows["none", "ig"], rows["noise:sigma=0.1", "ig"]
    prior = next(row for row in read(audited)["rows"] if row["attack"] == "prior-only")
    assert bare["psnr"] > 15
    assert bare["psnr"] >= noisy["psnr"] + 3
    assert bare["identified"] > prior["identified"]
    assert prior["prior_of"] == "ig"


@pytest.mark.network
def test_lpips_is_the_real_one(audited: Path) -> None:
    for row in read(audited)["rows"]:
        assert row["not_available"] == {}
        assert row["identified_by"] == "lpips"
        assert 0 < row["lpips"] < 1.5


def test_every_row_says_what_it_rests_on(audited: Path) -> None:
    audit = read(audited)
    assert audit["version"] == 2
    assert audit["complete"]
    assert {"gradveil", "python", "torch", "device", "threads"} <= audit["environment"].keys()
    for row in audit["rows"]:
        assert row["threat"] == "D"
        assert any("how many examples" in sentence for sentence in row["assumptions"])
        assert row["images"] == len(row["per_image"]) == 4
        assert row["problem_steps"] == 4 * BUDGETS["quick"].restarts * BUDGETS["quick"].iterations
        assert row["strategy"]
        for name in ("observation", "reconstruction", "truth"):
            assert (audited / row["files"][name]).is_file()
        pictures = {image["index"]: image["psnr"] for image in row["per_image"]}
        assert row["psnr"] == pytest.approx(sum(pictures.values()) / 4)
    verdict = audit["verdicts"][0]
    assert verdict["defense"] == "none"
    low, high = verdict["identified_interval"]
    assert low <= verdict["identified"] <= high


def test_observation_reconstruction_and_truth_are_separate_files(audited: Path) -> None:
    row = read(audited)["rows"][0]
    seen = load_observations(audited / row["files"]["observation"])
    found = load_reconstructions(audited / row["files"]["reconstruction"])
    truth, _ = read_tensors(audited / row["files"]["truth"], "truth")
    assert len(seen) == len(found) == len(truth["inputs"]) == 4
    mse = [float((one.inputs - truth["inputs"][i : i + 1]).square().mean()) for i, one in enumerate(found)]
    assert mse == pytest.approx([image["mse"] for image in row["per_image"]], rel=1e-4)


@pytest.mark.integration
def test_the_same_seed_gives_the_same_numbers(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run_case(make_case({**TINY, "seed": 5}), tmp_path / name)
    run_case(make_case({**TINY, "seed": 6}), tmp_path / "other")
    assert comparable(tmp_path / "one") == comparable(tmp_path / "two")
    assert comparable(tmp_path / "one")[0]["psnr"] != comparable(tmp_path / "other")[0]["psnr"]


@pytest.mark.integration
def test_a_resumed_audit_keeps_its_rows_and_adds_new_ones(tmp_path: Path) -> None:
    """One by one, so that numbers do not depend on what is attacked beside them."""
    apart = {**TINY, "attacks": ["ig:iterations=8,restarts=2,strategy=loop"]}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_case(make_case(apart), whole)
    run_case(make_case({**apart, "defenses": ["none"]}), parts)
    first = (parts / "rows" / read(parts)["rows"][0]["digest"] / "row.json").stat().st_mtime_ns
    with pytest.raises(GradveilError, match="--resume"):
        run_case(make_case(apart), parts)
    run_case(make_case(apart), parts, resume=True)
    assert comparable(parts) == comparable(whole)
    assert (parts / "rows" / read(parts)["rows"][0]["digest"] / "row.json").stat().st_mtime_ns == first


@pytest.mark.integration
def test_rows_of_other_images_are_not_set_beside_each_other(tmp_path: Path) -> None:
    """The data may have changed under the same name: whose images the kept rows are of is in the folder."""
    photos = tmp_path / "photos"
    inputs = load("cifar10-samples").batch(range(12)).inputs.permute(0, 2, 3, 1)
    pictures = [Image.fromarray(picture.numpy()) for picture in (255 * inputs).byte()]
    for number, picture in enumerate(pictures[:11]):
        (photos / str(number % 2)).mkdir(parents=True, exist_ok=True)
        picture.save(photos / str(number % 2) / f"{number:02}.png")
    fields = {**TINY, "data": f"folder:path={photos},size=32", "model": "lenet:init=wide"}
    run_case(make_case({**fields, "defenses": ["none"]}), tmp_path / "a")
    run_case(make_case({**fields, "defenses": ["none", "noise"]}), tmp_path / "a", resume=True)
    before = (tmp_path / "a" / "truth.safetensors").read_bytes()
    pictures[11].save(photos / "0" / "00.png")
    with pytest.raises(GradveilError, match="no longer holds the images"):
        run_case(make_case({**fields, "defenses": ["none", "clip"]}), tmp_path / "a", resume=True)
    assert (tmp_path / "a" / "truth.safetensors").read_bytes() == before


@pytest.mark.network
def test_rows_identified_by_another_metric_are_scored_again_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as offline:
        offline.setenv("GRADVEIL_OFFLINE", "1")
        offline.setenv("GRADVEIL_CACHE", str(tmp_path / "empty"))
        run_case(make_case({**TINY, "defenses": ["none"]}), tmp_path / "a")
    both = make_case({**TINY, "defenses": ["none", "noise"]})
    with pytest.raises(GradveilError, match=r"not identified by LPIPS.*gradveil score"):
        run_case(both, tmp_path / "a", resume=True)
    score_again(tmp_path / "a")
    assert {row.identified_by for row in run_case(both, tmp_path / "a", resume=True).rows} == {"lpips"}


@pytest.mark.integration
def test_scoring_a_strangers_audit_runs_no_code_of_it(tmp_path: Path) -> None:
    run_case(make_case({**TINY, "defenses": ["none"]}), tmp_path / "a")
    path, good = tmp_path / "a" / "audit.json", read(tmp_path / "a")
    evil = f"subprocess:getoutput:cmd=touch {tmp_path / 'ran'}"
    path.write_text(json.dumps({**good, "case": {**good["case"], "model": evil}}))
    with pytest.raises(GradveilError, match="runs code of its own, subprocess:getoutput"):
        score_again(tmp_path / "a")
    path.write_text(json.dumps({**good, "rows": [{**row, "digest": "../../elsewhere"} for row in good["rows"]]}))
    with pytest.raises(GradveilError, match="is damaged"):
        score_again(tmp_path / "a")
    for broken in ({"version": 1}, {"version": 1, "case": [], "rows": []}, {"version": 1, "case": {}, "rows": [1]}):
        path.write_text(json.dumps(broken))
        with pytest.raises(GradveilError, match="is damaged"):
            score_again(tmp_path / "a")
    assert not (tmp_path / "ran").exists()


@pytest.mark.integration
def test_chance_is_that_of_any_image_behind_the_update(tmp_path: Path) -> None:
    for size in (1, 2):
        audit = run_case(make_case({**TINY, "batch_size": size, "defenses": ["none"]}), tmp_path / str(size))
        assert [row.at_random for row in audit.rows] == [size / 10] * 2
        assert audit.verdicts[0].at_random == size / 10


def killed_at_the_second_row(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Interrupts an audit in its second row, before that is saved; the digests of both."""
    save, calls = Store.save_row, []

    def save_one(store: Store, digest: str, row: Row) -> None:
        calls.append(digest)
        if len(calls) == 2:
            raise KeyboardInterrupt
        save(store, digest, row)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "save_row", save_one)
        with pytest.raises(KeyboardInterrupt):
            work()
    return calls


@pytest.mark.integration
def test_an_interrupted_batch_is_run_again_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_case(make_case(TINY), whole)
    calls = killed_at_the_second_row(lambda: run_case(make_case(TINY), parts), monkeypatch)
    assert (parts / "rows" / calls[0] / "row.json").exists()
    assert Store(parts).row(calls[0]) is None, "the other row of its batch is missing"
    run_case(make_case(TINY), parts, resume=True)
    assert comparable(parts) == comparable(whole)
    assert not (parts / "rows" / "batch.json").exists()


@pytest.mark.integration
def test_half_a_batch_is_not_kept_while_another_batch_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = killed_at_the_second_row(lambda: run_case(make_case(TINY), tmp_path), monkeypatch)
    left = tmp_path / "rows" / calls[0] / ".reconstruction.safetensors.0123abcd"
    left.touch()  # as a kill in the middle of a write leaves it
    run_case(make_case({**TINY, "attacks": ["ig:iterations=4,restarts=1"]}), tmp_path, resume=True)
    assert Store(tmp_path).row(calls[0]) is None
    assert not left.exists()


@pytest.mark.integration
def test_two_audits_in_one_folder_are_one_and_a_refusal(tmp_path: Path) -> None:
    with claimed(tmp_path), ThreadPoolExecutor() as others:
        with pytest.raises(GradveilError, match="is in use already"):
            others.submit(run_case, make_case(TINY), tmp_path).result()
        assert run_case(make_case({**TINY, "defenses": ["none"]}), tmp_path).complete


@pytest.mark.integration
def test_what_is_searched_apart_is_saved_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against noise the informed attack weighs entries, without a defense it does not: two searches of one batch."""
    case = make_case({**TINY, "threat": "C", "attacks": ["informed:iterations=8,restarts=1"]})
    run_case(case, tmp_path / "whole")
    calls = killed_at_the_second_row(lambda: run_case(case, tmp_path / "parts"), monkeypatch)
    assert Store(tmp_path / "parts").row(calls[0]) is not None, "its search was done"
    run_case(case, tmp_path / "parts", resume=True)
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")


@pytest.mark.integration
def test_defenses_that_share_the_broadcast_are_attacked_together(tmp_path: Path) -> None:
    rows = run_case(make_case(TINY), tmp_path).rows
    bare, noisy = rows[:2]
    assert bare.seconds == noisy.seconds, "one batch, its time shared equally"
    assert "8 together" in bare.strategy or bare.strategy.startswith("loop"), "2 defenses, 2 images, 2 restarts"


@pytest.mark.integration
def test_a_batch_is_matched_to_the_truth_only_when_scored(tmp_path: Path) -> None:
    audit = run_case(make_case({**TINY, "images": 4, "batch_size": 4, "defenses": ["none"]}), tmp_path / "a")
    pictures = [image.picture for image in audit.rows[0].per_image]
    assert sorted(pictures) == [0, 1, 2, 3]
    (found,) = load_reconstructions(tmp_path / "a" / audit.rows[0].files.reconstruction)
    truth, _ = read_tensors(tmp_path / "a" / "truth.safetensors", "truth")
    mse = (found.inputs[pictures] - truth["inputs"]).square().mean(dim=(1, 2, 3))
    assert mse.tolist() == pytest.approx([image.mse for image in audit.rows[0].per_image], rel=1e-4)


@pytest.mark.integration
def test_fedavg_is_matched_through_the_local_run(tmp_path: Path) -> None:
    recipe = {"sends": "delta", "epochs": 2, "batch_size": 1, "lr": 0.05}
    fields = {"attacks": ["ig:iterations=60,restarts=1"], "images": 2, "batch_size": 2, "recipe": recipe}
    audit = run_case(make_case({**fields, "defenses": ["none"], "gallery": 10}), tmp_path / "a")
    bare, prior = audit.rows
    assert bare.trace.objective[0][-1] < 0.75 * bare.trace.objective[0][0]
    assert bare.label_accuracy > prior.label_accuracy or prior.label_accuracy == 1


def test_without_lpips_the_row_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "empty"))
    audit = run_case(make_case({**TINY, "defenses": ["none"]}), tmp_path / "a")
    for row in audit.rows:
        assert row.lpips is None
        assert "gradveil assets get lpips" in row.not_available["lpips"]
        assert row.identified_by == "ssim"
        assert row.identified is not None


@pytest.mark.network
def test_scoring_again_fills_in_what_was_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as offline:
        offline.setenv("GRADVEIL_OFFLINE", "1")
        offline.setenv("GRADVEIL_CACHE", str(tmp_path / "empty"))
        before = run_case(make_case({**TINY, "defenses": ["none"]}), tmp_path / "a")
    after = score_again(tmp_path / "a")
    assert before.rows[0].lpips is None
    assert after.rows[0].lpips > 0
    assert after.rows[0].psnr == before.rows[0].psnr


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attacks": ["igg"]}, "did you mean ig"),
        ({"defenses": []}, "at least one defense"),
        ({"defenses": ["none", "none"]}, "stands twice"),
        ({"images": 0}, "images: input should be greater"),
        ({"images": 3, "batch_size": 2}, "whole batches"),
        ({"images": 101}, "too few for 101"),
        ({"surprise": 1}, "surprise: extra inputs"),
        ({"threat": "A", "attacks": ["ig"]}, "needs batch-size, which threat A lacks"),
        ({"threat": "A"}, "no attack of the standard suite can run on lenet:init=wide under threat A"),
        ({"training": ["nowhere"]}, "nowhere holds no training"),
        ({"recipe": {"lr": -1}}, "lr is a number"),
        ({"model": "lenet:init=huge"}, "one of default, he, wide"),
        ({"budget": "endless"}, "budget: input should be"),
    ],
)
def test_a_bad_case_is_one_line(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(GradveilError, match=words) as caught:
        run_case(make_case(fields), tmp_path / "a")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a" / "audit.json").exists()


def test_cuda_is_refused_where_there_is_none(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(GradveilError, match="--device cpu"):
        run_case(Case(device="cuda"), tmp_path / "a")


def test_digests_differ_as_soon_as_anything_does() -> None:
    variants: list[dict[str, Any]] = [
        {}, {"seed": 1}, {"images": 2}, {"restarts": 3}, {"budget": "quick"}, {"gallery": 50}, {"threat": "B"},
        {"recipe": {"train_mode": True}}, {"model": "lenet"},
    ]  # fmt: skip
    digests = {digest for fields in variants for digest in digests_of(make_case({**fields, "attacks": ["ig"]}))}
    assert len(digests) == 3 * len(variants)
    plain = Case(attacks=("ig",))
    assert digests_of(make_case({"attacks": ["ig"]})) == digests_of(plain)
    costed = plain.model_copy(update={"training": ("somewhere",)})
    assert digests_of(costed) == digests_of(plain), "no row depends on a training"


def digests_of(case: Case) -> list[str]:
    """Of the rows of one attack: on every defense, and of the prior alone."""
    crossed = [case.digest(case.attacks[0], defense, prior_only=False) for defense in case.defenses]
    return [*crossed, case.digest(case.attacks[0], case.defenses[0], prior_only=True)]
