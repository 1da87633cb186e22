"""Federated training in this process: rounds of FedSGD or FedAvg among clients that each hold their share."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, NotRequired

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import TypedDict

from gradveil import models
from gradveil.attacks import finite_or_none
from gradveil.client import ClientRun, Reply, SimulatedClient, cross_entropy, running_statistics
from gradveil.core.errors import GradveilError, NotAvailableError
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import added_at_once, all_finite, scaled
from gradveil.core.types import Batch, Params, Recipe
from gradveil.data import ImageSet
from gradveil.defenses import DEFENSES, Censor, Defense, Log, Veil, can_remember, fresh, links_of
from gradveil.defenses.accounting import Guarantee, Ledger
from gradveil.engine import Runner
from gradveil.federated.case import Training
from gradveil.federated.partition import partition
from gradveil.models import Functional, PublicFeatures, encoded, trained_parameters

EVALUATED_AT_ONCE = 1000


@dataclass(frozen=True)
class State:
    """What the server holds between rounds; it broadcasts the parameters and the running statistics."""

    params: Params
    buffers: Params = field(default_factory=dict)
    """Running statistics of layers such as batch norm, by name; empty for a model without them."""
    velocity: Params = field(default_factory=dict)
    """The server's momentum; empty before the first step and without momentum."""
    mean: Params = field(default_factory=dict)
    """The mean of the parameters since the round that the case names; empty before it."""


@dataclass(frozen=True)
class RoundExchange:
    """What one client got and sent back in one round and, where it is known, what only the client knows."""

    round_number: int
    client: int
    sent: State
    update: Params
    examples: int | None
    """How many are behind the update."""
    batch: Batch | None = None
    index: Tensor | None = None
    """[n]: where the examples of the batch stand in the data set."""


@dataclass(frozen=True)
class Quality:
    """The share of examples classified right, and the mean loss."""

    accuracy: float
    loss: float


Finite = Annotated[int | float, Field(gt=-1e300, lt=1e300)]
"""JSON has whole numbers of any length, infinities and NaN."""


class DroppedReply(TypedDict):
    """A reply that was not used."""

    client: int
    reason: str


class RoundRecord(TypedDict):
    """A row of ``train.json``."""

    round: int
    accuracy: Finite | None
    loss: Finite | None
    clients: list[int]
    dropped: list[DroppedReply]
    seconds: Finite
    bytes_down: Finite
    bytes_up: Finite
    side_by_side: bool
    log: dict[str, Finite]
    epsilon: NotRequired[Finite | None]
    """Where the defense counts one; None: it is infinite."""
    delta: NotRequired[Finite]


@dataclass(frozen=True)
class Round:
    """What came of one round."""

    number: int
    clients: list[int]
    dropped: dict[int, str]
    """Why a client's reply was not used."""
    log: Log
    seconds: float
    bytes_down: int
    bytes_up: int
    side_by_side: bool
    spent: Guarantee | None = None
    """What the client that took part most has spent since the first round; None if its defense counts nothing."""

    def as_json(self, quality: Quality | None) -> RoundRecord:
        row: RoundRecord = {
            "round": self.number,
            "accuracy": None if quality is None else quality.accuracy,
            "loss": None if quality is None else finite_or_none(quality.loss),
            "clients": self.clients,
            "dropped": [{"client": client, "reason": reason} for client, reason in self.dropped.items()],
            "seconds": self.seconds,
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "side_by_side": self.side_by_side,
            "log": self.log.means(),
        }
        if self.spent is not None:
            row |= {"epsilon": finite_or_none(self.spent.epsilon), "delta": self.spent.delta}
        return row


