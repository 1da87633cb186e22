"""From trials to an answer: who keeps both wishes, who comes near, one recommendation, and what to type for it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gradveil.auditing.audit import Flag, Interval, Size, Text
from gradveil.core.errors import GradveilError
from gradveil.core.plugins import loaded
from gradveil.lab.advise.question import LINE_UP, Candidate, Question
from gradveil.report.words import in_sentence

Exact = Annotated[float, Field(strict=True, ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]


class Trial(BaseModel):
    """One candidate as it was measured; files may come from a stranger, and are checked when they are read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: Size
    what: Text
    """Of the search: which model and which kind of defense."""
    params: dict[Text, Positive]
    model: Text
    defense: Text
    lr: Positive
    rounds: Annotated[int, Field(strict=True, ge=1, le=2**31)]
    recognised: Exact | None = None
    interval: Interval | None = None
    certified: Flag = False
    untried: Flag = False
    accuracies: tuple[Exact, ...] = ()
    """On held-out examples after each quarter of the training that was done."""
    again: tuple[Exact, ...] = ()
    """At the end of trainings with other seeds."""
    state: Literal["measured", "dropped", "failed"] = "measured"
    why: Text = ""
    """It was dropped, or failed."""

    @property
    def candidate(self) -> Candidate:
        return Candidate(model=self.model, defense=self.defense, lr=self.lr, rounds=self.rounds)

    @property
    def most(self) -> float | None:
        """The share that may be recognised: what is certified, or the upper end of the interval."""
        return None if self.interval is None else self.interval[1]

    @property
    def accuracy(self) -> float | None:
        """Of the whole short training, the mean of all seeds; None where it was not finished."""
        return mean((self.accuracies[-1], *self.again)) if self.state == "measured" and self.accuracies else None


@dataclass(frozen=True)
class Recommendation:
    """What came out. ``best`` is None where nothing keeps both wishes."""

    trials: tuple[Trial, ...]
    baseline: Trial
    best: Trial | None
    nearest_private: Trial | None
    """Keeps what may be recognised, at the least loss."""
    nearest_accurate: Trial | None
    """Keeps what may be lost, with the least recognised."""
    front: tuple[Trial, ...]
    """Nobody else is at least as good in both."""
    learned: bool
    """Whether the training without a defense was long enough to tell a loss."""
    sentence: str
    command: str
    audit: str

    def lost(self, trial: Trial) -> float | None:
        return loss(trial, self.baseline)


def loss(trial: Trial, baseline: Trial) -> float | None:
    """Points of accuracy lost against no defense on the model that was asked about; None where that is not known."""
    if trial.accuracy is None or baseline.accuracy is None:
        return None
    return 100 * (baseline.accuracy - trial.accuracy)


def baseline_of(asked: Question, trials: Sequence[Trial]) -> Trial | None:
    """The best training without a defense on the model that was asked about."""
    plain = [one for one in trials if one.model == asked.model and one.defense == "none" and one.accuracy is not None]
    return max(plain, key=lambda one: one.accuracy or 0.0, default=None)


def keeps_privacy(asked: Question, trial: Trial) -> bool:
    """A certified ceiling is enough; a measurement needs an attack that was written for the defense."""
    certain = trial.certified or not trial.untried
    return certain and trial.most is not None and trial.most <= asked.max_recognised * (1 + 1e-9)


def keepers(asked: Question, trials: Sequence[Trial], baseline: Trial) -> list[Trial]:
    """Those that keep both wishes: what is certified comes first, then the least loss."""
    kept = [
        one
        for one in trials
        if keeps_privacy(asked, one) and (lost := loss(one, baseline)) is not None and lost <= asked.max_loss + 1e-9
    ]
    return sorted(kept, key=lambda one: (not one.certified, loss(one, baseline) or 0.0))


def distance(asked: Question, most: float, lost: float) -> float:
    """How far from both wishes: what the search makes small. Among those that keep both, less loss is better."""
    return max(0.0, most - asked.max_recognised) + max(0.0, lost - asked.max_loss) / 100 + lost / 1e4


