"""What an informed attacker does about each defense: said by the audit, shown by the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradveil.attacks.against import AGAINST
from gradveil.auditing import Case, Row, read_audit, run_case
from gradveil.core.errors import BadFileError
from gradveil.report.words import NO_MOVE, NOT_TOLD, NOT_TRIED, counter_moves
from report.saved_audit import edit_audit, write_audit

QUICK = "informed:iterations=2,restarts=1"


def audited(folder: Path, **settings: object) -> tuple[Row, ...]:
    case = {"data": "mnist-samples", "model": "mlp:hidden=8,depth=1", "images": 1, "gallery": 4, "attacks": (QUICK,)}
    run_case(Case(**{**case, **settings}), folder)  # type: ignore[arg-type]
    return read_audit(folder).rows


@pytest.mark.integration
def test_each_link_of_a_chain_gets_its_sentence(tmp_path: Path) -> None:
    chain = "sparsify+noise:sigma=0.1"
    rows = audited(tmp_path, defenses=("none", chain, "censor"))
    said = dict(counter_moves(rows))
    assert list(said) == [chain, "censor"]
    assert said[chain] == [
        ("sparsify", AGAINST["sparsify"].sentence),
        ("noise:sigma=0.1", AGAINST["noise"].sentence),
    ]
    assert said["censor"] == [("censor", AGAINST["censor"].sentence)]


@pytest.mark.integration
def test_options_without_a_counter_move_say_so(tmp_path: Path) -> None:
    rows = audited(tmp_path, defenses=("clip:per=global",))
    ((_, sentences),) = counter_moves(rows)
    assert [sentence for _, sentence in sentences] == [NO_MOVE]


@pytest.mark.integration
def test_who_was_not_told_does_nothing_about_it(tmp_path: Path) -> None:
    rows = audited(tmp_path, defenses=("sparsify",), threat="B")
    assert counter_moves(rows) == [("sparsify", [("sparsify", NOT_TOLD)])]


def test_without_an_informed_attack_the_report_says_so(tmp_path: Path) -> None:
    folder = write_audit(tmp_path)
    assert counter_moves(read_audit(folder).rows) == [("noise:sigma=0.1", [("noise:sigma=0.1", NOT_TRIED)])]
    edit_audit(folder, rows=edit_audit(folder)["rows"][:1])
    assert counter_moves(read_audit(folder).rows) == []


@pytest.mark.parametrize("damage", ["text", ["list"], {"noise:sigma=0.1": 3}])
def test_damaged_counter_moves_are_refused(tmp_path: Path, damage: object) -> None:
    folder = write_audit(tmp_path)
    rows = edit_audit(folder)["rows"]
    rows[1]["counter_moves"] = damage
    edit_audit(folder, rows=rows)
    with pytest.raises(BadFileError, match="counter_moves"):
        read_audit(folder)
