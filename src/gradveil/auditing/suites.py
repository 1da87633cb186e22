"""Suites: which attacks an audit runs when none is named. The budget, the threat model and the case decide.

There is nothing to tune. An attack is in the suite from some budget on, and only where it can run: where the threat
model grants all it needs, and the model, the data and the recipe allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from gradveil.attacks import ATTACKS, BUDGETS
from gradveil.attacks.analytic import readable_layer
from gradveil.attacks.generative import SHIPPED
from gradveil.core.errors import GradveilError
from gradveil.core.types import Recipe
from gradveil.domains import Domain
from gradveil.models import classifier, split_front
from gradveil.threat import Knowledge, Observation, ThreatModel, threat_model

LARGE = 1_000_000
"""Parameters from which on a model is large: a step of its problems costs some fifty times one of LeNet's."""
_ONLY_WHILE_MADE = frozenset({Knowledge.CRAFT, Knowledge.CANDIDATES})
"""What saved exchanges cannot give: they are answered already, and their files name no candidates."""


@dataclass(frozen=True, kw_only=True)
class SuiteSetting:
    """What decides which attacks can run."""

    threat: ThreatModel
    module: nn.Module
    model: str
    domain: Domain
    recipe: Recipe
    """How the client trains; for the choice only, whether the adversary knows it or not."""
    batch_size: int
    saved: bool = False
    """Whether the exchanges were saved elsewhere."""
    public: bool = False
    """Whether there are public examples on this machine."""

    @property
    def knows(self) -> frozenset[Knowledge]:
        return self.threat.knows - _ONLY_WHILE_MADE if self.saved else self.threat.knows

    @property
    def one_gradient(self) -> bool:
        return self.recipe.sends == "gradient"

    @property
    def replayable(self) -> bool:
        """Whether the adversary can repeat the client's local run."""
        return self.one_gradient or Knowledge.RECIPE in self.knows

    @property
    def reads_first_layer(self) -> bool:
        """Whether inputs can be read off the gradient of the first layer."""
        try:
            readable_layer(self.module, self.domain, "analytic")
        except GradveilError:
            return False
        return True

    @property
    def large(self) -> bool:
        return sum(parameter.numel() for parameter in self.module.parameters()) > LARGE

    @property
    def has_generator(self) -> bool:
        return self.replayable and self.domain.shape in SHIPPED

    @property
    def has_statistics(self) -> bool:
        return self.replayable and Knowledge.STATISTICS in self.knows

    @property
    def learnable(self) -> bool:
        """Whether a decoder can be trained on public examples within a minute."""
        return self.public and self.batch_size == 1 and self.one_gradient

    @property
    def fishable(self) -> bool:
        """Whether a crafted classifier can single out one of several examples."""
        layer = classifier(self.module, self.domain)
        trained = {n for n, p in self.module.named_parameters() if p.requires_grad}
        several = self.batch_size > 1 and self.domain.classes > 1
        return several and self.one_gradient and {f"{layer}.weight", f"{layer}.bias"} <= trained


@dataclass(frozen=True)
class Member:
    """An attack of the suites: from which budget on, where it can run, and what stands for it on a large model."""

    attack: str
    since: str
    fits: Callable[[SuiteSetting], bool] = lambda setting: setting.replayable
    large: str | None = "same"
    """None: a large model is not worth what it takes."""

    def spec(self, setting: SuiteSetting) -> str | None:
        return self.attack if self.large == "same" or not setting.large else self.large


MEMBERS = (
    Member("analytic", "quick", lambda setting: setting.reads_first_layer),
    Member("informed", "quick", large="informed:iterations=600,restarts=1"),
    Member(
        "informed:match=averaged",
        "quick",
        lambda setting: not setting.replayable,
        large="informed:match=averaged,iterations=600,restarts=1",
    ),
    Member("identify", "quick", lambda _: True),
    Member("replay", "quick", lambda _: True),
    Member("imprint", "quick", lambda setting: split_front(setting.model)[0] is None),
    Member("trap", "quick", lambda setting: setting.reads_first_layer),
    Member("ig", "standard", large="ig:iterations=600,restarts=1"),
    Member("gi", "standard", lambda setting: setting.has_statistics, large="gi:iterations=400,restarts=1"),
    Member("sme", "standard", lambda setting: not setting.one_gradient, large="sme:iterations=400,restarts=1"),
    Member("fingerprint", "standard", lambda _: True),
    Member("fishing", "standard", lambda setting: setting.fishable, large="fishing:then=ig:iterations=600;restarts=1"),
    Member("ggl:optimizer=adam,iterations=200,restarts=1", "standard", lambda setting: setting.has_generator),
    Member("learned", "standard", lambda setting: setting.learnable, large=None),
    Member("learned:rank=true", "standard", lambda setting: setting.learnable, large=None),
    Member("idlg", "thorough", lambda setting: setting.one_gradient and setting.batch_size == 1, large=None),
    Member(
        "gi",
        "thorough",
        lambda setting: setting.replayable and not setting.has_statistics,
        large="gi:iterations=400,restarts=1",
    ),
    Member("ggl", "thorough", lambda setting: setting.has_generator, large=None),
    Member("gias", "thorough", lambda setting: setting.has_generator, large="gias:iterations=300,restarts=1"),
    Member("gifd", "thorough", lambda setting: setting.has_generator, large="gifd:iterations=400,restarts=1"),
)
"""A larger budget runs all that a smaller one does. One short search in a generator is what fits into standard: its
steps cost some eight times those of a search over pixels. On a large model a search is both shorter, for more gradient
leads to the picture, and started once."""


def suite(budget: str, setting: SuiteSetting) -> tuple[str, ...]:
    """The attacks of a budget that can run in a setting, the cheap ones first."""
    upto = list(BUDGETS)[: list(BUDGETS).index(budget) + 1]
    fitting = []
    for member in (member for member in MEMBERS if member.since in upto):
        needs = ATTACKS.build(member.attack, BUDGETS[member.since]).requires
        if needs <= setting.knows and member.fits(setting):
            fitting.append(member)
    chosen = [ATTACKS.canonical(spec) for spec in (member.spec(setting) for member in fitting) if spec is not None]
    if not chosen:
        raise GradveilError(
            f"no attack of the {budget} suite can run on {setting.model} under threat {setting.threat.name}: "
            "name one with --attack, or grant more, as in --threat C"
        )
    return tuple(chosen)


def suite_for_saved(budget: str, seen: Sequence[Observation]) -> tuple[str, ...]:
    """The attacks that can run on all of these saved exchanges."""
    settings = [
        SuiteSetting(
            threat=threat_model(one.threat),
            module=one.module,
            model=one.model,
            domain=one.domain,
            recipe=one.recipe or Recipe(sends=one.kind),
            batch_size=one.batch_size or 1,
            saved=True,
        )
        for one in seen
    ]
    first, *others = [suite(budget, setting) for setting in settings]
    return tuple(attack for attack in first if all(attack in other for other in others))
