"""Which attacks an audit runs when none is named, and that every one of them can."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradveil import models
from gradveil.attacks import ATTACKS, BUDGETS, Budget
from gradveil.auditing import make_case, make_observed_case, run_case, run_observed, score_again
from gradveil.auditing.suites import MEMBERS, SuiteSetting, suite
from gradveil.core.errors import GradveilError
from gradveil.core.types import Recipe
from gradveil.data import load
from gradveil.federated import Training, run_training
from gradveil.threat import THREATS, threat_model

DEFENSES = [
    "none", "noise:sigma=0.1", "clip:bound=4", "sparsify", "dp", "soteria", "graddefense", "censor:trials=2", "outpost",
    "dcs2:iterations=2", "dcs2plus:iterations=2", "precode", "ats",
]  # fmt: skip
FEDAVG = Recipe(sends="delta", epochs=2, lr=0.05)


def setting(
    threat: str = "C", model: str = "lenet", data: str = "cifar10-samples", *, size: int | None = None, **other: Any
) -> SuiteSetting:
    domain = load(data).domain
    domain = domain if size is None else replace(domain, height=size, width=size)
    module = models.build(model, domain, seed=0)
    plain: dict[str, Any] = {"recipe": Recipe(), "batch_size": 1}
    return SuiteSetting(threat=threat_model(threat), module=module, model=model, domain=domain, **(plain | other))


def names(budget: str, *given: Any, **other: Any) -> set[str]:
    return {attack.partition(":")[0] for attack in suite(budget, setting(*given, **other))}


def test_a_larger_budget_runs_all_that_a_smaller_one_does() -> None:
    for threat in "BCDEFGH":
        quick, standard, thorough = (set(suite(budget, setting(threat))) for budget in BUDGETS)
        assert quick < standard < thorough


def test_every_attack_has_a_place() -> None:
    """Some case meets it with the thorough suite; dlg is idlg with less of a start."""
    cases = [setting("H", "mlp"), setting("E", batch_size=2), setting("H", batch_size=2), setting(recipe=FEDAVG)]
    cases.append(setting("D", public=True))
    met = {attack.partition(":")[0] for one in cases for attack in suite("thorough", one)}
    assert met == {name for name in ATTACKS if name != "dlg"}


@pytest.mark.parametrize("threat", sorted(set(THREATS) - {"A"}))
def test_nothing_in_a_suite_needs_more_than_the_threat_model_gives(threat: str) -> None:
    for attack in suite("thorough", setting(threat, "mlp", batch_size=2)):
        assert ATTACKS.build(attack, BUDGETS["quick"]).requires <= threat_model(threat).knows, attack


def test_what_cannot_run_is_left_out() -> None:
    assert "analytic" in names("quick", "A", "mlp")
    with pytest.raises(GradveilError, match="no attack of the quick suite can run on lenet under threat A"):
        suite("quick", setting("A", "lenet"))
    assert {"analytic", "trap"} & names("thorough", "H", "lenet") == set()
    assert {"imprint", "trap", "identify"} <= names("quick", "H", "mlp")
    assert {"imprint", "trap", "identify"} & names("thorough", "C", "mlp") == set()
    assert "fishing" in names("standard", "F", batch_size=2)
    assert "fishing" not in names("standard", "F", batch_size=1)
    assert "ggl" in names("standard", data="mnist-samples")
    assert {"ggl", "gias", "gifd"} & names("thorough", size=40) == set()
    assert "sme" in names("standard", recipe=FEDAVG)
    assert "sme" not in names("thorough")


def test_a_local_run_whose_recipe_is_not_known_is_averaged() -> None:
    assert suite("quick", setting("B", recipe=FEDAVG)) == ("informed:match=averaged",)
    assert suite("quick", setting("C", recipe=FEDAVG)) == ("informed",)


def test_a_large_model_gets_shorter_searches_and_fewer() -> None:
    small, large = (set(suite("thorough", setting("D", model))) for model in ("lenet", "resnet18"))
    assert {"informed", "ig", "ggl", "idlg"} <= small
    assert {"informed:iterations=600,restarts=1", "ig:iterations=600,restarts=1", "identify"} <= large
    assert not {"ggl", "idlg"} & large
    for budget, wider in (("quick", "standard"), ("standard", "thorough")):
        assert set(suite(budget, setting("D", "resnet18"))) < set(suite(wider, setting("D", "resnet18")))


def test_every_search_of_a_large_model_fits_all_defenses_into_one_batch() -> None:
    """20 images under 16 defenses: 320 problems, a third of what a GPU takes together."""
    for attack in suite("thorough", setting("E", "resnet18")):
        assert ATTACKS.build(attack, BUDGETS["thorough"]).problems_each == 1


def test_saved_exchanges_are_not_crafted_for_and_bring_no_candidates() -> None:
    saved = suite("thorough", setting("H", saved=True))
    assert not {"imprint", "fishing", "identify", "fingerprint"} & {attack.partition(":")[0] for attack in saved}
    assert {"informed", "ig"} <= set(saved)


TINY: dict[str, Any] = {"images": 2, "batch_size": 2, "gallery": 10, "restarts": 1}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Budgets of a few steps, and no network to compare pictures: what runs is under test, not what it finds."""
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "empty"))
    for name in BUDGETS:
        monkeypatch.setitem(BUDGETS, name, Budget(1, 4))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("model", "defenses"),
    [
        ("lenet", ["none", "soteria", "censor:trials=2", "precode"]),
        pytest.param("lenet", DEFENSES, marks=pytest.mark.slow),
        pytest.param("mlp", DEFENSES, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("short")
def test_the_quick_suite_of_the_strongest_adversary_runs(model: str, defenses: list[str], tmp_path: Path) -> None:
    case = make_case({**TINY, "budget": "quick", "threat": "H", "model": model, "defenses": defenses})
    audit = run_case(case, tmp_path / "a")
    met = {row.attack for row in audit.rows if row.prior_of is None}
    assert met == set(suite("quick", setting("H", model, batch_size=2))) == set(audit.case["attacks"])  # type: ignore[arg-type]
    assert len(audit.verdicts) == len(defenses)


@pytest.mark.slow
@pytest.mark.parametrize("threat", ["E", "H"])
@pytest.mark.parametrize("model", ["lenet", "mlp"])
@pytest.mark.usefixtures("short")
def test_the_thorough_suite_runs_on_every_defense(model: str, threat: str, tmp_path: Path) -> None:
    case = make_case({**TINY, "budget": "thorough", "threat": threat, "model": model, "defenses": DEFENSES})
    assert run_case(case, tmp_path / "a").complete


@pytest.mark.parametrize("threat", ["B", pytest.param("C", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("short")
def test_the_standard_suite_runs_on_local_training(threat: str, tmp_path: Path) -> None:
    recipe = {"sends": "delta", "epochs": 2, "batch_size": 1, "lr": 0.05}
    case = make_case({**TINY, "data": "mnist-samples", "threat": threat, "recipe": recipe, "defenses": ["none"]})
    assert "sme" in run_case(case, tmp_path / "a").case["attacks"]


@pytest.mark.usefixtures("short")
def test_saved_exchanges_get_a_suite_too(tmp_path: Path) -> None:
    training = Training(
        data="mnist-samples", clients=2, rounds=1, algorithm="fedsgd", batch_size=1, tap=("*@1",), threat="D"
    )
    run_training(training, tmp_path / "t")
    case = make_observed_case({"observations": [str(tmp_path / "t")], "budget": "quick", "gallery": 10})
    audit = run_observed(case, tmp_path / "a")
    assert set(audit.case["attacks"]) == {"analytic", "informed"}  # type: ignore[arg-type]


UNFIT = {**TINY, "budget": "quick", "model": "convnet:width=4", "attacks": ["identify"], "threat": "D"}


@pytest.mark.usefixtures("short")
def test_defenses_that_do_not_fit_the_model_are_refused_or_left_out(tmp_path: Path) -> None:
    case = {**UNFIT, "defenses": ["none", "dp"]}
    with pytest.raises(GradveilError, match="defense dp cannot bound"):
        run_case(make_case(case), tmp_path / "refused")
    audit = run_case(make_case({**case, "unfit": "leave out"}), tmp_path / "a")
    assert audit.case["defenses"] == ["none"]
    assert list(audit.left_out) == ["dp"]
    assert "batch norm" in audit.left_out["dp"]
    assert score_again(tmp_path / "a").left_out == audit.left_out
    with pytest.raises(GradveilError, match="no defense of the case can work on convnet:width=4: defense dp"):
        run_case(make_case({**case, "defenses": ["dp"], "unfit": "leave out"}), tmp_path / "none")


def test_what_to_do_with_unfit_defenses_does_not_change_a_row() -> None:
    refused, left_out = (make_case({**UNFIT, "defenses": ["none"], "unfit": what}) for what in ("refuse", "leave out"))
    assert refused.digest("ig", "none", prior_only=False) == left_out.digest("ig", "none", prior_only=False)


def test_members_stand_in_the_order_of_their_budgets() -> None:
    order = [list(BUDGETS).index(member.since) for member in MEMBERS]
    assert order == sorted(order)
