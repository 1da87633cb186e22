"""Against DCS2: its concealed pictures are searched for together with the private one.

What is sent is the gradient of the private picture under its label and of each concealed one under a mixture of two
labels. Cross-entropy is linear in its target, so all of it is the gradient of one batch with soft labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.attacks.base import Reconstruction
from gradveil.attacks.parts.channel import Channel, Span
from gradveil.attacks.parts.counter import CounterMove, against
from gradveil.attacks.parts.labels import prediction_errors
from gradveil.core.types import cross_entropy
from gradveil.defenses.dcs2 import DCS2, DCS2Plus
from gradveil.engine import Given
from gradveil.models import classifier
from gradveil.threat.observation import Observation


@dataclass(frozen=True)
class SearchBoth(CounterMove):
    """The private picture first, then ``k`` concealed ones, whose labels count ``mix`` against the private one."""

    k: int
    mix: float
    weight: float
    """How often the private picture's gradient is in the sum."""

    def prepare(self, one: Observation) -> Observation:
        """As many pictures as there are gradients in it; labels by how far the classifier's rows point down."""
        ordered = prediction_errors([one])[0].argsort()
        private = ordered[:1] if one.labels is None else one.labels
        others = ordered[ordered != private][: self.k]
        return replace(one, batch_size=1 + self.k, labels=torch.cat([private, others]))

    def extra(self, one: Observation) -> Given:
        assert one.labels is not None
        own: Tensor = F.one_hot(one.labels, one.domain.classes).to(next(iter(one.reply.values())))
        return {"targets": torch.cat([self.weight * own[:1], self.mix * own[1:] + (1 - self.mix) * own[:1]])}

    def finish(self, found: Reconstruction, one: Observation) -> Reconstruction:  # noqa: ARG002
        return replace(found, inputs=found.inputs[:1], labels=found.labels[:1])


def counter_move(defense: DCS2, one: Observation) -> CounterMove | None:
    """Of one example, with fewer concealed pictures than classes."""
    once = sum(isinstance(link, DCS2) for _, link in one.known_links()) == 1
    named = defense.by_place(torch.arange(1))
    alone = once and one.batch_size == 1 and named is not None and bool(named.all())
    readable = one.loss is cross_entropy and defense.k < one.domain.classes
    # a strict projection acts on nearly every step, and adds the batch's own gradient
    weight = 1 + defense.margin if isinstance(defense, DCS2Plus) and defense.strict else 1.0
    return SearchBoth(defense.k, defense.mix, weight) if alone and readable else None


@against(
    "dcs2",
    "dcs2plus",
    sentence="It searches for the concealed pictures together with the private one.",
    counter_move=counter_move,
)
def channel(defense: DCS2, one: Observation) -> Channel:
    """Gradients of concealed examples were added: what entered the classifier is the private examples' and theirs.

    Output gradients add up to zero over the classes: one more vector than the others, and the span shows nothing.
    """
    size = one.batch_size or 1
    named = defense.by_place(torch.arange(size))
    examples = size + defense.k * (size if named is None else int(named.sum()))
    if size > 1 and examples >= one.domain.classes:
        return Channel()
    return Channel(span=Span(f"{classifier(one.module, one.domain)}.weight", examples))
