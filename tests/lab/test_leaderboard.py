"""The leaderboard: its settings, what entries keep and refuse, and a page that follows from raw rows alone."""

from __future__ import annotations

import functools
import gzip
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from gradveil.auditing.verdict import privacy_grade
from gradveil.cli.main import app
from gradveil.core.errors import BadFileError, GradveilError, UnknownNameError
from gradveil.defenses import DEFENSES, Defense
from gradveil.lab.leaderboard import (
    SEEDS,
    SETTINGS,
    Entry,
    Line,
    Setting,
    Trained,
    enter,
    merged,
    read_entries,
    render_leaderboard,
    save_entry,
    settings_named,
)
from gradveil.lab.leaderboard.entries import path_of, read_entry
from gradveil.lab.leaderboard.page import leaderboard, picture
from gradveil.metrics.statistics import interval

COMMITTED = Path(__file__).parents[2] / "docs" / "leaderboard"
MOST_BYTES = 6_000_000
TINY = replace(
    SETTINGS["convnet"],
    audit={
        "data": "mnist-samples", "model": "mlp", "threat": "D", "images": 4, "gallery": 10, "budget": "standard",
        "attacks": ["analytic", "identify"], "unfit": "leave out", "in_rounds": [1],
    },
    training={
        "data": "mnist-samples", "model": "mlp", "clients": 2, "rounds": 2, "batch_size": 5, "algorithm": "fedsgd",
        "lr": 0.1, "server_momentum": 0.9, "average_from": 1, "train_mode": False,
    },
    shown=("none", "noise:sigma=10"),
)  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_every_shown_defense_fits_into_the_case_of_every_setting(setting: Setting) -> None:
    case = setting.case(setting.shown, "cpu")
    assert case.defenses == tuple(DEFENSES.canonical(spec) for spec in setting.shown)
    assert case.threat == "D"
    assert case.images >= 100
    if setting.training is None:
        assert setting.stages == ("untrained",)
        return
    training = setting.trained("none", 1, "cpu")
    assert training is not None
    assert replace(training.recipe, lr=case.recipe.lr) == case.recipe, "the audit is at the training's own point"
    assert training.batch_size in (case.batch_size, None)
    assert training.model == case.model
    assert training.seed == 1


