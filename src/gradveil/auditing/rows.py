"""A row of an audit: one attack on one set of exchanges, whether they were made for the audit or saved elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradveil.attacks import ATTACKS, Reconstruction
from gradveil.attacks.informed import answers
from gradveil.auditing.audit import PRIOR_ONLY, Files, Judgement, Ranking, Row, Trace
from gradveil.client import running_statistics
from gradveil.threat import Observation, threat_model


def make_row(
    *,
    digest: str,
    defense: str,
    attack: str,
    prior_only: bool,
    seen: Observation,
    judgement: Judgement,
    found: Sequence[Reconstruction],
    seconds: float,
    files: Files,
    ranking: Ranking | None = None,
    log: Mapping[str, float] | None = None,
    randomized: bool = False,
) -> Row:
    """The row of an attack; ``seen`` is the first of the observations."""
    threat = threat_model(seen.threat)
    informed = not prior_only and ATTACKS.parse(attack)[0] == "informed"
    return Row(
        **dict(judgement),
        **dict(ranking or Ranking()),
        digest=digest,
        defense=defense,
        attack=PRIOR_ONLY if prior_only else attack,
        prior_of=attack if prior_only else None,
        threat=seen.threat,
        adversary=threat.title,
        assumptions=(*threat.sentences(), *_tampering(seen)),
        objective=sum(one.objective for one in found) / len(found),
        seconds=seconds,
        problem_steps=sum(one.problem_steps for one in found),
        strategy=found[0].strategy,
        log=dict(log or {}),
        randomized=randomized,
        asked=len(seen.earlier) + 1,
        statistics_given=seen.statistics is not None,
        # Whether a client of this recipe has running statistics to send beside its update.
        statistics_sent=seen.recipe is not None and seen.recipe.train_mode and bool(running_statistics(seen.module)),
        counter_moves=answers(seen) if informed else None,
        trace=Trace(steps=found[0].steps, objective=tuple(one.trace for one in found)),
        files=files,
    )


def _tampering(seen: Observation) -> list[str]:
    """What the server did to the broadcast, where it did anything."""
    if not seen.crafted:
        return []
    asked = f"asked this client {len(seen.earlier) + 1} times, and " if seen.earlier else ""
    return [f"The server {asked}sent a model in which it had tampered with {', '.join(seen.crafted)}."]
