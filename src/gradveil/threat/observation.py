"""What the adversary sees. None stands for what it does not know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gradveil.core.trees import moved
from gradveil.core.types import Batch, Domain, Params, Recipe
from gradveil.threat.model import Knowledge, ThreatModel


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

    def to(self, device: torch.device | str) -> Observation:
        """The same observation with its tensors on another device."""
        labels = None if self.labels is None else self.labels.to(device)
        changed = {**self.__dict__, "sent": moved(self.sent, device), "reply": moved(self.reply, device)}
        return Observation(**{**changed, "labels": labels})


def observe(
    *,
    module: nn.Module,
    model: str,
    domain: Domain,
    sent: Params,
    reply: Params,
    batch: Batch,
    recipe: Recipe,
    defense: str,
    threat: ThreatModel,
) -> Observation:
    """What this threat model's adversary sees of one exchange. The only place where private facts are let through."""
    knows = threat.knows
    return Observation(
        module=module,
        model=model,
        domain=domain,
        threat=threat.name,
        sent=sent,
        reply=reply,
        kind=recipe.sends,
        batch_size=len(batch) if Knowledge.BATCH_SIZE in knows else None,
        labels=batch.labels.clone() if Knowledge.LABELS in knows else None,
        recipe=recipe if Knowledge.RECIPE in knows else None,
        defense=defense if Knowledge.DEFENSE in knows else None,
    )
