"""The client's side: the pure local run, the client with its defense around it, and a user's own loop under one."""

from gradveil.client.client import Client, Reply
from gradveil.client.guard import Guard, defend_update, protect
from gradveil.client.local import cross_entropy, local_update

__all__ = ["Client", "Guard", "Reply", "cross_entropy", "defend_update", "local_update", "protect"]
