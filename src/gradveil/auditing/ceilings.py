"""What is proved of a defense, as answers of a verdict: ceilings, and the certificate that its clients have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradveil.auditing.audit import CeilingAnswer, CertificateAnswer, Row
from gradveil.auditing.verdict import Ceilings
from gradveil.bounds import Ceiling, Proof, certificate
from gradveil.core.errors import GradveilError, NotAvailableError
from gradveil.defenses import DP, Ledger, links_of


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
        found[defense] = Ceilings(missing if top is None else _answer(top, replies), run, _certificate(proof, replies))
    return found


def _certificate(proof: Proof, replies: int) -> CertificateAnswer | None:
    """What ``client.certificate()`` says after so many replies; None where nothing counts what is sent."""
    counting = next((link for link in links_of(proof.defense) if isinstance(link, DP)), None)
    if proof.release is None or counting is None:
        return None
    spent = Ledger()
    spent.add(counting.counted, 1.0, proof.steps * replies)
    try:
        return CertificateAnswer.model_validate(certificate(proof.defense, spent).as_json())
    except GradveilError:  # the ceiling, or its absence, says why
        return None


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
