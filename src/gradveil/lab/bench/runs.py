"""Runs of many: the clients of a round, side by side and one after another; the cases of a sweep, and in a loop."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import torch

from gradveil.auditing import Case, run_case
from gradveil.core.seeding import generator
from gradveil.core.types import Json
from gradveil.data import ImageSet, MemoryImages
from gradveil.engine import SideBySide
from gradveil.federated import Federation, Training
from gradveil.lab.bench.base import CIFAR, benchmark, seconds
from gradveil.lab.sweeps import ResultFolder, Study, make_study, run_study

WARM_UP = 3
"""Rounds before the timed ones: work is captured when it has been asked for a few times."""


@benchmark
def rounds(
    *,
    model: Annotated[str, "Model, such as resnet18."] = "lenet",
    clients: Annotated[int, "Clients of the round."] = 10,
    examples: Annotated[int, "Random images at each client."] = 512,
    batch_size: Annotated[int, "Of the local steps."] = 64,
    algorithm: Annotated[str, "Of the training."] = "fedavg",
    defense: Annotated[str, "Of every client."] = "none",
    repeats: Annotated[int, "Timed rounds; the fastest counts."] = 5,
    device: Annotated[str, "cpu or cuda."] = "cpu",
) -> Json:
    """Time of a round of federated averaging with its clients side by side, against one after another."""
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


@benchmark
def sweep(
    *,
    cases: Annotated[int, "Cases of the sweep."] = 20,
    iterations: Annotated[int, "Steps of the attack in each."] = 300,
    model: Annotated[str, "Model, such as resnet18."] = "lenet:init=wide",
    repeats: Annotated[int, "Timed runs of each; the fastest counts."] = 3,
) -> Json:
    """Time of a sweep by one worker against its cases in a plain loop.

    Both run in turn; every case has its own seed, so that none share a batch. ``runner_s`` is the time of the fastest
    sweep that was not spent in cases: it does not depend on what else the machine did.
    """
    base = {"model": model, "images": 2, "attacks": f"ig:iterations={iterations}", "restarts": 2, "defenses": "none"}
    study = make_study("bench", {"base": base, "grid": {"seed": list(range(cases))}})
    before = torch.get_num_threads()
    torch.set_num_threads(study.threads)
    try:
        swept, looped = zip(*(_once(study) for _ in range(repeats)), strict=True)
    finally:
        torch.set_num_threads(before)
    sweep_s, in_cases = min(swept)
    return {
        "device": f"cpu, {study.threads} thread",
        "sweep_s": round(sweep_s, 2),
        "loop_s": round(min(looped), 2),
        "ratio": round(sweep_s / min(looped), 4),
        "runner_s": round(sweep_s - in_cases, 3),
        "runner_share": round(1 - in_cases / sweep_s, 4),
    }


def _once(study: Study) -> tuple[tuple[float, float], float]:
    """A sweep, in all and within cases, and a loop; both into fresh folders."""
    with tempfile.TemporaryDirectory() as name:
        out, plain = Path(name) / "sweep", Path(name) / "loop"
        whole = seconds(lambda: run_study(study, out, start="fork"), "cpu")
        within = sum(ResultFolder(out).seconds(entry.digest) or 0.0 for entry in study.entries)

        def loop() -> None:
            for entry in study.entries:
                assert isinstance(entry.case, Case)
                run_case(entry.case, plain / entry.digest)

        return (whole, within), seconds(loop, "cpu")
