"""What an attack changes in its matching because it knows the defense, and what is known about each defense."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from gradveil.attacks.base import Reconstruction
from gradveil.attacks.parts.channel import Adjustment, Channel
from gradveil.core.errors import GradveilError
from gradveil.core.progress import Progress
from gradveil.core.registry import split_spec
from gradveil.core.seeding import generator
from gradveil.core.trees import map_each, stack
from gradveil.core.types import Params
from gradveil.engine import Given
from gradveil.threat.observation import Observation

_TINY = 1e-30
_DOUBT = 2e4
"""How fast confidence falls with the size of the noise against the gradient: see docs/attacks/informed.md."""
_LEAST_SIGNAL = 0.05
"""The share of a reply's square that is at least taken for gradient."""


class CounterMove:
    """Changes nothing at any hook; each counter-move overrides one or two."""

    def kind(self) -> Hashable:
        """Problems whose counter-moves are of one kind are searched as one batch."""
        return self

    def prepare(self, one: Observation) -> Observation:
        """What the matching gets to see instead, such as the mean of several replies."""
        return one

    def extra(self, one: Observation) -> Given:  # noqa: ARG002
        """What is known of one problem beyond its reply.

        ``weights`` by tensor and of its shape say how much its entries count; ``confidence`` multiplies the distance,
        so that below 1 a plausible picture counts for more; ``buffers`` by name replace those of the model; ``targets``
        [B, classes] replace the labels.
        """
        return {}

    def kept(self, one: Observation) -> Observation:
        """What is left to match once everything else is known: a reply may hold a part of the layers."""
        return one

    def pair(self, update: Params, reply: Params) -> tuple[Params, Params]:
        """What is compared instead of a candidate's update and the reply; differentiable, and safe under vmap."""
        return update, reply

    def finish(self, found: Reconstruction, one: Observation) -> Reconstruction:  # noqa: ARG002
        """What the pictures that were found say about the private ones."""
        return found

    def solved(
        self,
        seen: Sequence[Observation],  # noqa: ARG002
        *,
        restarts: int,  # noqa: ARG002
        steps: int,  # noqa: ARG002
        seeds: Sequence[int],  # noqa: ARG002
        progress: Progress,  # noqa: ARG002
    ) -> list[Reconstruction] | None:
        """What it finds by a search of its own behind observations of its kind; None where updates are matched."""
        return None


@dataclass(frozen=True)
class ChannelMove(CounterMove):
    """The counter-move that follows from a channel alone.

    Noise averages out of several replies; the more of it is left, the more the picture itself has to be plausible.
    Where all entries have the same noise, all count the same, as in a likelihood; where it differs, parts of a tensor
    count by their share of signal. Entries that were set to zero do not count. A tensor that was clipped grows by as
    much as the client would have shrunk the candidate's: to clip the candidate instead would make all tensors equally
    long, and the matching would forget that those that were long by themselves say most.
    """

    channel: Channel

    @property
    def bound(self) -> float | None:
        """What each tensor that was sent was clipped to. With one factor for all tensors the cosine needs no move."""
        bound = self.channel.bound if self.channel.per == "tensor" else None
        return None if bound is None else bound * sum(self.channel.counted)

    @property
    def uneven(self) -> bool:
        """Whether the noise differs from entry to entry."""
        return bool(self.channel.noise_by_tensor)

    @property
    def helps(self) -> bool:
        """Whether anything follows from the channel."""
        return self.channel.noisy or bool(self.channel.zeroed) or self.bound is not None

    def kind(self) -> Hashable:
        """None where it is all in what it sees and gives: the search does not have to know it."""
        return self.bound

    def prepare(self, one: Observation) -> Observation:
        """In the place of every reply, so that who reduces them once more, for another link, finds the same."""
        if not self.channel.noisy:
            return one
        reply = map_each(self.reduce, stack(all_replies(one)))
        earlier = [replace(other, reply=reply) if _equal(other.sent, one.sent) else other for other in one.earlier]
        return replace(one, reply=reply, earlier=tuple(earlier))

    def reduce(self, tensors: Tensor) -> Tensor:
        """One tensor [...] made of those of all replies [R, ...]."""
        return tensors.mean(dim=0)

    def variances(self, one: Observation) -> Params:
        """The variance of the noise in every entry of the mean of all replies."""
        channel, count = self.channel, len(all_replies(one))
        levels = {name: (channel.noise or 0.0) + channel.noise_by_tensor.get(name, 0.0) for name in one.reply}
        steps = sum(weight**2 for weight in channel.counted)
        even = {name: torch.full_like(tensor, levels[name] * steps / count) for name, tensor in one.reply.items()}
        return map_each(torch.mul, even, _sent(one.reply)) if self.channel.zeroed else even

    def extra(self, one: Observation) -> Given:
        known: Given = {}
        if self.channel.largest:
            known["weights"] = _sent(one.reply)
        elif self.channel.zeroed:  # without the whole tensor: leaving out its zeros alone is worth the same
            known["weights"] = {
                name: torch.full_like(tensor, float(name not in self.channel.zeroed))
                for name, tensor in one.reply.items()
            }
        if self.channel.noisy:
            variances = self.variances(one)
            known["confidence"] = confidence(one.reply, variances)
            if self.uneven:
                share = map_each(signal, one.reply, variances)
                known["weights"] = map_each(torch.mul, known["weights"], share) if "weights" in known else share
        return known

    def pair(self, update: Params, reply: Params) -> tuple[Params, Params]:
        bound = self.bound
        if bound is None:
            return update, reply
        lengths = map_each(lambda tensor: (tensor.detach().square().sum() + _TINY).sqrt(), update)
        return update, map_each(lambda tensor, length: tensor * (length / bound).clamp(min=1), reply, lengths)


