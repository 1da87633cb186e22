"""What running a defense costs, counted and not timed: the same seed has to give the same numbers on every machine."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

OPERATION, NUMBER, PRODUCT = 1e-5, 1e-9, 2.5e-11
"""Seconds, on one core, for each operation of torch, each number that it makes, and each multiplication and addition in
convolutions and matrix products."""


class TooDearError(Exception):
    """What is counted takes more than it may."""


class CostMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch computes. Time would differ from run to run, and with it what an attack can afford.

    Raises:
        TooDearError: as soon as it takes more than ``most`` seconds.
    """

    def __init__(self, most: float = math.inf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds, self._most = 0.0, most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        numbers = sum(own.numel() for own in tree_leaves(made) if isinstance(own, Tensor))
        counted = flop_registry.get(func.overloadpacket)
        products = counted(*args, **kwargs, out_val=made) if counted else 0
        self.seconds += OPERATION + NUMBER * numbers + PRODUCT * products
        if self.seconds > self._most:
            raise TooDearError
        return made
