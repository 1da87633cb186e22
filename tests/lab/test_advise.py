"""Advice: the decision follows from what was measured, the search loses nothing, and files of others are checked."""

from __future__ import annotations

import json
import math
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gradveil.core.errors import BadFileError, GradveilError
from gradveil.lab.advise import Question, Recommendation, Trial, answer, render_advice
from gradveil.lab.advise import search as searching
from gradveil.lab.advise.answer import distance, keepers
from gradveil.lab.advise.measure import Privacy, proved
from gradveil.lab.advise.page import nearest
from gradveil.lab.advise.question import Candidate, clearness
from gradveil.lab.advise.search import advise, candidate, first_trials, kinds, space

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer loads names that click is about to drop
    from gradveil.cli.main import app

ASKED = Question(data="mnist-samples", model="mlp", clients=2)


def run(*arguments: str) -> None:
    app(list(arguments), standalone_mode=False)


def trial(number: int, defense: str, most: float | None, accuracy: float | None, **more: Any) -> Trial:
    about: dict[str, Any] = {"model": "mlp", "what": "mlp|x", "params": {}, "lr": 0.1, "rounds": 20}
    interval = None if most is None else (0.0, most)
    reached = () if accuracy is None else (accuracy,)
    return Trial(
        number=number, defense=defense, recognised=most, interval=interval, accuracies=reached, **{**about, **more}
    )  # fmt: skip


PLAIN = trial(1, "none", 1.0, 0.9)
VEIL = trial(2, "veil", 0.1, 0.88, certified=True)
NOISE = trial(3, "noise", 0.09, 0.89)
LEAKY = trial(4, "noise:sigma=0.1", 0.6, 0.9)
LOUD = trial(5, "veil:ceiling=0.05", 0.05, 0.5, certified=True)


def answered(*trials: Trial, asked: Question = ASKED) -> Recommendation:
    return answer(asked, trials, held_out=400, classes=10, examples=1000)


def test_what_is_certified_comes_before_what_was_only_measured() -> None:
    found = answered(PLAIN, NOISE, LEAKY, VEIL, LOUD)
    assert found.best == VEIL
    assert found.sentence.startswith("Use veil on mlp: nobody recognises more than 10.0% in a line-up of 100 over all")
    assert "accuracy 88.0% instead of 90.0% without a defense on mlp, 2.0 points lost" in found.sentence
    assert "--defense veil " in found.command
    assert "--defense none --defense veil " in found.audit
    assert [one.number for one in found.front] == [5, 3, 4]


def test_of_two_that_are_certified_the_one_that_costs_less_is_recommended() -> None:
    better = VEIL.model_copy(update={"number": 6, "accuracies": (0.885,)})
    assert answered(PLAIN, VEIL, better).best == better


def test_nothing_keeps_both_wishes_and_the_nearest_are_shown() -> None:
    found = answered(PLAIN, LEAKY, LOUD)
    assert found.best is None
    assert found.command == ""
    assert "Nothing that was tried keeps both wishes" in found.sentence
    assert (found.nearest_private, found.nearest_accurate) == (LOUD, LEAKY)


def test_a_defense_that_nobody_attacked_by_name_is_not_recommended_for_what_was_measured() -> None:
    untried = NOISE.model_copy(update={"untried": True})
    assert answered(PLAIN, untried).best is None
    assert answered(PLAIN, NOISE).best == NOISE
    assert "without a proof" in answered(PLAIN, NOISE).sentence


@pytest.mark.parametrize("state", ["dropped", "failed"])
def test_what_was_not_measured_to_its_end_is_no_answer(state: str) -> None:
    assert answered(PLAIN, VEIL.model_copy(update={"state": state})).best is None


def test_a_model_that_learned_nothing_loses_nothing() -> None:
    found = answered(trial(1, "none", 1.0, 0.12), trial(2, "veil", 0.1, 0.11, certified=True))
    assert found.best is None
    assert not found.learned
    assert "no loss can be told" in found.sentence
    assert nearest(found) == []


def test_few_held_out_examples_are_mentioned() -> None:
    found = answer(ASKED, [PLAIN, VEIL], held_out=16, classes=10, examples=80)
    assert "one of 16 held-out examples is 6.2 points" in found.sentence


