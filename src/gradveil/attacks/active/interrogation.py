"""A dishonest server and its clients: it sends what the attack crafts, they answer, until the attack asks no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gradveil.attacks.base import Attack, Crafted, Server
from gradveil.core.errors import GradveilError
from gradveil.threat.observation import Observation

MOST = 1000
"""Questions to one client after which something must be wrong with the attack."""

Answer = Callable[[Crafted, int], Observation]
"""(what was sent, the number of the question, from 0) -> what is seen of the client's reply."""


def interrogate(attack: Attack, server: Server, clients: Sequence[Answer], seed: int) -> list[Observation]:
    """What is seen of each client's last reply, with its earlier ones in it. The first question is the same to all."""
    asked = [attack.craft(server, (), seed)]
    """Questions that are the same to all, by the number of replies before them."""
    seen = []
    for answer in clients:
        history: list[Observation] = []
        crafted = asked[0]
        while crafted is not None:
            if len(history) == MOST:
                raise GradveilError(f"{type(attack).__name__} asked one client {MOST} times and is not done")
            history.append(answer(crafted, len(history)))
            if attack.asks_all_alike and len(history) < len(asked):
                crafted = asked[len(history)]
                continue
            crafted = attack.craft(server, history, seed)
            if attack.asks_all_alike:
                asked.append(crafted)
        if not history:
            raise GradveilError(f"{type(attack).__name__} crafts broadcasts, but had nothing to send")
        seen.append(replace(history[-1], earlier=tuple(history[:-1])))
    return seen
