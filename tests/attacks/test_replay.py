"""Replay recognises examples through defenses that it knows nothing of but how to run them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from exchanges import observed_through
from gradveil.attacks import BUDGETS, Identify, Replay, replay
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Params, Recipe
from gradveil.data import load
from gradveil.defenses import DEFENSES, Defense, Log, Transform
from gradveil.threat import Observation

DATA = load("mnist-samples").subset(range(40))


def size_of(tree: Params) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tree.values()]).square().mean().sqrt()


@dataclass(frozen=True, kw_only=True)
class Box(Transform):
    """A defense that no adversary was written for."""

    kind: str = "turned"
    at: Any = "step"

    def transform(self, tree: Params, rng: Stream, log: Log) -> Params:  # noqa: ARG002
        def one(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if self.kind == "turned":
                return tensor.flatten().flip(0).view_as(tensor)
            if self.kind == "signs":
                return tensor.sign()
            if self.kind == "steps":
                return (tensor / tensor.abs().max().clamp(min=1e-12) * 2).round() / 2
            if self.kind == "noise":
                return rng.noised({name: tensor}, 3 * float(size_of(tree)))[name]
            if self.kind == "holes":
                keep = rng.noised({name: torch.zeros_like(tensor)}, 1.0)[name] > 1
                return tensor * keep
            if self.kind == "lengths":
                drawn = rng.noised({name: torch.zeros_like(tensor)}, 1.0)[name]
                return drawn / drawn.norm() * tensor.norm()
            if self.kind == "nothing":
                return torch.zeros_like(tensor)
            raise ValueError(self.kind)

        return {name: one(name, tensor) for name, tensor in tree.items()}


def seen(defense: Defense, *, images: int = 8, **options: Any) -> list[Observation]:
    return observed_through(defense, DATA, images=images, **options)


def recognised(observations: list[Observation]) -> float:
    hits, place = 0, 0
    for one, found in zip(observations, Replay()(observations), strict=True):
        size = one.batch_size or 1
        assert found.scores is not None
        picked = set(found.scores.argsort()[:size].tolist())
        hits += len(picked & set(range(place, place + size)))
        place += size
    return hits / place


@pytest.mark.parametrize("kind", ["turned", "signs", "steps", "noise", "holes", "lengths"])
def test_single_examples_are_recognised_through_any_box(kind: str) -> None:
    assert recognised(seen(Box(kind=kind))) >= 0.85


def test_a_box_that_sends_nothing_tells_nothing() -> None:
    found = Replay()(seen(Box(kind="nothing"), images=2))
    assert not torch.equal(found[0].inputs, DATA.batch([0]).inputs), "the first place in the list says nothing either"
    for one in found:
        assert one.scores is not None
        assert float(one.scores.max() - one.scores.min()) == 0


@pytest.mark.integration
@pytest.mark.parametrize(("kind", "least"), [("signs", 0.95), ("steps", 0.95), ("holes", 0.5)])
def test_members_of_batches_are_recognised(kind: str, least: float) -> None:
    """Ten batches of four; chance is one member of ten.

    Sets are found whole or hardly at all, so that two batches, with which this test began, say little of random holes:
    28 members of 40 are found (give or take 4), and 4 of the first 8. Of signs and steps all are.
    """
    assert recognised(seen(Box(kind=kind), images=40, batch_size=4)) >= least


def test_several_local_steps_are_replayed_too() -> None:
    recipe = Recipe(sends="delta", lr=0.05, epochs=3)
    assert recognised(seen(Box(kind="steps"), images=4, recipe=recipe)) == 1


def test_a_defense_that_is_only_a_name_cannot_be_run() -> None:
    (one,) = seen(Box(), images=1)
    with pytest.raises(GradveilError, match="is a name alone here"):
        Replay()(replace(one, built_defense=None))


def test_one_draw_is_kept_back() -> None:
    with pytest.raises(GradveilError, match="draws is at least 3"):
        Replay(draws=2)


@pytest.mark.parametrize(
    ("kind", "seconds", "worst"), [("signs", 0.1, 0), ("steps", 0.1, 0), ("noise", 0.4, 1.5), ("holes", 0.4, 1.5)]
)
def test_a_dear_defense_is_run_on_the_likeliest_candidates(
    kind: str, seconds: float, worst: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third to a half of the candidates are run, and the right one is among them.

    What draws nothing is then known by its own reply. Of what draws, a dozen candidates of three replies each are
    little to learn from: the right one has up to two before it, one in the mean of four updates (``worst``).
    """
    monkeypatch.setattr(replay, "SECONDS", seconds)
    observations, runs, start = seen(Box(kind=kind), images=4), list[int](), SimulatedClient.start

    def counted(*args: Any, **options: Any) -> Any:
        runs.append(1)
        return start(*args, **options)

    monkeypatch.setattr(SimulatedClient, "start", counted)
    found = Replay()(observations)
    assert re.match(r"replayed \d+ of 40 candidates, \d draws? each, compared by", found[0].strategy)
    number, draws = map(int, re.findall(r"\d+", found[0].strategy.replace("of 40", ""))[:2])
    assert 2 <= number < 40
    assert number * draws < len(runs) <= number * draws + 1 + 2 * replay.FEW
    places = [int((one.scores < one.scores[i]).sum()) for i, one in enumerate(found) if one.scores is not None]
    assert sum(places) / 4 <= worst, f"{places} of 40; by chance 20"


