"""Results that were packed into one file count as done, and what is damaged in it does not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gradveil.core.atomic import write_json
from gradveil.lab.sweeps import ResultFolder, make_study, queue_of

STUDY = make_study("test", {"base": {"data": "mnist-samples", "model": "mlp", "images": 2}, "grid": {"seed": [0, 1]}})
DONE, OPEN = (entry.digest for entry in STUDY.entries)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """The packed results of a sweep with one of two cases done."""
    folder = ResultFolder(tmp_path / "sweep")
    write_json(folder.case(DONE) / "ran.json", {"seconds": 2.5})
    row = {"psnr": 20.0, "trace": [1.0] * 100, "files": {}}
    write_json(folder.case(DONE) / "result.json", {"digest": DONE, "kind": "audit", "rows": [row], "verdicts": []})
    write_json(folder.case(OPEN) / "failed.json", {"reason": "no luck"})
    folder.pack(tmp_path / "kept")
    return tmp_path / "kept"


def test_a_packed_case_is_done_and_keeps_what_can_be_compared(packed: Path) -> None:
    folder = ResultFolder(packed)
    assert [path.name for path in packed.iterdir()] == ["results.jsonl.gz"]
    assert folder.result(DONE) == {"digest": DONE, "kind": "audit", "rows": [{"psnr": 20.0}], "verdicts": []}
    assert folder.seconds(DONE) == 2.5
    assert folder.result(OPEN) is None
    assert [batch.digests for batch in queue_of(STUDY, folder).waiting] == [[OPEN]]


def test_equal_results_are_packed_to_equal_bytes(packed: Path, tmp_path: Path) -> None:
    ResultFolder(tmp_path / "sweep").pack(tmp_path / "again")
    assert (tmp_path / "again/results.jsonl.gz").read_bytes() == (packed / "results.jsonl.gz").read_bytes()


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]\n7\n{}", '{"digest": "DONE", "result": 1, "ran": 2}'])
def test_lines_that_are_no_results_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl.gz").write_bytes(gzip.compress(text.replace("DONE", DONE).encode()))
    assert ResultFolder(tmp_path).result(DONE) is None
    assert ResultFolder(tmp_path).seconds(DONE) is None


def test_a_file_that_is_cut_off_or_of_another_case_has_no_results(packed: Path) -> None:
    whole = (packed / "results.jsonl.gz").read_bytes()
    line = json.dumps({"digest": DONE, "result": {"digest": OPEN}, "ran": {}})
    for content in (whole[:-20], b"", b"plain text", whole[:30] + b"x" * 30, gzip.compress(line.encode())):
        (packed / "results.jsonl.gz").write_bytes(content)
        assert ResultFolder(packed).result(DONE) is None
