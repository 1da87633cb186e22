"""The leaderboard: its settings, what it keeps, and a page that is always that of its entries."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from gradveil.auditing.flags import FLAGS
from gradveil.cli.main import app
from gradveil.core.errors import BadFileError, GradveilError, UnknownNameError
from gradveil.defenses import DEFENSES, Defense
from gradveil.lab.leaderboard import (
    SETTINGS,
    SHOWN,
    Entry,
    Setting,
    Told,
    enter,
    read_entries,
    render_leaderboard,
    settings_named,
)
from gradveil.lab.leaderboard.entries import path_of
from gradveil.lab.leaderboard.page import AS_GOOD, leaderboard

COMMITTED = Path(__file__).parents[2] / "docs" / "leaderboard"
TINY = replace(
    SETTINGS["mnist-lenet-b1"],
    audit={
        "data": "mnist-samples", "model": "mlp", "threat": "D", "images": 2, "gallery": 10, "budget": "standard",
        "attacks": ["analytic", "identify"], "unfit": "leave out",
    },
    training={
        "data": "mnist-samples", "model": "mlp:normalize=true", "clients": 2, "rounds": 2, "batch_size": 20,
        "epochs": 1,
    },
)  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_every_shown_defense_fits_into_the_case_of_every_setting(setting: Setting) -> None:
    case = setting.case(SHOWN, "cpu")
    assert case.defenses == tuple(DEFENSES.canonical(spec) for spec in SHOWN)
    assert case.threat == "D"
    assert (setting.trained("none", "cpu") is None) == (setting.training is None)


def test_settings_are_chosen_by_pattern() -> None:
    assert [one.name for one in settings_named(["mnist-*-b8"])] == ["mnist-lenet-b8", "mnist-resnet18-b8"]
    assert len(settings_named([])) == len(SETTINGS)
    with pytest.raises(UnknownNameError, match="there are: mnist-lenet-b1"):
        settings_named(["mnst"])


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting of the tests in the place of the one whose name it has: entries of other settings are refused."""
    monkeypatch.setitem(SETTINGS, TINY.name, TINY)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(SETTINGS, TINY.name, TINY)
        for specs in (["none", "noise:sigma=10"], ["none", "clip:bound=1"]):  # entered one after the other, none kept
            list(enter(TINY, specs, folder / "docs", folder / "work", device="cpu"))
    return folder


@pytest.fixture
def board(measured: Path, tiny: None) -> Path:  # noqa: ARG001
    return measured


@pytest.mark.integration
def test_an_entry_says_what_was_found_and_what_it_costs(board: Path) -> None:
    entries = {entry.defense: entry for entry in read_entries(board / "docs")}
    assert entries.keys() == {"none", "noise:sigma=10.0", "clip:bound=1.0"}
    plain = entries["none"]
    assert plain.grade == "F"
    assert plain.worst is not None
    assert plain.worst.identified == 1
    assert plain.rebuilt is not None
    assert plain.rebuilt.attack == "analytic"
    assert plain.trained is not None
    assert plain.trained.rounds == 2
    noisy = entries["noise:sigma=10.0"]
    assert noisy.rebuilt is not None
    assert noisy.rebuilt.identified < 1


@pytest.mark.integration
def test_what_was_measured_is_not_measured_again(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in (board / "docs").rglob("*.json")}
    monkeypatch.setattr("gradveil.auditing.run._run_together", lambda *_: pytest.fail("attacked again"))
    list(enter(TINY, ["clip:bound=1"], board / "docs", board / "work", device="cpu"))
    assert {path: path.read_bytes() for path in (board / "docs").rglob("*.json")} == before


@pytest.mark.integration
def test_what_was_stopped_before_its_first_row_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def entered() -> list[Path]:
        return list(enter(TINY, ["none"], tmp_path / "docs", tmp_path / "work", device="cpu", train=False))

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("gradveil.auditing.run.save_reconstructions", stop)
        with pytest.raises(KeyboardInterrupt):
            entered()
    assert [path.name for path in entered()] == ["none.json"]


