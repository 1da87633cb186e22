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
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gradveil.core.errors import GradveilError
from gradveil.core.types import Recipe
from gradveil.defenses import (
    ATS,
    DCS2,
    DP,
    Censor,
    Clip,
    ClipExamples,
    DCS2Plus,
    Defense,
    GradDefense,
    Ledger,
    Noise,
    Outpost,
    Precode,
    Quantise,
    Soteria,
    Sparsify,
    Transform,
    Veil,
    links_of,
)
from gradveil.defenses.base import At, needs_only_tensors

AT: tuple[At, ...] = ("step", "update")
"""Where a defense acts on what leaves, in the order in which it does."""
LOW = 0.01
"""The share of false alarms at which membership is judged."""
FINEST = 60.0
"""Decibels, from which on a picture has no error that eight bits show."""
_SAYS_NOTHING = 50.0
KNOWN = (
    ATS, DCS2, DP, Censor, Clip, ClipExamples, DCS2Plus, Defense, GradDefense, Noise, Outpost, Precode,
    Quantise, Soteria, Sparsify, Veil,
)  # fmt: skip
"""Of all others nobody has looked at the code."""


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
    psnr: float | None = None
    """What no reconstruction without a prior passes, in decibels; None where no such bound is known."""

    @property
    def sentence(self) -> str:
        among, members = f"one of {self.candidates} candidates", f"{self.member:.1%} of the members at 1% false alarms"
        drawn = "" if self.psnr is None else f"; pictures drawn without a prior reach {self.psnr:.1f} dB at most"
        return (
            f"no adversary recognises more than {self.recognised:.1%} of the examples as {among} ({self.chance:.1%} by "
            f"luck), and none finds more than {members}{drawn}; {self.assumes}"
        )


def release_of(defense: Defense, *, examples: int, tensors: int) -> Release:
    """How a defense releases what ``examples`` together say in so many tensors.

    It is about what the defense is given. Running statistics that are sent beside it, say, are not in it.

    Raises:
        GradveilError: that says why there is no ceiling. A class that is not known here, a subclass of Clip, say, has
            none, and neither has a chain with one: whatever it does may undo a bound. A link that sees what comes
            before the noise, and one that sends it after the noise, need nothing but tensors.
    """
    reasons, links = list[str](), links_of(defense)
    for at in AT:
        bound, covers = math.inf, ""
        for place, link in enumerate(links):
            found = None
            if isinstance(link, DP) and type(link) in (DP, Veil) and at == "step":
                found = Release(link.sigma, at, "each example")
            elif type(link) is ClipExamples and at == "step":
                bound, covers = link.bound / examples, "each example"
            elif type(link) is Clip and link.at == at:
                # A projection: two gradients are no further apart after it, so that a bound from before stays.
                whole = link.bound if link.per == "global" else link.bound * math.sqrt(tensors)
                bound, covers = (bound, covers) if bound <= whole else (whole, "all examples together")
            elif type(link) is Noise and link.at == at and bound < math.inf:
                if link.kind == "gaussian" and link.sigma > 0:
                    found = Release(link.deviation / bound, at, covers)
                if link.kind != "gaussian":
                    reasons.append(f"{link.kind} noise is not counted here: its bound would be on sums of magnitudes")
            elif _changes(link, at):
                bound = math.inf
            if found is not None:
                strange = next((one for one in links if not _is_known(one)), None)
                odd = strange or _undoing(found, links[:place], links[place + 1 :])
                if odd is None:
                    return found
                reasons.append(f"{type(odd).__name__} may let the examples past the noise: nobody has proved otherwise")
        if bound < math.inf:
            reasons.append("what is sent is bounded, but no Gaussian noise follows the bound")
    raise GradveilError(
        reasons[0] if reasons else "nothing bounds what one example can change: clip it, then add noise"
    )


