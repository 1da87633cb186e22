"""Every flag on rows that raise it and on rows that do not, and where it is told apart from what looks alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gradveil.auditing import Row, make_case, run_case
from gradveil.auditing.flags import FLAGS, OF_VERDICTS, explained, flagged

PAGE = (Path(__file__).parents[2] / "docs" / "flags.md").read_text()


def row(**changes: Any) -> Row:
    """An attack that found half of the images, with nothing to complain of."""
    plain: dict[str, Any] = {
        "defense": "none",
        "attack": "ig",
        "prior_of": None,
        "threat": "C",
        "images": 32,
        "updates": 32,
        "identified": 0.5,
        "identified_interval": (0.1, 0.9),
        "psnr": 10.0,
        "gallery": 10,
        "at_random": 0.1,
        "label_accuracy": 1.0,
        "per_image": stopped("budget", "budget"),
        "trace": {"steps": [0, 10, 20], "objective": [[1.0, 0.5, 0.2], [0.9, 0.4, 0.3]]},
        "log": {},
        "randomized": False,
        "asked": 1,
        "statistics_given": False,
        "files": {"reconstruction": "reconstruction.safetensors"},
    }
    return Row(**{**plain, **changes})


def stopped(*reasons: str) -> list[dict[str, Any]]:
    return [{"picture": place, "stopped": reason} for place, reason in enumerate(reasons)]


def prior(identified: float, of: str = "ig") -> Row:
    flat = {"steps": [0, 10], "objective": [[0.1, 0.1]]}
    return row(attack="prior-only", prior_of=of, identified=identified, label_accuracy=0.0, trace=flat)


def trace(*lines: list[float | None]) -> dict[str, Any]:
    return {"trace": {"steps": list(range(len(lines[0]))), "objective": list(lines)}}


def raised(*rows: Row) -> list[str]:
    """The flags of the first row."""
    return list(flagged(rows)[0].flags)


AWARE, NOISE = "ig:aware=true", "noise:sigma=0.1"

RAISING = {
    "prior-only as good": [
        [row(), prior(0.5)],
        [row(identified=0.0), prior(0.0)],
        [row(identified=1 / 32, gallery=100, at_random=0.01), prior(0.0)],  # one lucky hit
        [row(identified=0.625), prior(0.5)],  # the prior alone finds private images, and little more is found
    ],
    "diverged": [[row(per_image=stopped("budget", "diverged"))]],
    "objective did not fall": [
        [row(**trace([1.0, 0.5, 0.2], [0.9, 0.9, 0.895]))],
        [row(**trace([1.0, 1.2]))],
        [row(**trace([None, None]))],
    ],
    "weaker attack was better": [
        [row(attack=AWARE), row(identified=0.75)],
        [row(attack="informed"), row(attack=AWARE, identified=0.75)],
        [
            row(attack="ig:aware=true,tv=0.1"),
            row(attack="ggl", identified=0.25),
            row(attack="analytic", identified=1.0),
        ],
    ],
    "random defense seen once": [[row(randomized=True)]],
    "fallback used": [[row(log={"fallback_rate": 0.25})]],
    "wrong labels": [[row(label_accuracy=0.5)]],
    "batch-norm statistics given": [[row(statistics_given=True, threat="E")]],
    "running statistics not attacked": [[row(statistics_sent=True)]],
}
QUIET = {
    "prior-only as good": [
        [row(), prior(0.125)],
        [row(), prior(1.0, of="dlg")],
        [row(identified=None), prior(0.0)],
        [prior(0.0)],
    ],
    "diverged": [[row()]],
    "objective did not fall": [[row()], [row(**trace([0.0]))], [prior(0.0)]],
    "weaker attack was better": [
        [row(attack=AWARE), row(identified=0.5)],
        [row(attack=AWARE), row(identified=1.0, defense=NOISE)],
        [row(attack=AWARE), row(attack="identify", identified=1.0, threat="D")],
        [row(attack=AWARE), row(attack="ggl", identified=0.75), row(identified=0.75)],
        [row(), row(attack=AWARE, identified=1.0)],
        [row(attack=AWARE), prior(1.0, of="dlg")],
        [row(attack=AWARE), row(identified=None)],
        [row(attack=AWARE, identified=None), row()],
    ],
    "random defense seen once": [[row(randomized=True, asked=4)], [row()]],
    "fallback used": [[row(log={"fallback_rate": 0.0})], [row(log={"clipped": 1.0})]],
    "wrong labels": [
        [row(label_accuracy=0.5, threat="C+labels")],
        [row(label_accuracy=0.5, candidates=100)],
        [row(identified=None, label_accuracy=None)],
        [prior(0.0)],
    ],
    "batch-norm statistics given": [[row(threat="E")]],
    "running statistics not attacked": [[row(statistics_sent=False)]],
}  # fmt: skip


def test_every_flag_is_tried_both_ways() -> None:
    assert set(RAISING) == set(QUIET) == {flag.name for flag in FLAGS}


@pytest.mark.parametrize(("name", "rows"), [(name, rows) for name, cases in RAISING.items() for rows in cases])
def test_a_flag_is_raised(name: str, rows: list[Row]) -> None:
    assert raised(*rows) == [name]


@pytest.mark.parametrize(("name", "rows"), [(name, rows) for name, cases in QUIET.items() for rows in cases])
def test_a_flag_is_not_raised(name: str, rows: list[Row]) -> None:
    assert name not in raised(*rows)


def test_what_a_flag_means_is_saved_beside_the_rows() -> None:
    marked = flagged([row(randomized=True), prior(0.0)])
    assert list(explained(marked)) == ["random defense seen once"]
    assert "draws at random" in explained(marked)["random defense seen once"].raised_if


@pytest.mark.parametrize("name", OF_VERDICTS)
def test_the_page_says_what_a_flag_of_a_verdict_says(name: str) -> None:
    (own,) = (
        " ".join(part.split()) for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if f"`{name}`\n" in part[:40]
    )
    assert f"**Raised if** {OF_VERDICTS[name].raised_if}." in own
    assert f"**Because** {OF_VERDICTS[name].because}." in own


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_the_page_says_what_the_flag_says(flag: Any) -> None:
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (own,) = (" ".join(part.split()) for part in section if part.startswith(f"`{flag.name}`"))
    assert f"**Raised if** {flag.raised_if}." in own
    assert f"**Because** {flag.because}." in own


def test_a_real_audit_knows_who_draws_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "empty"))
    random = ["noise:sigma=0.1", "dp", "ats", "precode", "censor:trials=2"]
    fields = {"model": "mlp", "attacks": ["analytic"], "images": 1, "gallery": 4, "defenses": ["none", "clip", *random]}
    audit = run_case(make_case(fields), tmp_path / "a")
    assert [row.defense for row in audit.rows if "random defense seen once" in row.flags] == random


@pytest.mark.integration
@pytest.mark.parametrize(
    ("model", "train_mode", "sent"),
    [("convnet:width=4", True, True), ("convnet:width=4", False, False), ("mlp", True, False)],
)
def test_a_real_audit_knows_whose_running_statistics_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, train_mode: bool, sent: bool
) -> None:
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "empty"))
    fields = {"model": model, "attacks": ["dlg:iterations=1"], "images": 1, "gallery": 4, "defenses": ["none"]}
    audit = run_case(make_case({**fields, "restarts": 1, "recipe": {"train_mode": train_mode}}), tmp_path / "a")
    (row,) = (row for row in audit.rows if not row.is_prior)
    assert ("running statistics not attacked" in row.flags) is sent
