"""Top-k with error feedback: what was not sent is added to what the client sends next (Stich et al., NeurIPS 2018)."""

from __future__ import annotations

from gradveil.core.types import Params
from gradveil.defenses.base import DEFENSES, Defense, Step
from gradveil.defenses.sparsify import kept_largest


@DEFENSES.register("topk")
class TopK(Defense):
    """Top-k with error feedback: the largest entries of each tensor; the share ``rate`` waits for a later step."""

    several_inputs = True

    def __init__(self, *, rate: float = 0.9) -> None:
        self.rate = rate
        self._require(0 <= rate < 1, "rate", "from 0 to below 1")
        self._waiting: Params = {}

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        whole = {name: g + self._waiting[name] if name in self._waiting else g for name, g in gradient.items()}
        sent = kept_largest(whole, self.rate)
        self._waiting = {name: (whole[name] - sent[name]).detach() for name in whole}
        left = sum(int(g.count_nonzero()) for g in sent.values())
        step.log.add("zeros", 1 - left / max(1, sum(g.numel() for g in sent.values())))
        return sent