def test_further_seeds_count_as_much_as_the_first() -> None:
    lucky = VEIL.model_copy(update={"again": (0.80, 0.81)})
    assert lucky.accuracy == pytest.approx(0.83)
    assert keepers(ASKED, [PLAIN, lucky], PLAIN) == []


def test_another_model_is_named_as_such() -> None:
    found = answered(PLAIN, VEIL.model_copy(update={"model": "features", "rounds": 40}))
    assert "on features, as your model mlp cannot" in found.sentence
    assert "--model features " in found.command
    assert "--algorithm fedsgd" in found.command
    assert "--batch-size 1000" in found.command


def test_the_distance_is_smallest_where_both_wishes_are_kept() -> None:
    kept = distance(ASKED, 0.1, 1.0)
    assert kept < distance(ASKED, 0.1, 2.0) < distance(ASKED, 0.1, 4.0)
    assert kept < distance(ASKED, 0.2, 0.0)


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_plan_of_veil_covers_all_steps_of_the_training_and_keeps_the_wish(epochs: int) -> None:
    asked = ASKED.model_copy(update={"epochs": epochs, "max_recognised": 0.05})
    chosen = candidate(asked, "mlp|veil", {"mlp|veil/lr": 0.1, "mlp|veil/bound": 1.0})
    assert f"rounds={20 * epochs}" in chosen.defense
    assert proved(chosen.defense).recognised <= 0.05 * (1 + 1e-8)


def test_public_features_are_tried_beside_a_model_and_not_twice() -> None:
    assert "features|veil" in kinds(ASKED)
    on = Question(data="cifar10-samples", model="features", defenses=("veil:mu=1", "none"))
    assert len(kinds(on)) == len(set(kinds(on)))
    assert "features|veil:mu=1.0" in kinds(on)
    for asked in (ASKED, on):
        for what, values in first_trials(asked):
            assert {name.rpartition("/")[2] for name in space(asked, what)} - {"lr"} <= values.keys()
        assert {what for what, _ in first_trials(asked)} == set(kinds(asked))


def test_a_short_training_has_the_noise_of_the_whole_one() -> None:
    """The mean of K replies of n examples each, with noise of sigma / n, has noise of sigma sqrt(K) / (K n)."""

    def noise(clients: int, examples: int, sigma: float) -> float:
        return sigma * math.sqrt(clients) / examples

    chosen = Candidate(model="features", defense="none", lr=1.0, rounds=10)
    short = chosen.training(ASKED, clients=4, examples=800)
    whole = chosen.training(ASKED, clients=100, examples=50_000)
    scale = clearness(short, 800) / clearness(whole, 50_000)
    assert noise(4, 800, scale) == pytest.approx(noise(100, 50_000, 1.0))


@pytest.mark.parametrize("wishes", [{"max_recognised": 0.01}, {"max_recognised": 1.0}, {"max_loss": -1}, {"short": 3},
                                    {"max_loss": math.nan}, {"max_recognised": math.nan}, {"lr": 0}])  # fmt: skip
def test_wishes_that_mean_nothing_are_refused(wishes: dict[str, Any]) -> None:
    with pytest.raises(GradveilError, match=next(iter(wishes))):
        Question(**wishes)


class FakeLaboratory:
    """Measures nothing: accuracy and privacy follow from the name of the defense."""

    made = 0
    crashing = ""

    def __init__(self, asked: Question, _folder: Path, _progress: object = None) -> None:
        self.asked, self.whole, self.held_out, self.shortened = asked, 1000, range(400), "nothing"
        self.train = type("Data", (), {"domain": type("Domain", (), {"classes": 10})})

    def privacy(self, chosen: Candidate) -> Privacy:
        type(self).made += 1
        if chosen.defense == self.crashing:
            raise ZeroDivisionError("of somebody")
        if chosen.defense.startswith("veil"):
            return proved(chosen.defense)
        share = 0.5 if chosen.defense.startswith("noise") else 1.0
        return Privacy(share, (share / 2, min(1.0, share + 0.1)), certified=False)

    def accuracies(self, chosen: Candidate, _seed: int | None = None) -> Iterator[float]:
        veiled = 0.5 if not chosen.on_features else 0.895 if "ceiling=0.1," in chosen.defense else 0.6
        yield from (0.3, 0.6, 0.8, veiled if chosen.defense.startswith("veil") else 0.9)