class Federation:
    """A server and its clients. ``state`` is the global model; ``round`` moves it on by one round.

    ``defense`` stands in for the one that the case names. ``on_exchange`` is shown every reply before it is judged.
    """

    def __init__(
        self,
        case: Training,
        train: ImageSet,
        *,
        defense: Defense | None = None,
        on_exchange: Callable[[RoundExchange], None] | None = None,
    ) -> None:
        self.case, self.train, self.on_exchange = case, train.to(case.device), on_exchange
        self.defense = defense or DEFENSES.build(case.defense)
        model = models.build(case.model, train.domain, seed=case.seed)
        self.module = self.defense.on_model(model).to(case.device)
        self.shares = partition(case.partition, train.labels, clients=case.clients, seed=case.seed)
        self.state = State(trained_parameters(self.module), running_statistics(self.module))
        self._summed = max((link.cohort for link in links_of(self.defense) if isinstance(link, Veil)), default=1)
        if self._summed > (case.per_round or case.clients):
            each = case.per_round or case.clients
            raise GradveilError(f"cohort={self._summed} is more than the {each} clients of a round, who add less noise")
        self.ledgers = [Ledger() for _ in range(case.clients)]
        """What was spent on the examples of each client."""
        self._client = SimulatedClient(self.module, recipe=case.recipe, defense=self.defense)
        remembering = range(case.clients if can_remember(self.defense) else 0)
        self._with_memory = {number: copy.copy(self._client) for number in remembering}
        for client in self._with_memory.values():
            client.defense = fresh(self.defense)
        self._evaluated = Functional(self.module)
        self._runner = Runner(case.side_by_side, case.device)
        self._encoded: dict[int, tuple[ImageSet, Tensor]] = {}
        self._counted = (1, Counter[int]())
        """A round, and how often each client took part before it."""

    @property
    def sends_statistics(self) -> bool:
        """Whether clients send running statistics beside their updates."""
        return bool(self.state.buffers) and self.case.train_mode

    def participants(self, number: int) -> list[int]:
        """The clients of a round, which counts from 1."""
        return participants(self.case.clients, self.case.per_round, seed=self.case.seed, round_number=number)

    def round(self, number: int) -> Round:
        """Broadcast, let the clients of this round train, and step along the mean of what they send."""
        started, clients, broadcast = time.perf_counter(), self.participants(number), self.state
        earlier = self.turns_before(number)
        starts = [
            partial(self.start, client, number, broadcasts=earlier[client] + 1, federation_round=number)
            for client in clients
        ]
        replies: list[Reply] = []
        dropped: dict[int, str] = {}
        for client, outcome in zip(clients, self._runner(starts), strict=True):
            reason = self._refusal(client, number, outcome)
            if isinstance(outcome, Reply) and reason is None:
                replies.append(outcome)
            else:
                dropped[client] = str(reason)
        if not replies:
            client, reason = next(iter(dropped.items()))
            raise GradveilError(f"round {number}: no reply could be used; client {client}: {reason}")
        if len(replies) < self._summed:
            client, reason = next(iter(dropped.items()))
            raise GradveilError(
                f"round {number}: {len(replies)} replies have less noise than the cohort of {self._summed} promises, "
                f"and are not summed; client {client}: {reason}"
            )
        weights = [reply.examples for reply in replies]
        change = average([as_delta(reply.update, self.case.recipe) for reply in replies], weights)
        buffers = average([reply.buffers for reply in replies], weights)
        state = server_step(broadcast, change, buffers, lr=self.case.server_lr, momentum=self.case.server_momentum)
        since = number - (self.case.average_from or math.inf)
        if since >= 0:
            before = broadcast.mean or state.params
            away = added_at_once(state.params, before, -1.0)
            state = replace(state, mean=added_at_once(before, away, 1 / (since + 1)))
        self.state = state
        log = Log()
        for reply in replies:
            log.merge(reply.log)
        return Round(
            number=number,
            clients=clients,
            dropped=dropped,
            log=log,
            seconds=time.perf_counter() - started,
            bytes_down=(_bytes(broadcast.params) + _bytes(broadcast.buffers)) * len(clients),
            bytes_up=sum(_bytes(reply.update) + _bytes(reply.buffers) * self.sends_statistics for reply in replies),
            side_by_side=self._runner.batched,
            spent=self.spent(),
        )

    def turns_before(self, number: int) -> Counter[int]:
        """How often each client took part before a round; rounds that come in order are counted once."""
        first, turns = self._counted if self._counted[0] <= number else (1, Counter[int]())
        for before in range(first, number):
            turns.update(self.participants(before))
        self._counted = number, turns
        return turns

    def _refusal(self, client: int, number: int, outcome: Reply | GradveilError) -> str | None:
        """Why what came of a client is not used, or None. What the reply costs is entered, whatever becomes of it."""
        if isinstance(outcome, GradveilError):
            return str(outcome)
        try:
            self.defense.check_steps(self.ledgers[client].steps + outcome.log.ledger.steps)
        except GradveilError as error:  # more than planned: it does not leave the client
            return str(error)
        self.ledgers[client].merge(outcome.log.ledger)
        if self.on_exchange is not None:  # an error here is no client's, and ends the training
            private = self.examples(client, number)
            self.on_exchange(RoundExchange(number, client, self.state, outcome.update, outcome.examples, *private))
        return why_unusable(outcome.update | outcome.buffers, self.state.params | self.state.buffers)

    def spent(self) -> Guarantee | None:
        """The largest of all clients since the first round; None if the defense, or nobody here, counts it."""
        if self.defense.delta is None:
            return None
        try:
            each = [ledger.guarantee(self.defense.delta) for ledger in self.ledgers]
        except NotAvailableError:
            return None
        return max(each, key=lambda one: one.epsilon)

    def quality(self, data: ImageSet) -> Quality:
        """Accuracy and loss of the global model, or of the mean of models where the case asks for it."""
        model = self._evaluated.with_buffers(self.state.buffers)
        return evaluate(model, self.state.mean or self.state.params, data, self._features(data))

    def _features(self, data: ImageSet) -> Tensor | None:
        """What a model on public features sees of a data set, computed once; None for other models."""
        if not isinstance(self.module, PublicFeatures):
            return None
        if id(data) not in self._encoded:
            self._encoded[id(data)] = data, encoded(self.module, data)
        return self._encoded[id(data)][1]

    def examples(self, client: int, number: int, order: Tensor | None = None) -> tuple[Batch, Tensor]:
        """What a client trains on in a round, in its order, and where these examples stand in the data set.

        ``order`` is a permutation of the client's share; None: one that follows from the seed.
        """
        case, share = self.case, self.shares[client]
        if order is None:
            order = torch.randperm(len(share), generator=generator(case.seed, "federated", "order", number, client))
        index = share[order[: case.batch_size]] if case.algorithm == "fedsgd" else share[order]
        return self.train.batch(index).to(case.device), index

    def start(
        self,
        client: int,
        number: int,
        *,
        broadcasts: int,
        federation_round: int | None = None,
        batch: Batch | None = None,
        rng: Stream | None = None,
    ) -> ClientRun:
        """Begin a client's run from ``state``, the broadcast of that number among those that it trained on.

        ``batch`` is what it trains on and ``rng`` what its defense draws from; None: what follows from the seed.
        ``federation_round`` is the round as its defense counts it; None where only the server says so, who could
        switch off a defense of the first rounds.
        """
        if batch is None:
            batch, index = self.examples(client, number)
            # A defense that changes or makes pictures, or looks at slopes in them, must get pictures.
            blind = all(link.several_inputs or type(link) in (Defense, Censor) for link in links_of(self.defense))
            seen = self._features(self.train) if blind else None
            batch = batch if seen is None else Batch(seen[index.to(seen.device)], batch.labels)
        rng = rng or Stream.seeded(self.case.seed, "federated", "defense", number, client)
        return self._with_memory.get(client, self._client).start(
            self.state.params,
            batch,
            rng,
            round_number=broadcasts,
            federation_round=federation_round,
            buffers=self.state.buffers,
        )


