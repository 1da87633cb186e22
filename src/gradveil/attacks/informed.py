"""The informed attack: gradient matching by an adversary who knows the defense and answers it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from gradveil.attacks.base import ATTACKS, Attack, Budget, Crafted, Reconstruction, Server
from gradveil.attacks.parts.counter import AGAINST, BatchedMoves, CounterMove, CounterMoves
from gradveil.attacks.parts.matching import Matching
from gradveil.attacks.parts.updates import Explanation
from gradveil.attacks.pixels import InvertingGradients
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.core.registry import split_spec
from gradveil.engine import Precision, Strategy
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


@dataclass(frozen=True, kw_only=True)
class Informed(Attack):
    """A matching attack, changed by the counter-move that fits; where none does, it estimates from the update alone."""

    matching: InvertingGradients
    replies: int = 1
    """How often each client is asked for the same data; more than once takes the power to."""

    @property
    def requires(self) -> frozenset[Knowledge]:  # type: ignore[override]
        return self.matching.requires | ({Knowledge.ASK_AGAIN} if self.replies > 1 else set())

    @property
    def problems_each(self) -> int:
        return self.matching.problems_each

    @property
    def crafts(self) -> bool:
        return self.replies > 1

    def craft(self, server: Server, history: Sequence[Observation], seed: int) -> Crafted | None:  # noqa: ARG002
        """The honest model, again and again: only the questions are dishonest."""
        return Crafted(server.module, server.model, server.sent, ()) if len(history) < self.replies else None

    def kind_of(self, one: Observation) -> Hashable:
        """Problems go together as far as their counter-moves allow, whatever the defenses are."""
        counter = self._counter(one)
        return self._estimating().kind_of(one) if counter is None else counter.kind()

    def _estimating(self) -> Matching:
        return replace(self.matching, aware=True)

    def _counter(self, one: Observation) -> CounterMove | None:
        simulated = self.matching.match == "simulated"
        return counter_for(one) if simulated or one.kind == "gradient" else None

    def prior_only(self) -> Attack | None:
        return self.matching.prior_only()

    def run(self, seen: Sequence[Observation], *, seeds: Sequence[int], progress: Progress) -> list[Reconstruction]:
        counters = [counter for counter in map(self._counter, seen) if counter is not None]
        if not counters:
            return self._estimating().run(seen, seeds=seeds, progress=progress)
        each = BatchedMoves(counters, seen)
        found = replace(self.matching, counter=each).run(each.left, seeds=seeds, progress=progress)
        return [counter.finish(one, own) for counter, one, own in zip(counters, found, seen, strict=True)]


class _Matching(InvertingGradients):
    title = "informed"


@ATTACKS.register("informed")
def informed(
    budget: Budget,
    *,
    iterations: int | None = None,
    restarts: int | None = None,
    lr: float = 0.1,
    tv: float = 1e-3,
    signed: bool = True,
    replies: int = 1,
    match: Explanation = "simulated",
    strategy: Strategy = "auto",
    precision: Precision = "float32",
) -> Attack:
    """IG by an adversary who answers the defense it knows with the counter-move that fits, else `ig` with `aware`."""
    if replies < 1:
        raise GradveilError(f"attack informed: replies is at least 1, not {replies}")
    matching = _Matching(
        budget, iterations=iterations, restarts=restarts, lr=lr, tv=tv, signed=signed, match=match, strategy=strategy,
        precision=precision,
    )  # fmt: skip
    return Informed(matching=matching, replies=replies)
