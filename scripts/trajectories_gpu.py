"""Whether every way of running problems takes the same path on a GPU: twenty steps of each, against double backward.

Adam follows the slope itself here, not its sign, which would blow rounding up to whole steps. One JSON object a line.
"""

from __future__ import annotations

import json
from typing import cast

import torch

from gradveil.attacks import ATTACKS, Budget
from gradveil.attacks.parts.matching import Matching
from gradveil.attacks.parts.search import Adam, Found, Problems
from gradveil.core.progress import SILENT
from gradveil.engine import Plan, bound
from gradveil.lab.bench import CIFAR, observations

PROBLEMS, STEPS = 4, 20


def walked(attack: Matching, model: str) -> dict[str, Found]:
    """The same twenty steps by every way there is, with and without a CUDA graph."""
    seen = observations(model, CIFAR, PROBLEMS, "cuda")
    ways, starts, given = attack.problems(seen, list(range(PROBLEMS)))
    project = attack.prepare(seen, list(range(PROBLEMS))).project
    found = {}
    for name, way in ways.items():
        if name.startswith("compiled") and not model.startswith("lenet"):
            continue  # minutes of compiling each
        for graph in (False, True):
            evaluate = bound(Plan(name, 1 if name.startswith("loop") else PROBLEMS, graph), way, starts, given)
            with SILENT.task("", None) as task:
                search = Adam(iterations=STEPS, lr=0.01)
                found[f"{name}{', CUDA graph' if graph else ''}"] = search.run(
                    Problems(evaluate, starts, project), task
                )
    return found


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for model in ("lenet:init=wide", "resnet18", "vit:depth=2,dim=96"):
        attack = cast(Matching, ATTACKS.build("ig", Budget(1, STEPS)))
        found = walked(attack, model)
        first = found["loop reverse"].unknowns["pixels"]
        away = {
            name: float(f"{(other.unknowns['pixels'] - first).norm() / first.norm():.1e}")
            for name, other in found.items()
        }
        print(json.dumps({"model": model, "steps": STEPS, "relative_distance": away}), flush=True)


if __name__ == "__main__":
    main()