@pytest.mark.parametrize("name", [name for name in SETTINGS if not name.startswith("sum-")])
def test_an_a_can_be_earned(name: str) -> None:
    case = SETTINGS[name].case(["none"], "cpu")
    found = interval([0] * (case.images // case.batch_size), case.batch_size)
    assert privacy_grade(found, case.batch_size / max(case.images, case.gallery)) == "A"


def test_settings_are_chosen_by_pattern() -> None:
    assert [one.name for one in settings_named(["sum-*"])] == ["sum-of-10", "sum-of-100"]
    assert len(settings_named([])) == len(SETTINGS)
    with pytest.raises(UnknownNameError, match="there are: linear"):
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
        for specs in (["none", "noise:sigma=10"], ["none", "dp"]):  # entered one after the other, none kept
            list(enter(TINY, specs, folder / "docs", folder / "work", device="cpu"))
    return folder


@pytest.fixture
def board(measured: Path, tiny: None) -> Path:  # noqa: ARG001
    return measured


@pytest.mark.integration
def test_an_entry_keeps_every_example_and_every_seed(board: Path) -> None:
    entries = {entry.defense: entry for entry in read_entries(board / "docs")}
    assert entries.keys() == {"none", "noise:sigma=10.0", "dp"}
    plain = entries["none"]
    assert [one.seed for one in plain.trainings] == list(SEEDS)
    assert all(one.rounds == (1, 2) for one in plain.trainings)
    assert [one.stage for one in plain.audits] == ["untrained", "trained"]
    rows = [row for one in plain.audits for row in one.rows if not row.is_prior]
    assert {row.attack for row in rows} == {"analytic", "identify"}
    assert all(len(row.per_image) == 4 for row in rows)
    line = Line(plain)
    assert (line.grade, line.worst) == ("F", 1.0)
    assert (plain.lacks(), plain.unseen()) == ([], [])
    told = [one.verdict() for one in entries["dp"].audits]
    assert all(one and one.ceiling and one.ceiling.recognised is not None for one in told)


@pytest.mark.integration
def test_what_was_measured_is_not_measured_again(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in (board / "docs").rglob("*.gz")}
    monkeypatch.setattr("gradveil.auditing.run._run_together", lambda *_: pytest.fail("attacked again"))
    monkeypatch.setattr("gradveil.lab.leaderboard.entries.train", lambda *_, **__: pytest.fail("trained again"))
    list(enter(TINY, ["noise:sigma=10"], board / "docs", board / "work", device="cpu"))
    assert {path: path.read_bytes() for path in (board / "docs").rglob("*.gz")} == before


@pytest.mark.integration
def test_an_attack_joins_what_entries_have(board: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    list(enter(TINY, ["none"], tmp_path, work, device="cpu", attacks=["identify"], train_too=False))
    (entry,) = read_entries(tmp_path)
    assert (entry.lacks(), entry.unseen()) == (["analytic"], ["trained"])
    list(enter(TINY, ["none"], tmp_path, work, device="cpu", attacks=["fingerprint"], train_too=False))
    (entry,) = read_entries(tmp_path)
    assert entry.audits[0].attacks == ("identify", "fingerprint")
    assert "Lacks: `analytic`; the trained model." in leaderboard([entry])
    assert board.exists()


@pytest.mark.integration
@pytest.mark.usefixtures("tiny")
def test_a_defense_that_does_not_fit_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = {**TINY.audit, "model": "resnet18", "attacks": ["identify"]}
    setting = replace(TINY, audit=audit, training=None)
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
    options = ["--load", str(tmp_path / "signs.py"), "--out", str(tmp_path / "docs"), "--work", str(tmp_path / "work")]
    only = ["--setting", TINY.name, "--no-training", "--device", "cpu"]
    told = CliRunner().invoke(app, ["leaderboard", "none", "signs:size=0.01", *only, *options])
    assert told.exit_code == 0, told.output
    monkeypatch.undo()  # whoever writes the page anew need not have the file
    monkeypatch.setitem(SETTINGS, TINY.name, TINY)
    assert "signs" not in DEFENSES
    assert "`signs:size=0.01`" in render_leaderboard(tmp_path / "docs").read_text()


def committed(defense: str = "none", setting: str = "linear") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(path_of(COMMITTED, setting, defense).read_bytes()))
    return found


def strange(folder: Path, changes: dict[str, Any], name: str = "none.json.gz") -> Path:
    """A leaderboard of one committed entry with something changed; dots are fields within fields."""
    entry = committed()
    for dotted, value in changes.items():
        *above, last = [int(part) if part.isdigit() else part for part in dotted.split(".")]
        functools.reduce(lambda tree, part: tree[part], above, entry)[last] = value  # type: ignore[index]
    path = folder / "entries" / "linear" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(json.dumps(entry).encode()))
    return folder


def test_an_entry_measured_elsewhere_is_taken(tmp_path: Path) -> None:
    (entry,) = read_entries(strange(tmp_path, {"audits.0.environment.device": "NVIDIA X"}))
    assert entry.audits[0].environment is not None
    assert entry.audits[0].environment.device == "NVIDIA X"


TRAINED = {"seed": 1, "rounds": [5], "accuracy": [0.5], "round_seconds": 1.0}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"audits.0.rows.0.identified_interval": [float("nan"), 1.0]}, "identified_interval"),
        ({"audits.0.rows.0.identified": 7.0}, "identified"),
        ({"audits.0.rows.0.attack": "a|b"}, "markup"),
        ({"audits.0.rows.0.defense": "dp"}, "of another defense"),
        ({"audits.0.rows.0.per_image": []}, "one score for each"),
        ({"audits.0.rows.0.images": 20}, "one score for each"),
        ({"audits.0.rows.0.threat": "A"}, "of another adversary"),
        ({"audits.0.environment.device": "<b>"}, "environment.device"),
        ({"trainings": [TRAINED]}, "has not the 40 rounds"),
        ({"trainings": [TRAINED, TRAINED]}, "the same seed"),
        ({"trainings": [{**TRAINED, "round_seconds": 0.0}]}, "round_seconds"),
        ({"trainings": [{**TRAINED, "accuracy": [float("nan")]}]}, "accuracy"),
        ({"trainings": [{**TRAINED, "accuracy": []}]}, "one accuracy for each round"),
        ({"setting": "nowhere"}, "no setting is called 'nowhere'"),
        ({"setting": "sum-of-10"}, r"it belongs into entries/sum-of-10/none\.json\.gz"),
        ({"defense": "a | b\n<script>alert(1)</script>"}, "markup"),
        ({"defense": "noise:sigma=0.10"}, "not how a defense is written"),
        ({"audits.0.case.images": 1}, "case differs from that of linear in 'images'"),
        ({"audits.0.case.gallery": 10_000}, "case differs from that of linear in 'gallery'"),
        ({"audits.0.case.data": "folder:path=/etc"}, "case differs from that of linear in 'data'"),
        ({"audits.0.case.threat": "A"}, "case differs from that of linear in 'threat'"),
        ({"audits.0.case.recipe": {"lr": 1e-9}}, "case differs from that of linear in 'recipe'"),
        ({"version": 1}, "another version"),
        ({"a\nb": 1}, "extra inputs"),
    ],
    ids=str,
)
def test_an_entry_against_the_rules_is_refused_in_one_line(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(BadFileError, match=complaint) as caught:
        read_entries(strange(tmp_path, changes))
    assert "\n" not in str(caught.value)


def test_an_entry_under_another_name_is_refused(tmp_path: Path) -> None:
    """Else one defense could stand in a table twice."""
    with pytest.raises(BadFileError, match=r"it belongs into entries/linear/none\.json\.gz"):
        read_entries(strange(tmp_path, {}, "copy.json.gz"))


@pytest.mark.parametrize("content", [b"", b"{}", gzip.compress(b"{}"), gzip.compress(b"{}")[:-4]], ids=range(4))
def test_a_damaged_entry_is_one_line(content: bytes, tmp_path: Path) -> None:
    path = path_of(tmp_path, "linear", "none")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(BadFileError, match="is not an entry"):
        read_entries(tmp_path)


def test_a_small_file_that_unpacks_to_a_large_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.lab.leaderboard.entries.LARGEST", 2**10)
    path = path_of(tmp_path, "linear", "none")
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(b" " * 2**12))
    with pytest.raises(BadFileError, match="too large"):
        read_entry(path)


