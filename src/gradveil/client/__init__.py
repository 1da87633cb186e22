"""The client's side: the pure local run, and the client that applies a defense around it."""

from gradveil.client.client import Client, Reply
from gradveil.client.local import cross_entropy, local_update

__all__ = ["Client", "Reply", "cross_entropy", "local_update"]
