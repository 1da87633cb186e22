"""The record of an audit: what is written is read, version 1 gives the same page, the schema is the published one."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gradveil.auditing import Audit, ImageScore, Row, read_audit
from gradveil.auditing.audit import SavedTraining
from gradveil.core.atomic import write_json
from gradveil.core.errors import BadFileError
from gradveil.metrics import METRICS
from gradveil.report import render
from report.saved_audit import edit_audit, write_audit, write_full_audit

ROOT = Path(__file__).parents[2]


def raw(folder: Path) -> dict[str, Any]:
    audit: dict[str, Any] = json.loads((folder / "audit.json").read_text())
    return audit


def holds(new: Any, old: Any) -> bool:
    """Whether all that was in an older record is in the new one, under the same keys."""
    if isinstance(old, dict):
        return all(holds(new[key], value) for key, value in old.items())
    if isinstance(old, list):
        return len(new) == len(old) and all(map(holds, new, old))
    return bool(new == old)


@pytest.mark.parametrize("written", [write_audit, write_full_audit])
def test_both_versions_give_the_same_page(tmp_path: Path, written: Any) -> None:
    folder = written(tmp_path)
    before = render(folder).read_bytes()
    assert raw(folder)["version"] == 1
    write_json(folder / "audit.json", read_audit(folder).as_json())
    assert raw(folder)["version"] == 2
    assert render(folder).read_bytes() == before


def test_a_committed_audit_of_version_1_keeps_every_number(tmp_path: Path) -> None:
    packed = ROOT / "docs" / "results" / "audit-cifar10" / "audit.json.gz"
    (tmp_path / "audit.json").write_bytes(gzip.decompress(packed.read_bytes()))
    audit, old = read_audit(tmp_path), raw(tmp_path)
    assert old["version"] == 1
    for row, was in zip(audit.as_json()["rows"], old["rows"], strict=True):
        assert holds(row, {key: value for key, value in was.items() if key not in was["log"]})
        assert row["at_random"] == 1 / was["gallery"]
        assert row["adversary"] == "data-enhanced eavesdropper"
    for verdict, was in zip(audit.as_json()["verdicts"], old["verdicts"], strict=True):
        rebuilt, answer = was.pop("rebuilt"), verdict["rebuilt"]
        assert holds(verdict, was)
        assert (rebuilt is None) == (answer is None)
        if rebuilt is not None:
            assert [answer["attack"], answer["share"]] == [rebuilt["attack"], rebuilt["identified"]]
            assert answer["interval"] == rebuilt["identified_interval"]
    leaking = {verdict.defense for verdict in audit.verdicts if verdict.outcome == "leaks"}
    assert "none" in leaking
    assert {verdict.chance for verdict in audit.verdicts} <= {None, *(v.at_random for v in audit.verdicts), 0.05}


@pytest.mark.integration
def test_what_is_written_is_read(audited: Path) -> None:
    audit = read_audit(audited)
    assert audit.as_json() == raw(audited)
    assert Audit.model_validate_json(audit.model_dump_json()) == audit


def test_scores_and_logs_stand_apart(audited: Path) -> None:
    folder = audited.parent / "logged"
    shutil.copytree(audited, folder, dirs_exist_ok=True)
    rows = raw(folder)["rows"]
    rows[0] |= {"log": {"epsilon": 3.0, "psnr": 1.0}, "epsilon": 3.0}
    edit_audit(folder, rows=rows)
    first = read_audit(folder).rows[0]
    assert first.log == {"epsilon": 3.0, "psnr": 1.0}
    assert first.psnr == rows[0]["psnr"] != 1.0
    assert "epsilon" not in first.model_dump()


def test_the_schema_is_the_published_one() -> None:
    published = json.loads((ROOT / "docs" / "audit.schema.json").read_text())
    assert Audit.model_json_schema(mode="serialization") == published, "gradveil schema > docs/audit.schema.json"
    assert published["properties"]["version"]["const"] == 2


def test_every_metric_of_the_table_has_a_place_in_the_record() -> None:
    shown = {name for name, metric in METRICS.items() if metric.meaning}
    assert shown <= set(Row.model_fields)
    assert all(metric.load() for metric in METRICS.values() if metric.function)


def test_any_label_that_a_tensor_holds_can_be_written() -> None:
    for label in (-(2**63), 2**63 - 1):
        assert ImageScore(picture=0, stopped="", label_guess=label).label_guess == label


def test_names_of_files_that_are_no_text_can_be_written() -> None:
    """A file system may hold any bytes, and Python stands surrogates for those that are no text."""
    training = SavedTraining(name="caf\udce9", folder="/tmp/caf\udce9")
    assert json.loads(training.model_dump_json())["folder"] == "/tmp/caf?"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"psnr": "high"}, r"row 1: 'psnr' should be a number or null; the file is damaged"),
        ({"identified": 2}, r"row 1: 'identified' should be less than or equal to 1"),
        ({"gallery": None}, r"row 1: it is scored in part"),
        ({"candidates": None, "ranked_first": 1.0}, r"row 1: it ranks no candidates"),
        ({"trace": []}, r"row 1: 'trace' should be an object"),
        ({"per_image": [{"picture": 0}]}, r"row 1, image 1: 'stopped' should be a text"),
        ({"per_image": [{"stopped": ""}]}, r"row 1, image 1: 'picture' should be a whole number"),
        ({"files": None}, r"row 1: 'files' should be an object"),
        ({"log": {"a\nb": "c"}}, r"row 1: 'log.a\\nb' should be a number or null"),
        ({"counter_moves": {"x": 3}}, r"row 1: 'counter_moves.x' should be a text"),
        ({"randomized": 1}, r"row 1: 'randomized' should be true or false"),
    ],
)
def test_a_complaint_names_the_field(audited: Path, change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    audit = raw(audited)
    audit["rows"][0] |= change
    (tmp_path / "audit.json").write_text(json.dumps(audit))
    with pytest.raises(BadFileError, match=complaint) as caught:
        read_audit(tmp_path)
    assert "\n" not in str(caught.value)