def participants(clients: int, per_round: int | None, *, seed: int, round_number: int) -> list[int]:
    """The clients of one round, ascending: drawn without repeats from the seed and the round alone.

    >>> participants(10, 3, seed=0, round_number=1) == participants(10, 3, seed=0, round_number=1)
    True
    """
    if per_round is None:
        return list(range(clients))
    drawn = torch.randperm(clients, generator=generator(seed, "federated", "participants", round_number))
    return sorted(drawn[:per_round].tolist())


def why_unusable(reply: Params, like: Params) -> str | None:
    """Why a reply cannot be used, or None: the server trusts neither shapes nor numbers."""
    wrong = reply.keys() ^ like.keys()
    wrong |= {name for name in reply.keys() & like.keys() if reply[name].shape != like[name].shape}
    if wrong:
        return f"it is not of this model: {min(wrong)!r} is missing, unknown or of another shape"
    return None if all_finite(reply) else "it holds NaN or infinity"


def as_delta(update: Params, recipe: Recipe) -> Params:
    """An update as a change of the parameters: a gradient is one step of the recipe's learning rate against it."""
    return scaled(update, -recipe.lr) if recipe.sends == "gradient" else update


def average(trees: Sequence[Params], weights: Sequence[float]) -> Params:
    """The mean of named tensors by weight; of whole numbers, such as counters, the largest.

    >>> average([{"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}], [3, 1])
    {'w': tensor([1.])}
    """
    first, *others = (weight / sum(weights) for weight in weights)
    measured = [name for name, tensor in trees[0].items() if tensor.is_floating_point()]
    means = {}
    if measured:
        total = list(torch._foreach_mul([trees[0][name] for name in measured], first))
        for tree, share in zip(trees[1:], others, strict=True):
            torch._foreach_add_(total, [tree[name] for name in measured], alpha=share)
        means = dict(zip(measured, total, strict=True))
    return {
        name: means[name] if name in means else torch.stack([tree[name] for tree in trees]).amax(dim=0)
        for name in trees[0]
    }


def server_step(state: State, change: Params, buffers: Params, *, lr: float, momentum: float) -> State:
    """The state after one server step along the mean change of the clients (FedAvgM, Hsu et al. 2019)."""
    velocity = added_at_once(change, state.velocity, momentum) if momentum and state.velocity else change
    moved = added_at_once(state.params, velocity, lr)
    if not all_finite(moved):
        raise GradveilError("the training diverged: the global model holds NaN or infinity; lower lr or server_lr")
    return State(moved, buffers, velocity if momentum else {})


def evaluate(model: Functional, params: Params, data: ImageSet, inputs: Tensor | None = None) -> Quality:
    """The quality of a model, which should be in eval mode, at these parameters; on ``inputs`` in place of pictures."""
    right = loss = 0.0
    device = next(iter(params.values())).device
    with torch.no_grad():
        for start in range(0, len(data), EVALUATED_AT_ONCE):
            part = slice(start, min(start + EVALUATED_AT_ONCE, len(data)))
            labels = data.labels[part].to(device)
            shown = data.batch(range(part.start, part.stop)).inputs.to(device) if inputs is None else inputs[part]
            scores = model(params, shown)
            right += float((scores.argmax(dim=1) == labels).sum())
            loss += float(cross_entropy(scores, labels)) * len(labels)
    return Quality(right / len(data), loss / len(data))


def _bytes(tree: Params) -> int:
    return sum(tensor.nbytes for tensor in tree.values())
