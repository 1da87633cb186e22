"""Loop and vmap, forward and reverse: different ways to the same numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exchanges import observed, private_batches
from gradveil.attacks import ATTACKS, Budget
from gradveil.attacks.engine import Plan, plan_for, run_as
from gradveil.attacks.matching import Matching
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.progress import SILENT

WAYS = [Plan(strategy, derivative, chunk) for strategy in ("loop", "vmap") for derivative in ("forward", "reverse")
        for chunk in ((1,) if strategy == "loop" else (2, 4))]  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path))
    return tmp_path / "strategies.json"


def matching(spec: str, iterations: int = 20, restarts: int = 2) -> Matching:
    attack = ATTACKS.build(spec, Budget(restarts, iterations))
    assert isinstance(attack, Matching)
    return attack


@pytest.mark.parametrize("model", ["lenet:init=wide", "convnet:width=4", "vit:depth=1,dim=24"])
def test_every_way_gives_the_same_trajectory(model: str) -> None:
    """Twenty steps of Adam without the sign, which would blow rounding up to whole steps."""
    seen = observed(private_batches(2), model=model)
    found = {}
    for way in WAYS:
        attack = matching("ig:signed=false,lr=0.01")
        ready = attack.prepare(seen, [0, 1])
        problems = attack._problems(seen[0], ready.prior)
        given = {"labels": ready.labels.repeat_interleave(2, 0), "reply": {
            name: torch.stack([one.reply[name] for one in seen]).repeat_interleave(2, 0) for name in seen[0].reply
        }}  # fmt: skip
        evaluate = run_as(way, problems[way.derivative], given)
        with SILENT.task("", None) as task:
            found[way] = attack.search.run(evaluate, ready.starts, ready.prior.project, task)
    first = found[WAYS[0]]
    for way in WAYS[1:]:
        torch.testing.assert_close(found[way].trace, first.trace, atol=1e-4, rtol=1e-4)
        apart = (found[way].unknowns["pixels"] - first.unknowns["pixels"]).norm() / first.unknowns["pixels"].norm()
        assert apart < 1e-4


def test_the_choice_is_measured_once_and_remembered(own_cache: Path) -> None:
    seen = observed(private_batches(2))
    attack = matching("ig")
    first = attack.prepare(seen, [0, 1]).plan
    (entry,) = json.loads(own_cache.read_text()).items()
    assert entry[1] == str(first)
    other = next(way for way in ("forward", "reverse") if way != first.derivative)
    own_cache.write_text(json.dumps({entry[0]: str(replace(first, derivative=other))}))
    assert attack.prepare(seen, [0, 1]).plan.derivative == other, "what was remembered is taken"


def test_a_strategy_can_be_forced() -> None:
    seen = observed(private_batches(1))
    for strategy in ("loop", "vmap"):
        (found,) = matching(f"ig:strategy={strategy}", 2)(seen, seeds=[0])
        assert found.strategy.startswith(strategy)


def test_a_damaged_memory_is_said(own_cache: Path) -> None:
    own_cache.write_text("{")
    with pytest.raises(BadFileError, match="delete it"):
        matching("ig", 2)(observed(private_batches(1)), seeds=[0])


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(GradveilError, match="there are: auto, loop, vmap"):
        plan_for({}, {"x": torch.zeros(1)}, {"y": torch.zeros(1)}, strategy="magic")  # type: ignore[arg-type]
