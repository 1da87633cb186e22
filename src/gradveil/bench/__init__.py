"""Benchmarks: each prints one JSON object, with its baseline measured in the same run."""

from gradveil.bench.generation import generation
from gradveil.bench.overhead import STANDARD_DEFENSES, overhead
from gradveil.bench.rounds import rounds
from gradveil.bench.sweep import sweep
from gradveil.bench.throughput import throughput

__all__ = ["STANDARD_DEFENSES", "generation", "overhead", "rounds", "sweep", "throughput"]