class CounterMoves(CounterMove):
    """The counter-moves against the links of a chain of defenses, in their order."""

    def __init__(self, moves: Sequence[CounterMove]) -> None:
        self.moves = tuple(moves)

    def kind(self) -> Hashable:
        return tuple(kind for kind in (move.kind() for move in self.moves) if kind is not None) or None

    def prepare(self, one: Observation) -> Observation:
        return reduce(lambda left, move: move.prepare(left), self.moves, one)

    def extra(self, one: Observation) -> Given:
        """Weights and confidences of several moves multiply."""
        known: Given = {}
        for more in (move.extra(one) for move in self.moves):
            both = {key: tree_map(torch.mul, known[key], more[key]) for key in known.keys() & more.keys()}
            known = {**known, **more, **both}
        return known

    def kept(self, one: Observation) -> Observation:
        return reduce(lambda left, move: move.kept(left), self.moves, one)

    def pair(self, update: Params, reply: Params) -> tuple[Params, Params]:
        return reduce(lambda both, move: move.pair(*both), self.moves, (update, reply))

    def finish(self, found: Reconstruction, one: Observation) -> Reconstruction:
        return reduce(lambda left, move: move.finish(left, one), reversed(self.moves), found)

    def solved(
        self, seen: Sequence[Observation], *, restarts: int, steps: int, seeds: Sequence[int], progress: Progress
    ) -> list[Reconstruction] | None:
        """A search of its own is that of the only link."""
        (first, *others) = self.moves
        own = first.solved(seen, restarts=restarts, steps=steps, seeds=seeds, progress=progress)
        return None if others else own


class BatchedMoves(Adjustment):
    """The counter-moves of a batch of problems, all of one kind, each for its own problem."""

    def __init__(self, moves: Sequence[CounterMove], seen: Sequence[Observation]) -> None:
        self.first, self.data_only = moves[0], moves[0].kind() is None
        prepared = [move.prepare(one) for move, one in zip(moves, seen, strict=True)]
        extras = [move.extra(one) for move, one in zip(moves, prepared, strict=True)]
        self.left = [move.kept(one) for move, one in zip(moves, prepared, strict=True)]
        """What the matching gets to see."""
        named, each = set().union(*extras), list[Given]()
        for one, own in zip(self.left, extras, strict=True):
            sure = torch.ones((), device=next(iter(one.reply.values())).device)
            undoubted: Given = {"weights": map_each(torch.ones_like, one.reply), "confidence": sure}
            each.append({key: value for key, value in undoubted.items() if key in named} | own)
        self._extra: Given = tree_map(lambda *tensors: torch.stack(tensors), *each)

    def extra(self, seen: Sequence[Observation]) -> Given:  # noqa: ARG002
        return self._extra

    def pair(self, update: Params, reply: Params, given: Given) -> tuple[Params, Params]:  # noqa: ARG002
        return self.first.pair(update, reply)

    def of_moments(self, given: Given) -> None:
        """Weights are of single entries."""


ChannelOf = Callable[[Any, Observation], Channel]
"""(defense, observation) -> what it did."""
MoveAgainst = Callable[[Any, Observation], CounterMove | None]
"""(defense, observation) -> how the matching is changed; None if these options leave no way."""


