"""A study file becomes cases: crossed, nested, excluded, each once, under a digest that says what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradveil.auditing import Case
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.federated import Training
from gradveil.lab.sweeps import ResultFolder, Study, batches_of, make_study, queue_of, read_study, status_of

BASE = {"data": "mnist-samples", "model": "mlp", "images": 2, "gallery": 10, "attacks": "ig:iterations=8,restarts=2"}


def study(**fields: Any) -> Study:
    return make_study("test", {"base": BASE, **fields})


def audits(of: Study) -> list[Case]:
    return [entry.case for entry in of.entries if isinstance(entry.case, Case)]


def test_a_grid_is_crossed_in_the_order_of_the_file() -> None:
    cases = audits(study(grid={"seed": [0, 1], "defenses": ["none", ["none", "clip:bound=1"]]}))
    assert [(case.seed, case.defenses) for case in cases] == [
        (0, ("none",)), (0, ("none", "clip:bound=1.0")), (1, ("none",)), (1, ("none", "clip:bound=1.0"))
    ]  # fmt: skip
    assert all(case.attacks == ("ig:iterations=8,restarts=2",) for case in cases)


def test_a_dotted_name_is_a_field_within_a_field_and_leaves_its_neighbors() -> None:
    fields = {"base": {**BASE, "recipe": {"sends": "delta", "epochs": 2}}, "grid": {"recipe.lr": [0.5, 0.25]}}
    recipes = [case.recipe for case in audits(make_study("test", fields))]
    assert [(recipe.lr, recipe.epochs) for recipe in recipes] == [(0.5, 2), (0.25, 2)]


def test_excluded_cases_and_repeated_ones_are_left_out() -> None:
    grids = [{"seed": [0, 1], "defenses": ["none", "clip:bound=1"]}, {"seed": [1, 2], "defenses": ["clip: bound=1.0"]}]
    cases = audits(study(grids=grids, exclude=[{"seed": 0, "defenses": "none"}]))
    assert [(case.seed, case.defenses[0]) for case in cases] == [
        (0, "clip:bound=1.0"), (1, "none"), (1, "clip:bound=1.0"), (2, "clip:bound=1.0")
    ]  # fmt: skip


def test_a_case_may_meet_several_rules_of_what_is_excluded() -> None:
    cases = audits(study(grid={"seed": [0, 1], "restarts": [1, 2]}, exclude=[{"seed": 0}, {"seed": 0, "restarts": 2}]))
    assert [(case.seed, case.restarts) for case in cases] == [(1, 1), (1, 2)]


def test_digests_do_not_depend_on_how_a_case_is_written() -> None:
    one = study(grid={"defenses": ["clip: bound=1.0"], "seed": [0]})
    other = make_study("other", {"base": {**BASE, "defenses": ["clip:bound=1"]}})
    assert one.entries[0].digest == other.entries[0].digest
    assert len({entry.digest for entry in study(grid={"seed": [0, 1, 2]}).entries}) == 3


def test_trainings_are_a_kind_of_study() -> None:
    fields = {"kind": "training", "base": {"data": "mnist-samples", "rounds": 2}, "grid": {"lr": [0.1, 0.2]}}
    cases = [entry.case for entry in make_study("test", fields).entries]
    assert cases == [Training(data="mnist-samples", rounds=2, lr=lr) for lr in (0.1, 0.2)]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"grid": {"seed": []}}, "grid.seed"),
        ({"grids": [{"seed": [0]}], "grid": {"seed": [0]}}, "either one grid"),
        ({"grid": {"defenses": ["nosie"]}}, "did you mean noise"),
        ({"grid": {"sede": [1]}}, "sede"),
        ({"grid": {"seed": [0]}, "exclude": [{"seed": 0}]}, "leaves no case"),
        ({"exclude": [{"sede": 0}]}, "not sede"),
        ({"grid": {"seed": [0, 1]}, "exclude": [{"seed": 0}, {"seed": "1"}]}, "exclude {seed: 1} meets no case"),
        (
            {"grid": {"defenses": ["none", "dp"]}, "exclude": [{"defenses": ["dp"]}]},
            "exclude {defenses: dp} meets no case",
        ),
        ({"base": {**BASE, "recipe.lr": 0.01}, "grid": {"recipe": [{"epochs": 2}]}}, "leaves nothing of recipe.lr"),
        ({"grid": {"data.size": [3]}}, "data is 'mnist-samples'"),
        ({"threads": 0}, "threads"),
        ({"workers": 2}, "workers"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(GradveilError, match=complaint) as caught:
        study(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["- a list", "base: [", "\x00"])
def test_a_file_that_is_no_study(text: str, tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(GradveilError, match=r"study\.yaml"):
        read_study(tmp_path / "study.yaml")
    with pytest.raises(GradveilError, match="there is no study file"):
        read_study(tmp_path / "missing.yaml")


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[3].glob("cases/studies/*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_studies_can_be_read(path: Path) -> None:
    assert len(read_study(path).entries) > 1


def test_cases_that_share_a_broadcast_are_one_batch() -> None:
    grid = {"defenses": ["none", "clip:bound=1", "precode", "noise:sigma=0.1"], "seed": [0, 1]}
    batches = batches_of(study(grid=grid))
    shared = [sorted(entry.case.defenses[0] for entry in batch.entries) for batch in batches]  # type: ignore[union-attr]
    assert shared == [["clip:bound=1.0", "noise:sigma=0.1", "none"]] * 2 + [["precode"]] * 2
    assert all(len({entry.case.seed for entry in batch.entries}) == 1 for batch in batches)


def test_a_batch_of_cases_is_no_larger_than_a_batch_of_the_engine_or_than_is_wished() -> None:
    grid = {"defenses": [f"clip:bound={bound}" for bound in range(1, 81)]}
    assert [len(batch.entries) for batch in batches_of(study(grid=grid))] == [32, 32, 16]
    assert {len(batch.entries) for batch in batches_of(study(grid=grid, together=1))} == {1}


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text('{"version": 1, "cases": [{}]}')
    with pytest.raises(BadFileError, match="is damaged: run the sweep again"):
        status_of(tmp_path)
    (tmp_path / "study.json").write_text("[" * 100_000)
    with pytest.raises(BadFileError, match="holds no sweep"):
        status_of(tmp_path)
    (tmp_path / "deep.yaml").write_text("[" * 100_000)
    with pytest.raises(GradveilError, match="nested without end"):
        read_study(tmp_path / "deep.yaml")


@pytest.mark.parametrize("text", ['{"x": 1}', '{"reason": 1}', "[]", "[" * 100_000])
def test_a_damaged_record_of_a_failure_or_result_is_none(text: str, tmp_path: Path) -> None:
    one = study(grid={"seed": [0, 1]})
    folder = ResultFolder(tmp_path)
    folder.save_study(one)
    for name, entry in zip(("failed.json", "result.json"), one.entries, strict=True):
        folder.case(entry.digest).mkdir()
        (folder.case(entry.digest) / name).write_text(text)
    now = status_of(tmp_path)
    assert (now.done, now.failed, now.left) == (0, {}, 2)
    assert len(queue_of(one, folder).waiting) == 2, "they are run again"


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "-1", "1" + "0" * 400, '"1"'])
def test_seconds_that_are_none_are_not_counted(seconds: str, tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path)
    folder.case("a").mkdir()
    (folder.case("a") / "ran.json").write_text(f'{{"seconds": {seconds}}}')
    assert folder.seconds("a") is None
