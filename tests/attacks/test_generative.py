"""Attacks that search in a generator, on real digits that it has not been trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import minimize

from exchanges import SAMPLES, observed, private_batches
from gradveil.attacks import ATTACKS, Budget
from gradveil.attacks.generative import Generative
from gradveil.attacks.parts.matching import Matching
from gradveil.attacks.parts.population import Evolution, TuRBO
from gradveil.attacks.parts.priors import Codes, into_l1_ball
from gradveil.attacks.parts.search import Problems
from gradveil.auditing import make_case, run_case
from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT
from gradveil.core.seeding import generator
from gradveil.metrics import psnr

SEARCHES = {"adam": 150, "cma": 30, "turbo": 40}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", SEARCHES)
def test_ggl_finds_digits(optimizer: str, tmp_path: Path) -> None:
    """On undefended updates, against the same search without them."""
    attack = f"ggl:optimizer={optimizer},iterations={SEARCHES[optimizer]},restarts=1"
    case = make_case({"data": "mnist-samples", "images": 4, "defenses": ["none"], "attacks": [attack]})
    audit = run_case(case, tmp_path)
    found, alone = audit.rows
    assert alone.attack == "prior-only"
    assert found.identified > alone.identified
    assert found.psnr > alone.psnr + 3
    for curve in found.trace.objective:
        assert curve[-1] < 0.7 * curve[0], json.dumps(curve)


@pytest.mark.integration
@pytest.mark.parametrize(
    "spec", ["ggl:optimizer=adam", "ggl:optimizer=cma,population=12", "ggl:optimizer=turbo", "gifd"]
)
def test_each_search_goes_down(spec: str) -> None:
    attack = ATTACKS.build(f"{spec}{',' if ':' in spec else ':'}iterations=20,restarts=1", Budget(1, 20))
    for one in attack(observed(private_batches(2)), seeds=[0, 1]):
        assert one.objective < one.trace[0]
        assert one.inputs.shape == (1, 3, 32, 32)


@pytest.mark.integration
@pytest.mark.parametrize("model", ["lenet:init=wide", "lenet"])
def test_no_clip_costs_ggl_more_than_a_decibel(model: str) -> None:
    batches = private_batches(2)
    private, quality = torch.cat([batch.inputs for batch in batches]), {}
    for defense in ("none", "clip:bound=4", "clip:bound=4,per=global"):
        attack = ATTACKS.build("ggl:optimizer=adam", Budget(1, 150))
        found = attack(observed(batches, model=model, defense=defense), seeds=[0, 1])
        quality[defense] = float(psnr(torch.cat([one.inputs for one in found]), private).mean())
    assert min(quality.values()) > quality["none"] - 1, quality


@pytest.mark.integration
def test_gias_ends_in_weights_that_fit_better_than_any_code() -> None:
    attack = ATTACKS.build("gias:iterations=40,weight_lr=0.0003,restarts=1", Budget(1, 40))
    (found,) = attack(observed(private_batches(1)), seeds=[0])
    code = [value for step, value in zip(found.steps, found.trace, strict=True) if step <= 5]
    assert found.objective < min(code)
    assert found.strategy.count("together") == 2, "two phases, each run in its own way"


def test_a_generator_of_another_shape_is_refused() -> None:
    with pytest.raises(GradveilError, match="draws 1x28x28, but the inputs are 3x32x32"):
        ATTACKS.build("ggl:generator=mnist", Budget(1, 2))(observed(private_batches(1)), seeds=[0])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("gifd:stages=4", "stages=4, but the generator has 3 after its code"),
        ("gifd:stages=-1", "stages is at least 0"),
        ("ggl:match=surrogate", "cma searches codes alone"),
        ("ggl:optimizer=turbo,match=surrogate", "turbo searches codes alone"),
        ("ggl:optimizer=turbo,limit=5", "leave limit out"),
        ("ggl:optimizer=turbo-1,limit=5", "leave limit out"),
    ],
)
def test_what_does_not_go_together_is_refused(spec: str, words: str) -> None:
    with pytest.raises(GradveilError, match=words):
        ATTACKS.build(spec, Budget(1, 4))(observed(private_batches(1)), seeds=[0])


def test_turbo_reaches_the_edge_of_its_box() -> None:
    attack = ATTACKS.build("ggl:optimizer=turbo", Budget(1, 4))
    assert isinstance(attack, Matching)
    (phase,) = attack.phases
    assert isinstance(phase.search, TuRBO)
    prior = phase.prior(observed(private_batches(1))[0], None)
    assert isinstance(prior, Codes)
    edge = torch.full((1, prior.generator.latent), phase.search.box)
    assert torch.equal(prior.code({"code": edge}), edge)


def test_turbo_as_published_counts_evaluations_and_starts_in_a_latin_hypercube() -> None:
    search = TuRBO.published(evaluations=1000)
    assert search.iterations * search.population == 1000
    first = search._first(256, 128, generator(0))
    assert all(torch.equal((256 * axis).floor().sort().values, torch.arange(256.0)) for axis in first.T)


def test_a_generator_of_larger_pictures_is_resized() -> None:
    """As BigGAN's 256 pixels are for ImageNet's 224."""
    (one,) = observed(private_batches(1))
    small = replace(one, domain=replace(SAMPLES.domain, height=24, width=24))
    attack = ATTACKS.build("ggl:generator=cifar10", Budget(1, 2))
    assert isinstance(attack, Generative)
    assert attack.codes(small).generator.shape == (3, 24, 24)
    assert attack.codes(one).generator.shape == (3, 32, 32)


@pytest.mark.parametrize("name", ["ggl", "gias", "gifd"])
def test_attacks_with_a_generator_do_to_candidates_what_the_defense_did(name: str) -> None:
    attack = ATTACKS.build(name, Budget(1, 2))
    assert isinstance(attack, Generative)
    assert attack.aware


@pytest.mark.parametrize("condition", ["label", "wrong", "none"])
def test_the_class_that_is_asked_for_can_be_wrong_or_none(condition: str) -> None:
    (one,) = observed(private_batches(1))
    attack = ATTACKS.build(f"ggl:condition={condition}", Budget(1, 2))
    assert isinstance(attack, Generative)
    codes = attack.codes(one)
    code, label = codes.starts(1, [generator(0)])["code"][0], torch.tensor([9])
    asked = {"label": label, "wrong": torch.tensor([0]), "none": None}[condition]
    drawn = codes.decode({"code": code}, {"labels": label})
    torch.testing.assert_close(drawn, codes.generator.decode(code, asked))


def test_all_populations_are_valued_as_one_batch() -> None:
    attack = ATTACKS.build("ggl:population=5,iterations=2,restarts=2,strategy=vmap", Budget(1, 2))
    found = attack(observed(private_batches(2)), seeds=[0, 1])
    assert "20 together" in found[0].strategy, "2 images, 2 restarts, 5 points each"


def test_evolution_minimises_what_it_is_given() -> None:
    """Four spheres with different centers, all at once."""
    centers = torch.randn((4, 1, 6), generator=generator(0))

    def evaluate(point: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        away = point["code"].view(4, -1, 1, 6) - centers[:, None]
        return {}, away.square().sum(dim=(2, 3)).flatten()

    with SILENT.task("", None) as task:
        spheres = Problems(evaluate, {"code": torch.zeros(4, 1, 6)}, seeds=[1, 2, 3, 4])
        found = Evolution(iterations=60, population=12).run(spheres, task)
    assert found.objectives.max() < 1e-4
    torch.testing.assert_close(found.unknowns["code"], centers, atol=0.02, rtol=0)


def test_the_l1_ball_is_met_at_its_nearest_point() -> None:
    points = torch.randn((5, 4), generator=generator(2)).double() * 2
    near = into_l1_ball(points, 1.5)
    for point, found in zip(points, near, strict=True):
        inside = point.abs().sum() <= 1.5
        ball: Any = {"type": "ineq", "fun": lambda y: 1.5 - abs(y).sum()}
        best = minimize(
            lambda y, x: ((y - x) ** 2).sum(),  # type: ignore[misc]
            point.numpy() * 0.1,
            args=(point.numpy(),),
            constraints=ball,
        ).x
        assert found.abs().sum() <= 1.5 + 1e-9
        torch.testing.assert_close(found, point if inside else torch.from_numpy(best), atol=2e-3, rtol=0)


def test_the_preset_is_a_composition() -> None:
    attack = ATTACKS.build("gifd:iterations=40", Budget(1, 40))
    assert isinstance(attack, Matching)
    assert [phase.search.iterations for phase in attack.phases] == [10, 10, 10, 10]
