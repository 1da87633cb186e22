"""A dishonest attack cannot pass: whatever it looks through, no private pixel, label or place is within its reach."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from scipy.stats import binom, chi2
from torch import Tensor, nn

import gradveil
from exchanges import SAMPLES, observed
from gradveil import models
from gradveil.attacks import ATTACKS, Attack, Reconstruction
from gradveil.attacks.identify import Identify
from gradveil.attacks.parts.candidate_updates import with_labels
from gradveil.auditing import make_case, run_case, score_again, sources
from gradveil.auditing.scoring import ranked
from gradveil.core.progress import Progress
from gradveil.core.types import Batch, Params
from gradveil.data import UNKNOWN, ImageSet
from gradveil.defenses import Defense
from gradveil.threat import Knowledge, Observation

EVERY, SIZE = 13, 3
PRIVATE = torch.arange(SIZE) * EVERY
DEFENSES = [
    "none", "noise:sigma=0.1", "clip:bound=4", "sparsify", "dp", "soteria", "graddefense", "censor:trials=2", "outpost",
    "dcs2:iterations=2", "dcs2plus:iterations=2", "precode", "ats", "clip:bound=4+noise:sigma=0.01",
]  # fmt: skip


def inside(thing: Any) -> Iterable[Any]:
    """What an attack can get at from a thing it holds, by any attribute, item or closure."""
    if isinstance(thing, Tensor):
        return [thing.grad if thing.is_leaf else None, thing.grad_fn, thing._base, *vars(thing).values()]
    if isinstance(thing, Mapping):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, list | tuple | set | frozenset):
        return thing
    if isinstance(thing, partial):
        return [thing.func, thing.args, thing.keywords]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, types.FunctionType):
        return [*(cell.cell_contents for cell in thing.__closure__ or ()), thing.__defaults__, thing.__kwdefaults__]
    if isinstance(thing, torch.autograd.graph.Node):
        saved = [getattr(thing, name) for name in dir(thing) if name.startswith("_saved")]
        return [*saved, *(node for node, _ in thing.next_functions)]
    slots = [getattr(thing, name, None) for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(thing, "__dict__", {}).values(), *slots]


def reachable(thing: Any) -> Iterator[Any]:
    """Everything within reach of a thing, itself included; code and what it imports is public."""
    held, waiting = {}, [thing]
    while waiting:
        one = waiting.pop()
        if id(one) in held or isinstance(one, type | types.ModuleType | str | bytes):
            continue
        held[id(one)] = one
        yield one
        waiting.extend(inside(one))


def stored(thing: Any) -> bytes:
    """The memory behind a thing: of a tensor, all that it is a view of."""
    if isinstance(thing, Tensor):
        return bytes(thing.detach().cpu().untyped_storage())
    numbers = isinstance(thing, list | tuple) and all(type(entry) is int for entry in thing)
    return torch.tensor(thing, dtype=torch.int64).numpy().tobytes() if numbers and thing else b""


def secrets(batch: Batch) -> dict[str, list[bytes]]:
    """The private facts as they would lie in memory."""
    pictures = [*batch.inputs, *(batch.inputs * 255).round().to(torch.uint8)]
    return {
        "pixels": [picture.numpy().tobytes() for picture in pictures],
        "labels": [batch.labels.numpy().tobytes()],
        "places": [PRIVATE.numpy().tobytes()],
    }


def betrayed(seen: Sequence[Observation]) -> set[str]:
    """Which private facts of the first observation are within reach of all of them."""
    known = secrets(SAMPLES.batch(PRIVATE))
    memory = [content for content in map(stored, reachable(list(seen))) if content]
    return {kind for kind, facts in known.items() if any(fact in content for fact in facts for content in memory)}


class Thief(Attack):
    """Returns the first thing within its reach that looks like a private batch, else grey."""

    def __init__(self) -> None:
        self.loot: set[str] = set()

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        del seeds, progress
        self.loot |= betrayed(seen)
        shape = (seen[0].batch_size or 1, *seen[0].domain.shape)
        tensors = (thing for thing in reachable(list(seen)) if isinstance(thing, Tensor))
        batch = next((t for t in tensors if t.shape == shape and t.min() >= 0 and t.max() <= 1), None)
        grey = torch.full(shape, 0.5) if batch is None else batch
        plain = torch.zeros(len(grey), dtype=torch.int64)
        return [Reconstruction(grey, plain, 0.0, (0.0,), (0,), (0.0,), "converged") for _ in seen]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("threat", "model", "defenses"),
    [
        ("C", "lenet", ["none", "dcs2:iterations=2", "precode"]),
        pytest.param("C", "lenet", DEFENSES, marks=pytest.mark.slow),
        ("E", "convnet:width=4", ["none"]),
    ],
)
def test_an_attack_that_looks_for_the_truth_finds_none(
    threat: str, model: str, defenses: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thief = Thief()
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "empty"))
    monkeypatch.setitem(ATTACKS._factories, "thief", lambda _budget: thief)
    fields = {"model": model, "threat": threat, "attacks": ["thief"], "defenses": defenses}
    case = make_case({**fields, "images": SIZE, "batch_size": SIZE, "every": EVERY, "gallery": 20})
    audit = run_case(case, tmp_path / "a")
    assert [row.defense for row in audit.rows if row.identified > 0] == []
    # under E the adversary holds candidates with the private pictures among them, but not which
    assert thief.loot == (set() if threat == "C" else {"pixels"})


def seen(threat: str = "C", **changes: Any) -> list[Observation]:
    (one,) = observed([SAMPLES.batch(PRIVATE)], threat=threat)
    for name, value in changes.items():
        object.__setattr__(one, name, value)
    return [one]


@pytest.mark.integration
def test_the_search_finds_what_is_there() -> None:
    """What is granted, and leaks that were put there on purpose: a closure, a view, a hook, a graph."""
    batch, module = SAMPLES.batch(PRIVATE), nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: batch)
    wide = torch.cat([torch.zeros(1, 3, 32, 32), batch.inputs])
    graph = {"fc": (batch.inputs * torch.ones((), requires_grad=True)).sum()}
    assert betrayed(seen()) == set()
    assert betrayed(seen("C+labels")) == {"labels"}
    assert betrayed(seen(loss=lambda outputs, _: outputs.sum() + batch.inputs.sum())) == {"pixels", "labels"}
    assert betrayed(seen(reply={"fc": wide[:1]})) == {"pixels"}
    assert betrayed(seen(module=module)) == {"pixels", "labels"}
    assert betrayed(seen(reply=graph)) == {"pixels"}
    assert betrayed(seen(crafted=tuple(PRIVATE.tolist()))) == {"places"}


class Placed(Attack):
    """Names candidates by their places in the list, and knows nothing else."""

    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.CANDIDATES})

    def __init__(self, habit: str) -> None:
        self.habit = habit

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        del seeds, progress
        known, size, found = seen[0].candidates, seen[0].batch_size or 1, []
        assert known is not None
        for number in range(len(seen)):
            start = {"one after the other": number * size, "first": 0, "last": len(known) - size}[self.habit]
            places = torch.arange(start, start + size)
            scores = torch.ones(len(known)).index_fill(0, places, 0.0)
            batch = known.batch(places)
            one = Reconstruction.closed_form(batch.inputs, batch.labels, 0.0)
            found.append(replace(one, candidates=known.name, scores=scores))
        return found


@pytest.mark.integration
@pytest.mark.parametrize("habit", ["one after the other", "first", "last"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_place_in_the_list_of_candidates_tells_nothing(
    habit: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole audits, of which a few seeds have to do: 48 examples, of which 0.6 or 2.3 are named by luck.

    An attack that gains by places would name most of them. As many as are named here, luck names in one of a thousand
    tests at least; the test after this one looks at many more lists.
    """
    monkeypatch.setitem(ATTACKS._factories, "placed", lambda _budget: Placed(habit))
    fields = {"model": "mlp", "threat": "D", "attacks": ["placed"], "defenses": ["none"], "images": 16}
    hits, seeds = 0.0, 3
    for seed in range(seeds):
        case = make_case({**fields, "batch_size": size, "seed": seed, "gallery": 40})
        row = run_case(case, tmp_path / f"{seed}").rows[0]
        assert row.candidates == 84
        assert row.ranked_first is not None
        assert row.luck is not None
        assert row.luck > 0.001
        hits += 16 * row.ranked_first
        assert [one.index for one in row.per_image] == list(range(16))
    assert binom.sf(round(hits) - 1, 16 * seeds, size / 84) > 0.001, f"{hits} of {16 * seeds} are named by places"


