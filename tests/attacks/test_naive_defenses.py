"""Naive defenses are recognised by ``replay``, and with it alone none of them gets a good grade from an audit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gradveil import models
from gradveil.attacks import ATTACKS, replay
from gradveil.auditing import Audit, make_case
from gradveil.auditing.run import run
from gradveil.auditing.sources import Simulation
from gradveil.client import rounds
from gradveil.data import load
from naive import HELD_OUT, NAIVE

DATA = load("cifar10-samples")
IMAGES, REPLAY = 16, "replay:draws=3"
MAKERS = {**NAIVE, **HELD_OUT}
DOZEN = (
    "public permutation and signs", "public factors", "sign", "1 bit", "2 bits by chance", "guessable noise", "warm-up",
    "top 1% with error feedback", "low decimals", "layer shuffle", "dropped layers", "batch scaling", "public mixing",
)  # fmt: skip
HARD = {"low decimals under noise", "fading noise"}
"""Held out, and not told by a few draws of little more than noise: ``docs/results/naive.md`` has what is."""


def audited(names: Sequence[str], folder: Path, patch: pytest.MonkeyPatch) -> Audit:
    """One audit of them all, as objects that nobody registered.

    Fewer draws, entries and rounds than usual make it cheap. They weaken the attack: grades of a usual audit are no
    better.
    """
    patch.setattr(replay, "ENTRIES", 2**13)
    patch.setattr(rounds, "LATER", (2,))
    built = {name: MAKERS[name]() for name in names}
    case = make_case({"images": IMAGES, "threat": "D"})
    case = case.model_copy(update={"defenses": tuple(built), "attacks": (REPLAY,)})
    clients = Simulation(case, DATA, lambda: models.build(case.model, DATA.domain, seed=0))
    return run(clients.plan(built, {REPLAY: ATTACKS.build(REPLAY)}), folder)


@pytest.mark.integration
@pytest.mark.parametrize(
    "names", [pytest.param(DOZEN, id="a dozen"), pytest.param(tuple(MAKERS), id="all", marks=pytest.mark.slow)]
)
def test_naive_defenses_are_recognised_and_get_no_good_grade(
    names: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = audited(names, tmp_path / "audit", monkeypatch)
    shares: dict[str, dict[int, float]] = {name: {} for name in names}
    for row in audit.rows:
        if not row.is_prior:
            assert row.candidates == len(DATA) - IMAGES
            shares[row.defense][row.round or 1] = row.ranked_first or 0.0
    missed = {name for name, found in shares.items() if max(found.values()) <= 0.9}
    assert missed <= HARD, shares
    assert len(names) - len(missed) >= 10
    verdicts = {verdict.defense: verdict for verdict in audit.verdicts}
    assert list(verdicts) == list(names)
    assert not {name for name, verdict in verdicts.items() if verdict.grade in ("A", "B")}
    assert all("no counter-move" in verdict.flags for verdict in verdicts.values())
    # it sends nothing in the first round, and its worst one counts
    assert shares["warm-up"].keys() == {1, 2}
    assert shares["warm-up"][1] < 0.1
    assert verdicts["warm-up"].round == 2