@pytest.fixture
def laboratory(monkeypatch: pytest.MonkeyPatch) -> type[FakeLaboratory]:
    monkeypatch.setattr(searching, "Laboratory", FakeLaboratory)
    FakeLaboratory.made, FakeLaboratory.crashing = 0, ""
    return FakeLaboratory


def asked_for(**changes: Any) -> Question:
    return Question(data="mnist-samples", model="mlp", trials=20, **changes)


@pytest.mark.usefixtures("laboratory")
def test_a_search_ends_in_a_recommendation_and_a_page(tmp_path: Path) -> None:
    found, shortened = advise(asked_for(), tmp_path)
    assert found.best is not None
    assert found.best.certified
    assert len(found.best.again) == 2
    assert {one.why for one in found.trials if one.defense == "censor"} == {"all were recognised, as without a defense"}
    page = render_advice(asked_for(), found, shortened, tmp_path / "advice.html").read_text()
    assert found.best.defense in page.replace("<wbr>", "")
    assert "<script" not in page


def test_an_interrupted_search_loses_one_trial_and_goes_on(
    tmp_path: Path, laboratory: type[FakeLaboratory], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = laboratory.accuracies

    def killed(self: FakeLaboratory, chosen: Candidate, seed: int | None = None) -> Iterator[float]:
        if self.made == 8:
            yield 0.3
            raise KeyboardInterrupt
        yield from whole(self, chosen, seed)

    monkeypatch.setattr(laboratory, "accuracies", killed)
    with pytest.raises(KeyboardInterrupt):
        advise(asked_for(), tmp_path)
    assert len(list((tmp_path / "trials").glob("*.json"))) == 7
    with pytest.raises(GradveilError, match="add --resume"):
        advise(asked_for(), tmp_path)
    monkeypatch.setattr(laboratory, "accuracies", whole)
    (tmp_path / "scratch-killed").mkdir()
    (tmp_path / "scratch-killed" / "truth.safetensors").write_bytes(b"private")
    kept = (tmp_path / "trials" / "0007.json").read_bytes()
    found, _ = advise(asked_for(), tmp_path, resume=True)
    assert (tmp_path / "trials" / "0007.json").read_bytes() == kept
    assert laboratory.made == 21, "the trial that was interrupted was measured again, and no other"
    assert [one.number for one in found.trials] == list(range(1, 21))
    assert list(tmp_path.glob("scratch-*")) == []


@pytest.mark.usefixtures("laboratory")
def test_wishes_may_change_and_nothing_else(tmp_path: Path) -> None:
    advise(asked_for(), tmp_path)
    strict, _ = advise(asked_for(max_loss=0.1), tmp_path, resume=True)
    assert strict.best is None
    assert strict.nearest_private is not None
    private, _ = advise(asked_for(max_recognised=0.02, defenses=("veil:mu=0.1",)), tmp_path, resume=True)
    assert private.best is None, "what was measured for other wishes is no promise for these"
    assert {"veil:ceiling=0.02,rounds=40,bound=0.3", "veil:mu=0.1"} <= {one.defense for one in private.trials}
    assert len(private.trials) > len(strict.trials) == 20
    with pytest.raises(GradveilError, match="was asked with clients=10, not 3"):
        advise(asked_for(clients=3), tmp_path, resume=True)


def test_a_defense_that_crashes_is_one_row_of_the_table(tmp_path: Path, laboratory: type[FakeLaboratory]) -> None:
    laboratory.crashing = "outpost"
    found, _ = advise(asked_for(), tmp_path)
    (crashed,) = [one for one in found.trials if one.defense == "outpost"]
    assert crashed.state == "failed"
    assert "ZeroDivisionError" in crashed.why
    assert found.best is not None


@pytest.mark.usefixtures("laboratory")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recognised": "nan"}, "recognised"),
        ({"accuracies": [1e999]}, "valid JSON|accuracies"),
        ({"rounds": -1}, "rounds"),
        ({"lr": 0}, "lr"),
        ({"number": 3}, "is not trial 1"),
        ({"model": "os:system"}, "is not trial 1"),
        ({"defense": "os:system", "certified": True}, "os"),
        ({"defense": "noise:sigma=1", "certified": True}, "no certificate"),
        ({"more": 1}, "more"),
    ],
)
def test_a_trial_of_somebody_else_is_checked(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    advise(asked_for(), tmp_path)
    path = tmp_path / "trials" / "0001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(GradveilError, match=said):
        advise(asked_for(), tmp_path, resume=True)


@pytest.mark.usefixtures("laboratory")
def test_what_is_certified_is_computed_and_not_read(tmp_path: Path) -> None:
    advise(asked_for(), tmp_path)
    for path in (tmp_path / "trials").glob("*.json"):
        saved = json.loads(path.read_text())
        if saved["certified"]:
            path.write_text(json.dumps({**saved, "recognised": 0.0, "interval": [0.0, 0.0]}))
    found, _ = advise(asked_for(), tmp_path, resume=True)
    assert all(one.most == pytest.approx(0.1, rel=1e-6) for one in found.trials if one.certified)


@pytest.mark.usefixtures("laboratory")
@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 9}', "[" * 100_000])
def test_a_damaged_question_is_refused(tmp_path: Path, text: str) -> None:
    advise(asked_for(), tmp_path)
    (tmp_path / "question.json").write_text(text)
    with pytest.raises(BadFileError):
        advise(asked_for(), tmp_path, resume=True)


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Pictures that are bright on the left or on the right, in a folder for each."""
    draw = np.random.default_rng(0)
    for name, slope in (("left", -70), ("right", 70)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(150):
            across = np.sign(np.arange(12) - 5.5)[None, :, None] * slope
            pixels = (128 + across + draw.integers(-50, 50, (12, 12, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


OWN = """
from torch import nn

