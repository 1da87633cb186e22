from __future__ import annotations

import builtins
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from gradveil import models
from gradveil.client import Client
from gradveil.core.errors import GradveilError, NotAvailableError
from gradveil.core.seeding import generator
from gradveil.core.trees import norm
from gradveil.core.types import Recipe
from gradveil.defenses import DEFENSES
from gradveil.defenses.dp import Guarantee, guarantee
from steps import SAMPLES, step_on


def test_without_noise_it_is_the_mean_of_clipped_examples() -> None:
    _, step = step_on("lenet:init=wide", examples=4)
    singles = [step.gradient(step.batch.take(slice(i, i + 1))) for i in range(4)]
    sent = DEFENSES.build("dp:sigma=0,bound=0.5").on_gradient(step.gradient(), step)
    for name in sent:
        expected = sum(g[name] * min(1.0, 0.5 / float(norm(g))) for g in singles) / 4
        assert torch.allclose(sent[name], expected, rtol=1e-4, atol=1e-8)
    assert min(float(norm(g)) for g in singles) > 0.5
    assert step.log.means() == {"clipped": 1.0}


@pytest.mark.parametrize("examples", [1, 4])
def test_noise_has_the_deviation_sigma_bound_over_n(examples: int) -> None:
    _, step = step_on("lenet", examples=examples)
    without = DEFENSES.build("dp:sigma=0,bound=2").on_gradient(step.gradient(), step)
    sent = DEFENSES.build("dp:sigma=0.7,bound=2").on_gradient(step.gradient(), step)
    noise = torch.cat([(sent[name] - without[name]).flatten() for name in sent]).double()
    assert noise.std().item() == pytest.approx(0.7 * 2 / examples, rel=0.02)
    assert noise.mean().abs() < 4 * 0.7 * 2 / examples / math.sqrt(len(noise))


@pytest.mark.parametrize(("accountant", "epsilon"), [("rdp", 1.712), ("prv", 1.526)])
def test_epsilon_is_that_of_opacus(accountant: str, epsilon: float) -> None:
    opacus = pytest.importorskip("opacus.accountants")
    theirs = {"rdp": opacus.RDPAccountant, "prv": opacus.PRVAccountant}[accountant]()
    theirs.history = [(1.1, 0.01, 1000)]
    found = guarantee(sigma=1.1, sample_rate=0.01, steps=1000, delta=1e-5, accountant=accountant)
    assert found == Guarantee(theirs.get_epsilon(delta=1e-5), 1e-5, accountant)
    assert found.epsilon == pytest.approx(epsilon, abs=1e-3)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_epsilon_falls_with_sigma_and_is_above_that_of_one_gaussian_mechanism(accountant: str) -> None:
    pytest.importorskip("opacus")
    found = [guarantee(sigma=s, sample_rate=1.0, steps=1, accountant=accountant).epsilon for s in (0.5, 1.1, 5, 50)]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 4
    for sigma, epsilon in zip((0.5, 1.1, 5, 50), found, strict=True):
        assert _gaussian_delta(sigma, epsilon) <= 1e-5 < _gaussian_delta(sigma, 0.7 * epsilon)


def _gaussian_delta(sigma: float, epsilon: float) -> float:
    """The exact delta of one Gaussian mechanism (Balle and Wang, ICML 2018)."""
    cdf = torch.distributions.Normal(0.0, 1.0).cdf
    half, ratio = torch.tensor([0.5 / sigma, epsilon * sigma]).double()
    return float(cdf(half - ratio) - math.exp(epsilon) * cdf(-half - ratio))


def test_a_reply_logs_epsilon_for_the_steps_that_saw_an_example() -> None:
    pytest.importorskip("opacus")
    module = models.build("lenet", SAMPLES.domain, seed=0)
    for recipe, visits in [
        (Recipe(), 1),
        (Recipe(sends="delta", epochs=3), 3),
        (Recipe(sends="delta", epochs=2, batch_size=2), 2),  # four steps, but each example is in two of them
    ]:
        client = Client(module, recipe=recipe, defense=DEFENSES.build("dp"))
        log = client.reply(client.model.params, SAMPLES.batch(range(4)), generator(0)).log
        expected = guarantee(sigma=1.1, sample_rate=1.0, steps=visits).epsilon
        assert log.values("epsilon") == (expected,)


