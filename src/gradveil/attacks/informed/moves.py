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
from gradveil.attacks.parts.updates import counts, local_steps
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
    after_steps: bool = False
    """Whether it answers updates of several local steps too."""


COUNTER_MOVES: dict[str, CounterMove] = {}


def counter_for(one: Observation) -> Counter | None:
    """The counter-moves against the known defense; None if it is unknown or has none, after so many local steps."""
    moves = [move for _, move in _moves(one) if move is not None]
    return Counters(moves) if moves else None


def answers(one: Observation) -> dict[str, str | None]:
    """By link of the known defense, what is done about it in a sentence; None where there is no counter-move."""
    return {link: None if move is None else COUNTER_MOVES[split_spec(link)[0]].sentence for link, move in _moves(one)}


def _moves(one: Observation) -> list[tuple[str, Counter | None]]:
    """Each link of the known defense and the counter-move against it."""

    def against(link: str) -> Counter | None:
        move = COUNTER_MOVES.get(split_spec(link)[0])
        fits = move is not None and (one.kind == "gradient" or (move.after_steps and one.recipe is not None))
        return move.make(DEFENSES.build(link), one) if move is not None and fits else None

    return [(link, against(link)) for link in DEFENSES.links(one.defense)] if one.defense is not None else []


def _against(*names: str, sentence: str, after_steps: bool = False) -> Callable[..., Any]:
    def keep(make: Callable[[Any, Observation], Counter | None]) -> Any:
        COUNTER_MOVES.update(dict.fromkeys(names, CounterMove(sentence, make, after_steps)))
        return make

    return keep


@_against(
    "soteria",
    sentence="It leaves the layer that Soteria prunes out of the matching; the rest was sent as it is.",
    after_steps=True,
)
def _soteria(defense: Any, one: Observation) -> Counter:
    layer = classifier(one.module, one.domain) if defense.layer == "classifier" else defense.layer
    return Without(f"{layer}.weight")


@_against("sparsify", sentence="It matches only the entries that were sent.", after_steps=True)
def _sparsify(_defense: Any, _: Observation) -> Counter:
    return OnlySent()


@_against(
    "clip",
    sentence="It matches the direction of each tensor and takes its length from the candidate.",
    after_steps=True,
)
def _clip(defense: Any, one: Observation) -> Counter | None:
    if getattr(defense, "per", "") != "layer":
        return None
    return Unclip(defense.bound * sum(_counted(one) if defense.at == "step" else [1.0]))


@_against(
    "noise",
    sentence="It averages all replies to the same model, and asks for smoother pictures the more noise is left.",
    after_steps=True,
)
def _noise(defense: Any, one: Observation) -> Counter:
    return _averaged(defense.sigma, _counted(one) if defense.at == "step" else [1.0])


@_against(
    "dp",
    sentence="It averages all replies to the same model, and asks for smoother pictures by the noise left.",
    after_steps=True,
)
def _dp(defense: Any, one: Observation) -> Counter:
    size = (one.recipe and one.recipe.batch_size) or one.batch_size or 1
    return _averaged(defense.sigma * defense.bound / size, _counted(one))


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
def _graddefense(defense: Any, _: Observation) -> Counter | None:
    if defense.bound is not None:  # drawn slices were scaled, by what nobody knows
        return None
    left = Noisy(lambda seen: slices.variances(defense, seen, count(seen)), uneven=True)
    return Counters([Together(most_frequent), left])


@_against("precode", sentence="It reads the bottleneck's draw off the gradient and matches the layers before it.")
def _precode(_defense: Any, one: Observation) -> Counter | None:
    others = [DEFENSES.build(link) for link in DEFENSES.links(one.defense or "none")]
    as_drawn = all(getattr(other, "per", "") != "layer" for other in others)  # weight and bias are scaled alike
    return ReadDraw() if one.batch_size == 1 and as_drawn else None


@_against("dcs2", "dcs2plus", sentence="It searches for the concealed pictures together with the private one.")
def _dcs2(defense: Any, one: Observation) -> Counter | None:
    once = (one.defense or "").count("dcs2") == 1
    alone = once and one.batch_size == 1 and defense.sensitive in ("all", "first")
    readable = one.loss is cross_entropy and defense.k < one.domain.classes
    return SearchBoth(defense.k, defense.mix) if alone and readable else None


@_against(
    "ats",
    sentence="It tries to undo every outcome of the policies and keeps the one that explains the picture.",
    after_steps=True,
)
def _ats(defense: Any, _: Observation) -> Counter | None:
    return UndoPolicies(defense.policies) if can_be_followed(defense.policies) and not defense.crop else None


def _counted(one: Observation) -> list[float]:
    """By what each defended gradient was multiplied in what was sent."""
    if one.kind == "gradient" or one.recipe is None:
        return [1.0]
    return [one.recipe.lr * times for times in counts(one.recipe, local_steps(one) or 1)]


def _averaged(sigma: float, counted: list[float]) -> Counter:
    """The mean of all replies, with what is left of the noise."""
    variance = sigma**2 * sum(weight**2 for weight in counted)

    def variances(seen: Observation) -> Params:
        return map_each(lambda tensor: torch.full_like(tensor, variance / count(seen)), seen.reply)

    return Counters([Together(mean), Noisy(variances)])