def test_private_examples_stand_anywhere_in_the_list() -> None:
    """Of 500 seeds, how often each place holds a private example, and how often the place of its own number."""
    images, seeds = 16, 500
    held, own = torch.zeros(len(SAMPLES) - images), 0
    for seed in range(seeds):
        case = make_case({"images": images, "threat": "D", "seed": seed})
        listed = sources.Simulation(case, SAMPLES, lambda: nn.Identity()).private.listed
        assert listed is not None
        held[listed] += 1
        own += int((listed == torch.arange(images)).sum())
    expected, places = seeds * images / len(held), len(held)
    # a list holds 16 private ones whatever its order is: counts of places vary less than independent ones would
    spread = (held - expected).square().sum() / expected / (1 - images / places) * (places - 1) / places
    assert chi2.sf(float(spread), places - 1) > 0.001
    for count in (own, held[0], held[-1]):
        assert abs(float(count) - expected) < 4 * expected**0.5, "as an attack by places would name them"


class Zeros(Defense):
    """Sends nothing."""

    def on_update(self, update: Params, rng: Any, log: Any) -> Params:
        del rng, log
        return {name: torch.zeros_like(tensor) for name, tensor in update.items()}


@pytest.mark.integration
@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_client_that_sends_zeros_is_recognised_by_chance_alone(size: int) -> None:
    model = models.build("lenet", SAMPLES.domain, seed=0)
    attacks = ["identify", "identify:informed=false", "fingerprint"]
    found = gradveil.audit(
        model, SAMPLES.batch(range(32)), defenses=[Zeros()], attacks=attacks, threat="D", batch_size=size,
        gallery=SAMPLES, progress=False,
    )  # fmt: skip
    for row in (row.record for row in found.rows):
        assert row.luck is not None
        assert row.luck > 0.02, row.attack
        assert row.ranked_first is not None
        assert row.ranked_first <= 4 * size / 68


