"""The batch-norm prior of GradInversion: a candidate batch should have the statistics that the private one had.

Only for threat models that give those statistics away; real systems send running means of them at most.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from gradveil.core.types import Params
from gradveil.models import batch_norm_statistics
from gradveil.threat.observation import Observation


class StatisticsPrior:
    """The squared distance of the mean and variance at the inputs of every batch norm, for one problem."""

    def __init__(self, one: Observation) -> None:
        self._module = copy.deepcopy(one.module).eval().requires_grad_(False)
        self._sent = one.sent

    def __call__(self, inputs: Tensor, wanted: Params) -> Tensor:
        found = batch_norm_statistics(self._module, self._sent, inputs)
        return torch.stack([(found[name] - wanted[name]).square().sum() for name in wanted]).sum()
