"""Reproductions: figures have their places, every scale expands to cases, one runs and resumes, pages tell all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradveil.core.errors import GradveilError, NotAvailableError
from gradveil.lab.reproduce import (
    PAPERS,
    SCALES,
    SETTINGS,
    Column,
    Reproduction,
    ReproductionPlan,
    Scale,
    Table,
    Word,
    page,
    plan,
    reproduction,
    reproductions,
    run_plan,
    values_of,
)
from gradveil.lab.reproduce.tables import _table
from gradveil.lab.sweeps import ResultFolder, Status, batches_of

MUST_SHOW = {
    "censor-1", "censor-2", "censor-3", "censor-7", "outpost-3", "outpost-4", "dcs2-1", "ggl-1", "ggl-2",
}  # fmt: skip
PAPER_PAGES = Path(__file__).parents[3] / "docs/results/paper"
SMALL_PAGES = PAPER_PAGES.with_name("small")
REPRODUCTIONS = reproductions()
TABLES = [(name, table) for name, one in REPRODUCTIONS.items() for table in one.tables]


def same(**fields: object) -> Word:
    """A word that stands for the same at both scales."""
    return Word(fields, fields)


def left_out(why: str, asks: str = "") -> Word:
    return Word(None, None, why, asks)


def attack(small: str, paper: str) -> Word:
    return Word({"attacks": small}, {"attacks": paper})


def run_here(planned: ReproductionPlan, out: Path, report: Callable[[Status], None] = lambda _status: None) -> None:
    run_plan(planned, out, start="here", report=report)


def tiny(**changes: object) -> Reproduction:
    """Two attacks on two defenses, one of them on data that are not at hand, in seconds."""
    table = Table(
        title="A small table",
        headings=("data", "attack", "defense"),
        words=(
            {"digits": same(data="mnist-samples"), "letters": left_out("", "emnist:path=FOLDER")},
            {"IG": attack("ig:iterations=8", "ig:iterations=9"), "GI": attack("gi:iterations=8", "gi:iterations=9")},
            {
                "none": same(defenses="none"),
                "Noise": same(defenses="noise:sigma=0.1"),
                "Magic": left_out("nobody knows how"),
            },
        ),
        columns=(Column("PSNR", "psnr"), Column("identified", "identified", in_paper=False)),
        base=same(model="mlp", images=2, gallery=10, restarts=1),
        figures={
            (*line, name): (figure,)
            for line, figures in {
                ("digits", "IG"): (20.0, 10.0, None),
                ("digits", "GI"): (20.0, 10.0, None),
                ("letters", "IG"): (1.0, 1.0, 1.0),
            }.items()
            for name, figure in zip(("none", "Noise", "Magic"), figures, strict=True)
        },
    )
    made = Reproduction(
        "tiny-1", "ggl", "Li et al. (2022)", "Table 9", "A table for tests.", (table,), {"small": "0", "paper": "0"},
        ("Digits are small.",), ("The pictures.",),
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def test_what_must_be_shown_is_there_and_names_are_those_of_their_papers() -> None:
    assert set(REPRODUCTIONS) >= MUST_SHOW
    assert all(one.name.startswith(f"{one.paper}-") and one.paper in PAPERS for one in REPRODUCTIONS.values())


@pytest.mark.parametrize(("name", "table"), TABLES, ids=[f"{name} {table.title}" for name, table in TABLES])
def test_every_line_has_a_word_under_each_heading_and_a_figure_or_none_in_each_column(name: str, table: Table) -> None:
    assert len(table.words) == len(table.headings)
    columns = sum(column.in_paper for column in table.columns)
    for line, figures in table.figures.items():
        assert all(text in words for text, words in zip(line, table.words, strict=True)), f"{name}: {line}"
        assert len(figures) == columns, f"{name}: {line}"
        assert all(figure is None or isinstance(figure, int | float) for figure in figures)
    used = {text for line in table.figures for text in line}
    assert used >= {text for words in table.words for text in words if text not in ("IID", "Non-IID")}, name


@pytest.mark.parametrize("name", REPRODUCTIONS)
@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_of_every_name_expands_to_valid_cases(name: str, scale: Scale) -> None:
    planned = plan(reproduction(name), scale, device="cpu" if scale == "small" else "cuda")
    waiting = planned.missing()
    assert planned.cases > 0 or waiting
    for line in (line for lines in planned.lines for line in lines):
        assert line.run or line.why, f"{name}: {line.line} is neither run nor explained"
    if planned.study is not None:
        attacked = {entry.case.device for entry in planned.study.entries if entry.kind == "audit"}
        assert attacked <= {planned.device}, "audits run where the user says; small trainings may stay on the CPU"
        assert sum(len(batch.entries) for batch in batches_of(planned.study)) == len(planned.study.entries)


def test_figures_of_the_papers_stand_in_their_cells() -> None:
    """A look at one cell of each paper, typed here a second time from its text."""
    known = {
        ("censor-1", ("CIFAR-10", "GIAS", "Sparsi")): (0.0003, 0.0100, 35.652, 0.9631),
        ("censor-2", ("ImageNet", "GIFD", "CENSOR")): (0.0686, 0.7614, 12.245, 0.0088),
        ("outpost-3", ("2: E=1, n=2, B=1", "EMNIST", "csDLG", "DP")): (1231.82, 0.65, 0.014),
        ("outpost-4", ("CIFAR-100", "E=1, n=8, B=4", "ResNet-152, untrained", "original (eval state)")): (
            0.883,
            12.535,
        ),
        ("dcs2-1", ("CIFAR10", "GS", "Soteria")): (9.08, 0.14),
        ("dcs2-6", ("CIFAR10", "Imprint", "PRECODE")): (120.02, 0.85),
        ("ggl-1", ("CelebA", "D2, R1")): (0.03671, 0.0227, 15.3471, 3.1093),
        ("ggl-3", ("ImageNet", "GI", "Gradient Clipping")): (0.3702, 4.3154, 0.9451, 1.8807),
    }
    for (name, line), figures in known.items():
        found = [table.figures[line] for table in reproduction(name).tables if line in table.figures]
        assert found == [figures], name


def test_data_that_the_user_brings_take_the_place_of_stand_ins(tmp_path: Path) -> None:
    brought = plan(tiny(), "small", data={"letters": f"folder:path={tmp_path},size=28"})
    specs = (
        {entry.case.data for entry in brought.study.entries if hasattr(entry.case, "data")} if brought.study else set()
    )
    assert f"folder:path={tmp_path},size=28" in specs
    assert plan(tiny(), "small").missing() == {"letters": "emnist:path=FOLDER"}
    with pytest.raises(GradveilError, match="has no data 'numbers' to bring; it has: digits, letters"):
        plan(tiny(), "small", data={"numbers": "mnist"})


def test_a_generator_goes_to_the_attacks_that_search_one_on_the_data_it_was_given_for() -> None:
    given = {"ImageNet": "biggan:path=x"}
    planned = plan(reproduction("censor-1"), "paper", data={"ImageNet": "folder:path=y"}, generators=given)
    attacks = {line.line[:2]: line.fields[0]["attacks"] for line in planned.lines[0] if line.run}
    assert attacks["ImageNet", "GIAS"].endswith(",generator=biggan:path=x")
    assert "generator" not in attacks["ImageNet", "IG"] + attacks["CIFAR-10", "GIAS"]


@pytest.mark.integration
def test_one_runs_resumes_and_tells_everything_on_its_page(tmp_path: Path) -> None:
    planned = plan(tiny(), "small")
    before = page(planned, tmp_path)
    assert "not run yet" in before
    run_here(planned, tmp_path)
    folder = ResultFolder(tmp_path)
    assert planned.study is not None
    results = {entry.digest: folder.case(entry.digest) / "result.json" for entry in planned.study.entries}
    written = {digest: path.stat().st_mtime_ns for digest, path in results.items()}
    assert len(written) == 4
    run_plan(planned, tmp_path)
    assert {digest: path.stat().st_mtime_ns for digest, path in results.items()} == written

    text = page(planned, tmp_path)
    row = json.loads(next(iter(results.values())).read_text())["rows"][0]
    assert f"| digits | IG | none | 20 / {row['psnr']:.2f} |" in text
    assert "digits, IG, Magic; digits, GI, Magic: nobody knows how." in text
    assert "--data 'letters=emnist:path=FOLDER'" in text
    assert "- The pictures." in text and "- Digits are small." in text  # noqa: PT018
    assert "gradveil reproduce tiny-1 --scale small --device cpu" in text
    assert "Seed 0." in text and "torch" in text  # noqa: PT018
    assert "not run yet" not in text


@pytest.mark.integration
def test_an_interrupted_one_goes_on_with_what_is_left(tmp_path: Path) -> None:
    planned, folder = plan(tiny(), "small"), ResultFolder(tmp_path)
    assert planned.study is not None

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_here(planned, tmp_path, stop)
    done = [entry.digest for entry in planned.study.entries if folder.result(entry.digest)]
    assert len(done) == 2, "the batch of the first attack"
    assert "digits, GI, none; digits, GI, Noise: not run yet." in page(planned, tmp_path)
    times = {digest: (folder.case(digest) / "result.json").stat().st_mtime_ns for digest in done}
    run_here(planned, tmp_path)
    assert all(folder.result(entry.digest) for entry in planned.study.entries)
    assert {digest: (folder.case(digest) / "result.json").stat().st_mtime_ns for digest in done} == times


def test_a_case_that_fails_is_on_the_page_with_its_reason(tmp_path: Path) -> None:
    base = same(model="lenet", images=3, gallery=10, every=99)
    planned = plan(tiny(tables=(replace(tiny().tables[0], base=base),)), "small")
    run_here(planned, tmp_path)
    assert "failed: mnist-samples has 100 images, too few for 3, every 99th" in page(planned, tmp_path)


def test_values_are_means_spreads_shares_and_the_first_of_each_batch() -> None:
    columns = (Column("m", "psnr"), Column("s", "psnr", "spread of images"), Column("k", "psnr", "kept"))
    table = replace(tiny().tables[0], columns=columns, first_of_batch=True)
    each = [{"psnr": value} for value in (10.0, 99.0, 20.0, 99.0)]
    result = {"case": {"batch_size": 2}, "rows": [{"prior_of": None, "per_image": each}]}
    half = {"case": {"batch_size": 1}, "rows": [{"prior_of": None, "per_image": [{"psnr": 7.5}]}]}
    values = values_of(table, {("digits", "IG", "none"): [result], ("digits", "IG", "Noise"): [half]})
    expected: Any = (15.0, pytest.approx(50**0.5), 100.0)
    assert values["digits", "IG", "none"] == expected
    assert values["digits", "IG", "Noise"] == (7.5, None, 50.0)


def test_the_best_of_a_batch_is_that_of_its_own_batch_whatever_is_missing() -> None:
    table = replace(tiny().tables[0], columns=(Column("b", "psnr", "best"),))

    def best(*values: float | None) -> float | None:
        row = {"prior_of": None, "per_image": [{"psnr": value} for value in values]}
        found = values_of(table, {("digits", "IG", "none"): [{"case": {"batch_size": 2}, "rows": [row]}]})
        return found["digits", "IG", "none"][0]

    assert best(10.0, 12.0, 20.0, 30.0) == 21.0
    assert best(None, 10.0, 20.0, 30.0) == 20.0
    assert best(None, None, 20.0, 30.0) == 30.0
    assert best(None, None, None, None) is None


def test_accuracy_is_that_of_the_last_evaluation_in_percent() -> None:
    table = replace(tiny().tables[0], kind="training", columns=(Column("accuracy", "accuracy"),))
    rows = [{"accuracy": 0.1}, {"accuracy": 0.25}, {"accuracy": None}]
    assert values_of(table, {("digits", "IG", "none"): [{"rows": rows}]}) == {("digits", "IG", "none"): (25.0,)}


def test_measurements_are_kept_and_shown(tmp_path: Path) -> None:
    asked: list[object] = []

    def measure(fields: dict[str, object]) -> dict[str, object]:
        asked.append(fields["data"])
        return {"psnr": 5.0, "surface": [[0.0, 1.0], [2.0, 3.0]]}

    table = replace(tiny().tables[0], kind="measure", measure=measure)
    planned = plan(tiny(tables=(table,)), "small")
    for _ in range(2):
        run_here(planned, tmp_path)
    assert asked == ["mnist-samples"] * 4, "four lines, each once"
    text = page(planned, tmp_path)
    assert "| digits | IG | none | 20 / 5.00 |" in text
    assert "██" in text


def test_a_measurement_that_failed_or_is_damaged_is_tried_again(tmp_path: Path) -> None:
    asked: list[object] = []

    def measure(fields: dict[str, object]) -> dict[str, object]:
        asked.append(fields["data"])
        if len(asked) <= 4:
            raise NotAvailableError("no network")
        return {"psnr": 5.0}

    planned = plan(tiny(tables=(replace(tiny().tables[0], kind="measure", measure=measure),)), "small")
    run_here(planned, tmp_path)
    assert "failed: no network" in page(planned, tmp_path)
    for _ in range(2):
        run_here(planned, tmp_path)
    assert len(asked) == 8, "four lines, each twice"
    assert "| digits | IG | none | 20 / 5.00 |" in page(planned, tmp_path)
    for path in (tmp_path / "measured").iterdir():
        path.write_text("[" * 100_000)
    assert "not run yet" in page(planned, tmp_path)
    run_here(planned, tmp_path)
    assert len(asked) == 12


def measured_at(weaker: float) -> Reproduction:
    """One table, measured by a function: noise of the text leaves 8 dB, that of the release 18; the paper has 20."""

    def measure(fields: dict[str, Any]) -> dict[str, object]:
        return {"psnr": 30.0 - weaker * fields["sigma"], "mse": 1.0}

    table = _table(
        title="Two settings",
        words={
            "data": {"digits": {}, "letters": {"both": {}, "asks": "emnist:path=FOLDER", "instead": "digits"}},
            "defense": {
                "none": {"sigma": 0},
                "Noise": {"both": {"sigma": 11}, "release": {"sigma": 6}},
                "Noise, twice": {"like": "Noise", "both": {"sigma": 12}},
            },
        },
        columns=[
            {"title": "PSNR", "metric": "psnr"},
            {"title": "MSE", "metric": "mse", "times": 4, "plus": 1, "unit": "of [-1, 1], ours times 4"},
        ],
        figures=[
            ["digits", "none", 30.0, 5.0],
            ["digits", "Noise", 20.0, 5.0],
            ["letters", "none", 1.0, 1.0],
        ],
        kind="measure",
    )  # fmt: skip
    return tiny(tables=(replace(table, measure=measure),))


def test_both_settings_stand_beside_the_paper_and_the_page_says_which_is_nearer(tmp_path: Path) -> None:
    plans = [plan(measured_at(2.0), settings) for settings in SETTINGS]
    assert [one.folder for one in plans] == ["tiny-1-paper"] * 2
    for one in plans:
        run_here(one, tmp_path)
    text = page(plans[1], tmp_path)
    assert text == page(plans[0], tmp_path), "one page for both"
    assert "| digits | Noise | 20 / 8.00 / 18.00 | 5 / 5.00 / 5.00 |" in text
    assert "| digits | Noise, twice | 20 / 6.00 / 6.00 | 5 / 5.00 / 5.00 |" in text, "the paper's figure of Noise"
    assert "| letters (here digits) | none | 30.00 / 30.00 [1] | 5.00 / 5.00 [1] |" in text
    assert "| text | 2 | 6.00 | 0.00 |" in text, "neither the other reading nor other data count"
    assert "| release | 2 | 1.00 | 0.00 |" in text
    assert "| release: pairs in the paper's order |  | 1 of 1 |" in text
    assert "The paper's figures agree better with the release in PSNR." in text
    assert "Units. MSE: of [-1, 1], ours times 4." in text
    assert "gradveil reproduce tiny-1 --settings release --device cpu" in text
    assert "letters" not in text.split("Farthest from the paper (text):")[1].split(".\n")[0]


def test_lines_of_the_release_that_are_not_run_are_named_as_such(tmp_path: Path) -> None:
    text, release = (plan(measured_at(2.0), settings) for settings in SETTINGS)
    run_here(text, tmp_path)
    assert "digits, Noise: not run yet, at the settings of the release." in page(release, tmp_path)
    assert "| text | 1 | 0.00 | 0.00 |" in page(text, tmp_path), "only lines that both have are compared"


def test_packed_measurements_are_read_and_those_packed_before_stay(tmp_path: Path) -> None:
    text, release = (plan(measured_at(2.0), settings) for settings in SETTINGS)
    packed = tmp_path / "packed"
    for one in (text, release):
        run_here(one, tmp_path / one.scale)
        ResultFolder(tmp_path / one.scale).pack(packed)
    assert [path.name for path in packed.iterdir()] == ["results.jsonl.gz"]
    assert "| digits | Noise | 20 / 8.00 / 18.00 |" in page(text, packed)


def test_where_the_release_is_not_known_to_differ_there_is_one_column() -> None:
    assert [one.scale for one in plan(tiny(), "release").settings()] == ["paper"]
    assert [one.scale for one in plan(measured_at(2.0), "release").settings()] == ["paper", "release"]


def test_a_page_shows_labels_fallbacks_and_what_the_prior_alone_reaches() -> None:
    text = page(plan(reproduction("censor-7"), "paper", device="cuda"), PAPER_PAGES / "cases" / "censor-7-paper")
    held = text.split("What else the rows hold")[1].split("</details>")[0]
    assert (
        "| settings | identified | labels right | fallback rate | cosine with the gradient | prior alone: PSNR |"
        in held
    )


def test_a_name_with_a_slip_gets_the_near_ones() -> None:
    with pytest.raises(GradveilError, match="no reproduction is called 'censor1'; did you mean censor-1"):
        reproduction("censor1")


def shortened(word: Word) -> Word:
    """The same with searches of two steps and trainings of one round, at the scale small."""
    if word.small is None:
        return word
    fields = {
        name: re.sub(r"iterations=\d+", "iterations=2", value) if isinstance(value, str) else value
        for name, value in word.small.items()
    }
    least = {"rounds": 1, "steps": 2, "points": 5, "round": 1}
    return replace(word, small={name: least.get(name, value) for name, value in fields.items()})


def with_fewer_candidates(word: Word) -> Word:
    return replace(word, small={**(word.small or {}), "gallery": 4})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in REPRODUCTIONS if plan(REPRODUCTIONS[name], "small").cases])
def test_every_line_runs_at_the_scale_small_with_the_shortest_searches(name: str, tmp_path: Path) -> None:
    tables = tuple(
        replace(
            table,
            words=tuple({text: shortened(word) for text, word in part.items()} for part in table.words),
            base=with_fewer_candidates(shortened(table.base)) if table.kind == "audit" else shortened(table.base),
            seeds={"small": 1, "paper": 1},
        )
        for table in reproduction(name).tables
    )
    planned = plan(replace(reproduction(name), tables=tables), "small")
    run_here(planned, tmp_path)
    text = page(planned, tmp_path)
    assert "failed:" not in text, [line for line in text.splitlines() if "failed:" in line]
    assert "not run yet" not in text


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", sorted(path.stem for path in PAPER_PAGES.glob("*.md")))
def test_committed_pages_are_what_their_results_say(name: str, settings: Scale) -> None:
    planned = plan(reproduction(name), settings, device="cuda")
    assert page(planned, PAPER_PAGES / "cases" / f"{name}-paper") == (PAPER_PAGES / f"{name}.md").read_text()


@pytest.mark.parametrize("folder", sorted((SMALL_PAGES / "cases").glob("*")), ids=lambda path: path.name)
def test_committed_pages_of_the_scale_small_are_what_their_results_say(folder: Path) -> None:
    name = folder.name.removesuffix("-small")
    assert page(plan(reproduction(name), "small"), folder) == (SMALL_PAGES / f"{name}.md").read_text()


def test_a_page_of_every_table_that_was_promised_is_committed() -> None:
    assert {path.stem for path in PAPER_PAGES.glob("*.md")} >= MUST_SHOW
