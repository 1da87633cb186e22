"""Ceilings against the best adversary that can be computed, and against the facts of the field."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import ndtr, ndtri
from torch import Tensor

from gradveil.bounds import Proof, best_psnr, ceiling, prove, release_of
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Params, Recipe
from gradveil.defenses import (
    DEFENSES,
    DP,
    Chain,
    Clip,
    ClipExamples,
    Defense,
    Ledger,
    Log,
    Noise,
    Soteria,
    Step,
    Transform,
)


def spent(sigma: float, steps: int = 1, rate: float = 1.0) -> Ledger:
    ledger = Ledger()
    ledger.add(sigma, rate, steps)
    return ledger


@pytest.mark.parametrize(
    ("mu", "share"), [(0.25, 0.019), (0.5, 0.034), (1 / 1.1, 0.078), (1, 0.092), (2, 0.37), (3, 0.75)]
)
def test_one_of_a_hundred_by_the_published_formula(mu: float, share: float) -> None:
    assert ceiling(spent(1 / mu), candidates=100).recognised == pytest.approx(share, abs=0.005)


def recognised(influences: np.ndarray, sigma: float, draws: int = 20_000, seed: int = 0) -> float:
    """How often the most likely candidate is the right one: no adversary does better."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(len(influences), size=draws)
    reply = influences[truth] + sigma * rng.standard_normal((draws, influences.shape[1]))
    likely = reply @ influences.T - (influences**2).sum(1) / 2
    return float((likely.argmax(1) == truth).mean())


@pytest.mark.parametrize("sigma", [0.3, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("kind", ["opposite", "right angles", "one line", "simplex", "random"])
def test_the_best_adversary_stays_below(kind: str, sigma: float) -> None:
    rng = np.random.default_rng(1)
    influences = {
        "opposite": np.array([[1.0], [-1.0]]),
        "right angles": np.eye(100),
        "one line": np.linspace(-1, 1, 100)[:, None],
        "simplex": np.eye(100) - 1 / 100,
        "random": (lambda x: x / np.linalg.norm(x, axis=1, keepdims=True))(rng.standard_normal((100, 5))),
    }[kind]
    assert np.linalg.norm(influences, axis=1).max() <= 1 + 1e-12
    top = ceiling(spent(sigma), candidates=len(influences)).recognised
    found = recognised(influences, sigma)
    assert found <= top + 3 * math.sqrt(top * (1 - top) / 20_000)
    if kind == "opposite":
        assert found >= top - 0.02, "two opposite candidates reach the ceiling"


def test_many_replies_are_one_with_less_noise() -> None:
    assert ceiling(spent(4.0, steps=16), candidates=50).recognised == pytest.approx(
        ceiling(spent(1.0), candidates=50).recognised
    )


def test_members_by_the_trade_off_of_gaussian_noise() -> None:
    found = ceiling(spent(1.0), candidates=100)
    assert found.member == pytest.approx(ndtr(ndtri(0.01) + 1))
    assert found.advantage == pytest.approx(2 * ndtr(0.5) - 1)


def test_sampled_steps_cost_less_and_never_less_than_they_should() -> None:
    """Against the exact power of one sampled step, by a likelihood ratio that is drawn often."""
    rate, sigma, draws = 0.1, 1.0, 400_000
    rng = np.random.default_rng(0)
    without = sigma * rng.standard_normal(draws)
    part = without + (rng.random(draws) < rate)

    def ratio(x: np.ndarray) -> np.ndarray:
        return np.asarray(1 - rate + rate * np.exp((2 * x - 1) / (2 * sigma**2)))

    for level in (0.001, 0.01, 0.1, 0.5):
        exact = float((ratio(part) > np.quantile(ratio(without), 1 - level)).mean())
        claimed = spent(sigma, rate=rate).power(level)
        assert exact <= claimed + 4 * math.sqrt(exact / draws)
        assert claimed < 0.7 * spent(sigma).power(level) or level == 0.5
    exact = float(np.maximum(ratio(without) - 1, 0).mean())
    assert exact - 0.001 <= spent(sigma, rate=rate).advantage() <= exact + 0.005


def test_nothing_spent_is_luck_and_no_noise_is_everything() -> None:
    assert ceiling(Ledger(), candidates=100).recognised == pytest.approx(0.01)
    assert Ledger().advantage() == 0
    assert ceiling(spent(0.0), candidates=100).recognised == 1
    assert ceiling(spent(0.0), candidates=100).advantage == 1


def test_of_a_batch_the_others_may_be_known() -> None:
    assert ceiling(spent(1e9), candidates=100, private=8).recognised == pytest.approx(8 / 93)
    assert ceiling(spent(1e9), candidates=8, private=8).recognised == 1
    with pytest.raises(GradveilError, match="9 private examples cannot be among 8"):
        ceiling(spent(1.0), candidates=8, private=9)


@pytest.mark.parametrize(
    ("spec", "sigma", "at"),
    [
        ("dp:sigma=2", 2.0, "step"),
        ("clip:per=example,bound=1+noise:sigma=0.5", 4.0, "step"),
        ("clip:per=example,bound=1+clip:per=global,bound=9+noise:sigma=0.5", 4.0, "step"),
        ("clip:per=example,bound=8+clip:per=global,bound=0.5+noise:sigma=1", 2.0, "step"),
        ("clip:per=global,bound=1,at=update+noise:sigma=2,at=update", 2.0, "update"),
        ("clip:per=layer,bound=1+noise:sigma=1", 0.5, "step"),
        ("clip:per=example,bound=1+noise:sigma=0.5+sparsify:rate=0.9", 4.0, "step"),
    ],
)
def test_what_is_bounded_and_noised_has_a_ceiling(spec: str, sigma: float, at: str) -> None:
    found = release_of(DEFENSES.build(spec), examples=8, tensors=4)
    assert found.sigma == pytest.approx(sigma)
    assert found.at == at


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("none", "nothing bounds"),
        ("noise:sigma=9", "nothing bounds"),
        ("noise:sigma=9+clip:per=global", "no Gaussian noise follows"),
        ("clip:per=example", "no Gaussian noise follows"),
        ("clip:per=example+noise:sigma=0", "no Gaussian noise follows"),
        ("clip:per=example+noise:sigma=1,at=update", "no Gaussian noise follows"),
        ("clip:per=global+sparsify:rate=0.5+noise:sigma=1", "nothing bounds"),
        ("clip:per=global+noise:sigma=1,kind=laplace", "laplace noise is not counted"),
        ("censor", "nothing bounds"),
        ("outpost", "nothing bounds"),
    ],
)
def test_what_is_not_has_none_and_says_why(spec: str, why: str) -> None:
    with pytest.raises(GradveilError, match=why):
        release_of(DEFENSES.build(spec), examples=8, tensors=4)


