"""DCS2's concealed pictures, searched for together with the private one.

What is sent is the gradient of the private picture under its label and of each concealed one under a mixture of two
labels. Cross-entropy is linear in its target, so all of it is the gradient of one batch with soft labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from gradveil.attacks.base import Reconstruction
from gradveil.attacks.counter import Counter
from gradveil.attacks.engine import Given
from gradveil.attacks.parts.labels import prediction_errors
from gradveil.threat.observation import Observation


@dataclass(frozen=True)
class SearchBoth(Counter):
    """The private picture first, then ``k`` concealed ones, whose labels count ``mix`` against the private one."""

    k: int
    mix: float

    def observed(self, one: Observation) -> Observation:
        """As many pictures as there are gradients in it; labels by how far the classifier's rows point down."""
        ordered = prediction_errors([one])[0].argsort()
        private = ordered[:1] if one.labels is None else one.labels
        others = ordered[ordered != private][: self.k]
        return replace(one, batch_size=1 + self.k, labels=torch.cat([private, others]))

    def known(self, one: Observation) -> Given:
        assert one.labels is not None
        own: Tensor = F.one_hot(one.labels, one.domain.classes).to(next(iter(one.reply.values())))
        return {"targets": torch.cat([own[:1], self.mix * own[1:] + (1 - self.mix) * own[:1]])}

    def revealed(self, found: Reconstruction, one: Observation) -> Reconstruction:  # noqa: ARG002
        return replace(found, inputs=found.inputs[:1], labels=found.labels[:1])
