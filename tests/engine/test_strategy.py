"""Loop, vmap and joint, forward and reverse: different ways to the same numbers."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from exchanges import observed, private_batches
from gradveil.attacks import ATTACKS, Budget
from gradveil.attacks.parts.matching import Matching
from gradveil.attacks.parts.search import Adam, Problems
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.progress import SILENT
from gradveil.core.trees import moved
from gradveil.core.types import Params
from gradveil.engine import Given, Plan, bound, plan_for, ways_of
from gradveil.engine import strategy as memory

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path))
    return tmp_path / "strategies.json"


def matching(spec: str, iterations: int = 20, restarts: int = 2) -> Matching:
    attack = ATTACKS.build(spec, Budget(restarts, iterations))
    assert isinstance(attack, Matching)
    return attack


@pytest.mark.integration
@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("attack", ["ig", "dlg"])
@pytest.mark.parametrize("model", ["lenet:init=wide", "convnet:width=4", "vit:depth=1,dim=24"])
def test_every_way_gives_the_same_trajectory(model: str, attack: str) -> None:
    """Ten steps of Adam without the sign, which would blow rounding up to whole steps."""
    seen = observed(private_batches(2), model=model)
    chosen = matching(attack)
    ways, starts, given = chosen.problems(seen, [0, 1])
    ways = {name: way for name, way in ways.items() if not name.startswith("compiled")}
    assert {"joint", "vmap forward", "vmap reverse", "loop forward", "loop reverse"} == ways.keys()
    search, project, found = Adam(iterations=10, lr=0.01), chosen.phases[0].prior(seen[0], None).project, {}
    for name, way in ways.items():
        for chunk in (1,) if name.startswith("loop") else (3, 4):
            evaluate = bound(Plan(name, chunk), way, starts, given)
            with SILENT.task("", None) as task:
                found[name, chunk] = search.run(Problems(evaluate, starts, project), task)
    first = found["loop reverse", 1]
    for other in found.values():
        torch.testing.assert_close(other.trace, first.trace, atol=1e-6, rtol=1e-6)
        for name in starts:
            assert (other.unknowns[name] - first.unknowns[name]).norm() <= 1e-6 * first.unknowns[name].norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compiled forward", "compiled reverse"])
def test_compiled_steps_are_the_same(name: str) -> None:
    ways, starts, given = matching("ig").problems(observed(private_batches(2)), [0, 1])
    compiled, plain = ways[name](starts, given), ways["loop reverse"](starts, given)
    torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-4)


def test_compiling_is_never_tried_unasked() -> None:
    ways, starts, given = matching("ig").problems(observed(private_batches(1)), [0])
    tried = {"compiled forward": pytest.fail, "vmap forward": ways["vmap forward"]}
    assert plan_for(tried, starts, given).way == "vmap forward"  # type: ignore[arg-type]


def test_bfloat16_is_near_and_not_the_same() -> None:
    ways, starts, given = matching("ig").problems(observed(private_batches(2)), [0, 1])
    exact, _ = bound(Plan("joint", 4), ways["joint"], starts, given)(starts)
    for name in ("joint", "vmap forward"):
        rough, values = bound(Plan(name, 4, False, "bfloat16"), ways[name], starts, given)(starts)
        alike = torch.nn.functional.cosine_similarity(rough["pixels"].flatten(1), exact["pixels"].flatten(1))
        assert rough["pixels"].dtype == values.dtype == torch.float32
        assert 0.97 < alike.min() < 0.999999


def test_the_choice_is_measured_once_and_remembered(own_cache: Path) -> None:
    seen = observed(private_batches(2))
    first = matching("ig").prepare(seen, [0, 1]).plan
    ((key, entry),) = json.loads(own_cache.read_text()).items()
    assert entry["way"] == first.way
    other = "vmap forward" if first.way != "vmap forward" else "joint"
    own_cache.write_text(json.dumps({key: {**entry, "way": other}}))
    assert matching("ig").prepare(seen, [0, 1]).plan.way == other, "what was remembered is taken"
    more = matching("ig", restarts=3).prepare(seen, [0, 1]).plan
    assert (more.way, more.chunk) == (other, 6), "for any number of problems"
    own_cache.write_text(json.dumps({key: {**entry, "way": other, "each": 2**60}}))
    assert matching("ig").prepare(seen, [0, 1]).plan.chunk == 1, "as many together as fit"


@pytest.mark.parametrize("spoiled", ["a file", "a file on the way", "a folder in place of the record"])
def test_an_unusable_cache_costs_only_the_measurement(
    spoiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("GRADVEIL_CACHE", str(cache / "below" if spoiled == "a file on the way" else cache))
    if spoiled.startswith("a file"):
        cache.touch()
    else:
        (cache / "strategies.json").mkdir(parents=True)
        (cache / "strategies.lock").mkdir()
    assert matching("ig").prepare(observed(private_batches(1)), [0]).plan.way


def test_for_a_large_model_only_joint_is_tried() -> None:
    def not_tried(*_: object) -> NoReturn:
        pytest.fail("tried")

    ways = {"joint": lambda u, _: (u, u["x"].sum(1)), "vmap forward": not_tried, "loop forward": not_tried}
    starts, given = {"x": torch.zeros(2, 3)}, {"reply": torch.zeros(2, 2**20)}
    assert plan_for(ways, starts, given) == Plan("joint", 2)
    with pytest.raises(pytest.fail.Exception):
        plan_for(ways, starts, {"reply": torch.zeros(2, 2**10)})


@GPU
@pytest.mark.parametrize("side_by_side", [1, 2, 5])
def test_problems_side_by_side_are_as_one_by_one(side_by_side: int) -> None:
    """Five problems through graphs of fewer, where the last part begins within the one before."""
    generator = torch.Generator().manual_seed(0)
    starts = moved({"x": torch.randn(5, 3, generator=generator)}, "cuda")
    given = {"reply": moved({"w": torch.randn(5, 4, 3, generator=generator)}, "cuda")}

    def single(unknowns: Params, about: Given) -> tuple[Params, torch.Tensor]:
        found = torch.func.grad_and_value(lambda u: (about["reply"]["w"] @ u["x"].tanh()).square().sum())(unknowns)
        return found[0], found[1]

    way = ways_of({"reverse": single}, None, starts, given)["loop reverse"]
    replayed = bound(Plan("loop reverse", side_by_side, graph=True), way, starts, given)
    for factor in (1.0, 0.5):  # with what a graph was captured for, and with something else
        point = {"x": starts["x"] * factor}
        torch.testing.assert_close(replayed(point), way(point, given))


@GPU
def test_what_cannot_be_captured_is_looped_over(own_cache: Path) -> None:
    def asks(unknowns: Params, _: Given) -> tuple[Params, torch.Tensor]:
        return unknowns, unknowns["x"].sum() * float(unknowns["x"].sum())

    starts, given = {"x": torch.ones(3, 2, device="cuda")}, {"reply": torch.zeros(3, 2**20, device="cuda")}
    ways = ways_of({"reverse": asks}, None, starts, given)
    assert plan_for(ways, starts, given) == Plan("loop reverse", 1)
    assert plan_for(ways, starts, given) == Plan("loop reverse", 1), "and so it is when it is remembered"
    assert not next(iter(json.loads(own_cache.read_text()).values()))["graph"]


@pytest.mark.parametrize("strategy", ["loop", "vmap", "joint"])
def test_a_strategy_can_be_forced(strategy: str) -> None:
    (found,) = matching(f"ig:strategy={strategy}", 2)(observed(private_batches(1)), seeds=[0])
    assert found.strategy.startswith(strategy)


def test_a_damaged_memory_is_said(own_cache: Path) -> None:
    own_cache.write_text("{")
    with pytest.raises(BadFileError, match="delete it"):
        matching("ig", 2)(observed(private_batches(1)), seeds=[0])


def test_a_strategy_that_cannot_run_this_is_refused() -> None:
    with pytest.raises(GradveilError, match="strategy 'joint' cannot run"):
        plan_for({"vmap reverse": lambda u, _: (u, u["x"])}, {"x": torch.zeros(1)}, {}, strategy="joint")


def _remember(names: list[str]) -> None:
    for name in names:
        memory._remember(name, memory.Choice("loop", 1), ["loop"])


def test_what_processes_remember_at_the_same_time_is_all_kept() -> None:
    """Workers of a sweep measure side by side, and none forgets what another found out."""
    names = [[f"{worker}-{number}" for number in range(40)] for worker in range(3)]
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_remember, args=(own,)) for own in names]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert set(memory._remembered()) == {name for own in names for name in own}
