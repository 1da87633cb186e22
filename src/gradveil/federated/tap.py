"""A tap on the line: saves what chosen clients answered in chosen rounds as the adversary would have it.

Beside each observation, in a file of its own, lies the truth: the private examples behind the reply.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.core.tensor_files import write_tensors
from gradveil.core.types import Batch, Domain, Params
from gradveil.federated.case import Training
from gradveil.federated.server import State, participants
from gradveil.threat import observe, save_observations, threat_model

_SPEC = re.compile(r"(\d+|\*)@(\d+|\*)")


@dataclass(frozen=True)
class Exchange:
    """One client's answer in one round, with what only the client knows."""

    round_number: int
    client: int
    sent: State
    reply: Params
    batch: Batch
    index: Tensor
    """[n]: where the examples of the batch stand in the data set."""


def tapped(case: Training) -> frozenset[tuple[int, int]]:
    """The (client, round) pairs that a case wants saved; who takes part when is known beforehand."""
    if not case.tap:
        return frozenset()
    there = {
        (client, number)
        for number in range(1, case.rounds + 1)
        for client in participants(case.clients, case.per_round, seed=case.seed, round_number=number)
    }
    found: set[tuple[int, int]] = set()
    for spec in case.tap:
        matching = {pair for pair in there if taps(spec, *pair)}
        if not matching:
            number = spec.partition("@")[2]
            who = sorted({c for c, n in there if str(n) == number})
            hint = (
                f"in round {number} there are {', '.join(map(str, who))}"
                if who
                else "clients count from 0, rounds from 1"
            )
            raise GradveilError(f"tap {spec}: no such client takes part in such a round; {hint}")
        found |= matching
    return frozenset(found)


def taps(spec: str, client: int, number: int) -> bool:
    """Whether a tap names the exchange of a client in a round.

    >>> taps("*@3", 7, 3), taps("0@*", 7, 3)
    (True, False)
    """
    parts = _SPEC.fullmatch(spec)
    if parts is None:
        raise GradveilError(f"cannot read the tap {spec!r}; write CLIENT@ROUND, such as 0@1, *@1 or 3@*")
    return parts[1] in ("*", str(client)) and parts[2] in ("*", str(number))


class Tap:
    """Saves exchanges of a training into a folder: those that ``wanted`` is true of, by client and round."""

    def __init__(
        self, case: Training, module: nn.Module, domain: Domain, folder: Path, wanted: Callable[[int, int], bool]
    ) -> None:
        self._case, self._module, self._domain, self._folder, self._wanted = case, module, domain, folder, wanted

    def __call__(self, one: Exchange) -> None:
        if not self._wanted(one.client, one.round_number):
            return
        module = copy.deepcopy(self._module)
        module.load_state_dict(one.sent.buffers, strict=False)
        seen = observe(
            module=module,
            model=self._case.model,
            domain=self._domain,
            sent=one.sent.params,
            reply=one.reply,
            batch=one.batch,
            recipe=self._case.recipe,
            defense=self._case.defense,
            threat=threat_model(self._case.threat),
        )
        name = f"round-{one.round_number:04d}-client-{one.client:04d}"
        private = {"inputs": one.batch.inputs, "labels": one.batch.labels, "index": one.index}
        write_tensors(self._folder / f"{name}.truth.safetensors", "truth", private, {})
        save_observations(self._folder / f"{name}.safetensors", [seen])
