"""Defenses, attacks and files that try to get a better verdict than they deserve, or a worse one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import gradveil
from exchanges import observed
from gradveil.attacks import ATTACKS, Attack, Crafted, Reconstruction, Server
from gradveil.attacks.identify import Identify
from gradveil.auditing import make_case
from gradveil.auditing.audit import Audit, CeilingAnswer, Files, Membership, Row
from gradveil.auditing.flags import counter_moves, flagged
from gradveil.auditing.gate import AuditGate
from gradveil.auditing.run import run
from gradveil.auditing.sources import Simulation
from gradveil.auditing.verdict import NO_COUNTER_MOVE, Ceilings, verdicts
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.core.streams import Stream
from gradveil.core.types import Params, Recipe
from gradveil.data import ImageSet, load
from gradveil.defenses import DEFENSES, DP, Chain, Clip, Defense, Log, Noise, Step, Transform, can_remember
from gradveil.metrics.statistics import luck, surprise
from gradveil.threat import Knowledge, Observation

DIGITS = load("mnist-samples").batch(range(16))


def own_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.Sigmoid(), nn.Linear(16, 10))


class none(Defense):  # noqa: N801
    """Sends everything, under the name of the baseline."""


class noise(Defense):  # noqa: N801
    """Sends everything, under the name and with the options of a defense that somebody has attacked."""

    def __init__(self) -> None:
        self.sigma, self.at = 1.0, "step"


@dataclass(frozen=True, kw_only=True)
class Silent(Noise):
    """The same, by the name that a registered class has."""

    name: ClassVar[str] = "noise"

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        return tree


class Bare(Chain):
    """A chain of defenses that it does not use."""

    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        return gradient

    def for_round(self, start: Step) -> Defense:  # noqa: ARG002
        return self


TAKEN: Params = {}


class Thief(Transform):
    """Keeps what comes before the noise."""

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        TAKEN.update(tree)
        return tree


class Painter(Transform):
    """Sends it after the noise."""

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        return {name: TAKEN[name] for name in tree}


def patched() -> Defense:
    """An instance of a known class that does something else."""
    found = Noise(sigma=30.0)
    object.__setattr__(found, "transform", lambda tree, _rng, _log: tree)
    return found


CLIP = Clip(bound=1.0, per="global", at="step")
LEAKING = {
    "called as the baseline": none(),
    "called as a defense": noise(),
    "named as a defense": Silent(sigma=30.0),
    "a chain of its own": Bare([DP(sigma=30.0)]),
    "past the noise": Chain([Thief(), CLIP, Noise(sigma=30.0), Painter()]),
    "patched": Chain([CLIP, patched()]),
}


@pytest.mark.parametrize("defense", LEAKING.values(), ids=LEAKING.keys())
def test_a_defense_earns_nothing_by_its_name_or_by_links_that_it_undoes(defense: Defense) -> None:
    found = gradveil.audit(own_model(), DIGITS, defense=defense, attack="identify", threat="D")
    (verdict,) = found.verdicts
    assert verdict.identified == 1.0
    assert verdict.grade == "F"
    assert verdict.ceiling is not None
    assert verdict.ceiling.recognised is None
    assert NO_COUNTER_MOVE in verdict.flags
    assert AuditGate.read([], "B").violations(Audit.model_validate(found.as_json()))


def test_a_name_is_of_the_class_that_was_registered_under_it() -> None:
    assert DEFENSES.describe(none()) == "own none"
    assert DEFENSES.describe(Silent()).startswith("Silent")
    assert DEFENSES.describe(Bare([DP()])) == "Bare"
    assert DEFENSES.describe(patched()).startswith("Noise:")
    for spec in ("none", "clip:bound=1.0", "clip:bound=1.0,per=example", "dp:sigma=2.0", "dcs2plus", "precode", "ats"):
        assert DEFENSES.describe(DEFENSES.build(spec)) == spec


def test_what_a_frozen_defense_keeps_in_a_tuple_is_a_memory() -> None:
    @dataclass(frozen=True)
    class Keeping(Defense):
        kept: tuple[list[Params], ...] = ([],)

    assert can_remember(Keeping())
    assert not can_remember(Noise())


def scored(attack: str, identified: float, interval: tuple[float, float], **more: object) -> Row:
    known = {"gallery": 100, "at_random": 0.01, "label_accuracy": 0.0, "luck": 1e-4, "images": 16, "updates": 16}
    fields = {"defense": "dp", "identified": identified, "identified_interval": interval, "needs": ("candidates",)}
    return Row.model_validate({**known, **fields, "attack": attack, "files": Files(reconstruction=""), **more})


@pytest.mark.parametrize("by_members", [False, True])
def test_a_ceiling_that_an_attack_passed_earns_nothing(by_members: bool) -> None:
    top = CeilingAnswer(recognised=0.02, chance=0.01, member=0.02)
    member = Membership(found=1.0, interval=(0.8, 1.0), members=16, others=1600)
    row = scored("identify", 1.0, (0.8, 1.0)) if not by_members else scored("identify", 0.0, (0.0, 0.2), member=member)
    (verdict,) = verdicts([row], ceilings={"dp": Ceilings(top, top)})
    assert verdict.ceiling is not None
    assert "passed" in verdict.ceiling.why
    assert verdict.ceiling_of_run is None
    assert verdict.grade not in ("A", "B")
    assert NO_COUNTER_MOVE in verdict.flags


def test_an_attack_that_does_not_know_the_defense_has_no_counter_move() -> None:
    row = scored("informed", 0.0, (0.0, 0.05), counter_moves={})
    (verdict,) = verdicts([row])
    assert NO_COUNTER_MOVE in verdict.flags
    assert verdict.grade == "C"


class Zeros(Defense):
    def on_gradient(self, gradient: Params, step: Step) -> Params:  # noqa: ARG002
        return {name: torch.zeros_like(tensor) for name, tensor in gradient.items()}


def test_zeros_give_no_labels_away_where_classes_take_turns(tmp_path: Path) -> None:
    """Ten digits in a row are one of each: so is the guess of an attack that sees nothing."""
    case = make_case(
        {"data": "mnist-samples", "model": "mlp", "images": 100, "batch_size": 10, "attacks": ["analytic"]}
    )
    clients = Simulation(case, load("mnist-samples"), own_model)
    plan = clients.plan({"zeros": Zeros()}, {"analytic": ATTACKS.build("analytic")})
    (verdict,) = run(plan, tmp_path).verdicts
    assert verdict.labels is not None
    assert verdict.labels.share == 1.0
    assert verdict.labels.chance == 1.0
    assert verdict.labels.above_chance is False


@dataclass(frozen=True)
class Eliminate(Attack):
    """Names candidates that are not among the public examples, without a look at what clients send."""

    held: list[torch.Tensor]
    requires: ClassVar[frozenset[Knowledge]] = frozenset(
        {Knowledge.CRAFT, Knowledge.PUBLIC_DATA, Knowledge.CANDIDATES, Knowledge.BATCH_SIZE}
    )

    def craft(self, server: Server, history: Sequence[Observation], seed: int) -> Crafted | None:  # noqa: ARG002
        if history:
            return None
        assert server.public is not None
        self.held.append(server.public.inputs)
        return Crafted(server.module, server.model, server.sent, ())

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:  # noqa: ARG002
        known = seen[0].candidates
        assert known is not None
        batch = known.batch(range(len(known)))
        public = (torch.cdist(batch.inputs.flatten(1), self.held[0].flatten(1)) < 1e-4).any(dim=1)
        self.held.append(public)
        one = batch.take(slice(seen[0].batch_size or 1))
        return [Reconstruction.closed_form(one.inputs, one.labels, 0.0) for _ in seen]


@pytest.mark.parametrize("images", [1, 8, 90])
def test_public_data_does_not_tell_who_is_private(images: int, tmp_path: Path) -> None:
    case = make_case({"data": "mnist-samples", "model": "mlp", "images": images, "threat": "G", "attacks": ["imprint"]})
    attack, clients = Eliminate([]), Simulation(case, load("mnist-samples"), own_model)
    run(clients.plan({"none": Defense()}, {"eliminate": attack}), tmp_path)
    public, candidates = attack.held[0], attack.held[-1]
    assert len(public) >= 2
    assert not candidates.any()
    assert clients.lists[0] is not None
    assert len(candidates) == len(clients.lists[0]) > images


def test_statistics_that_nobody_attacked_earn_no_good_grade() -> None:
    kept = {"defense": "noise", "luck": 1.0, "counter_moves": {"noise": "It ranks candidates."}}
    row = scored("identify", 0.0, (0.0, 0.05), **kept, threat="D")
    sent = row.model_copy(update={"statistics_sent": True})
    assert [verdicts(flagged([each]))[0].grade for each in (row, sent)] == ["A", "C"]


def test_a_defense_that_tells_who_took_part_does_not_hold() -> None:
    member = Membership(found=1.0, interval=(0.8, 1.0), luck=1e-4, members=16, others=1600)
    moves = {"noise": "It ranks candidates."}
    kept = {"defense": "noise", "luck": 1.0, "counter_moves": moves}
    (quiet,) = verdicts([scored("identify", 0.0, (0.0, 0.05), **kept)])
    (telling,) = verdicts([scored("identify", 0.0, (0.0, 0.05), **kept, member=member)])
    assert (quiet.grade, quiet.outcome) == ("A", "holds")
    assert telling.outcome == "leaks"


def test_a_defense_that_names_people_by_their_labels_does_not_hold() -> None:
    read = {"needs": (), "label_accuracy": 1.0, "label_interval": (0.8, 1.0), "label_chance": 0.1}
    kept = {"defense": "noise", "luck": 1.0, "counter_moves": {"noise": "It ranks candidates."}}
    rows = [scored("identify", 0.0, (0.0, 0.05), **kept), scored("ig", 0.0, (0.0, 0.05), **(kept | read))]
    found = [verdicts(rows, people=people)[0] for people in (False, True)]
    assert [one.outcome for one in found] == ["holds", "leaks"]
    assert [one.grade for one in found] == ["A", "F"], "no gate by grade lets a client pass whom everybody can name"
    assert AuditGate.read([], "D").violations(Audit(rows=tuple(rows), verdicts=(found[1],), labels_are_people=True))
    hidden = [rows[0], rows[1].model_copy(update={"label_accuracy": 0.0, "label_interval": (0.0, 0.05)})]
    assert verdicts(hidden, people=True)[0].grade == "A"
    given = [row.model_copy(update={"threat": "D+labels"}) for row in rows]
    assert verdicts(given, people=True)[0].grade == "A", "what the adversary was given was not leaked"


def test_an_attack_that_leaves_the_counter_move_out_is_not_credited_with_it() -> None:
    several, batch = Recipe(sends="delta", epochs=2, lr=0.1), load("cifar10-samples").batch([0])
    (one,) = observed([batch], recipe=several, defense="noise:sigma=0.1")
    moves = [counter_moves(ATTACKS.build(f"informed:match={match}"), one) for match in ("simulated", "averaged")]
    assert [None in (each or {}).values() for each in moves] == [False, True]


def test_scores_that_are_no_numbers_are_luck() -> None:
    assert luck(np.full((4, 100), np.nan), np.arange(4)[:, None]) == 1.0
    held, lacking = surprise(np.array([[1.7e308, -1.7e308, 0.0]]), np.array([[1.7e308, 2.0, -1.7e308]]))
    assert np.isfinite(held).all()
    assert np.isfinite(lacking).all()


@dataclass(frozen=True)
class Part(Attack):
    """Scores some of the candidates."""

    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.CANDIDATES})

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:  # noqa: ARG002
        known = seen[0].candidates
        assert known is not None
        one = known.batch([0])
        plain = Reconstruction.closed_form(one.inputs, torch.zeros(1, dtype=torch.int64), 0.0)
        return [replace(plain, candidates=known.name, scores=torch.zeros(len(known) - 1)) for _ in seen]


def test_an_attack_scores_all_candidates_or_none() -> None:
    with pytest.raises(GradveilError, match="did not score each of the"):
        gradveil.audit(own_model(), DIGITS, attack=Part(), threat="D")


@dataclass(frozen=True, kw_only=True)
class Blind(Identify):
    """Called as an attack that knows the defense, and scores all candidates alike."""

    def scores(self, seen: Sequence[Observation], known: ImageSet, *_: object) -> torch.Tensor:
        return torch.zeros(len(seen), len(known))


def test_an_attack_earns_nothing_for_a_defense_by_its_base_class() -> None:
    found = gradveil.audit(own_model(), DIGITS, defense="noise:sigma=1e-9", attack=Blind(), threat="D")
    (verdict,) = found.verdicts
    assert NO_COUNTER_MOVE in verdict.flags
    assert verdict.grade not in ("A", "B")


def test_a_grade_that_does_not_exist_passes_no_gate() -> None:
    (verdict,) = verdicts([scored("identify", 0.0, (0.0, 0.05))])
    audit = Audit(rows=(), verdicts=(verdict.model_copy(update={"grade": "<b>"}),))
    assert AuditGate.read([], "F").violations(audit)


def test_a_round_of_few_examples_is_not_hidden_by_one_of_many() -> None:
    """Saved rounds: 1 of 64 found in one, 0 of 2 in the next, which excludes next to nothing."""
    moves = {"counter_moves": {"dp": "It ranks candidates."}, "luck": 1.0}
    many = scored("identify", 1 / 64, (0.0, 0.084), images=64, updates=64, round=1, **moves)
    few = scored("identify", 0.0, (0.0, 0.842), images=2, updates=2, round=2, **moves)
    (alone,), (both,) = verdicts([many]), verdicts([many, few])
    assert (alone.grade, both.grade) == ("A", "F")
    assert both.identified_interval == (0.0, 0.842)
    assert both.recognised is not None
    assert both.recognised.interval == (0.0, 0.842)
    assert (both.identified, both.round) == (1 / 64, 1), "the worst case that was measured stays in the sentence"
    audit = Audit(rows=(many, few), verdicts=(both,))
    assert AuditGate.read(["identified=0.1", "recognised=0.1"]).violations(audit)
    (level,) = verdicts([many, scored("ig", 0.0, (0.0, 0.9), images=64, updates=64)])
    assert level.identified_interval == (0.0, 0.084), "of equally many, the best counts"


@pytest.mark.parametrize("odd", ["model", "examples"])
def test_another_precision_is_refused_in_one_line(odd: str) -> None:
    model = own_model().double() if odd == "model" else own_model()
    with pytest.raises(GradveilError, match=r"of torch.float64, and audits compute in torch.float32: convert them"):
        gradveil.audit(model, (DIGITS.inputs.double(), DIGITS.labels), attack="analytic")