def answer(asked: Question, trials: Sequence[Trial], *, held_out: int, classes: int, examples: int) -> Recommendation:
    """The answer to a question, from what was measured.

    Args:
        asked: The question.
        trials: All trials, at least one of them without a defense on the model that was asked about.
        held_out: Examples that trainings were evaluated on.
        classes: How many there are to guess from.
        examples: That the clients of the whole training share.
    """
    baseline = baseline_of(asked, trials)
    if baseline is None or baseline.accuracy is None:
        raise GradveilError(f"no training of {asked.model} without a defense came to its end: try more --trials")
    known = [one for one in trials if one.most is not None and loss(one, baseline) is not None]
    # A model that guesses must be far from keeping the wish, or a loss says nothing.
    ahead = 100 * (baseline.accuracy - 1 / max(classes, 1))
    learned = ahead >= max(5.0, min(3 * asked.max_loss, asked.max_loss + 20))
    kept = keepers(asked, known, baseline) if learned else []
    best = kept[0] if kept else None
    private = [one for one in known if keeps_privacy(asked, one)]
    accurate = [one for one in known if (loss(one, baseline) or 0.0) <= asked.max_loss]
    near = (
        min(private, key=lambda one: loss(one, baseline) or 0.0, default=None),
        min(accurate, key=lambda one: (one.most or 0.0, loss(one, baseline) or 0.0), default=None),
    )
    points = [(one, one.most or 0.0, loss(one, baseline) or 0.0) for one in known]
    front = [
        one for one, most, lost in points
        if not any(up <= most and less <= lost and (up, less) != (most, lost) for _, up, less in points)
    ]  # fmt: skip
    wishes = f"at most {asked.max_recognised:.3g} recognised and at most {asked.max_loss:g} points lost"
    if not learned:
        sentence = (
            f"No recommendation: without a defense a short training of {asked.model} reaches {baseline.accuracy:.1%}, "
            f"and a guess {1 / max(classes, 1):.1%}, so that no loss can be told. Raise --rounds, --short or --lr."
        )
    elif best is None:
        sentence = f"Nothing that was tried keeps both wishes, {wishes}."
    else:
        sentence = _sentence(asked, best, baseline, held_out)
    resolution = 100 / max(held_out, 1)
    if learned and resolution > max(asked.max_loss, 0.5):
        sentence += f" Mind that one of {held_out} held-out examples is {resolution:.1f} points: this is a rough guess."
    return Recommendation(
        trials=tuple(trials),
        baseline=baseline,
        best=best,
        nearest_private=near[0],
        nearest_accurate=near[1],
        front=tuple(sorted(front, key=lambda one: one.most or 0.0)),
        learned=learned,
        sentence=sentence,
        command=train_command(asked, best, examples) if best else "",
        audit=audit_command(asked, best) if best else "",
    )


def _sentence(asked: Question, best: Trial, baseline: Trial, held_out: int) -> str:
    """The one sentence."""
    lost = loss(best, baseline) or 0.0
    seeds = len(best.again) + 1
    much = f"{lost:.1f} points lost" if lost >= 0 else f"{-lost:.1f} points gained"
    if best.certified:
        over = f"in a line-up of {LINE_UP} over all {best.rounds} rounds"
        proven = f"nobody recognises more than {best.most:.1%} {over}, certified"
    else:
        proven = (
            f"at most {best.most:.1%} were recognised in a line-up of {LINE_UP}, by two attacks and without a proof"
        )
    where = (
        f" on {best.model}" if best.model == asked.model else f" on {best.model}, as your model {asked.model} cannot"
    )
    return (
        f"Use {best.defense}{where}: {proven}; accuracy {best.accuracy:.1%} instead of {baseline.accuracy:.1%} without "
        f"a defense on {asked.model}, {much} ({'mean of ' + str(seeds) + ' seeds, ' if seeds > 1 else ''}{held_out:,} "
        "held-out examples)."
    )


def train_command(asked: Question, trial: Trial, examples: int) -> str:
    """What trains the whole federation with it."""
    case = trial.candidate.training(asked, clients=asked.clients, examples=examples)
    names = "data examples model defense partition algorithm clients rounds lr epochs batch_size average_from seed"
    said = {name: getattr(case, name) for name in names.split()}
    parts = [
        f"--{name.replace('_', '-')} {shlex.quote(_shown(value))}" for name, value in said.items() if value is not None
    ]
    return f"gradveil train {' '.join([*parts, *_loads()])} --out trained"


def audit_command(asked: Question, trial: Trial) -> str:
    """What looks at single replies of it, under all attacks of a suite."""
    named = {"data": asked.data, "model": trial.model}
    parts = [f"--{name} {shlex.quote(value)}" for name, value in named.items()]
    parts += ["--defense none", f"--defense {shlex.quote(trial.defense)}"]
    return f"gradveil audit {' '.join([*parts, *_loads()])} --budget quick --out audited"


def _loads() -> list[str]:
    """The options that load a person's own code, as it is loaded now."""
    return [f"--load {shlex.quote(one.path or one.module)}" for one in loaded()]


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def told(asked: Question, found: Recommendation, trial: Trial) -> str:
    """A trial in a sentence, for who comes near."""
    lost = found.lost(trial)
    how = "certified" if trial.certified else "measured"
    share = "not known" if trial.most is None else f"{trial.most:.1%}"
    much = "not known" if lost is None else f"{lost:.1f}"
    place = "" if trial.model == asked.model else f" on {trial.model}"
    return f"{in_sentence(trial.defense)}{place}: up to {share} recognised ({how}), {much} points lost"


def outcome_of(asked: Question, found: Recommendation, trial: Trial) -> str:
    """In the last column of the table."""
    if trial.state != "measured":
        return f"{trial.state}: {trial.why}"
    if found.best is not None and trial.number == found.best.number:
        return "recommended"
    if not found.learned:
        return "cannot be told"
    lost = found.lost(trial)
    kept = keeps_privacy(asked, trial), lost is not None and lost <= asked.max_loss
    words = {(True, True): "keeps both", (True, False): "keeps privacy", (False, True): "keeps accuracy"}
    word = words.get(kept, "neither")
    return word + (", nobody attacked it by name" if trial.untried and not trial.certified else "")


def order_of(found: Recommendation, trial: Trial) -> tuple[bool, float, float]:
    """Of the table: what was measured first, then by what may be recognised and by what is lost."""
    lost = found.lost(trial)
    return trial.state != "measured", trial.most if trial.most is not None else 2.0, math.inf if lost is None else lost
