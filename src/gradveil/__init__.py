"""Gradveil shows what a federated-learning update gives away about the private data behind it, and stops it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradveil import attacks as attacks
    from gradveil import defenses as defenses
    from gradveil.api import AuditResult as AuditResult
    from gradveil.api import audit as audit
    from gradveil.client.guard import Guard as Guard
    from gradveil.client.guard import protect as protect
    from gradveil.client.owner import Client as Client
    from gradveil.client.updates import defend_update as defend_update
    from gradveil.core import errors as errors
    from gradveil.core.errors import GradveilError as GradveilError

__version__ = "0.1.0"
__all__ = ["AuditResult", "Client", "GradveilError", "Guard", "__version__", "audit", "defend_update", "protect"]

_WHERE = {
    "Client": "gradveil.client.owner",
    "Guard": "gradveil.client.guard",
    "AuditResult": "gradveil.api",
    "GradveilError": "gradveil.core.errors",
    "audit": "gradveil.api",
    "defend_update": "gradveil.client.updates",
    "protect": "gradveil.client.guard",
}
_ROOMS = {"attacks": "gradveil.attacks", "defenses": "gradveil.defenses", "errors": "gradveil.core.errors"}


def __getattr__(name: str) -> Any:
    """Loads the public names when first asked for: `import gradveil` alone stays light, without torch."""
    if name in _ROOMS:
        return import_module(_ROOMS[name])
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
