"""The verdict on each defense: its worst case, graded, in words, and what it costs where that was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradveil.attacks import ATTACKS, BUDGETS
from gradveil.auditing.costs import Cost
from gradveil.auditing.flags import PRIOR_ONLY, Row, prior_of
from gradveil.threat import Knowledge, threat_model

GRADES = {
    "privacy": {"A": 0.1, "B": 0.25, "C": 0.5, "D": 0.75},
    "utility": {"A": 0.01, "B": 0.03, "C": 0.06, "D": 0.12},
}
"""Up to where each grade goes; above all of them is F. Privacy: the share identified beyond chance, at the upper end of
its interval. Utility: the accuracy lost."""
WORST = "F"


def verdicts(rows: Sequence[Row], costs: Mapping[str, Cost] | None = None) -> list[dict[str, Any]]:
    """One verdict per defense: its worst case over the attacks and rounds, beside chance and beside its cost."""
    attacks = [row for row in rows if row["attack"] != PRIOR_ONLY]
    found: list[dict[str, Any]] = []
    for defense in dict.fromkeys(row["defense"] for row in attacks):
        own = [row for row in attacks if row["defense"] == defense]
        worst = max(own, key=_leakage)
        alone = prior_of(worst, rows)
        found.append(
            {
                "defense": defense,
                "grade": privacy_grade(worst),
                "identified": worst["identified"],
                "identified_interval": worst["identified_interval"],
                "attack": worst["attack"],
                "threat": worst["threat"],
                "adversary": threat_model(worst["threat"]).title,
                "prior_only_identified": None if alone is None else alone["identified"],
                "images": worst["images"],
                "gallery": worst["gallery"],
                "chance": None if worst["gallery"] is None else chance_of(worst),
                **{key: worst[key] for key in ("candidates", "ranked_first", "round") if key in worst},
                "rebuilt": _rebuilt(worst, own, rows),
                "flags": worst["flags"],
                "sentence": _sentence(worst, alone),
                "cost": _cost((costs or {}).get(defense)),
            }
        )
    return found


def worst_of(rows: Sequence[Row]) -> Row | None:
    """The row that leaks most, among equals the one of the higher PSNR; None where none was scored."""
    return max((row for row in rows if row["identified"] is not None), key=_leakage, default=None)


def without_candidates(rows: Sequence[Row]) -> list[Row]:
    """The rows of attacks that hold no list to choose from, and so have to rebuild the private images."""
    return [row for row in rows if not _chooses(row)]


def _chooses(row: Row) -> bool:
    return Knowledge.CANDIDATES in ATTACKS.build(row["attack"], BUDGETS["quick"]).requires


def _rebuilt(worst: Row, own: Sequence[Row], rows: Sequence[Row]) -> dict[str, Any] | None:
    """The worst without candidates, where the worst of all is a choice among them; it would say the same twice else."""
    found = worst_of(without_candidates(own)) if _chooses(worst) else None
    if found is None:
        return None
    alone = prior_of(found, rows)
    return {
        "attack": found["attack"],
        "identified": found["identified"],
        "identified_interval": found["identified_interval"],
        "prior_only_identified": None if alone is None else alone["identified"],
    }


def privacy_grade(row: Row) -> str | None:
    """From A to F by the upper end of the interval, less what picking at random would get; None if not measured.

    The upper end is what the images tried cannot exclude: a good grade takes many of them. In a line-up no longer than
    a batch every pick is right, and nothing is measured.
    """
    if row["identified_interval"] is None or (chance := chance_of(row)) >= 1:
        return None
    return _grade((row["identified_interval"][1] - chance) / (1 - chance), GRADES["privacy"])


def chance_of(row: Row) -> float:
    """What picking at random identifies: a picture counts for whichever of the images behind its update is like it."""
    return float(row.get("chance") or 1 / row["gallery"])  # audits from before it was kept had no larger one


def _grade(value: float, bounds: Mapping[str, float]) -> str:
    return next((letter for letter, bound in bounds.items() if value <= bound), WORST)


def _cost(cost: Cost | None) -> dict[str, Any] | None:
    if cost is None:
        return None
    return {
        "grade": _grade(cost.accuracy_lost, GRADES["utility"]),
        "accuracy": cost.accuracy,
        "accuracy_lost": cost.accuracy_lost,
        "round_seconds": cost.round_seconds,
        "time_added": cost.time_added,
        "sentence": _cost_sentence(cost),
    }


def _cost_sentence(cost: Cost) -> str:
    points, percent = round(100 * cost.accuracy_lost, 1), round(100 * cost.time_added)
    lost = f"{abs(points):g} points of accuracy {'lost' if points >= 0 else 'gained'}"
    time = f"{abs(percent)}% {'more' if percent >= 0 else 'less'} time per round"
    return f"In training, {lost} ({cost.accuracy:.1%} instead of {cost.plain_accuracy:.1%}) and {time}."


def _leakage(row: Row) -> tuple[float, float]:
    """What was scored comes before what was not."""
    return (-1.0, 0.0) if row["identified"] is None else (row["identified"], row["psnr"])


def _sentence(row: Row, alone: Row | None) -> str:
    guard = "Without a defense" if row["defense"] == "none" else f"Under {row['defense']}"
    if row["identified"] is None:
        return f"{guard}, nothing could be scored: there is no truth, only the objective of {_name(row)} itself."
    if row.get("round") is not None:
        guard = f"In round {row['round']} {guard[0].lower()}{guard[1:]}"
    if "ranked_first" in row:
        return f"{guard}, {_ranked(row, alone)}"
    done = f"picked out of {row['gallery']} by what {_name(row)} rebuilt from the update"
    return f"{guard}, {_found(row, 'identified')} {done}{_without(alone, 'identified')}."


def _ranked(row: Row, alone: Row | None) -> str:
    """An attack that chooses among candidates rebuilds nothing: it ranks them, and its choice is then judged."""
    done = f"ranked first among {row['candidates']} candidates by {_name(row)}"
    said = f"{_found(row, 'ranked_first')} {done}{_without(alone, 'ranked_first')}."
    if _count(row, "ranked_first") == _count(row, "identified"):
        return said
    return f"{said} The pictures it chose pick {_count(row, 'identified')} of {row['images']} out of {row['gallery']}."


def _found(row: Row, key: str) -> str:
    """How many private images, as the subject of a sentence."""
    count, total = _count(row, key), row["images"]
    whole = "the private image was" if total == 1 else f"all {total} private images were"
    some = f"{count} of {total} private images {'was' if count == 1 else 'were'}"
    return {0: "no private image was", total: whole}.get(count, some)


def _without(alone: Row | None, key: str) -> str:
    return (
        ""
        if alone is None or key not in alone
        else f", and {_count(alone, key)} of {alone['images']} without the update"
    )


def _name(row: Row) -> str:
    """The attack without its options, which stand beside the sentence."""
    return str(row["attack"]).partition(":")[0]


def _count(row: Row, key: str) -> int:
    return round(float(row[key]) * int(row["images"]))
