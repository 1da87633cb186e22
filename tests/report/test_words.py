"""Sentences a reviewer reads: true to the numbers, and short."""

from __future__ import annotations

import doctest
import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import gradveil.report
from gradveil.auditing import Row, Verdict, read_audit
from gradveil.auditing.audit import Answer
from gradveil.auditing.version1 import judged
from gradveil.report import words
from report.saved_audit import write_audit


def verdict(defense: str, share: float | None, low: float, chance: float | None = 0.0, **more: Any) -> Verdict:
    found = {"identified": share, "identified_interval": (low, 1.0), "prior_only_identified": chance, "images": 4}
    return judged(Verdict(**{"defense": defense, "at_random": 0.0, **found, **more}))


def chosen(defense: str, rebuilt: float | None, low: float = 0.0) -> Verdict:
    """All identified by choice; besides, this share of rebuilt images, or nothing known of it."""
    found = Answer(attack="ig", share=rebuilt, interval=(low, 1.0), chance=0.0, above_chance=low > 0)
    return verdict(defense, 1.0, 0.5, ranked_first=1.0, rebuilt=found)


@pytest.fixture
def rows(tmp_path: Path) -> tuple[Row, ...]:
    return read_audit(write_audit(tmp_path, attacks=["ig", "dlg"])).rows


def attacks(rows: tuple[Row, ...]) -> list[Row]:
    return [row for row in rows if not row.is_prior]


@pytest.mark.parametrize(
    ("verdicts", "sentence"),
    [
        ([verdict("none", 1.0, 0.5)], "100% of private images were identified with no defense: more often than chance"),
        ([verdict("noise", 0.0, 0.0)], "0% of private images were identified with noise: not more often than chance"),
        ([verdict("none", 1.0, 0.5), verdict("noise", 0.0, 0.0)], "In 1 of the 2 settings tried"),
        ([verdict("none", 1.0, 0.5), verdict("noise", 0.9, 0.4)], "In each of the 2 settings tried"),
        ([verdict("a", 0.1, 0.0), verdict("b", 0.2, 0.0)], "In none of the 2 settings tried"),
        ([verdict("a", 0.1, 0.0), verdict("b", 0.2, 0.0)], "At worst, 20% of private images were identified with b"),
        ([verdict("a", 0.1, 0.0), verdict("b", 0.2, 0.0)], "identified with b; at best, 10% with a."),
        ([verdict("a", 0.0, 0.0), verdict("b", 0.2, 0.0), verdict("c", 0.0, 0.0)], "at best, 0% with a and 1 more."),
        ([verdict("none", 1.0, 0.5), verdict("b", 1.0, 0.5)], "than chance explains. It was 100% in every setting."),
        ([chosen("a", 0.5, 0.1)], "than chance explains. Without a list of candidates it was 50%."),
        ([chosen("a", 0.5, 0.1), chosen("b", 0.0)], "without a list of candidates were enough for that in 1 of 2. It"),
        ([chosen("a", 0.5, 0.1), verdict("b", 1.0, 0.5)], "were enough for that in 2 of 2."),
        ([chosen("a", 0.0), chosen("b", 0.0)], "were enough for that in 0 of 2."),
        ([chosen("a", 0.5, 0.1), chosen("b", None)], "were enough for that in 1 of 1."),
        ([chosen("a", None), verdict("b", 0.5, 0.1)], "than chance explains. At worst, 100%"),
        ([verdict("a", None, 0.0)], "has no verdict"),
        ([verdict("a", 0.5, 0.1, chance=None)], "chance was not measured"),
        ([], "has no verdict"),
    ],
)
def test_headline(verdicts: list[Verdict], sentence: str) -> None:
    assert sentence in words.headline(verdicts)


def test_recipe_of_one_gradient() -> None:
    assert "gradient of one step" in words.recipe({"sends": "gradient"})


def test_recipe_of_local_training() -> None:
    recipe: words.CaseFields = {
        "sends": "delta",
        "lr": 0.05,
        "epochs": 2,
        "batch_size": 8,
        "momentum": 0.9,
        "train_mode": True,
    }
    assert words.recipe(recipe) == (
        "The client trains for 2 epochs in mini-batches of 8 images, with learning rate 0.05, momentum 0.9, and the "
        "model in training mode, then sends the change of its parameters (FedAvg)."
    )


def test_what_holds_for_some_rows_is_said_briefly(rows: tuple[Row, ...]) -> None:
    every = attacks(rows)
    none_ig, none_dlg, noise_ig, noise_dlg = every
    assert words.where(every, every) == ""
    assert words.where([none_ig, none_dlg], every) == "against no defense"
    assert words.where([none_ig, noise_ig], every) == "for ig"
    assert words.where([none_dlg, noise_ig], every) == "dlg against no defense; ig against noise:sigma=0.1"
    assert words.where([rows[-1], noise_ig], rows) == "prior only (dlg); ig against noise:sigma=0.1"
    assert words.where([noise_dlg], every) == "dlg against noise:sigma=0.1"


def test_shared_assumptions_come_first(rows: tuple[Row, ...]) -> None:
    said = words.assumptions(rows)
    assert [where for _, where in said] == ["", "", "against noise:sigma=0.1"]


def test_logs_are_said_once(rows: tuple[Row, ...]) -> None:
    assert words.logged(rows) == [("noise:sigma=0.1", "sigma = 0.1")]


def test_the_setting_names_what_was_attacked(tmp_path: Path) -> None:
    case: dict[str, Any] = json.loads((write_audit(tmp_path) / "audit.json").read_text())["case"]
    said = " ".join(words.setting(case, line_ups=[100, 100]))
    for fact in (
        "4 images of cifar10-samples",
        "lenet:init=wide",
        "1 private image.",
        "line-up of 100 images",
        "quick",
    ):
        assert fact in said
    assert "line-up of 4 to 16 images" in " ".join(words.setting(case, line_ups=[16, 4]))


@pytest.mark.parametrize(
    ("attacks", "ends"),
    [
        (["ig:iterations=2", "gi"], "“standard”, where the options of an attack do not say otherwise."),
        (["ig:restarts=1,tv=0.1"], "“standard”, where the options of an attack do not say otherwise."),
        (["ig:tv=0.1", "gi"], "“standard”."),
        (None, "“standard”."),
    ],
)
def test_the_budget_is_not_said_of_what_options_decide(attacks: list[str] | None, ends: str) -> None:
    said = words.setting({"budget": "standard", "attacks": attacks})  # type: ignore[dict-item]
    assert [sentence for sentence in said if "budget" in sentence] == [f"The adversary searches with the budget {ends}"]


@pytest.mark.parametrize("module", [module.name for module in pkgutil.iter_modules(gradveil.report.__path__)])
def test_examples_in_docstrings(module: str) -> None:
    assert doctest.testmod(importlib.import_module(f"gradveil.report.{module}")).failed == 0