def _is_known(link: Defense) -> bool:
    """Whether it is of a class of Gradveil and as it was made: a hook that was set on an instance is no option."""
    options = getattr(type(link), "__dataclass_fields__", {})
    return type(link) in KNOWN and vars(link).keys() <= options.keys()


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


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What is proved of a defense in one setting of an audit; or why nothing is."""

    release: Release | None = None
    why: str = ""
    """There is no ceiling; empty where there is one."""
    constant: bool = False
    """Whether the same reply was seen whatever the examples are: it stands for an attack, but bounds no other reply."""
    steps: int = 1
    """How often one reply releases what the bound covers."""
    candidates: int = 1
    private: int = 1
    planned: tuple[float, int] | None = None
    """The sample rate and the number of steps of a whole training, where the defense plans one."""

    def ceiling(self, replies: int = 1) -> Ceiling | None:
        """For an adversary who has so many replies about the same examples."""
        if self.release is None:
            return None
        count = "one reply" if replies == 1 else f"all of {replies} replies"
        each = "" if self.steps == 1 else f", each of {self.steps} noisy steps"
        return self._of(1.0, self.steps * replies, f"{count}{each}")

    def of_run(self) -> Ceiling | None:
        """For all replies of the training that the defense plans."""
        if self.release is None or self.planned is None:
            return None
        rate, steps = self.planned
        drawn = "" if rate == 1 else f", for which examples are drawn at a rate of {rate:g} that nobody sees"
        return self._of(rate, steps, f"all {steps} noisy steps that are planned{drawn}")

    def _of(self, rate: float, steps: int, what: str) -> Ceiling | None:
        if self.release is None:
            return None
        spent = Ledger()
        spent.add(self.release.sigma, rate, steps)
        assumes = (
            f"this is for {what}, with Gaussian noise of {self.release.sigma:.3g} times what {self.release.covers} can "
            "change, which nobody can predict; any candidate was as likely to be the private one, and the adversary "
            "may know all other examples"
        )
        top = ceiling(spent, candidates=self.candidates, private=self.private, assumes=assumes)
        return replace(top, psnr=best_psnr(self.release.sigma, steps))


def prove(
    defense: Defense,
    module: nn.Module,
    recipe: Recipe,
    *,
    inputs: Tensor,
    size: int,
    candidates: int,
    given: Collection[str] = (),
) -> Proof:
    """What is proved of clients who train by this recipe, each on ``size`` of the ``inputs`` [n, ...].

    Args:
        defense: What the clients do.
        module: The model, as it is sent to them.
        recipe: How they train.
        inputs: Of all clients, to see whether one of them is there twice: it has twice the influence then.
        size: How many of them each client has.
        candidates: How many the adversary chooses from.
        given: What the adversary is told about the private examples beside replies, in words.
    """
    mini = size if recipe.sends == "gradient" else min(recipe.batch_size or size, size)
    visits = 1 if recipe.sends == "gradient" else recipe.epochs
    mixing = [layer for layer in module.modules() if isinstance(layer, _NormBase)]
    try:
        if given:
            raise GradveilError(f"the adversary is told {', '.join(sorted(given))} beside the replies")
        if recipe.train_mode and mixing:
            raise GradveilError(
                "batch norm in the train mode mixes examples, and its statistics are sent beside updates"
            )
        if candidates < size:
            raise GradveilError("there are fewer candidates than private examples")
        tensors = sum(parameter.requires_grad for parameter in module.parameters())
        release = release_of(defense, examples=size % mini or mini, tensors=tensors)
        if release.sigma == 0:
            raise GradveilError("there is no noise")
    except GradveilError as error:
        return Proof(why=str(error))
    copies = int(torch.unique(inputs.flatten(1), dim=0, return_counts=True)[1].max())
    alone = release.covers == "each example"
    steps = visits * copies**2 if alone else visits * math.ceil(size / mini)
    plan = next((link for link in links_of(defense) if isinstance(link, DP) and link.steps is not None), None)
    planned = None if plan is None or plan.steps is None else (plan.sample_rate or 1.0, plan.steps)
    return Proof(
        release=release,
        steps=steps if release.at == "step" else 1,
        candidates=candidates,
        private=size,
        planned=planned if release.at == "step" else None,
    )


def best_psnr(sigma: float, steps: int = 1) -> float | None:
    """The PSNR in decibels that no reconstruction without a prior passes; None where the bound says nothing.

    Without a prior means unbiased: right on average for every example in [0, 1] that there could be. Let x and x' be
    two examples that differ in one pixel. An unbiased estimate of that pixel has a variance of at least
    (x - x')^2 / chi2, where chi2 is that of the replies under x' against those under x (Chapman and Robbins, 1951). For
    Gaussian noise chi2 is exp(d^2) - 1 with d the distance of the two in deviations of the noise: at most 2 / sigma in
    a step, for both are within the bound. Some x' is at least 1/2 away. So the mean squared error is at least
    1/4 / (exp(4 steps / sigma^2) - 1), whatever the model and the adversary's other knowledge are.

    >>> round(best_psnr(2.0), 1), best_psnr(0.1)
    (8.4, None)
    """
    exponent = max(4 * steps / max(sigma, 1e-100) / max(sigma, 1e-100), 1e-300)  # larger says less, and is finite
    least = 10 * math.log10(4 * math.expm1(exponent)) if exponent < _SAYS_NOTHING else math.inf
    return least if least < FINEST else None