from gradveil.defenses import DEFENSES, Defense


def small(domain):
    return nn.Sequential(nn.Flatten(), nn.Linear(432, domain.classes))


@DEFENSES.register("crashing")
class Crashing(Defense):
    def on_gradient(self, gradient, step):
        return {}["nothing"]
"""


@pytest.mark.integration
def test_a_recommendation_run_as_printed_keeps_both_wishes(
    tmp_path: Path, photographs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a folder of images and a module of one's own, from the command line, without public features."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "empty"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "ours.py").write_text(OWN)
    question = ["--data", f"folder:path={photographs},size=12", "--model", "ours:small", "--clients", "1"]
    question += ["--batch-size", "240", "--rounds", "8", "--lr", "0.05", "--defense", "crashing", "--load", "ours"]
    run("advise", *question, "--trials", "19", "--out", "advice")
    said = capsys.readouterr().out
    assert "Use veil:ceiling=0.1,rounds=8" in said
    assert "certified" in said
    assert "failed: it raised KeyError" in " ".join(said.split())
    assert (tmp_path / "advice" / "advice.html").exists()
    assert "--load ours" in said
    line = next(line for line in said.splitlines() if line.strip().startswith("gradveil train"))
    run(*shlex.split(line)[1:])
    run(*[word if word != "trained" else "plain" for word in shlex.split(re.sub(r"--defense \S+", "", line))[1:]])
    capsys.readouterr()
    private, plain = (json.loads((tmp_path / name / "train.json").read_text()) for name in ("trained", "plain"))
    assert plain["rows"][-1]["accuracy"] - private["rows"][-1]["accuracy"] <= 0.03
    assert proved(private["case"]["defense"]).recognised <= 0.1 * (1 + 1e-8)


def test_three_images_are_too_few_and_that_is_said(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "photos" / name / "0.png")
    asked = Question(data=f"folder:path={tmp_path / 'photos'},size=4", model="mlp", clients=1)
    with pytest.raises(GradveilError, match="too small to hold a part of it out"):
        advise(asked, tmp_path / "advice")
