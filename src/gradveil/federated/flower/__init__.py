"""Federated training on Flower: apps that are ready to run, and mods that bring defenses to any ClientApp."""

from gradveil.core.errors import NotAvailableError

try:
    from gradveil.federated.flower.client import client_app
    from gradveil.federated.flower.grid import CheckedGrid
    from gradveil.federated.flower.mods import MessageExchange, checked, defended, inspected, recorded, tap
    from gradveil.federated.flower.node import NODE_KEYS, OF_THE_SERVER, RUN_MAY_SET, NodeSettings, read_node
    from gradveil.federated.flower.server import STRATEGIES, Settings, read_settings, server_app
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "flwr":
        raise
    raise NotAvailableError("Flower is not installed: pip install 'gradveil[flower]'") from None

__all__ = [
    "NODE_KEYS",
    "OF_THE_SERVER",
    "RUN_MAY_SET",
    "STRATEGIES",
    "CheckedGrid",
    "MessageExchange",
    "NodeSettings",
    "Settings",
    "checked",
    "client_app",
    "defended",
    "inspected",
    "read_node",
    "read_settings",
    "recorded",
    "server_app",
    "tap",
]
