"""Stepping N problems together. Problems are written for themselves; here is decided how N of them are run.

``loop`` takes them one by one, on a GPU some side by side; ``vmap`` lets torch batch the code of one; ``joint`` is code
that was written for many. On a GPU each is captured as a CUDA graph where it can be, which removes the cost of starting
thousands of small kernels. Which way is fastest depends on the model and the machine, so a short measurement decides.
Its result is kept: the same machine takes the same way again, and gives the same numbers. ``compiled`` fuses kernels of
vmap; compiling takes longer than most attacks, so it is never tried unasked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from gradveil.assets import cache_folder
from gradveil.core.atomic import open_file, remove_partial, write_json
from gradveil.core.errors import BadFileError, GradveilError, StrategyError
from gradveil.core.fields import Json
from gradveil.core.reading import read_text
from gradveil.core.types import Params
from gradveil.engine.agreement import FEW, agree, same_tensors
from gradveil.engine.graphs import Evaluate, at, captured, captured_by_parts, concatenated, cuda_settings, side_by_side
from gradveil.engine.network import UnsupportedError

Given = dict[str, Any]
"""What a problem is about, such as the observed update and the labels: any nesting of dicts of tensors."""

Single = Callable[[Params, Given], tuple[Params, Tensor]]
"""One problem: (unknowns, given) -> (gradient of the objective in the unknowns, objective as a scalar)."""

Batched = Callable[[Params, Given], tuple[Params, Tensor]]
"""N problems: (unknowns [N, ...], given [N, ...]) -> (gradients [N, ...], objectives [N])."""

Strategy = Literal["auto", "loop", "vmap", "joint", "compiled"]
Precision = Literal["float32", "tf32", "bfloat16"]

_TRIED = {"cpu": 4, "cuda": 128}
"""On so many problems, at most, a way is timed."""
_TRIED_BYTES = 2**30
"""On fewer if what is given of them takes more than this: on a large model few problems fill a card."""
_LARGE_BYTES = 2**22
"""From so much given of a problem on, as of models with a million parameters, ``joint`` is not compared with the rest,
and where there is no such way, ``loop`` on a GPU is not compared with ``vmap``.