def test_what_could_not_be_entered_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.lab.leaderboard.entries.audit", lambda *_, **__: pytest.fail("measured"))
    setting, work = SETTINGS["linear"], tmp_path / "work"
    with pytest.raises(BadFileError, match="case differs from that of linear in 'images'"):
        list(enter(setting, ["none"], strange(tmp_path / "docs", {"audits.0.case.images": 1}), work, device="cpu"))

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
    assert [path_of(Path(), "s", spec).name.removesuffix(".json.gz") for spec in names] == [
        "none", "mine-shift-1", "clip-bound-4.0-noise-sigma-0.01", "dcs2-iterations-100-sensitive-first"
    ]  # fmt: skip


def test_entries_are_merged_by_seed_and_attack() -> None:
    trained = [Trained(seed=seed, rounds=(80,), accuracy=(0.1 * seed,), round_seconds=1.0) for seed in (1, 2)]
    first, second = (Entry(setting="features", defense="none", trainings=(one,)) for one in trained)
    both = merged(second, merged(None, first))
    assert [one.seed for one in both.trainings] == [1, 2]
    again = merged(both, first.model_copy(update={"trainings": (trained[0].model_copy(update={"accuracy": (0.9,)}),)}))
    assert [one.accuracy for one in again.trainings] == [(0.9,), (0.2,)]


def test_saving_twice_changes_nothing(tmp_path: Path) -> None:
    entry = next(one for one in read_entries(COMMITTED) if one.defense == "none" and one.setting == "linear")
    path = save_entry(tmp_path, entry)
    before = path.read_bytes()
    assert save_entry(tmp_path, entry).read_bytes() == before


