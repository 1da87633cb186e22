"""Searches that repeat the local steps of a large model: problems side by side in one CUDA graph, against a plain loop.

PYTHONPATH=src python scripts/local_steps_gpu.py --updates 4

Eight images behind each update, in two epochs of mini-batches of four; one line for each number side by side.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch

from gradveil import models
from gradveil.attacks import ATTACKS, Budget
from gradveil.attacks.parts.matching import Matching
from gradveil.client import SimulatedClient
from gradveil.core.streams import Stream
from gradveil.core.trees import moved
from gradveil.core.types import Params, Recipe
from gradveil.data import load
from gradveil.engine import Evaluate, Plan, bound
from gradveil.threat import Observation, observe, threat_model

RECIPE = Recipe(sends="delta", epochs=2, batch_size=4, lr=0.01)
EXAMPLES = 8


def updates(model: str, count: int) -> list[Observation]:
    """What clients with eight images each send after four local steps."""
    data = load("cifar10-samples")
    module = models.build(model, data.domain, seed=0)
    client, seen = SimulatedClient(module, recipe=RECIPE), list[Observation]()
    for i in range(count):
        batch = data.batch(range(i * EXAMPLES, (i + 1) * EXAMPLES))
        reply = client.reply(client.model.params, batch, Stream.seeded(0, "client", i)).update
        known = observe(
            module=module, model=model, domain=data.domain, sent=client.model.params, reply=reply,
            batch=batch, recipe=RECIPE, defense="none", threat=threat_model("C"), candidates=data,
        )  # fmt: skip
        sent = seen[0].sent if seen else moved(known.sent, "cuda")
        seen.append(replace(known, sent=sent, reply=moved(reply, "cuda")))
    module.to("cuda")
    return seen


def seconds_of(evaluate: Evaluate, point: Params, repeats: int) -> float:
    evaluate(point)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        evaluate(point)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--updates", type=int, default=4)
    options = parser.parse_args()
    attack = ATTACKS.build("ig:restarts=1", Budget(1, 2))
    assert isinstance(attack, Matching)
    seen = updates(options.model, options.updates)
    ways, starts, given = attack.problems(seen, list(range(len(seen))))
    way, name = ways["loop reverse"], "loop reverse"
    plain = seconds_of(bound(Plan(name, 1), way, starts, given), starts, 2)
    print(f"plain loop: {1000 * plain / len(seen):.1f} ms a problem", flush=True)
    together = 1
    while together <= len(seen):
        started = time.perf_counter()
        evaluate = bound(Plan(name, together, graph=True), way, starts, given)
        captured = time.perf_counter() - started
        took = seconds_of(evaluate, starts, 5)
        print(
            f"{together} side by side in a graph: {1000 * took / len(seen):.1f} ms a problem, "
            f"{plain / took:.1f} times faster, captured in {captured:.1f} s",
            flush=True,
        )
        together *= 2


if __name__ == "__main__":
    main()
