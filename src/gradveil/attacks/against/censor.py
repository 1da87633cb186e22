"""Against CENSOR: what is sent stands at right angles to the gradient, and is as long as it.

Both are equations for the private example, and every reply brings new ones: enough of them are solved for the picture
(``parts/right_angles``). They also tell candidates apart, and labels (``parts/labels``).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gradveil.attacks.base import Reconstruction
from gradveil.attacks.parts.channel import Channel, RightAngle
from gradveil.attacks.parts.counter import CounterMove, against
from gradveil.attacks.parts.labels import infer_labels
from gradveil.attacks.parts.right_angle_labels import bare_replies
from gradveil.attacks.parts.right_angles import STEPS, clients_at_once, comparable, rebuild
from gradveil.core.progress import Progress
from gradveil.core.trees import map_each
from gradveil.core.types import Params
from gradveil.defenses import Censor
from gradveil.domains import Images
from gradveil.threat.observation import Observation


@dataclass(frozen=True)
class SolveRightAngles(CounterMove):
    """Solves for the pictures whose gradients are at right angles to every reply, and as long."""

    angle: RightAngle
    broadcasts: tuple[int, ...]
    """Those that the client answered, in their order: clients that got the same ones are solved together."""

    def kind(self) -> Hashable:
        return self

    def solved(
        self, seen: Sequence[Observation], *, restarts: int, steps: int, seeds: Sequence[int], progress: Progress
    ) -> list[Reconstruction]:
        steps, found = min(steps, STEPS), list[Reconstruction]()
        labels = infer_labels(seen, seen[0].batch_size or 1)
        together = clients_at_once(seen[0], labels, restarts)
        with progress.task("right angles", len(seen) * restarts * steps) as task:
            for start in range(0, len(seen), together):
                some = slice(start, start + together)
                found += rebuild(
                    seen[some],
                    labels[some],
                    with_norms=self.angle.spread == 0,
                    whole=self.angle.whole,
                    restarts=restarts,
                    steps=steps,
                    seeds=seeds[some],
                    task=task,
                )
        return found


@dataclass(frozen=True, eq=False)
class MatchBareReply(CounterMove):
    """Matches a reply that is the gradient itself, though it may not be the last."""

    bare: Observation

    def kind(self) -> Hashable:
        return id(self.bare.sent)

    def prepare(self, one: Observation) -> Observation:  # noqa: ARG002
        return self.bare


def solve_right_angles(defense: Censor, one: Observation) -> CounterMove | None:
    """Not where other links follow or come before, and not where nobody can tell if the gradient itself was sent."""
    angle = right_angle(defense)
    alone = len(one.known_links()) == 1 and isinstance(one.domain, Images)
    bare = bare_replies(one, angle) if angle.exact and alone else None
    if bare is None:
        return None
    if bare:
        return MatchBareReply(bare[-1])
    return SolveRightAngles(angle, tuple(id(exchange.sent) for exchange in comparable(one)))


def right_angle(defense: Censor) -> RightAngle:
    return RightAngle(
        whole=not defense.layerwise,
        spread={"preserve": 0.0, "random": defense.spread, "public": None}[defense.norms],
        released=defense.projection == "released",
        projected=defense.projection != "none",
        trials=defense.trials,
        plain=defense.fallback == "original" or defense.rounds is not None,
        told_apart=defense.source == "normal",
    )


@against(
    "censor",
    sentence="It solves for the picture whose gradients are at right angles to all replies, and as long as they are; "
    "where a reply is the gradient itself, it matches that.",
    counter_move=solve_right_angles,
)
def censor(defense: Censor, _: Observation) -> Channel:
    def draw(update: Params, drawn: Params) -> Params:
        """One trial: orthogonal to the update in every tensor, and of its length."""

        def orthogonal(g: Tensor, r: Tensor) -> Tensor:
            square = g.square().sum() + 1e-20
            left = r - (r * g).sum() / square * g
            return left * (square / (left.square().sum() + 1e-20)).sqrt()

        return map_each(orthogonal, update, drawn)

    return Channel(right_angle=right_angle(defense), draw=draw)
