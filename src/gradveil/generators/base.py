"""What a generator is: from a latent code to images, in named stages that can be entered in the middle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError


class Generator(nn.Module, ABC):
    """``decode(z)`` runs all stages; ``onward`` and ``until`` run some of them, for searches in between.

    A stage maps features [n, ...] to features; the first takes the code [n, latent], the last gives images [n, C, H, W]
    in [0, 1]. What images are to be of goes into every stage as shares of classes [n, classes].
    """

    latent: int
    shape: tuple[int, int, int]
    """[C, H, W] of the images."""
    classes: int | None
    """How many classes it can be asked for; None where it cannot be asked."""
    stages: tuple[str, ...]
    card: Mapping[str, Any] = MappingProxyType({})
    """What the weights were trained on and how, where the file says so."""

    @abstractmethod
    def stage(self, name: str, features: Tensor, wanted: Tensor | None) -> Tensor:
        """One stage; ``wanted`` is [n, classes], or None."""

    def decode(self, z: Tensor, labels: Tensor | None = None) -> Tensor:
        """Images [n, C, H, W] in [0, 1] for codes [n, latent], and labels [n] where there are classes."""
        return self.onward(z, self.stages[0], labels)

    def codes(self, count: int, rng: torch.Generator) -> Tensor:
        """Codes [count, latent] as the generator expects them, drawn on the device of ``rng``."""
        return torch.randn(count, self.latent, generator=rng, device=rng.device)

    def forward(self, z: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.decode(z, labels)

    def onward(self, features: Tensor, start: str, labels: Tensor | None = None) -> Tensor:
        """Images from the features that enter the stage ``start``."""
        return self._run(features, self.stages[self._place(start) :], labels)

    def until(self, z: Tensor, stop: str, labels: Tensor | None = None) -> Tensor:
        """The features that enter the stage ``stop``."""
        return self._run(z, self.stages[: self._place(stop)], labels)

    def between(self, features: Tensor, start: str, stop: str, labels: Tensor | None = None) -> Tensor:
        """The features that enter the stage ``stop``, from those that enter the stage ``start``."""
        return self._run(features, self.stages[self._place(start) : self._place(stop)], labels)

    def _run(self, features: Tensor, stages: tuple[str, ...], labels: Tensor | None) -> Tensor:
        wanted = None  # a label that the generator cannot use is no mistake: the attack found it anyway
        if self.classes is not None:
            if labels is None:
                shape = (len(features), self.classes)
                wanted = torch.full(shape, 1 / self.classes, device=features.device, dtype=features.dtype)
            elif labels.dim() > 1:
                wanted = labels
            else:  # torch's one_hot looks at the labels' values, and so cannot draw for many problems at once
                classes = torch.arange(self.classes, device=features.device)
                wanted = (labels.unsqueeze(-1) == classes).to(features.dtype)
        for name in stages:
            features = self.stage(name, features, wanted)
        return features

    def _place(self, name: str) -> int:
        if name not in self.stages:
            raise GradveilError(f"this generator has no stage {name!r}; its stages: {', '.join(self.stages)}")
        return self.stages.index(name)
