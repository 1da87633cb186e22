"""Naive defenses are recognised by ``replay``, and with it alone none of them gets a good grade from an audit."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradveil import models
from gradveil.attacks import ATTACKS, replay
from gradveil.auditing import Audit, make_case
from gradveil.auditing.run import run
from gradveil.auditing.sources import Simulation
from gradveil.data import load
from naive import HELD_OUT, NAIVE

DATA = load("cifar10-samples")
IMAGES, REPLAY = 4, "replay:draws=3"
MAKERS = {**NAIVE, **HELD_OUT}


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    """One audit of them all, as objects that nobody registered. Fewer draws and entries than usual make it cheap."""
    built = {f"naive {name}": make() for name, make in MAKERS.items()}
    case = make_case({"images": IMAGES, "threat": "D"})
    case = case.model_copy(update={"defenses": tuple(built), "attacks": (REPLAY,)})
    clients = Simulation(case, DATA, lambda: models.build(case.model, DATA.domain, seed=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "ENTRIES", 2**13)
        plan = clients.plan(built, {REPLAY: ATTACKS.build(REPLAY)})
        return run(plan, Path(tmp_path_factory.mktemp("naive")) / "audit")


def shares(audit: Audit) -> dict[str, dict[int, float]]:
    """By defense and round, how many private images ``replay`` ranks first."""
    found: dict[str, dict[int, float]] = {}
    for row in audit.rows:
        if row.attack == REPLAY and not row.is_prior:
            assert row.candidates is not None
            assert row.candidates >= 90
            found.setdefault(row.defense, {})[row.round or 1] = row.ranked_first or 0.0
    return dict(zip(MAKERS, (found[verdict.defense] for verdict in audit.verdicts), strict=True))


@pytest.mark.slow
def test_naive_defenses_are_recognised_in_long_lists(audit: Audit) -> None:
    found = shares(audit)
    easy = [name for name in MAKERS if max(found[name].values()) > 0.9]
    assert set(NAIVE) <= set(easy), "twenty-one of them, of which ten have to be"
    assert {"secret factors", "random signs by row"} <= set(easy)


@pytest.mark.slow
def test_no_naive_defense_gets_a_good_grade(audit: Audit) -> None:
    grades = dict(zip(MAKERS, (verdict.grade for verdict in audit.verdicts), strict=True))
    assert not {name for name, grade in grades.items() if grade in ("A", "B")}


@pytest.mark.slow
def test_a_warm_up_counts_in_its_worst_round(audit: Audit) -> None:
    found = shares(audit)["warm-up"]
    assert found.keys() == {1, 2}
    assert found[1] < 0.3
    assert audit.verdicts[list(MAKERS).index("warm-up")].round == 2
