"""The client's side: the pure local run, the client with its defense around it, a user's own loop, and inspection."""

from gradveil.client.client import Client, Reply
from gradveil.client.guard import Guard, defend_update, protect
from gradveil.client.inspection import CHECKS, Finding, Inspection, inspect
from gradveil.client.local import cross_entropy, local_update

__all__ = [
    "CHECKS",
    "Client",
    "Finding",
    "Guard",
    "Inspection",
    "Reply",
    "cross_entropy",
    "defend_update",
    "inspect",
    "local_update",
    "protect",
]