class Mixed(Defense):
    """Every example becomes the mean of all."""

    def on_inputs(self, inputs: Tensor, rng: Stream) -> Tensor:  # noqa: ARG002
        return inputs.mean(0, keepdim=True).expand_as(inputs)


class Late(Defense):
    def on_update(self, update: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        return update


class Unclipped(Clip):
    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        return tree


class NotNoised(Noise):
    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        return tree


class Bare(DP):
    def noisy(self, step: Step) -> Params:
        return step.gradient()


class Other(Transform):
    """Acts on gradients, although it is for updates."""

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        return tree

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return {name: step.batch.inputs.sum().expand_as(tensor) for name, tensor in gradient.items()}


CLIP, NOISE = Clip(bound=1.0, per="global", at="step"), Noise(sigma=1.0)


@pytest.mark.parametrize(
    "links",
    [
        [ClipExamples(bound=1.0), NOISE, Soteria()],
        [Mixed(), DP()],
        [DP(), Mixed()],
        [Mixed(), ClipExamples(bound=1.0), NOISE],
        [Mixed(), CLIP, NOISE],  # as a whole they are bounded, mixed or not, but nobody has looked at what Mixed keeps
        [Late(), DP()],
        [CLIP, NOISE, Late()],
        [Late(), CLIP, NOISE],
        [Unclipped(bound=1.0, per="global", at="step"), NOISE],
        [CLIP, NotNoised(sigma=1.0)],
        [Bare()],
        [CLIP, Other(at="update"), NOISE],
        [CLIP, NOISE, Other(at="update")],
    ],
)
def test_what_may_let_examples_past_the_noise_has_none(links: list[Defense]) -> None:
    with pytest.raises(GradveilError, match=r"past the noise|nothing bounds|no Gaussian noise follows"):
        release_of(Chain(links), examples=4, tensors=4)


def test_what_changes_each_example_by_itself_leaves_the_ceiling() -> None:
    for spec in ("ats+dp:sigma=2", "dp:sigma=2+ats", "precode+dp:sigma=2", "dp:sigma=2+sparsify:rate=0.9"):
        assert release_of(DEFENSES.build(spec), examples=4, tensors=4).sigma == 2
    for links in ([CLIP, NOISE], [DEFENSES.build("ats"), CLIP, NOISE]):
        assert release_of(Chain(links), examples=4, tensors=4).covers == "all examples together"


def test_a_step_without_noise_tells_everything_at_any_level() -> None:
    assert [spent(0.0).power(level) for level in (0.0, 0.5, 1.0)] == [1.0] * 3


PICTURES = torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(0))
PLAIN = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))


