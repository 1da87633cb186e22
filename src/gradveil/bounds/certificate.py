"""A certificate: what is proved of a client's replies, against whom, on what it rests, and for how long."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from gradveil.bounds.ceiling import LOW, best_psnr, release_of
from gradveil.core.errors import GradveilError
from gradveil.core.types import Json
from gradveil.defenses import DP, Defense, Ledger, Veil, links_of

LINE_UPS = (10, 100, 1000)
AGAINST = (
    "anybody who sees every reply of this client, knows the model, the defense and all other examples, and has any "
    "prior knowledge but the noise"
)


@dataclass(frozen=True)
class Certificate:
    """What no adversary passes, for all replies of a client together."""

    defense: str
    steps: int
    """Noisy steps on one example that are covered: those that are planned or, without a plan, those so far."""
    taken: int
    """Steps that were taken so far."""
    recognised: dict[str, float]
    """By the length of a line-up: the largest share of examples that can be picked out of it."""
    member: float
    """The largest share of members that a test finds which takes 1% of others for members."""
    epsilon: float
    delta: float
    psnr: float | None
    """What no reconstruction without a prior passes, in decibels; None where the bound says nothing."""
    against: str
    assumes: tuple[str, ...]

    def as_json(self) -> Json:
        return asdict(self) | {"text": self.text}

    @property
    def text(self) -> str:
        """The certificate for a person to read."""
        shares = ", ".join(f"{_up(share, 1e-3):.1%} in a line-up of {size}" for size, share in self.recognised.items())
        unit = 10.0 ** (math.floor(math.log10(self.epsilon)) - 2) if self.epsilon else 1.0
        drawn = (
            "" if self.psnr is None else f" Pictures drawn without a prior reach at most {_up(self.psnr, 0.1):.1f} dB."
        )
        lines = [
            f"Certificate for {self.defense}: {self.steps} steps on each example, {self.taken} of them taken.",
            f"Nobody recognises an example more often than this: {shares}.",
            f"Nobody finds more than {_up(self.member, 1e-3):.1%} of the members at 1% false alarms.{drawn}",
            f"All replies together are ({_up(self.epsilon, unit):.3g}, {self.delta:g})-differentially private.",
            f"This holds against {self.against}.",
            "It rests on:",
            *(f"- {each};" for each in self.assumes),
        ]
        return "\n".join(lines)[:-1] + "."


def _up(value: float, unit: float) -> float:
    """Rounded up: what is written must not be less than what is proved."""
    return math.ceil(value / unit - 1e-6) * unit


def certificate(defense: Defense, spent: Ledger) -> Certificate:
    """What is proved of the replies of a client who has spent so much and will spend what the defense plans.

    Raises:
        GradveilError: if nothing is proved, with the reason.
    """
    link = next((one for one in links_of(defense) if isinstance(one, DP)), None)
    if link is None:
        raise GradveilError("there is no certificate: only veil and dp count what they send; use one of them")
    release_of(defense, examples=1, tensors=1)  # refuses chains in which something may pass the noise by
    if replace(link) != link:
        raise GradveilError("there is no certificate: options of the defense were changed after it was made")
    whole = Ledger()
    whole.merge(spent)
    left = (link.steps or 0) - spent.steps
    if left > 0:
        whole.add(link.counted, link.sample_rate or 1.0, left)
    if not whole.steps:
        raise GradveilError("there is no certificate yet: nothing was sent, and the defense plans no steps")
    if not all(sigma for sigma, _, _ in whole.state()):
        raise GradveilError("there is no certificate: a step without noise that counts was sent, or is planned")
    epsilon = whole.guarantee(link.delta).epsilon
    assumes = [
        "one example is one person's: who has several of them is covered less",
        f"noise of {link.sigma:.4g} times what one example can change is drawn anew each step; nobody can predict it",
        "the model mixes no examples and sends nothing beside its update but their number",
        "before the replies each candidate of a line-up is as likely as any other",
        "the same examples have no part in another training, nor at another client",
    ]
    rates = sorted({rate for _, rate, _ in whole.state()})
    if rates[0] < 1:
        assumes.append(f"examples are drawn for steps at rates of {rates[0]:g} to {rates[-1]:g} by draws nobody sees")
    against, alone = AGAINST, not isinstance(link, Veil) or link.cohort == 1
    if isinstance(link, Veil) and not alone:
        against = AGAINST.replace("every reply of this client", f"the sum of the replies of {link.cohort} clients")
        assumes.append(
            f"replies are summed before anybody sees one, and {link.cohort} clients who follow the rules are in each "
            f"sum: a reply alone has {link.cohort**0.5:.3g} times less noise than is promised"
        )
        assumes.append("a reply is one step of plain SGD at the same rate for all, weighed by its number of examples")
    strength = math.hypot(*(math.sqrt(steps) / sigma for sigma, _, steps in whole.state()))
    psnr = best_psnr(1 / strength) if rates == [1.0] else None
    return Certificate(
        defense=defense.spec,
        steps=whole.steps,
        taken=spent.steps,
        recognised={str(size): whole.power(1 / size) for size in LINE_UPS},
        member=whole.power(LOW),
        epsilon=epsilon,
        delta=link.delta,
        psnr=psnr,
        against=against,
        assumes=tuple(assumes),
    )
