"""The register of benchmarks, how long work takes, and the inputs that benchmarks use."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import ParamSpec

import torch

from gradveil.core.types import Json
from gradveil.domains import Images

P = ParamSpec("P")
CIFAR = Images(3, 32, 32, 10, (0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.262))
BENCHES: dict[str, Callable[..., Json]] = {}
"""By name. The keyword arguments of a benchmark, with their help as annotation, are the options of its command."""


def benchmark(work: Callable[P, Json]) -> Callable[P, Json]:
    """Register a benchmark. Its name, its arguments, the device and the version of torch come first in its result."""
    signature = inspect.signature(work)

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> Json:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        shown = {name: value for name, value in given.arguments.items() if isinstance(value, str | int)}
        on_gpu = shown.get("device") == "cuda"
        shown["device"] = torch.cuda.get_device_name() if on_gpu else f"cpu, {torch.get_num_threads()} threads"
        return {"bench": work.__name__, **shown, "torch": torch.__version__, **work(*args, **kwargs)}

    BENCHES[work.__name__] = run
    return run


def seconds(work: Callable[[], object], device: str) -> float:
    """How long work takes, with a GPU's queue emptied before and after."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