def test_a_described_training_is_told_apart_from_the_reply() -> None:
    pytest.importorskip("opacus")
    defense = DEFENSES.build("dp:sample_rate=0.01,steps=1000,accountant=prv")
    client = Client(models.build("lenet", SAMPLES.domain, seed=0), recipe=Recipe(), defense=defense)
    log = client.reply(client.model.params, SAMPLES.batch(range(2)), generator(0)).log
    assert log.means()["epsilon_described"] == pytest.approx(1.526, abs=1e-3)
    assert log.means()["epsilon"] == guarantee(sigma=1.1, sample_rate=1.0, steps=1, accountant="prv").epsilon


@pytest.mark.parametrize(("sigma", "steps"), [(0.1, 1000), (0.001, 1)])
def test_where_prv_cannot_count_rdp_stands_in_for_it(sigma: float, steps: int) -> None:
    pytest.importorskip("opacus")
    found = guarantee(sigma=sigma, sample_rate=0.01, steps=steps, accountant="prv")
    assert found == guarantee(sigma=sigma, sample_rate=0.01, steps=steps)
    assert found.accountant == "rdp"


def test_a_reply_that_contradicts_the_described_training_is_refused() -> None:
    defense, recipe = DEFENSES.build("dp:sample_rate=0.1,steps=2"), Recipe(sends="delta", epochs=3)
    client = Client(models.build("lenet", SAMPLES.domain, seed=0), recipe=recipe, defense=defense)
    with pytest.raises(GradveilError, match="3 steps, more than the 2"):
        client.reply(client.model.params, SAMPLES.batch(range(2)), generator(0))


def test_running_statistics_which_it_does_not_cover_are_refused() -> None:
    kept, forgotten = (nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=track)) for track in (True, False))
    with pytest.raises(GradveilError, match=r"layer '0'.*track_running_stats=False"):
        DEFENSES.build("dp").check(kept)
    DEFENSES.build("dp").check(forgotten)


def test_no_noise_is_no_guarantee_and_logs_none() -> None:
    assert guarantee(sigma=0.0, sample_rate=1.0, steps=1).epsilon == math.inf
    client = Client(
        models.build("lenet", SAMPLES.domain, seed=0), recipe=Recipe(), defense=DEFENSES.build("dp:sigma=0")
    )
    log = client.reply(client.model.params, SAMPLES.batch(range(2)), generator(0)).log
    assert log.values("epsilon") == ()


def test_without_opacus_it_works_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refusing(name: str, *rest: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "opacus":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refusing)
    with pytest.raises(NotAvailableError, match="pip install opacus"):
        guarantee(sigma=1.234, sample_rate=0.01, steps=10)
    client = Client(
        models.build("lenet", SAMPLES.domain, seed=0), recipe=Recipe(), defense=DEFENSES.build("dp:sigma=1.234")
    )
    log = client.reply(client.model.params, SAMPLES.batch(range(2)), generator(0)).log
    assert set(log.means()) == {"clipped"}


def test_batch_norm_is_refused_with_the_fix() -> None:
    with pytest.raises(GradveilError, match=r"layer 'body.bn0'.*batch_norm=false.*torch.nn.GroupNorm"):
        Client(models.build("convnet:width=8", SAMPLES.domain, seed=0), recipe=Recipe(), defense=DEFENSES.build("dp"))
    fixed = models.build("convnet:width=8,batch_norm=false", SAMPLES.domain, seed=0)
    Client(fixed, recipe=Recipe(), defense=DEFENSES.build("dp"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dp:sigma=-1", "sigma is at least 0"),
        ("dp:bound=0", "bound is above 0"),
        ("dp:delta=1", "delta is above 0 and below 1"),
        ("dp:sample_rate=0.1", "go together"),
        ("dp:sample_rate=2,steps=5", "sample_rate is above 0 and at most 1"),
        ("dp:sample_rate=0.1,steps=0", "steps is at least 1"),
    ],
)
def test_impossible_options_are_refused(spec: str, message: str) -> None:
    with pytest.raises(GradveilError, match=message):
        DEFENSES.build(spec)


def test_accounting_is_silent() -> None:
    pytest.importorskip("opacus")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert guarantee(sigma=1000.0, sample_rate=1.0, steps=1).epsilon < 0.01
