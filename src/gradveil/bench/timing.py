"""How long work takes, with a GPU's queue emptied before and after, and the inputs that benchmarks use."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gradveil.core.types import Domain

CIFAR = Domain(3, 32, 32, 10, (0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.262))


def seconds(work: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
