"""What a round of federated training takes: its clients side by side against one after another."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gradveil.bench.timing import CIFAR, seconds
from gradveil.core.seeding import generator
from gradveil.data import ImageSet, MemoryImages
from gradveil.federated import Federation, Training
from gradveil.federated.case import SideBySide

WARM_UP = 3
"""Rounds before the timed ones: work is captured when it has been asked for a few times."""


def rounds(
    *, model: str = "lenet", clients: int = 10, examples: int = 512, batch_size: int = 64, algorithm: str = "fedavg",
    defense: str = "none", repeats: int = 5, device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """Milliseconds of the fastest round with ``examples`` random images at each client, both ways in the same run."""
    ms: dict[SideBySide, float] = {}
    ways: tuple[SideBySide, ...] = ("false", "true")
    for way in ways:
        case = Training(
            data="cifar10", model=model, clients=clients, algorithm=algorithm, batch_size=batch_size, lr=0.01,  # type: ignore[arg-type]
            defense=defense, side_by_side=way, device=device,  # type: ignore[arg-type]
        )  # fmt: skip
        federation = Federation(case, _random_images(clients * examples))
        for number in range(1, 1 + WARM_UP):
            federation.round(number)
        timed = range(1 + WARM_UP, 1 + WARM_UP + repeats)
        ms[way] = 1e3 * min(seconds(partial(federation.round, number), device) for number in timed)
    return {
        "bench": "rounds",
        "model": model,
        "clients": clients,
        "examples": examples,
        "batch_size": batch_size,
        "algorithm": algorithm,
        "defense": defense,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "in_turn_ms": round(ms["false"], 1),
        "side_by_side_ms": round(ms["true"], 1),
        "times_faster": round(ms["false"] / ms["true"], 2),
    }


def _random_images(count: int) -> ImageSet:
    rng = generator(0, "bench")
    return MemoryImages(
        name="random images",
        images=torch.randint(0, 256, (count, *CIFAR.shape), generator=rng, dtype=torch.uint8),
        labels=torch.arange(count) % CIFAR.classes,
        class_names=tuple(map(str, range(CIFAR.classes))),
        mean=CIFAR.mean,
        std=CIFAR.std,
    )