def test_too_few_runs_do_not_replace_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six updates and three candidates that can be run: these are not the best for updates that have another best."""
    monkeypatch.setattr(replay, "SECONDS", 0.1)
    found = Replay()(seen(Box(kind="noise"), images=6))
    assert found[0].strategy.endswith("too few, ranked by identify")
    assert [int(one.scores.argmin()) for one in found if one.scores is not None] == list(range(6))


def test_what_was_not_run_ranks_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the first pass, which is made to be the other way round, decides who is run and who is not."""
    monkeypatch.setattr(replay, "SECONDS", 0.1)
    first = -torch.arange(40.0).expand(2, -1)
    monkeypatch.setattr(Identify, "scores", lambda *_: first)
    for one in Replay()(seen(Box(kind="turned"), images=2)):
        assert one.scores is not None
        run = int(re.findall(r"\d+", one.strategy)[0])
        assert one.scores.argsort()[:run].sort().values.tolist() == list(range(40 - run, 40))
        assert one.scores.argsort()[run:].tolist() == list(range(40 - run - 1, -1, -1))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_defense_that_is_too_dear_is_not_run(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "SECONDS", 1e-3)
    found = Replay()(seen(Box(kind="signs"), images=batch_size, batch_size=batch_size))
    assert found[0].strategy == "a reply is too dear: nothing was run"
    assert found[0].scores is not None


def test_what_it_affords_is_counted_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "SECONDS", 0.2)
    observations = seen(Box(kind="noise"), images=2)
    one, again = Replay()(observations), Replay()(observations)
    for a, b in zip(one, again, strict=True):
        assert a.strategy == b.strategy
        assert a.scores is not None
        assert b.scores is not None
        assert torch.equal(a.scores, b.scores)


def test_a_larger_budget_affords_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "SECONDS", 0.1)
    observations = seen(Box(kind="signs"), images=1)
    assert "of 40" in Replay(BUDGETS["quick"])(observations)[0].strategy
    assert Replay(BUDGETS["thorough"])(observations)[0].strategy == "replayed, compared by distance"


def test_draws_behind_a_layer_leave_what_entered_it() -> None:
    """PRECODE draws in front of the classifier: gradients differ from draw to draw, directions of features do not."""
    assert recognised(seen(DEFENSES.build("precode"), images=4)) == 1
