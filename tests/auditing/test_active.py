from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from gradveil.attacks import ATTACKS, Attack, Budget, Crafted, Reconstruction, Server, load_reconstructions
from gradveil.attacks.active.fishing import Fishing
from gradveil.attacks.active.interrogation import interrogate
from gradveil.auditing import Case, run_case
from gradveil.core.errors import GradveilError
from gradveil.threat import load_observations

IMPRINT = Case(
    data="cifar10-samples", model="lenet", threat="F", images=8, batch_size=4, attacks=("imprint:bins=64",),
    defenses=("none", "precode"), gallery=20,
)  # fmt: skip


@pytest.mark.integration
def test_an_audit_of_a_dishonest_server(tmp_path: Path) -> None:
    audit = run_case(IMPRINT, tmp_path)
    bare, reshaped = audit.rows
    assert bare.psnr > 60
    assert bare.identified == 1
    assert reshaped.psnr > 60, "a front reads what the model behind it would hide"
    assert "tampered with front.query.weight" in bare.assumptions[-1]
    for row in (bare, reshaped):
        seen = load_observations(tmp_path / row.files.observation)
        assert "front.query.weight" in seen[0].crafted
        assert seen[0].sent is seen[1].sent, "both clients got the same broadcast"
        again = ATTACKS.build(row.attack, IMPRINT.effort())(seen, seeds=[0, 1])
        saved = load_reconstructions(tmp_path / row.files.reconstruction)
        assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(again, saved, strict=True))


@pytest.mark.integration
def test_what_a_client_was_asked_before_is_kept(tmp_path: Path) -> None:
    case = IMPRINT.model_copy(update={"attacks": ("fishing:then=ig:iterations=2;restarts=1",), "defenses": ("none",)})
    audit = run_case(case, tmp_path)
    (row,) = (row for row in audit.rows if row.prior_of is None)
    assert "asked this client" in row.assumptions[-1]
    first, second = (
        load_observations(path)[0] for path in sorted((tmp_path / "observations").iterdir(), key=lambda p: len(p.name))
    )
    assert len(first.earlier) >= 1
    attack = ATTACKS.build(row.attack, case.effort())
    assert isinstance(attack, Fishing)
    for seen in (first, second):
        changed = {name for name in seen.sent if not torch.equal(seen.sent[name], seen.earlier[0].sent[name])}
        assert changed, "each question has another classifier"
        assert changed <= set(seen.crafted)
        assert attack.isolated(seen).batch_size == 1


def test_an_honest_adversary_crafts_nothing(tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match="needs craft"):
        run_case(IMPRINT.model_copy(update={"threat": "C"}), tmp_path)


class Insatiable(Attack):
    def craft(self, server: Server, history: object, seed: int) -> Crafted | None:  # noqa: ARG002
        return Crafted(server.module, server.model, server.sent, ())

    def run(self, seen: object, *, seeds: object, progress: object) -> list[Reconstruction]:
        raise NotImplementedError


@pytest.mark.integration
def test_an_attack_that_never_stops_asking_is_stopped(tmp_path: Path) -> None:
    run_case(IMPRINT.model_copy(update={"attacks": ("analytic",), "model": "mlp", "defenses": ("none",)}), tmp_path)
    (path,) = (tmp_path / "observations").iterdir()
    seen = load_observations(path)[0]
    server = Server(seen.module, seen.model, seen.sent, seen.domain)
    with pytest.raises(GradveilError, match="is not done"):
        interrogate(Insatiable(), server, [lambda _crafted, _number: dataclasses.replace(seen)], 0)
    with pytest.raises(GradveilError, match="nothing to send"):
        interrogate(ATTACKS.build("ig", Budget(1, 1)), server, [lambda _crafted, _number: seen], 0)
