"""What ``gradveil.protect`` costs without a defense, against the same loop without a guard: one JSON object a line.

Both loops run in turns in one process, with SGD and momentum; each time is the fastest of its rounds.

    python scripts/guard_overhead.py --device cuda
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch.nn.functional import cross_entropy

import gradveil
from gradveil import models
from gradveil.data import load


def step_ms(guarded: bool, options: argparse.Namespace) -> float:
    """Milliseconds of one step of a fresh model, the first steps left out."""
    data = load("cifar10-samples")
    model = models.build(options.model, data.domain, seed=0).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    guard = gradveil.protect(model, optimizer, cross_entropy, defense="none") if guarded else None
    batch = data.batch(range(options.batch_size)).to(options.device)
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    started = 0.0
    for number in range(options.steps + 2):
        if number == 2:
            wait()
            started = time.perf_counter()
        optimizer.zero_grad()
        (guard.loss if guard else cross_entropy)(model(batch.inputs), batch.labels).backward()
        optimizer.step()
    wait()
    taken = time.perf_counter() - started
    if guard:
        guard.close()
    return 1000 * taken / options.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    times: dict[bool, list[float]] = {guarded: [] for guarded in (False, True)}
    for _ in range(options.repeats):
        for guarded, found in times.items():
            found.append(step_ms(guarded, options))
    row = {"bench": "guard", "model": options.model, "batch_size": options.batch_size, "device": options.device}
    row |= {"threads": torch.get_num_threads(), "steps": options.steps, "repeats": options.repeats}
    print(json.dumps(row | {"plain_ms": round(min(times[False]), 2), "guarded_ms": round(min(times[True]), 2)}))


if __name__ == "__main__":
    main()