class Guess(Attack):
    """Takes for granted that a list holds the truth: as sure of its best candidate in any list."""

    requires: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.CANDIDATES})

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        found = Identify()(seen, seeds=seeds, progress=progress)
        return [
            replace(one, scores=(one.scores > one.scores.min()).double()) for one in found if one.scores is not None
        ]


@pytest.mark.integration
def test_lists_without_the_truth_are_asked_about_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTACKS._factories, "guess", lambda _budget: Guess())
    fields = {"model": "lenet", "threat": "D", "attacks": ["identify", "guess"], "images": 20}
    audit = run_case(make_case({**fields, "defenses": ["none", "noise:sigma=100"]}), tmp_path / "a")
    rows = {(row.attack, row.defense): row for row in audit.rows if not row.is_prior}
    found = {key: row.member for key, row in rows.items()}
    for member in found.values():
        assert member is not None
        assert (member.members, member.others) == (20, 20 * 80)
    sure, hidden = found["identify", "none"], found["identify", "noise:sigma=100.0"]
    assert sure is not None
    assert hidden is not None
    assert sure.found == 1.0
    assert (sure.advantage or 0) > 0.95
    assert (hidden.found or 0) <= 0.15
    assert (hidden.advantage or 0) < 0.3
    guessed = found["guess", "none"]
    assert guessed is not None
    assert rows["guess", "none"].ranked_first == 1.0
    assert guessed.found == 0.0, "it names one of 80 in a list without the truth too"
    again = score_again(tmp_path / "a")
    assert [row.member for row in again.rows] == [row.member for row in audit.rows]
    crowded = make_case({**fields, "images": 60, "defenses": ["none"], "attacks": ["fingerprint"]})
    row = run_case(crowded, tmp_path / "b").rows[0]
    assert row.member is None
    assert "too small" in row.not_available["member"]


def test_candidates_of_ones_own_batch_have_no_labels() -> None:
    model = models.build("lenet:init=wide", SAMPLES.domain, seed=0)
    plan = sources.own(model, SAMPLES.batch(range(10)), defenses=["noise:sigma=0.5"], attacks=["identify"], threat="D")
    cell = plan.cells[0]
    seen, private = cell.exchange().observations, cell.private()
    known = seen[0].candidates
    assert known is not None
    assert private is not None
    assert private.listed is not None
    assert known.labels.unique().tolist() == [UNKNOWN]
    assert torch.equal(known.batch(private.listed).inputs, private.batch.inputs)
    tried = with_labels(known, seen)
    assert len(tried.owners) == 10 * len(known)
    labelled = replace(known, labels=SAMPLES.labels[places_of(known)])
    with_none = cell.attack(seen, seeds=cell.seeds)
    with_all = cell.attack([replace(one, candidates=labelled) for one in seen], seeds=cell.seeds)
    first = [ranked(found, private.listed, known).ranked_first for found in (with_none, with_all)]
    assert abs((first[0] or 0) - (first[1] or 0)) <= 0.2, "labels that nobody knows give nobody away"


def places_of(known: ImageSet) -> Tensor:
    """Where candidates stand among the samples."""
    pictures, all_samples = known.batch(range(len(known))).inputs, SAMPLES.batch(range(len(SAMPLES))).inputs
    return torch.cdist(pictures.flatten(1), all_samples.flatten(1)).argmin(dim=1)
