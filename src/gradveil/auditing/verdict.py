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
    chance = {row["prior_of"]: row["identified"] for row in rows if row["attack"] == PRIOR_ONLY}
    marked = []
    for row in rows:
        flags = []
        if row["attack"] != PRIOR_ONLY and row["attack"] in chance and row["identified"] <= chance[row["attack"]]:
            flags.append("prior-only as good")
        if any(image["stopped"] == "diverged" for image in row["per_image"]):
            flags.append("diverged")
        marked.append({**row, "flags": flags})
    return marked


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One verdict per defense: its worst case over the attacks, beside chance."""
    attacks = [row for row in rows if row["attack"] != PRIOR_ONLY]
    chance = {row["prior_of"]: row["identified"] for row in rows if row["attack"] == PRIOR_ONLY}
    found = []
    for defense in dict.fromkeys(row["defense"] for row in attacks):
        worst = max((row for row in attacks if row["defense"] == defense), key=_leakage)
        found.append(
            {
                "defense": defense,
                "identified": worst["identified"],
                "identified_interval": worst["identified_interval"],
                "attack": worst["attack"],
                "threat": worst["threat"],
                "prior_only_identified": chance.get(worst["attack"]),
                "images": worst["images"],
                "sentence": _sentence(worst, chance.get(worst["attack"])),
            }
        )
    return found


def _leakage(row: dict[str, Any]) -> tuple[float, float]:
    return row["identified"], row["psnr"]


def _sentence(row: dict[str, Any], chance: float | None) -> str:
    count, total = round(row["identified"] * row["images"]), row["images"]
    guard = "Without a defense" if row["defense"] == "none" else f"Under {row['defense']}"
    whole = "the private image was" if total == 1 else f"all {total} private images were"
    picked = {0: "no private image was", total: whole}.get(count)
    said = picked or f"{count} of {total} private images {'was' if count == 1 else 'were'}"
    without = "" if chance is None else f", and {round(chance * total)} of {total} without the update"
    return f"{guard}, {said} picked out of {row['gallery']} by what {row['attack']} rebuilt from the update{without}."
