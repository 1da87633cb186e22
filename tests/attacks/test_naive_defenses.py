"""Naive defenses are recognised by ``replay``, and none of them gets a good grade from an audit of the quick suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradveil import models
from gradveil.attacks import ATTACKS
from gradveil.auditing import Audit, make_case
from gradveil.auditing.run import run
from gradveil.auditing.sources import Simulation
from gradveil.data import load
from naive import HELD_OUT, NAIVE

DATA = load("cifar10-samples")
EASY = [*NAIVE, "secret factors", "random signs by row"]


def audited(name: str, attacks: list[str], folder: Path) -> Audit:
    case = make_case({"images": 32, "threat": "D", "budget": "quick"}).model_copy(update={"defenses": (name,)})
    simulation = Simulation(case, DATA, lambda: models.build(case.model, DATA.domain, seed=0))
    make = {**NAIVE, **HELD_OUT}[name]
    return run(simulation.plan({name: make()}, {spec: ATTACKS.build(spec) for spec in attacks}), folder)


@pytest.mark.integration
@pytest.mark.parametrize("name", EASY)
def test_replay_recognises_them_and_no_grade_is_good(name: str, tmp_path: Path) -> None:
    audit = audited(name, ["replay"], tmp_path)
    assert max(row.ranked_first or 0.0 for row in audit.rows if not row.is_prior) > 0.9
    (verdict,) = audit.verdicts
    assert verdict.grade not in ("A", "B")
    assert verdict.outcome == "leaks"


@pytest.mark.integration
@pytest.mark.parametrize("name", sorted(HELD_OUT.keys() - set(EASY)))
def test_what_is_held_out_gets_no_good_grade_either(name: str, tmp_path: Path) -> None:
    (verdict,) = audited(name, ["identify", "replay"], tmp_path).verdicts
    assert verdict.grade not in ("A", "B")


@pytest.mark.integration
def test_a_warm_up_counts_in_its_worst_round(tmp_path: Path) -> None:
    audit = audited("warm-up", ["replay"], tmp_path)
    shares = {row.round: row.ranked_first for row in audit.rows if not row.is_prior}
    assert shares.keys() == {1, 2}
    assert (shares[1] or 0.0) < 0.2
    assert audit.verdicts[0].round == 2
