"""Compare accountants on a grid: epsilon, seconds and memory of each call, one JSON row a line.

    python scripts/accountants.py LIBRARY rows.jsonl     LIBRARY: opacus, dp-accounting or gradveil

Each call runs in a process of its own with a limit of time and memory, so that one that fails leaves a row. Rows that
the file holds already are not run again.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

SIGMAS = (0.3, 0.6, 1.1, 2.0, 8.0)
RATES = (1e-3, 1e-2, 0.1, 1.0)
STEPS = (1, 100, 1000, 10_000)
DELTAS = (1e-5, 1e-6)
SECONDS, GIGABYTES = 10, 8

Count = Callable[[float, float, int, float], float]


def opacus() -> dict[str, Count]:
    from opacus.accountants import PRVAccountant, RDPAccountant

    def counted(kind: type, sigma: float, rate: float, steps: int, delta: float) -> float:
        accountant = kind()
        accountant.history = [(sigma, rate, steps)]
        return float(accountant.get_epsilon(delta=delta))

    return {
        "opacus rdp": lambda *given: counted(RDPAccountant, *given),
        "opacus prv": lambda *given: counted(PRVAccountant, *given),
    }


def google() -> dict[str, Count]:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    def counted(kind: type, sigma: float, rate: float, steps: int, delta: float) -> float:
        event = PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)) if rate < 1 else GaussianDpEvent(sigma)
        return float(kind().compose(SelfComposedDpEvent(event, steps)).get_epsilon(delta))

    return {
        "google rdp": lambda *given: counted(RdpAccountant, *given),
        "google pld": lambda *given: counted(PLDAccountant, *given),
    }


def gradveil() -> dict[str, Count]:
    from gradveil.defenses.accounting import _library, guarantee

    _library()  # loading it is not counting

    def counted(sigma: float, rate: float, steps: int, delta: float) -> float:
        return guarantee(sigma=sigma, sample_rate=rate, steps=steps, delta=delta).epsilon

    return {"gradveil": counted}


def measured(count: Count, given: tuple[float, float, int, float]) -> dict[str, object]:
    """Epsilon (None if it failed), seconds of the processor, and by how many MB the call raised the peak of memory."""

    def work(channel: Connection) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES * 2**30,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found, why = count(*given), None
            except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
                found, why = None, f"{type(error).__name__}: {error}"[:120]
        seconds, after = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if found is not None and not math.isfinite(found):
            found, why = None, repr(found)
        channel.send({"epsilon": found, "failure": why, "seconds": seconds, "mb": (after - before) / 1024})

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=work, args=(theirs,))
    process.start()
    process.join()
    if ours.poll():
        return ours.recv()
    return {"epsilon": None, "failure": f"more than {SECONDS} s", "seconds": None, "mb": None}


def row_key(row: dict[str, object]) -> tuple[object, ...]:
    return tuple(row[name] for name in ("accountant", "sigma", "sample_rate", "steps", "delta"))


def main() -> None:
    library, path = sys.argv[1], Path(sys.argv[2])
    accountants = {"opacus": opacus, "dp-accounting": google, "gradveil": gradveil}[library]()
    done = {row_key(json.loads(line)) for line in path.read_text().splitlines()} if path.exists() else set()
    with path.open("a") as file:
        for delta, sigma, rate, steps in itertools.product(DELTAS, SIGMAS, RATES, STEPS):
            given = sigma, rate, steps, delta
            for name, count in accountants.items():
                row = {"accountant": name, "sigma": sigma, "sample_rate": rate, "steps": steps, "delta": delta}
                if row_key(row) not in done:
                    file.write(json.dumps(row | measured(count, given)) + "\n")
                    file.flush()


if __name__ == "__main__":
    main()
