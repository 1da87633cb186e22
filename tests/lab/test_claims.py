"""The page of claims is what the files of the four papers say, and every row of it leads somewhere."""

import re
from pathlib import Path

import pytest
from claims import FOLDER, PAGE, PAPERS, ROOT, Claim, claims, page
from pydantic import ValidationError

COUNTS = {"censor": 130, "outpost": 131, "dcs2": 90, "ggl": 115}
MACHINE = re.compile(r"(?<![\w.])/(?:home|mnt|opt|root|tmp|usr|var|work|Users)\b|~/|\b[A-Z]:\\")


def test_every_paper_has_its_file_and_its_number_of_claims() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(COUNTS) == set(PAPERS)
    assert {paper: len(claims(paper)) for paper in COUNTS} == COUNTS


def test_the_page_is_what_the_files_say() -> None:
    assert PAGE.read_text() == page()


def rows_of(paper: str) -> list[tuple[str, str]]:
    return [(one.id, row) for one in claims(paper) for row in one.rows]


@pytest.mark.parametrize("paper", COUNTS)
def test_every_row_is_a_file_of_the_repository_and_every_test_is_in_its_file(paper: str) -> None:
    for claim, row in rows_of(paper):
        path, _, name = row.partition("::")
        assert not Path(path).is_absolute(), f"{claim}: {row}"
        assert (ROOT / path).resolve().is_relative_to(ROOT.resolve()), f"{claim}: {row}"
        assert (ROOT / path).is_file(), f"{claim}: {row}"
        if name:
            assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), f"{claim}: {row}"


@pytest.mark.parametrize("paper", COUNTS)
def test_a_page_in_words_is_no_row(paper: str) -> None:
    assert [(claim, row) for claim, row in rows_of(paper) if row.endswith(".md")] == []


@pytest.mark.parametrize("paper", COUNTS)
def test_no_text_holds_a_path_of_a_machine(paper: str) -> None:
    for one in claims(paper):
        for text in (one.claim, one.setting, one.found, one.because):
            assert MACHINE.search(text) is None, f"{one.id}: {text}"


@pytest.mark.parametrize(
    "fields",
    [
        {"verdict": "holds", "found": "so it is", "rows": []},
        {"verdict": "holds", "found": "", "rows": ["README.md"]},
        {"verdict": "holds", "found": "so it is", "rows": ["nowhere.jsonl"]},
        {"verdict": "not tested"},
        {"verdict": "not tested", "because": "no data", "rows": ["README.md"]},
        {"verdict": "maybe", "found": "so it is", "rows": ["README.md"]},
    ],
)
def test_a_claim_that_is_not_complete_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Claim.model_validate({"id": "C-01", "place": "Table I", "claim": "It works.", **fields})
