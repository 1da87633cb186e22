"""Flags: reasons to look twice at a row. Each is data: a name, when it is raised, why, and the test on the rows.

``docs/flags.md`` says the same at more length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradveil.attacks import ATTACKS, BUDGETS, Attack
from gradveil.attacks.identify import Identify, changes_inputs
from gradveil.attacks.informed import Informed, answers
from gradveil.attacks.parts.channel import Channel
from gradveil.attacks.parts.counter import AGAINST
from gradveil.auditing.audit import Awareness, Meaning, Row, Verdict
from gradveil.auditing.chance import above_chance
from gradveil.auditing.verdict import NO_CANDIDATES, NO_COUNTER_MOVE, STATISTICS, needs_of
from gradveil.core.registry import split_spec
from gradveil.threat import Knowledge, Observation, threat_model

_FALL = 0.01
"""The share of its first value by which an objective has to fall to count as fallen."""


@dataclass(frozen=True)
class Flag:
    """A reason not to take a row at face value."""

    name: str
    raised_if: str
    because: str
    raised: Callable[[Row, Sequence[Row]], bool]
    """(row of an attack, all rows of the audit) -> whether the row is flagged."""


def _prior_as_good(row: Row, rows: Sequence[Row]) -> bool:
    """By the exact test of the verdict: a lucky hit proves nothing."""
    alone = row.prior_among(rows)
    if alone is None or row.identified is None or alone.identified is None:
        return False
    own = [other for other in rows if not other.is_prior and other.defense == row.defense]
    above = above_chance(own, rows)[next(i for i, other in enumerate(own) if other is row)]
    return row.identified <= alone.identified or not above


def _did_not_fall(row: Row, _: Sequence[Row]) -> bool:
    searched = [line for line in row.trace.objective if len(line) > 1]
    known = [[value for value in line if value is not None] for line in searched]
    return any(not line or line[0] - line[-1] <= _FALL * abs(line[0]) for line in known)


def _weaker_was_better(row: Row, rows: Sequence[Row]) -> bool:
    """Compares with attacks that are less aware of the defense; of equals, one that did as well is enough."""
    if row.identified is None:
        return False
    place = (row.defense, row.training, row.stage)
    beside = [
        other
        for other in rows
        if not other.is_prior and other.identified is not None and (other.defense, other.training, other.stage) == place
    ]
    if _level(row) < max(map(_level, beside)):
        return False
    better = [other for other in beside if (other.identified or 0.0) > row.identified]
    weaker = [other for other in better if _level(other) < _level(row)]
    return len(weaker) == len(better) and any(needs_of(other) <= needs_of(row) for other in weaker)


def awareness_of(attack: Attack) -> Awareness:
    """How far an attack takes the defense into account."""
    if isinstance(attack, Informed):
        return "informed"
    return "estimates" if getattr(attack, "aware", False) else "none"


def counter_moves(attack: Attack, seen: Observation) -> dict[str, str | None] | None:
    """What an attack does about each link of the defense it knows, None where nothing; None of attacks that never do.

    A likelihood of what the defense leaves of a candidate's update is written for that defense, too. What a subclass
    does instead is not known.
    """
    if type(attack) is Informed:
        matched = attack.match == "simulated" or seen.kind == "gradient"
        return answers(seen) if matched else dict.fromkeys(answers(seen))
    if type(attack) is not Identify or not attack.informed or seen.defense is None:
        return None
    found: dict[str, str | None] = {}
    for spec, link in seen.known_links():
        known = None if link is None else AGAINST.get(split_spec(spec)[0])
        ranks = known is not None and (known.channel(link, seen) != Channel() or changes_inputs(link))
        found[spec] = "It ranks candidates by what this defense leaves of their updates." if ranks else None
    return found


def _level(row: Row) -> int:
    awareness = row.awareness or awareness_of(ATTACKS.build(row.attack, BUDGETS["quick"]))
    return ("none", "estimates", "informed").index(awareness)


def _wrong_labels(row: Row, _: Sequence[Row]) -> bool:
    granted = Knowledge.LABELS in threat_model(row.threat).knows
    inferred = row.label_accuracy is not None and row.candidates is None and not granted
    return inferred and row.label_accuracy != 1.0


FLAGS = (
    Flag(
        "prior-only as good",
        "the attack identified no more images than luck explains, or no more than its prior-only row, the same search "
        "without the update",
        "its pictures may come from the prior alone. Either the defense holds, or this attack was too weak to tell",
        _prior_as_good,
    ),
    Flag(
        "diverged",
        "at least one search ended on an objective that is not finite",
        "such a search was weaker than it could have been, so the row may understate what leaks",
        lambda row, _: any(image.stopped == "diverged" for image in row.per_image),
    ),
    Flag(
        "objective did not fall",
        "at least one search ended with an objective less than 1% below the one it started from",
        "a search that gets nowhere says nothing of what leaks: its step, its start or its objective does not fit",
        _did_not_fall,
    ),
    Flag(
        "weaker attack was better",
        "an attack that thinks less of the defense, and needs no more knowledge, identified more images than the most "
        "informed one",
        "the informed attack is then not the strongest there is, and an informed one that works may find still more",
        _weaker_was_better,
    ),
    Flag(
        "random defense seen once",
        "the defense draws at random, and the adversary saw one reply for each private batch",
        "another draw may give more away, and draws of several rounds can be averaged out",
        lambda row, _: row.randomized and row.asked == 1,
    ),
    Flag(
        "fallback used",
        "the defense logged a fallback rate above zero",
        "in those steps it did not do what it promises, and what was sent instead may be worth more to an attacker",
        lambda row, _: (row.log.get("fallback_rate") or 0.0) > 0,
    ),
    Flag(
        "wrong labels",
        "labels had to be inferred from the update, and at least one was wrong",
        "a search for a picture of the wrong class is weaker: labels may become known in another way",
        _wrong_labels,
    ),
    Flag(
        "batch-norm statistics given",
        "the attack was given the batch-norm statistics of the private batch",
        "real systems send running means of them at most, so the row may overstate what leaks",
        lambda row, _: row.statistics_given,
    ),
    Flag(
        STATISTICS,
        "the clients' batch norm was in the train mode, and the attack looked at their updates alone",
        "such clients send running means and variances beside their updates, which no defense hides and which name an "
        "image that stands alone: the row understates what leaks, and the grade is C at best",
        lambda row, _: row.statistics_sent,
    ),
)


def flagged(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows with the names of their flags. The search without the update is only looked at for divergence."""

    def names(row: Row) -> tuple[str, ...]:
        concerned = [flag for flag in FLAGS if not row.is_prior or flag.name == "diverged"]
        return tuple(flag.name for flag in concerned if flag.raised(row, rows))

    return tuple(row.model_copy(update={"flags": names(row)}) for row in rows)


OF_VERDICTS = {
    NO_COUNTER_MOVE: Meaning(
        raised_if="no attack that was written for this defense, for each link of it, was run, no ceiling earns a good "
        "grade, and what is sent depends on the examples",
        because="a defense that nobody has attacked by name looks better than it is: the grade is C at best",
    ),
    NO_CANDIDATES: Meaning(
        raised_if="no attack held a list of candidates",
        because="somebody who holds the right picture needs little of an update to point at it: the grade is C at best",
    ),
}
"""Flags of a defense as a whole, which no row has."""


def explained(rows: Sequence[Row], verdicts: Sequence[Verdict] = ()) -> dict[str, Meaning]:
    """By name, what the flags of these rows and verdicts mean: saved beside them for whoever reads them."""
    names = {name for row in rows for name in row.flags} | {name for one in verdicts for name in one.flags}
    known = {flag.name: Meaning(raised_if=flag.raised_if, because=flag.because) for flag in FLAGS} | OF_VERDICTS
    return {name: meaning for name, meaning in known.items() if name in names}
