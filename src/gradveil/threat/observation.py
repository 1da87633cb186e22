"""What the adversary sees. None stands for what it does not know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from gradveil.core.trees import moved
from gradveil.core.types import Batch, Loss, Params, Recipe, cross_entropy
from gradveil.data import ImageSet
from gradveil.defenses import DEFENSES, Defense
from gradveil.domains import Domain
from gradveil.models import Functional, batch_norm_statistics
from gradveil.threat.model import Knowledge, ThreatModel

PublicSource = Callable[[str | None], ImageSet]
"""(the spec of a data set, or None for the usual one) -> its examples less all that may be private."""


@dataclass(frozen=True)
class Observation:
    """One broadcast and one client's reply to it, with whatever else the threat model grants."""

    module: nn.Module
    """The architecture; its own parameters are not used, those of ``sent`` are."""
    model: str
    """The spec the architecture was built from."""
    domain: Domain
    threat: str
    sent: Params
    reply: Params
    kind: Literal["gradient", "delta"]
    batch_size: int | None = None
    labels: Tensor | None = None
    recipe: Recipe | None = None
    defense: str | None = None
    """Its spec or, where it is a user's own and not registered, what describes it."""
    statistics: Params | None = None
    """Mean and variance of the private batch at every batch norm."""
    reshaped: str | None = None
    """The spec of the defenses that changed the architecture: as public as the model, whatever else is known."""
    crafted: tuple[str, ...] = ()
    """Names of the parameters that a dishonest server tampered with; empty for an honest broadcast."""
    earlier: tuple[Observation, ...] = ()
    """What the same client answered before, where the adversary may ask again; the oldest first."""
    loss: Loss = cross_entropy
    """What clients minimise; as public as the architecture."""
    candidates: ImageSet | None = None
    """A list with the private examples somewhere among others. It is not saved: a file must not choose what is read."""
    built_defense: Defense | None = None
    """The known defense itself, where it is available: one that is not registered cannot be built from its name.

    It is as it was before any client used it: what it remembers of private examples is not known."""
    round_number: int = 1
    """How many broadcasts the client has answered with this one."""
    public: PublicSource | None = None
    """Public examples where they are known, without any that may be private. Not saved, as candidates are not."""

    def known_links(self) -> list[tuple[str, Defense | None]]:
        """Each link of the known defense by its spec; None in the place of one that is a name alone."""
        return [] if self.defense is None else DEFENSES.named_links(self.defense, self.built_defense)

    def to(self, device: torch.device | str) -> Observation:
        """The same observation with its tensors on another device."""
        labels = None if self.labels is None else self.labels.to(device)
        statistics = None if self.statistics is None else moved(self.statistics, device)
        earlier = tuple(one.to(device) for one in self.earlier)
        changed = {"sent": moved(self.sent, device), "reply": moved(self.reply, device), "labels": labels}
        return replace(self, **changed, statistics=statistics, earlier=earlier)  # type: ignore[arg-type]


def observe(
    *,
    module: nn.Module,
    model: str,
    domain: Domain,
    sent: Params,
    reply: Params,
    batch: Batch | None = None,
    batch_size: int | None = None,
    recipe: Recipe,
    defense: str,
    built_defense: Defense | None = None,
    threat: ThreatModel,
    crafted: tuple[str, ...] = (),
    earlier: tuple[Observation, ...] = (),
    candidates: ImageSet | None = None,
    public: PublicSource | None = None,
    loss: Loss = cross_entropy,
    round_number: int = 1,
) -> Observation:
    """What this threat model's adversary sees of one exchange. The only place where private facts are let through.

    Who taps a line has no ``batch``, and at most its size: labels and statistics are then unknown to everybody.
    """
    knows = threat.knows
    batch_size = batch_size if batch is None else len(batch)
    return Observation(
        module=module,
        model=model,
        domain=domain,
        threat=threat.name,
        sent=sent,
        reply=reply,
        kind=recipe.sends,
        batch_size=batch_size if Knowledge.BATCH_SIZE in knows else None,
        labels=batch.labels.clone() if batch is not None and Knowledge.LABELS in knows else None,
        recipe=recipe if Knowledge.RECIPE in knows else None,
        defense=defense if Knowledge.DEFENSE in knows else None,
        built_defense=built_defense if Knowledge.DEFENSE in knows else None,
        statistics=_statistics(module, sent, batch, recipe)
        if batch is not None and Knowledge.STATISTICS in knows
        else None,
        reshaped=DEFENSES.reshaping(defense, built_defense),
        crafted=crafted,
        earlier=earlier,
        candidates=candidates if Knowledge.CANDIDATES in knows else None,
        public=public if Knowledge.PUBLIC_DATA in knows else None,
        loss=loss,
        round_number=round_number,
    )


def _statistics(module: nn.Module, sent: Params, batch: Batch, recipe: Recipe) -> Params | None:
    """Those that the client's own pass had: in train mode each layer normalises by the statistics of the batch."""
    with torch.no_grad():
        model = Functional(module, train_mode=recipe.train_mode)
        return batch_norm_statistics(model.module, sent, batch.inputs) or None
