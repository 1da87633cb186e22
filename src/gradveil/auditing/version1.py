"""Audits of version 1 in the shape of today's. They may lack what later ones had, and say null of it.

In them, ``chance`` was what picking at random gets, and whoever read a verdict judged it. What a defense logged stood
among the scores too, where nobody looks for it now.
"""

from __future__ import annotations

from typing import Any, Literal

from gradveil.auditing.audit import Verdict
from gradveil.auditing.chance import at_least
from gradveil.auditing.verdict import GOOD
from gradveil.core.fields import Json

_SELDOM = 0.025
"""Chance was ruled out where it finds as many in fewer than one of forty audits."""

_ADVERSARIES = {
    "A": "eavesdropper",
    "B": "informed eavesdropper",
    "C": "parameter-aware eavesdropper",
    "D": "data-enhanced eavesdropper",
    "E": "statistics-informed eavesdropper",
    "F": "active manipulator",
    "G": "data-enhanced manipulator",
    "H": "active client manipulator",
}


def upgraded(audit: Json) -> Json:
    """The audit as version 2 has it, before it is checked; what is not of the expected kind stays as it is."""
    audit = _known(audit)
    case = audit.get("case")
    gallery = case.get("gallery") if isinstance(case, dict) else None
    changes = {"rows": lambda row: upgraded_row(row, gallery), "verdicts": _verdict, "trainings": _known}
    for key, change in changes.items():
        if isinstance(audit.get(key), list):
            audit[key] = [change(one) for one in audit[key]]
    grades = audit.get("grades")
    if isinstance(grades, dict):
        audit["grades"] = {kind: _known(bounds) for kind, bounds in _known(grades).items()}
    return audit | {"version": 2}


def upgraded_row(row: Any, gallery: Any = None) -> Any:
    """The same of a row; ``gallery`` is how many images its line-up had, where it does not say that itself."""
    if not isinstance(row, dict):
        return row
    row = {"gallery": gallery, **_known(row)}
    row |= {"at_random": _at_random(row), "adversary": _adversary(row)}
    if isinstance(row.get("per_image"), list):
        row["per_image"] = [_image(image, place) for place, image in enumerate(row["per_image"])]
    return row


def judged(verdict: Verdict) -> Verdict:
    """The verdict beside chance, as far as such an audit tells: its rows do not say what luck does.

    Not being above chance is good news only with the grade to go with it.
    """
    share, interval, alone = verdict.identified, verdict.identified_interval, verdict.prior_only_identified
    chance = None if alone is None or verdict.at_random is None else max(alone, verdict.at_random)
    above, images = None, verdict.images or 0
    if share is not None and interval is not None and chance is not None:
        above = interval[0] > chance and at_least(round(share * images), images, chance) < _SELDOM
    outcome: Literal["leaks", "holds", "unknown"] = "unknown"
    if above:
        outcome = "leaks"
    elif above is False and verdict.grade in GOOD:
        outcome = "holds"
    return verdict.model_copy(update={"chance": chance, "above_chance": above, "outcome": outcome})


def _image(image: Any, place: int) -> Any:
    if not isinstance(image, dict):
        return image
    return {
        "identified": False,
        "stopped": "",
        **image,
        "picture": place if image.get("picture") is None else image["picture"],
    }


def _verdict(verdict: Any) -> Any:
    if not isinstance(verdict, dict):
        return verdict
    found = _known(verdict)
    if isinstance(found.get("rebuilt"), dict):
        found["rebuilt"] = _known(found["rebuilt"]) | {"chance": None}  # it was not judged
    return {"adversary": _adversary(found), **found, "at_random": _at_random(found) or 0.0, "chance": None}


def _adversary(found: Json) -> str:
    return _ADVERSARIES.get(str(found.get("threat", "")).partition("+")[0], "")


def _at_random(found: Json) -> Any:
    """Older audits kept the size of the line-up alone: there was one image behind an update."""
    gallery = found.get("gallery")
    return found.get("chance") or (1 / gallery if type(gallery) is int and gallery > 0 else None)


def _known(fields: Any) -> Any:
    """Without nulls, which say that there is no value, as a field that is missing does."""
    return {key: value for key, value in fields.items() if value is not None} if isinstance(fields, dict) else fields