``joint`` won whenever it was; letting cuDNN try its kernels for the other ways took up to a minute of a GPU. ``vmap``
over weights makes grouped convolutions, which lost to streams where clients of a federation go side by side.
"""
_SIDE_BY_SIDE = 16
"""So many problems, at most, run beside each other on a GPU: enough to fill it."""
_SHARE_OF_MEMORY = 0.4


@dataclass(frozen=True)
class Choice:
    """What is remembered: the fastest way, the bytes of memory that it takes for a problem, and whether in a graph."""

    way: str
    each: int
    graph: bool = True


@dataclass(frozen=True)
class Plan:
    """How the problems are run."""

    way: str
    chunk: int
    graph: bool = False
    precision: Precision = "float32"

    def __str__(self) -> str:
        graph, precise = (", CUDA graph" if self.graph else ""), self.precision
        return f"{self.way}, {self.chunk} together{graph}, {precise}"


def ways_of(
    singles: Mapping[str, Single], joint: Callable[[], Batched] | None, unknowns: Params, given: Given
) -> dict[str, Batched]:
    """Every way to run a batch, by name.

    Args:
        singles: the code of one problem, by name; the last is the plainest.
        joint: makes the code of many; None where there is none. It is among the ways only if the model's layers allow
            it and it gives what the plain loop gives on a few of the problems.
        unknowns: of all problems, [N, ...].
        given: of all problems.
    """
    found: dict[str, Batched] = {}
    for name, single in singles.items():
        found[f"vmap {name}"] = vmap(single)
        found[f"loop {name}"] = _one_by_one(single)
        found[f"compiled {name}"] = _compiled(single)
    if joint is None:
        return found
    try:
        together, plain, about = joint(), found[f"loop {list(singles)[-1]}"], at(given, slice(FEW))

        def same(point: Params) -> bool:
            with _precision("float32", _device(point)):
                (gradients, values), (expected, others) = together(point, about), plain(point, about)
            return same_tensors(gradients, expected) and same_tensors({"value": values}, {"value": others})

        return {"joint": together, **found} if agree(same, at(unknowns, slice(FEW))) else found
    except UnsupportedError:
        return found


def plan_for(
    ways: Mapping[str, Batched],
    unknowns: Params,
    given: Given,
    *,
    strategy: Strategy = "auto",
    precision: Precision = "float32",
) -> Plan:
    """The fastest way to run these problems here: measured once, then remembered for any number of them."""
    large = _bytes_each(unknowns, given) >= _LARGE_BYTES
    if strategy != "auto":
        admitted = [way for way in ways if way.split()[0] == strategy]
    elif large and "joint" in ways:
        admitted = ["joint"]
    elif large and _on_gpu(unknowns):
        admitted = [way for way in ways if way.startswith("loop")]
    else:
        admitted = [way for way in ways if not way.startswith("compiled")]
    if not admitted:
        raise StrategyError(f"strategy {strategy!r} cannot run this attack on this model; there are: {', '.join(ways)}")
    key = _fingerprint(admitted, unknowns, given, precision)
    choice = _kept(key, admitted)
    if choice is None:
        fastest = _fastest({way: ways[way] for way in admitted}, unknowns, given, precision)
        if fastest is None:
            hint = "; compiling also needs a C++ compiler" if strategy == "compiled" else ""
            raise GradveilError(
                f"this model cannot be differentiated twice, or its problems do not fit into memory{hint}"
            )
        choice = _remember(key, fastest, admitted)
    return _planned(choice, unknowns, precision)


def _fastest(ways: Mapping[str, Batched], unknowns: Params, given: Given, precision: Precision) -> Choice | None:
    """The way with the shortest time, measured on some of the problems; None where none can run."""
    choices = [Choice(way, _memory_of_each(way, run, unknowns, given, precision)) for way, run in ways.items()]
    if [choice.way for choice in choices] == ["joint"]:  # it has run already: it is compared before it is trusted
        return choices[0]
    if _on_gpu(unknowns):  # what asks the card for a number cannot be captured
        choices += [replace(choice, graph=False) for choice in choices if choice.way.startswith("loop")]
    timed = {
        choice: _seconds_per_problem(ways[choice.way], _planned(choice, unknowns, precision), unknowns, given)
        for choice in choices
    }
    best = min(timed, key=timed.__getitem__)
    return None if timed[best] == float("inf") else best


def bound(plan: Plan, way: Batched, unknowns: Params, given: Given) -> Evaluate:
    """One function that evaluates all problems under the plan; ``unknowns`` show the shapes to come."""

    def run(point: Params, about: Given) -> tuple[Params, Tensor]:
        with _precision(plan.precision, _device(point)):
            return way(point, about)

    def in_chunks(point: Params) -> tuple[Params, Tensor]:
        parts = [slice(start, start + plan.chunk) for start in range(0, _count(point), plan.chunk)]
        return concatenated([run(at(point, part), at(given, part)) for part in parts])

    if not plan.graph:
        return in_chunks
    if not plan.way.startswith("loop"):
        return captured(in_chunks, unknowns)
    return captured_by_parts(run, unknowns, given, min(plan.chunk, _count(unknowns)))


def _one_by_one(single: Single) -> Batched:
    def loop(unknowns: Params, given: Given) -> tuple[Params, Tensor]:
        works = [partial(single, at(unknowns, i), at(given, i)) for i in range(_count(unknowns))]
        results = side_by_side(works) if _on_gpu(unknowns) else [work() for work in works]
        gradients = {name: torch.stack([gradient[name] for gradient, _ in results]) for name in results[0][0]}
        return gradients, torch.stack([value for _, value in results])

    return loop


def _compiled(single: Single) -> Batched:
    """Compiled when first called: even to ask for a compiler loads it, for seconds."""
    made: list[Batched] = []

    def run(unknowns: Params, given: Given) -> tuple[Params, Tensor]:
        if not made:
            made.append(torch.compile(vmap(single), dynamic=False))
        return made[0](unknowns, given)

    return run


@contextlib.contextmanager
def _precision(precision: Precision, device: torch.device) -> Iterator[None]:
    """Plain float32 by default: torch lets convolutions use TF32 by itself, which changes gradients by percents.

    bfloat16 is torch's autocast: products in bfloat16, sums, objective and unknowns in float32. cuDNN may try its
    kernels and take the fastest: left to its rules it takes one here that is 25 times too slow.
    """
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16", cache_enabled=False)
    with cuda_settings(tf32=precision == "tf32", benchmark=True), mixed:
        yield


def _count(unknowns: Params) -> int:
    return len(next(iter(unknowns.values())))


def _device(unknowns: Params) -> torch.device:
    return next(iter(unknowns.values())).device


def _on_gpu(unknowns: Params) -> bool:
    return _device(unknowns).type == "cuda"


def _memory_of_each(name: str, way: Batched, unknowns: Params, given: Given, precision: Precision) -> int:
    """Bytes that a problem takes: on a GPU what a few of them took, elsewhere many times what is given of it."""
    if not _on_gpu(unknowns):
        return 20 * _bytes_each(unknowns, given)
    few = 1 if name.startswith("loop") else min(_count(unknowns), FEW)  # the first is done before the second begins
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        with _precision(precision, _device(unknowns)):
            way(at(unknowns, slice(few)), at(given, slice(few)))
    except (RuntimeError, NotImplementedError):
        return sys.maxsize  # what fails here fails again when timed, and is left out there
    return max(1, (torch.cuda.max_memory_allocated() - before) // few)


def _planned(choice: Choice, unknowns: Params, precision: Precision) -> Plan:
    """The way with as many problems together as fit."""
    loop = choice.way.startswith("loop")
    if loop and not (_on_gpu(unknowns) and choice.graph):
        return Plan(choice.way, 1, False, precision)
    if _on_gpu(unknowns):
        torch.cuda.empty_cache()  # what only waits to be used again is free too
        memory, _ = torch.cuda.mem_get_info()
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = min(_count(unknowns), _SIDE_BY_SIDE) if loop else _count(unknowns)
    together = max(1, min(most, int(_SHARE_OF_MEMORY * memory / choice.each)))
    return Plan(choice.way, together, _on_gpu(unknowns), precision)


def _bytes_each(unknowns: Params, given: Given) -> int:
    total = sum(int(tensor.nbytes) for tensor in [*tree_leaves(given), *unknowns.values()])
    return total // _count(unknowns) + 1


def _seconds_per_problem(way: Batched, plan: Plan, unknowns: Params, given: Given) -> float:
    """The time of one problem under the plan, infinite where it cannot run."""
    tried = _tried(unknowns, given)
    if plan.way.startswith("loop"):
        tried = min(tried, FEW)  # a few tell enough: a graph of many takes long to capture
    some = tried if plan.graph else min(plan.chunk, tried)
    part = at(unknowns, slice(some))

    def timed() -> float:
        started = time.perf_counter()
        evaluate(part)
        if _on_gpu(part):
            torch.cuda.synchronize()
        return time.perf_counter() - started

    try:
        evaluate = bound(plan, way, part, at(given, slice(some)))
        best = timed()
        for _ in range(3 if best < 1 else 1):
            best = min(best, timed())
    except (NotImplementedError, RuntimeError):
        return float("inf")
    return best / some


def _tried(unknowns: Params, given: Given) -> int:
    """On how many of the problems a way is timed."""
    most = max(FEW, _TRIED_BYTES // _bytes_each(unknowns, given))
    return min(_count(unknowns), _TRIED[_device(unknowns).type], most)


def _fingerprint(ways: list[str], unknowns: Params, given: Given, precision: str) -> str:
    """All that a measurement depends on: the machine, what one problem is, and on how many of them ways are timed."""
    name = torch.cuda.get_device_name() if _on_gpu(unknowns) else f"cpu x{torch.get_num_threads()}"
    shapes = [tuple(tensor.shape[1:]) for tensor in (*unknowns.values(), *tree_leaves(given))]
    tried = _tried(unknowns, given)
    text = json.dumps([torch.__version__, name, os.uname().machine, ways, tried, shapes, precision])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _remembered() -> Json:
    """What was measured before. It is only a record of speeds: without access to it all is measured again."""
    path = cache_folder() / "strategies.json"
    try:
        said = json.loads(read_text(path))
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"{path} cannot be read ({error}); delete it, it is only a record of speeds") from None
    return said if isinstance(said, dict) else {}


def _kept(key: str, ways: list[str]) -> Choice | None:
    known = _remembered().get(key)
    if not isinstance(known, dict) or known.get("way") not in ways or type(known.get("each")) is not int:
        return None
    return Choice(known["way"], min(max(1, known["each"]), 2**50), known.get("graph") is not False)


def _remember(key: str, choice: Choice, ways: list[str]) -> Choice:
    """What is kept from now on: another process may have measured the same meanwhile, and the first is kept.

    Processes take turns, so that none writes over what another has just kept. A cache that cannot be locked or written
    costs another measurement, no more.
    """
    path = cache_folder() / "strategies.json"
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            file = open_file(path.with_suffix(".lock"), os.O_WRONLY, shared=True)
            fcntl.flock(held.enter_context(os.fdopen(file, "w")), fcntl.LOCK_EX)
            remove_partial(path.parent, path.name)
        kept = _kept(key, ways)
        if kept is None:
            with contextlib.suppress(GradveilError):
                write_json(path, {**_remembered(), key: asdict(choice)}, shared=True)
    return kept or choice