def proved(defense: Defense, recipe: Recipe = Recipe(), size: int = 1, **more: Any) -> Proof:  # noqa: B008
    return prove(defense, PLAIN, recipe, **{"inputs": PICTURES, "size": size, "candidates": 100, **more})


def test_a_proof_counts_the_steps_of_an_audit() -> None:
    several = Recipe(sends="delta", epochs=3, batch_size=2)
    noisy = Chain([ClipExamples(bound=1.0), Noise(sigma=0.5)])
    whole = Chain([Clip(bound=1.0, per="global", at="step"), Noise(sigma=0.5)])
    assert proved(DP(sigma=2.0)).steps == 1
    assert proved(DP(sigma=2.0), several, size=4).steps == 3, "an example is in one step of each epoch"
    assert proved(whole, several, size=4).steps == 6, "all are in every step"
    release = proved(noisy, several, size=4).release
    assert release is not None
    assert release.sigma == 1.0, "one of two examples behind a step"
    as_variance = Chain([ClipExamples(bound=1.0), Noise(sigma=0.25, unit="variance")])
    assert proved(as_variance, several, size=4).release == release
    uneven = proved(noisy, several, size=5).release
    assert uneven is not None
    assert uneven.sigma == 0.5, "the last step is of one example"
    twice = proved(DP(sigma=2.0), inputs=torch.cat([PICTURES[:1]] * 2), size=2)
    assert twice.steps == 4, "twice in a batch is twice the influence"


def test_more_replies_and_a_planned_training_have_higher_ceilings() -> None:
    proof = proved(DP(sigma=4.0, steps=100))
    one, ten, run = proof.ceiling(), proof.ceiling(10), proof.of_run()
    assert one is not None
    assert ten is not None
    assert run is not None
    assert one.recognised < ten.recognised < run.recognised
    assert one.recognised == ceiling(spent(4.0), candidates=100).recognised
    assert "one reply" in one.assumes
    assert "all of 10 replies" in ten.assumes
    assert "all 100 noisy steps" in run.assumes
    assert proved(DP(sigma=4.0)).of_run() is None, "nobody knows how long the training is"


@pytest.mark.parametrize(
    ("defense", "more", "why"),
    [
        (Noise(sigma=1.0), {}, "nothing bounds"),
        (DP(sigma=0.0), {}, "no noise"),
        (DP(), {"given": ["labels"]}, "is told labels"),
        (DP(), {"candidates": 1, "size": 4}, "fewer candidates"),
    ],
)
def test_where_nothing_is_proved_it_says_why(defense: Defense, more: dict[str, Any], why: str) -> None:
    proof = proved(defense, **more)
    assert why in proof.why
    assert proof.ceiling() is None


def test_batch_norm_in_the_train_mode_is_not_covered() -> None:
    mixing = torch.nn.Sequential(torch.nn.BatchNorm2d(1), *PLAIN)
    guard = Chain([Clip(bound=1.0, per="global", at="step"), Noise(sigma=0.5)])
    settings: dict[str, Any] = {"inputs": PICTURES, "size": 1, "candidates": 100}
    assert prove(guard, mixing, Recipe(train_mode=True), **settings).why
    assert not prove(guard, mixing, Recipe(), **settings).why


@pytest.mark.parametrize("sigma", [0.7, 1.0, 2.0, 4.0])
def test_no_unbiased_estimate_of_a_pixel_is_better_than_the_bound(sigma: float) -> None:
    """A pixel in [0, 1] that is sent as -1 to 1, and noised: the plain estimate is the best unbiased one."""
    rng = np.random.default_rng(0)
    pixel = rng.random(200_000)
    reply = 2 * pixel - 1 + sigma * rng.standard_normal(len(pixel))
    error = float(np.mean(((reply + 1) / 2 - pixel) ** 2))
    bound = best_psnr(sigma)
    assert bound is not None
    assert -10 * math.log10(error) <= bound + 0.1
    assert best_psnr(sigma, 4) is None or best_psnr(sigma, 4) == pytest.approx(best_psnr(sigma / 2))