@pytest.mark.integration
def test_trainings_on_different_data_do_not_meet(board: Path) -> None:
    other = replace(TINY, name="cifar10-lenet-b1", training={**(TINY.training or {}), "data": "cifar10-samples"})
    (entry,) = enter(other, ["none"], board / "other", board / "work", device="cpu")
    assert entry.exists()
    assert {path.name for path in (board / "work" / "trainings").iterdir()} == {"mnist-lenet", "cifar10-lenet"}


def test_the_page_shows_every_entry_the_best_first(board: Path) -> None:
    page = render_leaderboard(board / "docs").read_text()
    shares = [int(share) for share in re.findall(r"\| [A-F](?:, no counter-move)? \| (\d+)% \(", page)]
    assert len(shares) == 3
    assert shares == sorted(shares)
    assert re.search(r"\| `none` \| F \| 100% \(\d+ to 100\) \| `\w+` \| 100%", page)
    assert "Not measured yet: mnist-lenet-b8" in page


def test_the_page_says_what_there_is_to_find_and_what_chance_finds(board: Path) -> None:
    page = leaderboard(read_entries(board / "docs"))
    assert "2 private images, 1 behind each update, among the 100 candidates of `mnist-samples`" in page
    assert "Random picks identify 10% of them on average, which with so few images is grade D" in page


def test_what_is_no_better_than_chance_is_marked_and_stands_before_what_is(board: Path) -> None:
    one = next(entry for entry in read_entries(board / "docs") if entry.defense == "clip:bound=1.0")
    entries = [one, one.model_copy(update={"defense": "zeros", "flags": (AS_GOOD,)})]
    lines = [line for line in leaderboard(entries).splitlines() if line.startswith("| `")]
    assert [("zeros" in line, "†" in line) for line in lines] == [(True, True), (False, False)]
    assert AS_GOOD in {flag.name for flag in FLAGS}


def test_costs_have_columns_where_they_were_measured(board: Path) -> None:
    entries = read_entries(board / "docs")
    assert re.search(
        r"\| accuracy \| lost \| time \|\n(?s:.*)\| \d+\.\d% \| -?\d+\.\d \| \d+\.\dx \|", leaderboard(entries)
    )
    assert "Training: 2 rounds of mnist-samples on 2 of 2 clients" in leaderboard(entries)
    without = leaderboard([entry.model_copy(update={"trained": None}) for entry in entries])
    assert "| by | without candidates | labels | member | ceiling |\n" in without
    assert "cost in training is not measured yet" in without


@pytest.mark.integration
def test_a_defense_that_does_not_fit_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = replace(
        TINY, audit={**TINY.audit, "model": "resnet18", "attacks": ["ig:iterations=1,restarts=1"]}, training=None
    )
    monkeypatch.setitem(SETTINGS, setting.name, setting)
    list(enter(setting, ["none", "dp"], tmp_path / "docs", tmp_path / "work", device="cpu"))
    page = render_leaderboard(tmp_path / "docs").read_text()
    assert "| `dp` |" not in page
    assert re.search(r"Cannot work on this model:\n\n- `dp`: .*batch norm", page, re.IGNORECASE)


@pytest.mark.integration
@pytest.mark.usefixtures("tiny")
def test_a_file_of_ones_own_registers_a_defense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DEFENSES, "_factories", dict(DEFENSES._factories))  # what is registered here ends here
    text = (Path(__file__).parents[2] / "docs" / "defenses" / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    (tmp_path / "signs.py").write_text(code[1])
    told = CliRunner().invoke(
        app, ["leaderboard", "--load", str(tmp_path / "signs.py"), "--out", str(tmp_path / "docs")]
    )
    assert told.exit_code == 0, told.output
    list(enter(TINY, ["none", "signs:size=0.01"], tmp_path / "docs", tmp_path / "work", device="cpu", train=False))
    monkeypatch.undo()  # whoever writes the page anew need not have the file
    monkeypatch.setitem(SETTINGS, TINY.name, TINY)
    assert "signs" not in DEFENSES
    assert "`signs:size=0.01`" in render_leaderboard(tmp_path / "docs").read_text()


def test_a_damaged_entry_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "results" / "mnist-lenet-b1").mkdir(parents=True)
    (tmp_path / "results" / "mnist-lenet-b1" / "x.json").write_text('{"version": 1}')
    with pytest.raises(BadFileError, match=r"x\.json is not an entry"):
        read_entries(tmp_path)
    entry = json.loads(next((COMMITTED / "results").glob("*/none.json")).read_text())
    (tmp_path / "results" / "mnist-lenet-b1" / "x.json").write_text(json.dumps(entry | {"case": {}}))
    with pytest.raises(BadFileError, match=r"x\.json is not an entry"):
        read_entries(tmp_path)


