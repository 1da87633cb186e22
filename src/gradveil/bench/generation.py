"""What a generation of CMA-ES costs: its whole population decoded and valued, against one step down the slope."""

from __future__ import annotations

from typing import Any

import torch

from gradveil.attacks import ATTACKS, Budget
from gradveil.attacks.parts.matching import Matching
from gradveil.bench.throughput import observations
from gradveil.bench.timing import CIFAR, seconds
from gradveil.core.progress import SILENT
from gradveil.core.types import Domain
from gradveil.threat import Observation


def generation(
    *, model: str = "lenet:init=wide", images: int = 8, population: int = 50, rounds: int = 10, device: str = "cpu",
    domain: Domain = CIFAR, generator: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """Seconds of one generation for all images, and of one step of Adam on as many codes as the generation values."""
    seen = observations(model, domain, images, device)
    evolution = _attack(f"ggl:generator={generator},optimizer=cma,population={population},restarts=1", rounds)
    descent = _attack(f"ggl:generator={generator},optimizer=adam,restarts={population}", rounds)
    whole, step = _seconds_a_round(evolution, seen, rounds, device), _seconds_a_round(descent, seen, rounds, device)
    return {
        "bench": "generation",
        "model": model,
        "images": images,
        "population": population,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "generation_ms": round(1e3 * whole, 2),
        "gradient_step_ms": round(1e3 * step, 2),
        "ratio": round(whole / step, 3),
    }


def _attack(spec: str, rounds: int) -> Matching:
    attack = ATTACKS.build(f"{spec},iterations={rounds}", Budget(1, rounds))
    assert isinstance(attack, Matching)
    return attack


def _seconds_a_round(attack: Matching, seen: list[Observation], rounds: int, device: str) -> float:
    """Of the search alone, after one that warms up: what is prepared once for all rounds is left out."""
    ready = attack.prepare(seen, list(range(len(seen))))

    def walk() -> None:
        with SILENT.task("", None) as task:
            attack.phases[0].search.run(ready, task)

    walk()
    return seconds(walk, device) / rounds
