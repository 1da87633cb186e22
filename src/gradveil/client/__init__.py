"""The client's side: the pure local run, the client with its defense around it, a user's own loop, and inspection."""

from gradveil.client.client import Reply, SimulatedClient
from gradveil.client.guard import Guard, protect
from gradveil.client.inspection import CHECKS, Finding, Inspection, inspect
from gradveil.client.local import Run, Wanted, cross_entropy, finished, local_update
from gradveil.client.updates import defend_update

__all__ = [
    "CHECKS",
    "Finding",
    "Guard",
    "Inspection",
    "Reply",
    "Run",
    "SimulatedClient",
    "Wanted",
    "cross_entropy",
    "defend_update",
    "finished",
    "inspect",
    "local_update",
    "protect",
]