def strange(folder: Path, changes: dict[str, Any], name: str = "none.json") -> Path:
    """A leaderboard of one committed entry with something changed; dots are fields within fields."""
    entry = json.loads((COMMITTED / "results/cifar10-lenet-b1/none.json").read_text())
    for dotted, value in changes.items():
        *above, last = dotted.split(".")
        functools.reduce(dict.__getitem__, above, entry)[last] = value
    path = folder / "results" / "cifar10-lenet-b1" / name
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(entry))
    return folder


def test_an_entry_measured_elsewhere_is_taken(tmp_path: Path) -> None:
    others = {"case.device": "cpu", "environment.device": "NVIDIA X", "environment.threads": 3}
    (entry,) = read_entries(strange(tmp_path, others))
    assert entry.environment.device == "NVIDIA X"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"worst.interval": [float("nan"), 1.0]}, "worst.interval"),
        ({"worst.interval": [0.5, 1e300]}, "worst.interval"),
        ({"worst.identified": float("inf")}, "worst.identified"),
        ({"worst.attack": "a|b"}, "worst.attack"),
        ({"trained.round_seconds": 0.0}, "round_seconds"),
        ({"trained.accuracy": float("nan")}, "trained.accuracy"),
        ({"grade": "A |\n| x"}, "grade"),
        ({"environment.device": "<b>"}, "environment.device"),
        ({"setting": "nowhere"}, "no setting is called 'nowhere'"),
        ({"setting": "cifar10-lenet-b8"}, "it belongs into results/cifar10-lenet-b8/none.json"),
        ({"defense": "dp"}, "it belongs into results/cifar10-lenet-b1/dp.json"),
        ({"defense": "a | b\n<script>alert(1)</script>"}, "markup"),
        ({"defense": "none`"}, "markup"),
        ({"defense": "dp:sigma"}, "cannot read 'sigma'"),
        ({"defense": "noise:sigma=0.10"}, "not how a defense is written"),
        ({"defense": ""}, "not how a defense is written"),
        ({"case.images": 1}, "case differs from that of cifar10-lenet-b1 in 'images'"),
        ({"case.gallery": 10_000}, "case differs from that of cifar10-lenet-b1 in 'gallery'"),
        ({"case.data": "folder:path=/etc"}, "case differs from that of cifar10-lenet-b1 in 'data'"),
        ({"case.recipe.lr": 1e-9}, "case differs from that of cifar10-lenet-b1 in 'recipe'"),
        ({"case.more": float("nan")}, "case differs from that of cifar10-lenet-b1 in 'more'"),
        ({"a\nb": 1}, "extra inputs"),
    ],
    ids=str,
)
def test_an_entry_that_is_not_of_its_place_or_no_result_is_one_line(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(BadFileError, match=complaint) as caught:
        read_entries(strange(tmp_path, changes))
    assert "\n" not in str(caught.value)


def test_an_entry_under_another_name_is_refused(tmp_path: Path) -> None:
    """Else one defense could stand in a table twice."""
    with pytest.raises(BadFileError, match=r"it belongs into results/cifar10-lenet-b1/none\.json"):
        read_entries(strange(tmp_path, {}, "copy.json"))


def test_a_reason_is_shown_as_the_words_it_is(tmp_path: Path) -> None:
    unfit = "no <script>\n`x` ![picture](http://nowhere)"
    page = leaderboard(read_entries(strange(tmp_path, {"unfit": unfit})))
    assert r"- `none`: no \<script> \`x\` !\[picture](http://nowhere)" in page


def test_what_could_not_be_entered_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.lab.leaderboard.entries.run_case", lambda *_, **__: pytest.fail("measured"))
    setting, work = SETTINGS["cifar10-lenet-b1"], tmp_path / "work"
    with pytest.raises(BadFileError, match="case differs from that of cifar10-lenet-b1 in 'images'"):
        list(enter(setting, ["none"], strange(tmp_path / "docs", {"case.images": 1}), work, device="cpu"))

    def mine(*, mark: str = "") -> Defense:
        del mark
        return Defense()

    monkeypatch.setitem(DEFENSES._factories, "mine", mine)
    with pytest.raises(GradveilError, match="cannot be entered: it holds line breaks or markup"):
        list(enter(setting, ["mine:mark=<b>"], tmp_path / "other", work, device="cpu"))


def test_different_defenses_lie_in_different_files() -> None:
    specs = ["mine:shift=-1", "mine:shift=1", "mine:shift=1.", "Mine:shift=1", "mine+shift+1"]
    specs += ["x:a=b+y:c=d", "x:a=b,y=c+d", "x+a:b=y,c=d", "x:a=b,y=c,d=e", "clip:bound=1e-05", "clip:bound=1e+05"]
    assert len({path_of(Path(), "s", spec) for spec in specs}) == len(specs)
    names = ["none", "mine:shift=1", "clip:bound=4.0+noise:sigma=0.01", "dcs2:iterations=100,sensitive=first"]
    assert [path_of(Path(), "s", spec).stem for spec in names] == [
        "none", "mine-shift-1", "clip-bound-4.0-noise-sigma-0.01", "dcs2-iterations-100-sensitive-first"
    ]  # fmt: skip


def test_the_committed_page_is_that_of_the_committed_entries(tmp_path: Path) -> None:
    for entry in read_entries(COMMITTED):
        assert entry.setting in SETTINGS
    (tmp_path / "results").symlink_to(COMMITTED / "results")
    assert render_leaderboard(tmp_path).read_text() == (COMMITTED / "README.md").read_text()


def test_labels_members_and_ceilings_are_columns_where_entries_have_them() -> None:
    (old,) = [one for one in read_entries(COMMITTED) if (one.setting, one.defense) == ("cifar10-lenet-b1", "none")]
    assert (old.labels, old.member, old.ceiling) == (None, None, None)
    assert "| labels |" not in leaderboard([old])
    assert "Intervals count updates" not in leaderboard([old])
    assert old.worst is not None
    labels = Told(attack="ig", share=1.0, interval=(0.8, 1.0), chance=0.1, above_chance=True)
    member = Told(share=0.01, interval=(0.0, 0.2), above_chance=False)
    worst = old.worst.model_copy(update={"updates": 20})
    more = {"labels": labels, "member": member, "ceiling": 0.31, "flags": ("no counter-move",), "worst": worst}
    new = Entry.model_validate_json(old.model_copy(update={**more, "defense": "dp"}).model_dump_json(exclude_none=True))
    page = leaderboard([old, new])
    assert "| without candidates | labels | member | ceiling |" in page
    (line,) = [line for line in page.splitlines() if line.startswith("| `dp` |")]
    assert f"| {old.grade}, no counter-move |" in line
    assert "| 100% (80 to 100) | 1% (0 to 20) † | 31% |" in line
    (line,) = [line for line in page.splitlines() if line.startswith("| `none` |")]
    assert "|  |  | none |" in line
    assert "Intervals count updates" in page


@pytest.mark.integration
def test_an_entry_keeps_what_the_audit_answers(board: Path) -> None:
    kept = {one.defense: one for one in read_entries(board / "docs")}["none"]
    assert kept.ceiling is None, "nothing is proven of it"
    assert kept.labels is not None
    assert kept.labels.share == 1.0
