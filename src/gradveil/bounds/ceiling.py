"""The share of private examples that no adversary recognises on average, whatever he computes.

A reply that is bounded and noised says little about one example. Let Q be what the adversary would see if the example
had no part, and P_z what he sees if it is candidate z. Whatever he does, he names z on some set A_z of replies, and
these sets do not overlap. Without the example he is right by luck alone: the mean of Q(A_z) over a list of m candidates
is at most 1/m. The noise keeps P_z near Q: P_z(A) is at most T(Q(A)), where T is the trade-off function of the noise,
T(x) = Phi(Phi^-1(x) + mu) for Gaussian noise (Dong, Roth and Su, 2022). T is concave, so the mean of P_z(A_z) is at
most T(1/m) (Balle et al., 2022; Hayes et al., 2023; Kaissis et al., 2023).

Nothing is assumed about the model, the other examples, the adversary's other knowledge or his computer. What is assumed
is said by :attr:`Ceiling.assumes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradveil.core.errors import GradveilError
from gradveil.defenses import ATS, DP, Clip, ClipExamples, Defense, Ledger, Noise, Precode, Transform, links_of
from gradveil.defenses.base import At, needs_only_tensors

AT: tuple[At, ...] = ("step", "update")
"""Where a defense acts on what leaves, in the order in which it does."""
LOW = 0.01
"""The share of false alarms at which membership is judged."""


@dataclass(frozen=True)
class Release:
    """How a defense releases what the examples say: bounded, then noised."""

    sigma: float
    """The noise, as a multiple of what one example can change."""
    at: At
    """Whether each local step is released so, or the update as a whole."""
    covers: str
    """Whose influence the bound is on, in words."""


@dataclass(frozen=True)
class Ceiling:
    """What no adversary passes, on average over private examples."""

    recognised: float
    """The share that can be picked out of a list of ``candidates``, of which ``private`` are in the batch."""
    chance: float
    """What naming candidates without a look at the reply reaches."""
    candidates: int
    private: int
    member: float
    """How many members a test can find that takes 1% of others for members."""
    advantage: float
    """The most that true alarms can be more frequent than false ones, at any threshold."""
    assumes: str

    @property
    def sentence(self) -> str:
        among = f"one of {self.candidates} candidates"
        return (
            f"no adversary recognises more than {self.recognised:.1%} of the examples as {among} ({self.chance:.1%} by "
            f"luck), and none finds more than {self.member:.1%} of the members at 1% false alarms; {self.assumes}"
        )


def release_of(defense: Defense, *, examples: int, tensors: int) -> Release:
    """How a defense releases what ``examples`` together say in so many tensors.

    It is about what the defense is given. Running statistics that are sent beside it, say, are not in it.

    Raises:
        GradveilError: that says why there is no ceiling. A class that is not known here, a subclass of Clip, say, has
            none: whatever it does may undo a bound.
    """
    reasons, links = list[str](), links_of(defense)
    for at in AT:
        bound, covers = math.inf, ""
        for place, link in enumerate(links):
            found = None
            if type(link) is DP and at == "step":
                found = Release(link.sigma, at, "each example")
            elif type(link) is ClipExamples and at == "step":
                bound, covers = link.bound / examples, "each example"
            elif type(link) is Clip and link.at == at:
                # A projection: two gradients are no further apart after it, so that a bound from before stays.
                whole = link.bound if link.per == "global" else link.bound * math.sqrt(tensors)
                bound, covers = (bound, covers) if bound <= whole else (whole, "all examples together")
            elif type(link) is Noise and link.at == at and bound < math.inf:
                if link.kind == "gaussian" and link.sigma > 0:
                    found = Release(link.sigma / bound, at, covers)
                if link.kind != "gaussian":
                    reasons.append(f"{link.kind} noise is not counted here: its bound would be on sums of magnitudes")
            elif _changes(link, at):
                bound = math.inf
            if found is not None:
                odd = _undoing(found, links[:place], links[place + 1 :])
                if odd is None:
                    return found
                reasons.append(f"{type(odd).__name__} may let the examples past the noise: nobody has proved otherwise")
        if bound < math.inf:
            reasons.append("what is sent is bounded, but no Gaussian noise follows the bound")
    raise GradveilError(
        reasons[0] if reasons else "nothing bounds what one example can change: clip it, then add noise"
    )


def _changes(link: Defense, at: At) -> bool:
    """Whether this link may do something else to what leaves a step, or the update."""
    if isinstance(link, Transform) and needs_only_tensors(link):
        return link.at == at
    hooks = ("on_gradient", "on_gradients", "for_round") if at == "step" else ("on_update",)
    return _has_own(link, *hooks)


def _has_own(link: Defense, *hooks: str) -> bool:
    return any(getattr(type(link), hook) is not getattr(Defense, hook) for hook in hooks)


def _undoing(release: Release, before: list[Defense], after: list[Defense]) -> Defense | None:
    """A link beside those that bound and noise which may look at private examples later, or mix them before."""
    for place, link in enumerate((*before, *after)):
        follows = place >= len(before)
        # An update comes after all steps, wherever the link stands.
        late = _changes(link, "update") and (follows or release.at == "step")
        late = late or (_changes(link, "step") and follows and release.at == "step")
        mixes = release.covers == "each example" and _has_own(link, "on_inputs", "on_forward")
        if (late and not needs_only_tensors(link)) or (mixes and type(link) not in (ATS, Precode)):
            return link
    return None


def ceiling(spent: Ledger, *, candidates: int, private: int = 1, assumes: str = "") -> Ceiling:
    """The ceiling for all that the ledger says was released.

    ``private`` of the candidates are in the batch and the adversary names as many. He may know the others: then one
    example is among ``candidates - private + 1``.
    """
    if not 1 <= private <= candidates:
        raise GradveilError(f"{private} private examples cannot be among {candidates} candidates")
    chance = min(1.0, private / (candidates - private + 1))
    return Ceiling(
        recognised=spent.power(chance),
        chance=chance,
        candidates=candidates,
        private=private,
        member=spent.power(LOW),
        advantage=spent.advantage(),
        assumes=assumes,
    )