def lines_of(page: str) -> dict[tuple[str, str], list[str]]:
    """By title of the setting and defense, the cells of a line of the page."""
    found = {}
    for section in page.split("\n## ")[1:]:
        for line in section.splitlines():
            if line.startswith("| `"):
                cells = [cell.strip() for cell in line.strip("|").split(" | ")]
                found[section.partition("\n")[0], cells[0].strip("` ")] = cells
    return found


def share_of(row: dict[str, Any], what: str) -> float:
    """Of one raw row, from its examples alone."""
    images = row["per_image"]
    if what == "labels":  # of a batch the labels count in any order
        right, size = 0, len(images) * 1 // row["updates"]
        for start in range(0, len(images), size):
            part = images[start : start + size]
            guessed, true = ([one.get(name, 0) for one in part] for name in ("label_guess", "label"))
            right += sum(min(guessed.count(label), true.count(label)) for label in set(true))
        return right / len(images)
    return math.fsum(one.get("identified_share", 0) for one in images) / len(images)


def test_every_share_and_accuracy_of_the_page_follows_from_raw_rows() -> None:
    """By other code than the page's: from the text of entries, example by example."""
    page = lines_of((COMMITTED / "README.md").read_text())
    checked = 0
    for path in sorted((COMMITTED / "entries").glob("*/*.gz")):
        entry = json.loads(gzip.decompress(path.read_bytes()))
        setting = SETTINGS[entry["setting"]]
        audits = sorted(entry.get("audits", []), key=lambda one: setting.stages.index(one["stage"]))
        if not any(one.get("rows") for one in audits):
            continue
        cells = page[setting.title, entry["defense"]]
        answers = zip(("rebuilt", "recognised", "labels"), (cells[3], cells[4], cells[6]), strict=True)
        for what, cell in answers:
            shown = [part.split("%")[0] for part in cell.split(" / ")]
            wanted = []
            for one in (each for each in audits if each.get("rows")):
                rows = [row for row in one["rows"] if row["attack"] != "prior-only"]
                choosing = [row for row in rows if "candidates" in row["needs"]]
                asked = choosing if what == "recognised" else [row for row in rows if row not in choosing]
                wanted.append(f"{max(share_of(row, what) for row in asked):.0%}"[:-1] if asked else "?")
            assert shown == wanted, (path, what)
            checked += len(shown)
        done = [one for one in entry.get("trainings", []) if one.get("complete", True) and one.get("accuracy")]
        if setting.training is not None and len(done) > 1:
            ends = [100 * one["accuracy"][-1] for one in done]
            digits = 1 if stdev(ends) < 0.5 else 0
            assert cells[8].startswith(f"{mean(ends):.{digits}f} ± {stdev(ends):.{digits}f}%"), path
    assert checked > 50


def test_lines_are_in_order_of_the_worst_answer_then_of_accuracy() -> None:
    entries = read_entries(COMMITTED)
    for setting in SETTINGS.values():
        shown = [key[1] for key in lines_of((COMMITTED / "README.md").read_text()) if key[0] == setting.title]
        lines = {one.defense: Line(one) for one in entries if one.setting == setting.name}
        keys = [(round(lines[name].worst or 0, 2), -mean(lines[name].accuracies or [0])) for name in shown]
        assert keys == sorted(keys), setting.name


def worst_at(share: float, accuracy: float, defense: str) -> Line:
    """A line with this worst answer and accuracy."""
    line = Line(Entry(setting="features", defense=defense))
    trained = tuple(Trained(seed=seed, rounds=(80,), accuracy=(accuracy,), round_seconds=1.0) for seed in SEEDS)
    object.__setattr__(line, "entry", line.entry.model_copy(update={"trainings": trained}))
    return _Fixed(line.entry, share)


class _Fixed(Line):
    def __init__(self, entry: Entry, share: float) -> None:
        super().__init__(entry)
        object.__setattr__(self, "share", share)

    @property
    def worst(self) -> float:
        return float(vars(self)["share"])


