"""What the rows say of each defense, and which rows not to trust blindly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PRIOR_ONLY = "prior-only"


def flagged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their flags.

    ``prior-only as good``: raised if the attack identified no more than the same search without the update, because
    then its pictures come from the prior. ``diverged``: raised if a search ended on a value that is not finite.
    """
    chance = _chance(rows)
    marked = []
    for row in rows:
        flags, alone = [], chance.get(row["attack"])
        if alone is not None and row["identified"] is not None and row["identified"] <= alone["identified"]:
            flags.append("prior-only as good")
        if any(image["stopped"] == "diverged" for image in row["per_image"]):
            flags.append("diverged")
        marked.append({**row, "flags": flags})
    return marked


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One verdict per defense: its worst case over the attacks and rounds, beside chance."""
    attacks = [row for row in rows if row["attack"] != PRIOR_ONLY]
    chance = _chance(rows)
    found = []
    for defense in dict.fromkeys(row["defense"] for row in attacks):
        worst = max((row for row in attacks if row["defense"] == defense), key=_leakage)
        alone = chance.get(worst["attack"])
        found.append(
            {
                "defense": defense,
                "identified": worst["identified"],
                "identified_interval": worst["identified_interval"],
                "attack": worst["attack"],
                "threat": worst["threat"],
                "prior_only_identified": None if alone is None else alone["identified"],
                "images": worst["images"],
                **({"round": worst["round"]} if "round" in worst else {}),
                "sentence": _sentence(worst, alone),
            }
        )
    return found


def _chance(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By attack, the row of the same search without the update."""
    return {row["prior_of"]: row for row in rows if row["attack"] == PRIOR_ONLY}


def _leakage(row: dict[str, Any]) -> tuple[float, float]:
    """What was scored comes before what was not."""
    return (-1.0, 0.0) if row["identified"] is None else (row["identified"], row["psnr"])


def _sentence(row: dict[str, Any], alone: dict[str, Any] | None) -> str:
    guard = "Without a defense" if row["defense"] == "none" else f"Under {row['defense']}"
    if row["identified"] is None:
        return f"{guard}, nothing could be scored: there is no truth, only the objective of {row['attack']} itself."
    count, total = _count(row), row["images"]
    whole = "the private image was" if total == 1 else f"all {total} private images were"
    picked = {0: "no private image was", total: whole}.get(count)
    said = picked or f"{count} of {total} private images {'was' if count == 1 else 'were'}"
    without = "" if alone is None else f", and {_count(alone)} of {alone['images']} without the update"
    if row.get("round") is not None:
        guard = f"In round {row['round']} {guard[0].lower()}{guard[1:]}"
    return f"{guard}, {said} picked out of {row['gallery']} by what {row['attack']} rebuilt from the update{without}."


def _count(row: dict[str, Any]) -> int:
    return round(float(row["identified"]) * int(row["images"]))
