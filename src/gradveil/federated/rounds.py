"""Federated training in this process: rounds of FedSGD or FedAvg among clients that each hold their share."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradveil import models
from gradveil.attacks import finite_or_none
from gradveil.client import Client, Run
from gradveil.core.errors import GradveilError, NotAvailableError
from gradveil.core.seeding import generator
from gradveil.core.streams import Stream
from gradveil.core.trees import detached
from gradveil.core.types import Batch, Params
from gradveil.data import ImageSet
from gradveil.defenses import DEFENSES, Defense, Log
from gradveil.defenses.accounting import Guarantee, Ledger
from gradveil.federated.case import Training
from gradveil.federated.evaluate import Quality, evaluate
from gradveil.federated.local import Answer, local_training, running_statistics
from gradveil.federated.partition import partition
from gradveil.federated.server import State, as_difference, average, complaint, participants, stepped
from gradveil.federated.tap import Exchange
from gradveil.federated.together import Runner
from gradveil.models import Functional


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

    def as_json(self, quality: Quality | None) -> dict[str, Any]:
        """A row of ``train.json``; it has an epsilon only where the defense counts one, None where it is infinite."""
        spent = self.spent and {"epsilon": finite_or_none(self.spent.epsilon), "delta": self.spent.delta}
        return {
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
            **(spent or {}),
        }


class Federation:
    """A server and its clients. ``state`` is the global model; ``round`` moves it on by one round.

    ``defense`` stands in for the one that the case names. ``on_exchange`` is shown every answer before it is judged.
    """

    def __init__(
        self,
        case: Training,
        train: ImageSet,
        *,
        defense: Defense | None = None,
        on_exchange: Callable[[Exchange], None] | None = None,
    ) -> None:
        self.case, self.train, self.on_exchange = case, train.to(case.device), on_exchange
        chosen = defense or DEFENSES.build(case.defense)
        model = models.build(case.model, train.domain, seed=case.seed)
        self.module = chosen.on_model(model).to(case.device)
        self.shares = partition(case.partition, train.labels, clients=case.clients, seed=case.seed)
        self.state = State(detached(dict(self.module.named_parameters())), running_statistics(self.module))
        self.defense = chosen
        self.ledgers = [Ledger() for _ in range(case.clients)]
        """What was spent on the examples of each client."""
        self._training = copy.deepcopy(self.module).train()
        self._client = Client(self.module, recipe=case.recipe, defense=chosen)
        self._evaluated = Functional(self.module)
        self._runner = Runner(case.side_by_side, case.device)

    @property
    def sends_statistics(self) -> bool:
        """Whether clients send running statistics beside their updates."""
        return bool(self.state.buffers) and self.case.train_mode

    def participants(self, number: int) -> list[int]:
        """The clients of a round, which counts from 1."""
        return participants(self.case.clients, self.case.per_round, seed=self.case.seed, round_number=number)

    def round(self, number: int) -> Round:
        """Broadcast, let the clients of this round train, and step along the mean of what they send."""
        started, clients = time.perf_counter(), self.participants(number)
        earlier = Counter(client for before in range(1, number) for client in self.participants(before))
        runs = (self.answering(client, number, broadcasts=earlier[client] + 1) for client in clients)
        results = dict(zip(clients, self._runner(runs), strict=True))
        if self.on_exchange is not None:  # not in a client's run: an error here is no client's, and ends the training
            for client, result in results.items():
                if isinstance(result, Answer):
                    self.on_exchange(
                        Exchange(number, client, self.state, result.update, *self.examples(client, number))
                    )
        answers, dropped = self._judged(results)
        if not answers:
            client, reason = next(iter(dropped.items()))
            raise GradveilError(f"round {number}: no reply could be used; client {client}: {reason}")
        broadcast = _bytes(self.state.params) + _bytes(self.state.buffers)
        self._step(answers)
        sent = [_bytes(answer.update) + _bytes(answer.buffers) * self.sends_statistics for answer in answers]
        log = Log()
        for answer in answers:
            log.merge(answer.log)
        return Round(
            number=number,
            clients=clients,
            dropped=dropped,
            log=log,
            seconds=time.perf_counter() - started,
            bytes_down=broadcast * len(clients),
            bytes_up=sum(sent),
            side_by_side=self._runner.batched,
            spent=self.spent(),
        )

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
        """Accuracy and loss of the global model."""
        return evaluate(self._evaluated.with_buffers(self.state.buffers), self.state.params, data)

    def examples(self, client: int, number: int, order: Tensor | None = None) -> tuple[Batch, Tensor]:
        """What a client trains on in a round, in its order, and where these examples stand in the data set.

        ``order`` is a permutation of the client's share; None: one that follows from the seed.
        """
        case, share = self.case, self.shares[client]
        if order is None:
            order = torch.randperm(len(share), generator=generator(case.seed, "federated", "order", number, client))
        index = share[order[: case.batch_size]] if case.algorithm == "fedsgd" else share[order]
        return self.train.batch(index).to(case.device), index

    def answering(
        self,
        client: int,
        number: int,
        *,
        broadcasts: int,
        batch: Batch | None = None,
        rng: Stream | None = None,
    ) -> Run[Answer]:
        """A client's answer to ``state``, the broadcast of that number among those that it trained on.

        ``batch`` is what it trains on and ``rng`` what its defense draws from; None: what follows from the seed. What
        it costs is added to the client's ledger before the answer leaves, and more than planned does not leave.
        """
        case = self.case
        batch = self.examples(client, number)[0] if batch is None else batch
        rng = rng or Stream.seeded(case.seed, "federated", "defense", number, client)
        answer = yield from local_training(
            self._client, self._training, self.state, batch, rng, round_number=broadcasts
        )
        self.defense.check_steps(self.ledgers[client].steps + answer.log.ledger.steps)
        self.ledgers[client].merge(answer.log.ledger)
        return answer

    def _judged(self, results: dict[int, Answer | GradveilError]) -> tuple[list[Answer], dict[int, str]]:
        """The answers that can be used, and why the others cannot, by client."""
        like = self.state.params | self.state.buffers
        usable: list[Answer] = []
        dropped: dict[int, str] = {}
        for client, result in results.items():
            if isinstance(result, GradveilError):
                dropped[client] = str(result)
            elif (reason := complaint(result.update | result.buffers, like)) is not None:
                dropped[client] = reason
            else:
                usable.append(result)
        return usable, dropped

    def _step(self, answers: list[Answer]) -> None:
        weights = [answer.examples for answer in answers]
        change = average([as_difference(answer.update, self.case.recipe) for answer in answers], weights)
        buffers = average([answer.buffers for answer in answers], weights)
        self.state = stepped(self.state, change, buffers, lr=self.case.server_lr, momentum=self.case.server_momentum)


def _bytes(tree: Params) -> int:
    return sum(tensor.nbytes for tensor in tree.values())
