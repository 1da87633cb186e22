"""Ceilings as answers of a verdict: for what the adversaries of an audit saw, and for a whole training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradveil.auditing.audit import CeilingAnswer, Row
from gradveil.auditing.verdict import Ceilings
from gradveil.bounds import Ceiling, Proof
from gradveil.core.errors import NotAvailableError


def ceilings(proofs: Mapping[str, Proof], rows: Sequence[Row]) -> dict[str, Ceilings]:
    """By defense. An adversary who asked again, or who saw a later round, has as many replies about an example."""
    found: dict[str, Ceilings] = {}
    for defense, proof in proofs.items():
        seen = [max(row.asked, row.round or 1) for row in rows if row.defense == defense and not row.is_prior]
        replies = max(seen, default=1)
        run: CeilingAnswer | None = None
        try:
            if (whole := proof.of_run()) is not None:
                run = _answer(whole, None)
        except NotAvailableError as error:  # without an accountant, sampled steps cannot be counted
            run = _without(str(error), None)
        top = proof.ceiling(replies)
        missing = _without(proof.why, replies, constant=proof.constant)
        found[defense] = (missing if top is None else _answer(top, replies), run)
    return found


def _answer(top: Ceiling, replies: int | None) -> CeilingAnswer:
    sentence = f"{top.sentence[0].upper()}{top.sentence[1:]}."
    return CeilingAnswer(
        recognised=top.recognised,
        chance=top.chance,
        member=top.member,
        psnr=top.psnr,
        replies=replies,
        assumes=top.assumes,
        sentence=sentence,
    )


def _without(why: str, replies: int | None, *, constant: bool = False) -> CeilingAnswer:
    return CeilingAnswer(why=why, replies=replies, constant=constant, sentence=f"There is no ceiling: {why}.")
