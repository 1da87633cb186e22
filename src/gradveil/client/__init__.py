"""The client's side: the pure local run, the client with its defense around it, a user's own loop, and inspection."""

from gradveil.client.client import ClientRun, OnSuspicion, Reply, SimulatedClient, StatisticsAfter, running_statistics
from gradveil.client.guard import Guard, protect
from gradveil.client.inspection import CHECKS, Finding, Inspection, inspect
from gradveil.client.local import LocalRun, local_update, mini_batches
from gradveil.client.rounds import Streams, replies_in_round, rounds_to_audit, sends_constant
from gradveil.client.updates import defend_update
from gradveil.core.types import cross_entropy
from gradveil.engine import Gradient, Request

__all__ = [
    "CHECKS",
    "ClientRun",
    "Finding",
    "Gradient",
    "Guard",
    "Inspection",
    "LocalRun",
    "OnSuspicion",
    "Reply",
    "Request",
    "SimulatedClient",
    "StatisticsAfter",
    "Streams",
    "cross_entropy",
    "defend_update",
    "inspect",
    "local_update",
    "mini_batches",
    "protect",
    "replies_in_round",
    "rounds_to_audit",
    "running_statistics",
    "sends_constant",
]
