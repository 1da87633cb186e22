"""Veil: its noise keeps its promise by the ledger's own count, and its certificate says no more than is proved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradveil
from gradveil.bounds import certificate, prove
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Recipe
from gradveil.defenses import DEFENSES, DP, Chain, Ledger, Veil

MODEL = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))


def batch(count: int) -> Batch:
    rng = torch.Generator().manual_seed(0)
    return Batch(torch.rand(count, 3, 2, 2, generator=rng), torch.randint(3, (count,), generator=rng))


@pytest.mark.parametrize(
    ("spec", "promised"),
    [("veil", 0.1), ("veil:ceiling=0.034,rounds=80", 0.034), ("veil:ceiling=0.5,lineup=10,rounds=1", 0.5)],
)
def test_all_rounds_together_reach_the_ceiling_and_never_pass_it(spec: str, promised: float) -> None:
    defense = DEFENSES.build(spec)
    assert isinstance(defense, Veil)
    spent = Ledger()
    spent.add(defense.sigma, 1.0, defense.rounds)
    reached = spent.power(1 / defense.lineup)
    assert promised * (1 - 1e-6) < reached <= promised * (1 + 1e-8)
    spent.add(defense.sigma, 1.0, 1)
    assert spent.power(1 / defense.lineup) > promised


@pytest.mark.parametrize(("epsilon", "delta", "rounds"), [(8.0, 1e-5, 1), (1.0, 1e-6, 50), (0.1, 0.2, 3)])
def test_an_epsilon_is_kept_as_the_ledger_counts_it(epsilon: float, delta: float, rounds: int) -> None:
    defense = Veil(epsilon=epsilon, delta=delta, rounds=rounds)
    planned = defense.planned()
    assert planned is not None
    assert epsilon * (1 - 1e-6) < planned.epsilon <= epsilon


def test_mu_is_that_of_gaussian_differential_privacy() -> None:
    assert Veil(mu=0.5, rounds=16).sigma == pytest.approx(4 / 0.5)
    assert Veil(mu=0.5, rounds=16, cohort=64).sigma == pytest.approx(4 / 0.5 / 8)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("veil:ceiling=0.1,mu=1", "two promises"),
        ("veil:ceiling=0.01", "above 1 in 100"),
        ("veil:ceiling=1", "below 1"),
        ("veil:mu=0", "mu"),
        ("veil:epsilon=-1", "epsilon"),
        ("veil:rounds=0", "rounds"),
        ("veil:cohort=0", "cohort"),
        ("veil:lineup=1", "lineup"),
        ("veil:bound=0", "bound"),
        ("veil:sigma=0", "no option"),
        ("veil:beyond_plan=true", "no option"),
    ],
)
def test_what_cannot_be_promised_is_refused(spec: str, says: str) -> None:
    with pytest.raises(GradveilError, match=says):
        DEFENSES.build(spec)


def test_it_sends_what_dp_sends_with_its_noise() -> None:
    defense, plain = Veil(mu=1, rounds=4, bound=0.3), DP(sigma=2.0, bound=0.3)
    replies = [
        SimulatedClient(MODEL, recipe=Recipe(), defense=one).reply(
            dict(MODEL.named_parameters()), batch(5), Stream.seeded(0, "veil")
        )
        for one in (defense, plain)
    ]
    for name, tensor in replies[0].update.items():
        torch.testing.assert_close(tensor, replies[1].update[name])


def test_a_share_of_the_noise_is_sent_and_the_sum_is_counted() -> None:
    alone, together = Veil(mu=1, rounds=1), Veil(mu=1, rounds=1, cohort=100)
    wide, recipe = nn.Sequential(nn.Flatten(), nn.Linear(12, 3000)), Recipe()
    sent = dict(wide.named_parameters())
    replies = [
        SimulatedClient(wide, recipe=recipe, defense=one).reply(sent, batch(1), Stream.seeded(0, "veil"))
        for one in (alone, together)
    ]
    spreads = [float(torch.cat([tensor.flatten() for tensor in one.update.values()]).std()) for one in replies]
    assert spreads[0] / spreads[1] == pytest.approx(10, rel=0.05)
    assert replies[0].log.ledger.state() == replies[1].log.ledger.state() == [[1.0, 1.0, 1]]


def test_more_rounds_than_planned_are_refused() -> None:
    client = gradveil.Client(MODEL, defense=Veil(rounds=2, mu=1))
    for _ in range(2):
        client.start(MODEL.state_dict())
        client.step(batch(40).inputs, batch(40).labels)
        client.reply()
    assert client.certificate().taken == client.certificate().steps == 2
    client.start(MODEL.state_dict())
    with pytest.raises(GradveilError, match="3 steps, more than the 2 that are planned"):
        client.step(batch(40).inputs, batch(40).labels)


def test_a_certificate_counts_what_was_spent_and_what_is_planned() -> None:
    defense, spent = Veil(rounds=40), Ledger()
    spent.add(defense.sigma, 1.0, 10)
    found = certificate(defense, spent)
    assert (found.steps, found.taken) == (40, 10)
    assert found.recognised["100"] == pytest.approx(0.1, rel=1e-6)
    assert found.recognised["10"] > found.recognised["100"] > found.recognised["1000"]
    assert found.as_json()["recognised"] == found.recognised
    assert "10.0% in a line-up of 100" in found.text
    spent.add(defense.sigma, 1.0, 60)  # somebody went on with other code: the certificate tells it
    assert certificate(defense, spent).recognised["100"] > 0.15


def test_the_certificate_of_a_cohort_rests_on_the_sum() -> None:
    found = certificate(Veil(cohort=100), Ledger())
    assert "the sum of the replies of 100 clients" in found.against
    assert any("10 times less noise" in each for each in found.assumes)
    proof = prove(Veil(cohort=100), MODEL, Recipe(), inputs=batch(4).inputs, size=1, candidates=100)
    alone = prove(Veil(), MODEL, Recipe(), inputs=batch(4).inputs, size=1, candidates=100)
    run, own = proof.of_run(), alone.of_run()  # an audit sees single replies
    assert run is not None
    assert own is not None
    assert own.recognised == pytest.approx(0.1, rel=1e-6)
    assert run.recognised > 0.99


@pytest.mark.parametrize("spec", ["none", "noise:sigma=1", "clip:per=example+noise:sigma=1", "censor"])
def test_without_a_count_there_is_no_certificate(spec: str) -> None:
    with pytest.raises(GradveilError, match="no certificate"):
        certificate(DEFENSES.build(spec), Ledger())


def test_a_subclass_that_may_pass_the_noise_by_has_no_certificate() -> None:
    class Bare(Veil):
        def on_gradient(self, gradient, step):  # type: ignore[no-untyped-def]  # noqa: ARG002
            return gradient

    with pytest.raises(GradveilError):
        certificate(Bare(), Ledger())
    with pytest.raises(GradveilError):
        certificate(Chain([Bare()]), Ledger())


def test_a_client_with_few_examples_is_told_what_its_noise_does() -> None:
    assert Veil().caution(5130, 450) is None
    assert "with 2 examples and 39,000 numbers" in str(Veil().caution(39_000, 2))
    assert Chain([Veil(), DEFENSES.build("sparsify")]).caution(39_000, 2) == Veil().caution(39_000, 2)
    client = gradveil.Client(MODEL, defense="veil:rounds=4000")
    client.start(MODEL.state_dict())
    with pytest.warns(UserWarning, match=r"with 2 examples .* times as long"):
        client.step(batch(2).inputs, batch(2).labels)
