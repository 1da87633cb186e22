"""Veil: bounded and noised updates whose noise follows from a wish, for all rounds of a training together.

The mechanism is that of DP-SGD. What is new is the question that it answers: not how much noise there is, but how often
somebody who sees every reply of a client can pick one of its examples out of a line-up.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

from gradveil.core.errors import GradveilError
from gradveil.defenses.accounting import MOST_STEPS, Ledger, guarantee
from gradveil.defenses.base import DEFENSES, Step
from gradveil.defenses.dp import DP

LOUD = 10.0
"""A client is warned if the noise of its reply is more than this many times as long as anything it can hide."""
USUAL = 0.1
"""The ceiling where nothing is wished for."""
WEAKEST = 1e6
"""Of mu and epsilon: who promises more promises nothing."""


@functools.lru_cache(maxsize=64)
def _strength_at(epsilon: float, delta: float) -> float:
    """The largest mu whose epsilon, as the ledger counts it, is not above the one that is wanted."""
    low, high = 0.0, 2 * (1 + epsilon)  # at this mu epsilon is above what is wanted, whatever delta is below 1/2
    for _ in range(60):
        middle = (low + high) / 2
        enough = guarantee(sigma=1 / middle, sample_rate=1.0, steps=1, delta=delta).epsilon <= epsilon
        low, high = (middle, high) if enough else (low, middle)
    if low == 0:
        raise GradveilError(f"defense veil: epsilon={epsilon:g} cannot be kept at delta={delta:g}: allow more")
    return low


@DEFENSES.register("veil")
@dataclass(frozen=True, kw_only=True)
class Veil(DP):
    """Veil: clip each example's gradient, and add the noise that keeps a promise over all ``rounds`` together.

    The promise is one of three: nobody recognises more than the share ``ceiling`` of examples in a line-up of
    ``lineup``; or all replies together are ``mu``-GDP; or they are (``epsilon``, ``delta``)-DP. A round is one step on
    each example: with E local epochs there are E times as many. More are refused.

    With ``cohort`` clients whose replies are summed before anybody sees them, each adds its share of the noise. The
    promise is on the sum then, and not on a reply alone.
    """

    ceiling: float | None = None
    lineup: int = 100
    mu: float | None = None
    epsilon: float | None = None
    rounds: int = 40
    cohort: int = 1
    sigma: float = field(init=False, default=0.0)
    """Noise of a reply, in units of what one example can change; it follows from the promise."""
    steps: int | None = field(init=False, default=None)
    sample_rate: float | None = field(init=False, default=None)
    beyond_plan: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        given = [name for name in ("ceiling", "mu", "epsilon") if getattr(self, name) is not None]
        if len(given) > 1:
            raise GradveilError(f"defense veil: {given[0]} and {given[1]} are two promises: give one of them")
        for name, least in (("rounds", 1), ("cohort", 1), ("lineup", 2)):
            whole = type(getattr(self, name)) is int and least <= getattr(self, name) <= MOST_STEPS
            self._require(whole, name, f"a whole number of at least {least} and at most {MOST_STEPS}")
        for name in given:
            wish = getattr(self, name)
            number = isinstance(wish, int | float) and not isinstance(wish, bool) and 0 < wish <= WEAKEST
            self._require(number, name, f"a number above 0 and at most {WEAKEST:g}")
        sigma = math.sqrt(self.rounds) / self.strength / math.sqrt(self.cohort)
        object.__setattr__(self, "sigma", sigma)
        object.__setattr__(self, "steps", self.rounds)
        super().__post_init__()

    @property
    def strength(self) -> float:
        """The mu of all rounds together: how many deviations of the noise one example can move what is sent."""
        if self.mu is not None:
            return self.mu
        if self.epsilon is not None:
            return _strength_at(self.epsilon, self.delta)
        from scipy.special import ndtri

        wish = USUAL if self.ceiling is None else self.ceiling
        self._require(1 / self.lineup < wish < 1, "ceiling", f"above 1 in {self.lineup} and below 1")
        found = float(ndtri(wish) - ndtri(1 / self.lineup)) * (1 - 1e-9)
        self._require(found > 0, "ceiling", f"further above 1 in {self.lineup}")
        return found

    @property
    def counted(self) -> float:
        return self.sigma * math.sqrt(self.cohort)

    @property
    def summed(self) -> bool:
        return self.cohort > 1

    def enter(self, step: Step, steps: int, *also: Ledger) -> None:
        # A second step starts where the first one led, which a client's own share of the noise does not hide.
        if self.summed and step.number > 1:
            raise GradveilError(
                "defense veil: with a cohort a reply is one step, for no more is proved of a sum: use fedsgd, or one "
                "local epoch in one batch"
            )
        super().enter(step, steps, *also)

    def caution(self, numbers: int, examples: float) -> str | None:
        loud = self.sigma * math.sqrt(numbers) / max(examples, 1)
        if loud <= LOUD:
            return None
        return (
            f"defense veil: with {examples:g} examples and {numbers:,} numbers to send, the noise is {loud:.0f} times "
            "as long as anything it hides: the server learns little from such a client alone; send fewer numbers (a "
            "head on public features), bring more examples, or share the noise in a secure sum (cohort=N)"
        )
