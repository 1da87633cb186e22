"""What the replies to Fishing's questions say about the client's batch, read off the gradient of the classifier.

With the bias as one more column, row k of that gradient is the mean over the batch of (p_k - [k is the label]) (h, 1),
for representations h. Fishing chooses p, the same for all examples or one of two values, so rows give sums of h and
counts of examples, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gradveil.attacks.parts.updates import explained
from gradveil.core.seeding import generator
from gradveil.core.trees import scaled, subtract
from gradveil.core.types import Params
from gradveil.models import classifier
from gradveil.threat.observation import Observation

_ROUNDING = 3e-6
"""As a share of a mean representation: what two that are the same differ by."""
_STEEP = 300.0
"""How many levels of a drawn feature the length of the mean is: examples of a class differ by a part of that."""


@dataclass(frozen=True)
class Feature:
    """A direction of representations, scaled so that the batch's mean lies at 0 and the mean of the target at 1."""

    along: Tensor
    origin: Tensor

    def level(self, representation: Tensor) -> float:
        return float(self.along @ representation - self.origin)


class Answers:
    """The replies of one client, in the order of Fishing's questions: all rows zero, class, closed gate, gates."""

    def __init__(self, replies: Sequence[Observation], target: int | None) -> None:
        self.replies = [explained(one, "averaged") for one in replies]
        self.size = self.replies[0].batch_size or 1
        self._wanted = target

    def __len__(self) -> int:
        return len(self.replies)

    @cached_property
    def names(self) -> tuple[str, str]:
        """The classifier's weight and bias."""
        layer = classifier(self.replies[0].module, self.replies[0].domain)
        return f"{layer}.weight", f"{layer}.bias"

    @cached_property
    def counts(self) -> Tensor:
        """[classes] of int64: examples of each class, which add up to the batch; from the first reply.

        All rows zero make every p one over the number of classes, and the bias gradient that less the share of the
        class.
        """
        errors = self.replies[0].reply[self.names[1]]
        owed = (1 / len(errors) - errors).clamp(min=0) + 1e-9
        owed = self.size * owed / owed.sum()
        whole = (owed + 1e-3).floor()
        missing = self.size - int(whole.sum())
        most_owed = (owed - whole).argsort(descending=True, stable=True)
        return whole.scatter_add(0, most_owed[: max(0, missing)], torch.ones_like(whole)).long()

    @cached_property
    def target(self) -> int:
        """The class that is fished for: the one asked for, or the rarest there is."""
        if self._wanted is not None:
            return self._wanted
        return int(self.counts.where(self.counts > 0, self.size + 1).argmin())

    def row(self, number: int) -> Tensor:
        """[features + 1]: the target's row of one reply, the bias last."""
        weight, bias = (self.replies[number].reply[name][self.target] for name in self.names)
        return torch.cat([weight, bias[None]])

    @cached_property
    def of_target(self) -> int:
        """Examples of the target class, by the second reply: there p is zero, and only they are left in the row."""
        return round(-self.size * float(self.row(1)[-1]))

    @cached_property
    def feature(self) -> Feature:
        """From the mean of the batch to the mean of the target class. The first two replies give both means.

        Where the batch is of one class they differ by rounding, which is no direction: then any that is drawn will do.
        """
        classes = len(self.replies[0].reply[self.names[1]])
        batch = classes * (self.row(0) - self.row(1))[:-1]
        own = self.row(1)[:-1] / self.row(1)[-1]
        apart = own - batch
        if apart.norm() <= _ROUNDING * own.norm():
            drawn = own * torch.randn(len(own), generator=generator(0, "feature")).to(own)
            along = _STEEP * len(own) ** 0.5 * drawn / own.square().sum()
            return Feature(along, along @ own - 1)
        along = apart / apart.square().sum()
        return Feature(along, along @ batch)

    def caught(self, number: int) -> tuple[float, float]:
        """How many examples lie above the cut of a gate, and their mean level; not whole where a gate half opens."""
        opened = self.row(number) - self.row(2)
        return self.size * float(opened[-1]), self.feature.level(opened[:-1] / opened[-1])

    @property
    def gates(self) -> range:
        """Numbers of the replies to gates."""
        return range(3, len(self.replies))

    def above(self, gate: int) -> tuple[Observation, Params]:
        """The closed gate, and what one example replies to it, if it alone lies above the cut of another.

        The two replies differ in those examples only; their labels, which move both alike, cancel out.
        """
        return self.replies[2], scaled(subtract(self.replies[2].reply, self.replies[gate].reply), self.size)

    def of_class(self) -> tuple[Observation, Params]:
        """The class question, and the mean of what the examples of the target class reply to it alone.

        The other rows hold the whole batch, but what they would hold without it follows from the target's: they share
        evenly what it loses.
        """
        mean = scaled(self.replies[1].reply, self.size / max(1, self.of_target))
        for name in self.names:
            own = mean[name][self.target]
            rows = (-own / (len(mean[name]) - 1)).expand_as(mean[name]).clone()
            rows[self.target] = own
            mean[name] = rows
        return self.replies[1], mean
