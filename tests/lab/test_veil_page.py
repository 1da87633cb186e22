"""The page about what `veil` costs: made of its rows, and these keep what was promised."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from statistics import fmean

import pytest

from gradveil.core.registry import split_spec
from gradveil.defenses import DEFENSES, Veil

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
ROWS = [json.loads(line) for line in (RESULTS / "veil.jsonl").read_text().splitlines()]


def accuracies(partition: str, **wanted: str) -> dict[int, float]:
    """By seed, on CIFAR-10; without a promise, those of no defense."""
    return {
        row["seed"]: row["accuracy"]
        for row in ROWS
        if (row["data"], row["partition"]) == ("cifar10", partition)
        and {k: v for k, v in split_spec(row["defense"])[1].items() if k in ("ceiling", "cohort")} == wanted
    }


def test_the_page_is_what_its_rows_give() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "veil_page.py"))["page"]
    assert (RESULTS / "veil.md").read_text() == page()


@pytest.mark.parametrize(
    ("wanted", "least"),
    [
        ({}, 0.915),
        ({"ceiling": "0.1"}, 0.89),
        ({"ceiling": "0.034"}, 0.875),
        ({"ceiling": "0.1", "cohort": "100"}, 0.91),
    ],
)
def test_accuracy_is_kept_at_every_promise(wanted: dict[str, str], least: float) -> None:
    found = accuracies("iid", **wanted)
    assert sorted(found) == [1, 2, 3]
    assert fmean(found.values()) >= least


def test_no_row_had_more_rounds_than_its_promise_covers() -> None:
    for row in ROWS:
        defense = DEFENSES.build(row["defense"])
        if isinstance(defense, Veil):
            defense.check_steps(row["rounds"])
            assert defense.ceiling is not None
            assert defense.counted * defense.strength == pytest.approx(row["rounds"] ** 0.5)


@pytest.mark.parametrize("wanted", [{}, {"ceiling": "0.1"}], ids=["none", "veil"])
def test_skewed_shares_end_where_equal_ones_do(wanted: dict[str, str]) -> None:
    even, skewed = accuracies("iid", **wanted), accuracies("dirichlet:alpha=0.1", **wanted)
    assert sorted(skewed) == [1, 2, 3]
    assert skewed == pytest.approx(even, abs=5e-4)


def test_a_veiled_round_takes_at_most_twice_as_long() -> None:
    cifar = [row for row in ROWS if (row["data"], row["partition"]) == ("cifar10", "iid")]
    plain, veiled = (
        fmean(row["seconds"] for row in cifar if (row["defense"] == "none") is bare) for bare in (True, False)
    )
    assert veiled <= 2 * plain