@dataclass(frozen=True)
class Against:
    """What an adversary who knows a defense makes of it."""

    channel: ChannelOf
    counter_move: MoveAgainst | None
    """By default what follows from the channel."""
    sentence: str | None
    """What the matching does about it, for a report; None where it never does anything."""
    after_steps: bool
    """Whether that holds for updates of several local steps too."""

    def move(self, defense: Any, one: Observation) -> CounterMove | None:
        """The counter-move, if there is one that fits as many local steps as were taken."""
        if one.kind != "gradient" and not (self.after_steps and one.recipe is not None):
            return None
        if self.counter_move is not None:
            return self.counter_move(defense, one)
        follows = ChannelMove(self.channel(defense, one))
        return follows if follows.helps else None


AGAINST: dict[str, Against] = {}
"""By the name of a defense; filled by the files of ``attacks/against``."""


def against(
    *names: str, sentence: str | None = None, counter_move: MoveAgainst | None = None, after_steps: bool = False
) -> Callable[[ChannelOf], ChannelOf]:
    """Register what a function says of the channel of these defenses, each of which has one."""

    def keep(channel: ChannelOf) -> ChannelOf:
        if twice := AGAINST.keys() & set(names):
            raise ValueError(f"somebody attacks {min(twice)!r} already")
        AGAINST.update(dict.fromkeys(names, Against(channel, counter_move, sentence, after_steps)))
        return channel

    return keep


def channels_of(one: Observation) -> list[Channel]:
    """What the links of the known defense did to the gradient, in their order."""
    known = [(link, AGAINST.get(split_spec(spec)[0])) for spec, link in one.known_links() if link is not None]
    return [against.channel(link, one) for link, against in known if against is not None]


Averages = Literal["distances", "gradients", "nearest"]
"""What is averaged over draws: the distances of what was drawn (Athalye et al. 2018), or what was drawn, which is then
compared once (as CENSOR's paper has it). ``nearest`` averages nothing: only the draw nearest to the reply counts."""


class Averaged:
    """The mean or least distance over ``count`` draws of the observation's own defense, or the distance of their mean.

    Expectation over transformation. An adversary who knows the defense cannot know what it drew, but can draw as it
    does: the same draws for all problems and all steps.
    """

    def __init__(self, one: Observation, count: int, what: Averages = "distances") -> None:
        self.what = what
        if one.defense is None:
            raise GradveilError(
                "averaging over a defense needs to know it: use a threat model that gives it, such as C"
            )
        draws = [channel.draw for channel in channels_of(one)]
        if len(one.known_links()) != 1 or len(draws) != 1 or draws[0] is None:
            raise GradveilError(
                f"the draws of defense {one.defense!r} cannot be averaged over: those of noise and censor can"
            )
        self.draw, rng = draws[0], generator(0, "eot")
        self.draws = {
            name: torch.randn((count, *tensor.shape), generator=rng).to(tensor) for name, tensor in one.reply.items()
        }

    def __call__(self, update: Params, distance: Callable[[Params], Tensor]) -> Tensor:
        if self.what == "gradients":
            return distance(map_each(lambda each: each.mean(dim=0), vmap(partial(self.draw, update))(self.draws)))
        each = vmap(lambda drawn: distance(self.draw(update, drawn)))(self.draws)
        return each.mean() if self.what == "distances" else each.amin()


def all_replies(one: Observation) -> list[Params]:
    """All replies to this broadcast, the last one last."""
    return [*(other.reply for other in one.earlier if _equal(other.sent, one.sent)), one.reply]


def confidence(reply: Params, variances: Params) -> Tensor:
    """From 1, for no noise, down: a scalar, by the deviation of the noise against the length of the gradient."""
    whole, noise = (
        torch.stack([t.sum() for t in tree.values()]).sum() for tree in (map_each(torch.square, reply), variances)
    )
    entries = sum(t.numel() for t in reply.values())
    gradient = (whole - noise).clamp(min=_LEAST_SIGNAL * float(whole) + _TINY)
    return 1 / (_DOUBT * (noise / entries / gradient).sqrt()).clamp(min=1)


def signal(tensor: Tensor, variances: Tensor) -> Tensor:
    """The share of the square of all entries of like noise that it does not explain (Wiener's rule), by entry."""
    levels, group = torch.unique(variances, return_inverse=True)
    squares, sizes = (
        torch.zeros_like(levels).index_add(0, group.flatten(), part.flatten())
        for part in (tensor.square(), torch.ones_like(tensor))
    )
    share: Tensor = (1 - levels * sizes / (squares + _TINY)).clamp(min=0)
    return share[group]


def _sent(reply: Params) -> Params:
    """1 where an entry was sent, 0 where it was set to zero."""
    return map_each(lambda tensor: (tensor != 0).to(tensor), reply)


def _equal(a: Params, b: Params) -> bool:
    return a is b or (a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items()))
