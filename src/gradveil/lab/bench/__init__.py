"""Benchmarks: each returns one JSON object, with its baseline measured in the same run."""

from gradveil.lab.bench.attacks import generation, observations, throughput
from gradveil.lab.bench.base import BENCHES, CIFAR, seconds
from gradveil.lab.bench.overhead import STANDARD_DEFENSES, overhead
from gradveil.lab.bench.runs import rounds, sweep

__all__ = [
    "BENCHES",
    "CIFAR",
    "STANDARD_DEFENSES",
    "generation",
    "observations",
    "overhead",
    "rounds",
    "seconds",
    "sweep",
    "throughput",
]
