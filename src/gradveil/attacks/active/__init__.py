"""Attacks of a server that crafts what it sends. Importing this package registers them."""

from gradveil.attacks.active.fishing import Fishing
from gradveil.attacks.active.imprint import Imprinting
from gradveil.attacks.active.trap import Trap

__all__ = ["Fishing", "Imprinting", "Trap"]
