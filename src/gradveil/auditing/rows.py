"""A row of an audit: one attack on one set of exchanges, whether they were made for the audit or saved elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradveil.attacks import ATTACKS, Reconstruction, finite_or_none
from gradveil.attacks.informed import answers
from gradveil.auditing.flags import PRIOR_ONLY
from gradveil.client import running_statistics
from gradveil.threat import Observation, threat_model


def row(
    *,
    digest: str,
    defense: str,
    attack: str,
    prior_only: bool,
    seen: Observation,
    scores: dict[str, Any],
    found: Sequence[Reconstruction],
    seconds: float,
    log: dict[str, float],
    randomized: bool,
    files: dict[str, Any],
) -> dict[str, Any]:
    """The row as ``audit.json`` has it; ``scores`` is what a judge found, ``seen`` the first of the observations."""
    return {
        "digest": digest,
        "defense": defense,
        "attack": PRIOR_ONLY if prior_only else attack,
        "prior_of": attack if prior_only else None,
        "threat": seen.threat,
        "assumptions": [*threat_model(seen.threat).sentences(), *_tampering(seen)],
        **scores,
        "objective": finite_or_none(sum(one.objective for one in found) / len(found)),
        "seconds": seconds,
        "problem_steps": sum(one.problem_steps for one in found),
        "strategy": found[0].strategy,
        "log": log,
        **log,
        "randomized": randomized,
        "asked": len(seen.earlier) + 1,
        "statistics_given": seen.statistics is not None,
        "statistics_sent": _sends_statistics(seen),
        **({} if prior_only else _counter_moves(attack, seen)),
        "trace": _trace(found),
        "files": files,
    }


def _tampering(seen: Observation) -> list[str]:
    """What the server did to the broadcast, where it did anything."""
    if not seen.crafted:
        return []
    asked = f"asked this client {len(seen.earlier) + 1} times, and " if seen.earlier else ""
    return [f"The server {asked}sent a model in which it had tampered with {', '.join(seen.crafted)}."]


def _sends_statistics(seen: Observation) -> bool:
    """Whether a client of this recipe has running statistics to send beside its update."""
    return seen.recipe is not None and seen.recipe.train_mode and bool(running_statistics(seen.module))


def _counter_moves(attack: str, seen: Observation) -> dict[str, Any]:
    """What the informed attack does about each link of the defense."""
    return {"counter_moves": answers(seen)} if ATTACKS.parse(attack)[0] == "informed" else {}


def _trace(found: Sequence[Reconstruction]) -> dict[str, Any]:
    curves = [[finite_or_none(value) for value in one.trace] for one in found]
    return {"steps": list(found[0].steps), "objective": curves}
