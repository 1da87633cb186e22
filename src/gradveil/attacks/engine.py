"""Stepping N problems together. A problem is written for itself alone; here is decided how N of them are run.

``loop`` takes them one by one; ``vmap`` takes them in chunks that fit memory. Which is faster depends on the model and
the machine (on a CPU, vmap makes LeNet five times faster and ResNet-18 two times slower), so a short measurement
decides, and its result is kept: the same machine takes the same way again, and gives the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from gradveil.assets import cache_folder
from gradveil.core.atomic import write_json
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.types import Params

Given = dict[str, Any]
"""What a problem is about, such as the observed update and the labels: any nesting of dicts of tensors."""

Problem = Callable[[Params, Given], tuple[Params, Tensor]]
"""One problem: (unknowns, given) -> (gradient of the objective in the unknowns, objective as a scalar)."""

Evaluate = Callable[[Params], tuple[Params, Tensor]]
"""All problems: unknowns [N, ...] -> (gradients [N, ...], objectives [N])."""

Strategy = Literal["auto", "loop", "vmap"]

_PROBED_ON_CPU = 4
_SHARE_OF_MEMORY = 0.3


@dataclass(frozen=True)
class Plan:
    """How the problems are run."""

    strategy: str
    derivative: str
    chunk: int

    def __str__(self) -> str:
        together = f", {self.chunk} together" if self.strategy == "vmap" else ""
        return f"{self.strategy}{together}, {self.derivative}"


def plan_for(problems: Mapping[str, Problem], unknowns: Params, given: Given, *, strategy: Strategy = "auto") -> Plan:
    """The fastest way to run these problems here. ``problems`` are equal ways to derive one, by name."""
    count, chunk = _count(unknowns), _fitting_chunk(unknowns, given)
    ways = [Plan(s, d, chunk) for s in ("vmap", "loop") if strategy in ("auto", s) for d in problems]
    if not ways:
        raise GradveilError(f"no strategy is called {strategy!r}; there are: auto, loop, vmap")
    if len(ways) == 1:
        return ways[0]
    key = _fingerprint(ways, unknowns, given)
    known = _remembered().get(key)
    for way in ways:
        if known == str(way):
            return way
    some = count if _device(unknowns).type == "cuda" else min(count, _PROBED_ON_CPU)
    timed = {way: _seconds_per_problem(problems[way.derivative], way, unknowns, given, some) for way in ways}
    best = min(timed, key=timed.__getitem__)
    _remember(key, str(best))
    return best


def run_as(plan: Plan, problem: Problem, given: Given) -> Evaluate:
    """One function that evaluates all problems under the plan."""
    if plan.strategy == "vmap":
        together = vmap(problem, chunk_size=plan.chunk)
        return lambda unknowns: together(unknowns, given)

    def one_by_one(unknowns: Params) -> tuple[Params, Tensor]:
        results = [problem(_at(unknowns, i), _at(given, i)) for i in range(_count(unknowns))]
        gradients = {name: torch.stack([gradient[name] for gradient, _ in results]) for name in unknowns}
        return gradients, torch.stack([value for _, value in results])

    return one_by_one


def _at(tree: Any, index: int | slice) -> Any:
    return tree_map(lambda tensor: tensor[index], tree)


def _count(unknowns: Params) -> int:
    return len(next(iter(unknowns.values())))


def _device(unknowns: Params) -> torch.device:
    return next(iter(unknowns.values())).device


def _seconds_per_problem(problem: Problem, way: Plan, unknowns: Params, given: Given, some: int) -> float:
    few = min(some, way.chunk) if way.strategy == "vmap" else 1
    part, about = _at(unknowns, slice(few)), _at(given, slice(few))
    evaluate = run_as(way, problem, about)
    try:
        return min(_timed(evaluate, part) for _ in range(3)) / few
    except (NotImplementedError, RuntimeError) as error:
        if way.derivative == "reverse" and way.strategy == "loop":
            raise GradveilError(f"this model cannot be differentiated twice: {' '.join(str(error).split())}") from error
        return float("inf")


def _timed(evaluate: Evaluate, unknowns: Params) -> float:
    started = time.perf_counter()
    evaluate(unknowns)
    if _device(unknowns).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _fitting_chunk(unknowns: Params, given: Given) -> int:
    """How many problems fit: each holds its update, the direction, their derivatives and activations."""
    leaves = [tensor for tensor in _leaves(given) if tensor.is_floating_point()]
    count = _count(unknowns)
    each = sum(t.nbytes for t in [*leaves, *unknowns.values()]) // count
    if _device(unknowns).type == "cuda":
        free, _ = torch.cuda.mem_get_info(_device(unknowns))
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(count, int(_SHARE_OF_MEMORY * free / (10 * each + 1))))


def _leaves(tree: Any) -> list[Tensor]:
    leaves: list[Tensor] = torch.utils._pytree.tree_leaves(tree)
    return leaves


def _fingerprint(ways: list[Plan], unknowns: Params, given: Given) -> str:
    device = _device(unknowns)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{torch.get_num_threads()}"
    shapes = [tuple(tensor.shape) for tensor in (*unknowns.values(), *_leaves(given))]
    text = json.dumps([torch.__version__, name, os.uname().machine, [str(way) for way in ways], shapes])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _remembered() -> dict[str, str]:
    path = cache_folder() / "strategies.json"
    try:
        said = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadFileError(f"{path} cannot be read ({error}); delete it, it is only a record of speeds") from None
    return {str(k): str(v) for k, v in said.items()} if isinstance(said, dict) else {}


def _remember(key: str, way: str) -> None:
    write_json(cache_folder() / "strategies.json", {**_remembered(), key: way})
