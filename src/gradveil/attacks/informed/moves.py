"""Which counter-move fits which defense: the table that the attack and reports read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gradveil.attacks.counter import Counter, Counters
from gradveil.attacks.informed import slices
from gradveil.attacks.informed.asking import Together, count, mean, most_frequent
from gradveil.attacks.informed.bottleneck import ReadDraw
from gradveil.attacks.informed.concealed import SearchBoth
from gradveil.attacks.informed.policies import UndoPolicies, can_be_followed
from gradveil.attacks.informed.unclip import Unclip
from gradveil.attacks.informed.weights import Noisy, OnlySent, Without
from gradveil.client.local import cross_entropy
from gradveil.core.registry import split_spec
from gradveil.core.trees import map_each
from gradveil.core.types import Params
from gradveil.defenses import DEFENSES
from gradveil.defenses.outpost import layer_risks, layers
from gradveil.models import classifier
from gradveil.threat.observation import Observation


@dataclass(frozen=True)
class CounterMove:
    """What an attacker does who knows a defense."""

    sentence: str
    """For a report."""
    make: Callable[[Any, Observation], Counter | None]
    """(defense, observation) -> how the matching is changed; None where this defense with these options has none."""


COUNTER_MOVES: dict[str, CounterMove] = {}


def counter_for(one: Observation) -> Counter | None:
    """The counter-moves against the known defense; None if it is unknown, has none, or took several local steps."""
    if one.defense is None or one.kind != "gradient":
        return None
    links = [(split_spec(link)[0], DEFENSES.build(link)) for link in DEFENSES.links(one.defense)]
    made = [COUNTER_MOVES[name].make(defense, one) for name, defense in links if name in COUNTER_MOVES]
    moves = [move for move in made if move is not None]
    return Counters(moves) if moves else None


def _against(*names: str, sentence: str) -> Callable[..., Any]:
    def keep(make: Callable[[Any, Observation], Counter | None]) -> Any:
        COUNTER_MOVES.update(dict.fromkeys(names, CounterMove(sentence, make)))
        return make

    return keep


@_against(
    "soteria", sentence="It leaves the layer that Soteria prunes out of the matching; the rest was sent as it is."
)
def _soteria(defense: Any, one: Observation) -> Counter:
    layer = classifier(one.module, one.domain) if defense.layer == "classifier" else defense.layer
    return Without(f"{layer}.weight")


@_against("sparsify", sentence="It matches only the entries that were sent.")
def _sparsify(_defense: Any, _: Observation) -> Counter:
    return OnlySent()


@_against("clip", sentence="It matches the direction of each tensor and takes its length from the candidate.")
def _clip(defense: Any, _: Observation) -> Counter | None:
    return Unclip(defense.bound) if getattr(defense, "per", "") == "layer" else None


@_against(
    "noise",
    sentence="It averages all replies to the same model, and asks for smoother pictures the more noise is left.",
)
def _noise(defense: Any, _: Observation) -> Counter:
    return _averaged(defense.sigma**2)


@_against("dp", sentence="It averages all replies to the same model, and asks for smoother pictures by the noise left.")
def _dp(defense: Any, one: Observation) -> Counter:
    return _averaged((defense.sigma * defense.bound / (one.batch_size or 1)) ** 2)


@_against(
    "outpost",
    sentence="It matches only the entries that were sent, and layers by how much of them is not noise: "
    "the spread of their weights tells.",
)
def _outpost(defense: Any, _: Observation) -> Counter:
    def variances(seen: Observation) -> Params:
        groups = layers(seen.sent)
        levels = (defense.scale * layer_risks(seen.sent, groups)).square() / count(seen)
        each = {name: level for names, level in zip(groups, levels, strict=True) for name in names}
        return map_each(lambda tensor, level: level * (tensor != 0).to(tensor), seen.reply, each)

    return Counters([Together(mean), OnlySent(), Noisy(variances, uneven=True)])


@_against(
    "graddefense",
    sentence="It computes the slices, takes the value that several replies share, and trusts noisy slices less.",
)
def _graddefense(defense: Any, one: Observation) -> Counter:
    if count(one) > 1:
        return Together(most_frequent)
    return Noisy(lambda seen: slices.variances(defense, seen), uneven=True)


@_against("precode", sentence="It reads the bottleneck's draw off the gradient and matches the layers before it.")
def _precode(_defense: Any, one: Observation) -> Counter | None:
    return ReadDraw() if one.batch_size == 1 else None


@_against("dcs2", "dcs2plus", sentence="It searches for the concealed pictures together with the private one.")
def _dcs2(defense: Any, one: Observation) -> Counter | None:
    once = (one.defense or "").count("dcs2") == 1
    alone = once and one.batch_size == 1 and defense.sensitive in ("all", "first")
    readable = one.loss is cross_entropy and defense.k < one.domain.classes
    return SearchBoth(defense.k, defense.mix) if alone and readable else None


@_against("ats", sentence="It tries to undo every outcome of the policies and keeps the one that explains the picture.")
def _ats(defense: Any, _: Observation) -> Counter | None:
    return UndoPolicies(defense.policies) if can_be_followed(defense.policies) and not defense.crop else None


def _averaged(variance: float) -> Counter:
    """The mean of all replies, with what is left of the noise."""

    def variances(seen: Observation) -> Params:
        return map_each(lambda tensor: torch.full_like(tensor, variance / count(seen)), seen.reply)

    return Counters([Together(mean), Noisy(variances)])