def test_who_dominates_whom() -> None:
    veil = worst_at(0.05, 0.80, "veil")
    assert worst_at(0.05, 0.85, "noise").dominates(veil), "as private and more accurate"
    assert worst_at(0.01, 0.80, "noise").dominates(veil), "more private and as accurate"
    assert not worst_at(0.05, 0.80, "noise").dominates(veil), "the same"
    assert not worst_at(0.06, 0.99, "noise").dominates(veil)
    assert not worst_at(0.00, 0.79, "noise").dominates(veil)


def test_the_picture_has_a_dot_for_every_trained_line() -> None:
    entries = read_entries(COMMITTED)
    text = (COMMITTED / "frontier.svg").read_text()
    assert text == picture(entries)
    tree = ElementTree.fromstring(text)
    dots = [node for node in tree.iter() if node.tag.endswith("circle")]
    lines = [Line(one) for one in entries if SETTINGS[one.setting].training is not None]
    assert len(dots) == sum(bool(line.accuracies) and line.worst is not None for line in lines) > 0
    assert "prefers-color-scheme: dark" in text


def test_the_committed_page_is_that_of_the_committed_entries(tmp_path: Path) -> None:
    (tmp_path / "entries").symlink_to(COMMITTED / "entries")
    assert render_leaderboard(tmp_path).read_text() == (COMMITTED / "README.md").read_text()


def test_all_that_is_kept_is_small() -> None:
    assert sum(path.stat().st_size for path in COMMITTED.rglob("*") if path.is_file()) < MOST_BYTES


@pytest.mark.parametrize("name", ["linear-200", "features-200"])
def test_veil_holds_what_it_promises_on_200_examples(name: str) -> None:
    entries = [one for one in read_entries(COMMITTED) if one.setting == name]
    if not entries:
        assert name == "features-200", "what two cores can afford is measured"
        return
    (entry,) = entries
    verdict = entry.audits[0].verdict()
    assert verdict is not None
    assert verdict.grade in ("A", "B")
    assert verdict.images == 200
    assert verdict.ceiling is not None
    assert verdict.ceiling.recognised is not None
    assert verdict.ceiling_of_run is not None
    assert verdict.ceiling_of_run.recognised is not None
    assert verdict.identified is not None
    assert verdict.identified_interval is not None
    assert verdict.identified < verdict.ceiling_of_run.recognised, "what is promised"
    assert verdict.identified_interval[0] <= verdict.ceiling.recognised, "no reply gives away more than is proven"
    assert {"identify", "replay"} <= set(entry.audits[0].attacks)


@pytest.mark.parametrize("name", [name for name, one in SETTINGS.items() if one.reaches is not None])
def test_undefended_trainings_learn(name: str) -> None:
    plain = [Line(one) for one in read_entries(COMMITTED) if (one.setting, one.defense) == (name, "none")]
    if not plain:
        assert f"- `{name}`: " in (COMMITTED / "README.md").read_text().partition("## Not measured yet")[2]
        return
    assert plain[0].accuracies
    assert min(plain[0].accuracies) >= (SETTINGS[name].reaches or 0)


def test_the_first_edition_is_that_of_its_files() -> None:
    """Its page is no longer computed: every share in it is compared with the file that it came from."""
    text, checked = (COMMITTED / "first-edition.md").read_text(), 0
    for section in text.split("\n## ")[1:]:
        setting = re.search(r"`((?:mnist|cifar10)-[\w-]+)`; suite", section)
        assert setting is not None
        files = (COMMITTED / "results" / setting[1]).glob("*.json")
        entries = {one["defense"]: one for one in (json.loads(path.read_text()) for path in files)}
        for spec, grade, share in re.findall(r"^\| `([^`]+)` \| ([A-F])[^|]* \| (\d+)% ", section, re.MULTILINE):
            worst = entries[spec]["worst"]
            assert (grade, int(share)) == (entries[spec]["grade"], round(100 * worst["identified"])), (setting[1], spec)
            checked += 1
    assert checked > 80
