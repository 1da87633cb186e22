"""The informed attack: gradient matching by an adversary who knows the defense and answers it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from gradveil.attacks.base import ATTACKS, Attack, Crafted, Reconstruction, Server
from gradveil.attacks.parts.counter import AGAINST, BatchedMoves, CounterMove, CounterMoves
from gradveil.attacks.parts.open_switches import with_open_switches
from gradveil.attacks.pixels import InvertingGradients
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.core.registry import split_spec
from gradveil.core.seeding import generator
from gradveil.threat.model import Knowledge
from gradveil.threat.observation import Observation


def counter_for(one: Observation) -> CounterMoves | None:
    """The counter-moves against the known defense; None if it is unknown or has none, after so many local steps."""
    moves = [move for _, move in _moves(one) if move is not None]
    return CounterMoves(moves) if moves else None


def answers(one: Observation) -> dict[str, str | None]:
    """By link of the known defense, what is done about it in a sentence; None where there is no counter-move."""
    return {link: None if move is None else AGAINST[split_spec(link)[0]].sentence for link, move in _moves(one)}


def _moves(one: Observation) -> list[tuple[str, CounterMove | None]]:
    """Each link of the known defense and the counter-move against it."""
    found = []
    for spec, link in one.known_links():
        known = None if link is None else AGAINST.get(split_spec(spec)[0])
        found.append((spec, None if known is None else known.move(link, one)))
    return found


@ATTACKS.register("informed")
@dataclass(frozen=True, kw_only=True)
class Informed(InvertingGradients):
    """IG by an adversary who answers the defense it knows with the counter-move that fits, else `ig` with `aware`."""

    replies: int = 1
    """How often each client is asked for the same data; more than once takes the power to."""
    weights: Literal["honest", "fresh", "open"] = "honest"
    """What is sent when a client is asked again: the honest model, or one with fresh weights, which is a craft; or each
    time fresh weights with which rectifiers do not switch."""
    aware: ClassVar[bool] = True  # type: ignore[misc]
    draws: ClassVar[int] = 0  # type: ignore[misc]
    title = "informed"

    def __post_init__(self) -> None:
        if self.replies < 1:
            raise GradveilError(f"attack informed: replies is at least 1, not {self.replies}")
        super().__post_init__()

    @property
    def requires(self) -> frozenset[Knowledge]:  # type: ignore[override]
        again = {Knowledge.ASK_AGAIN} if self.replies > 1 else set()
        return (
            InvertingGradients.requires | again | ({Knowledge.CRAFT} if again and self.weights != "honest" else set())
        )

    @property
    def across_broadcasts(self) -> bool:
        return self.without_update

    @property
    def crafts(self) -> bool:
        return self.replies > 1

    @property
    def asks_all_alike(self) -> bool:
        return True

    def craft(self, server: Server, history: Sequence[Observation], seed: int) -> Crafted | None:
        """The honest model, again and again: only the questions are dishonest. Or fresh weights after the first.

        Fresh ones are the entries of each tensor in another order: as large as those that were trained, and of any
        model, whoever built it.
        """
        asked = len(history)
        if asked >= self.replies:
            return None
        if self.weights == "honest" or (asked == 0 and self.weights == "fresh"):
            return Crafted(server.module, server.model, server.sent, ())
        rng = generator(seed, "fresh weights", asked)
        sent = {
            name: tensor.flatten()[torch.randperm(tensor.numel(), generator=rng).to(tensor.device)].view_as(tensor)
            for name, tensor in server.sent.items()
        }
        if self.weights == "open":
            sent = with_open_switches(server.module, sent, server.domain)
        return Crafted(server.module, server.model, sent, tuple(sent))

    def prior_only(self) -> Attack | None:
        return replace(self, without_update=True, replies=1, weights="honest")

    def kind_of(self, one: Observation) -> Hashable:
        """Problems go together as far as their counter-moves allow, whatever the defenses are."""
        counter = self._counter(one)
        return super().kind_of(one) if counter is None else counter.kind()

    def _counter(self, one: Observation) -> CounterMove | None:
        known = self.match == "simulated" or one.kind == "gradient"
        return counter_for(one) if known and not self.without_update else None

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        counters = [counter for counter in map(self._counter, seen) if counter is not None]
        if not counters:
            return super().run(seen, seeds=seeds, progress=progress)
        solved = counters[0].solved(seen, restarts=self.problems_each, steps=self.steps, seeds=seeds, progress=progress)
        if solved is not None:
            return solved
        moves = BatchedMoves(counters, seen)
        adjusted = replace(self, adjustment=moves)
        found = super(Informed, adjusted).run(moves.left, seeds=seeds, progress=progress)
        return [counter.finish(one, own) for counter, one, own in zip(counters, found, seen, strict=True)]
