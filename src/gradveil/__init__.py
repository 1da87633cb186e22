"""Gradveil shows what a federated-learning update gives away about the private data behind it, and stops it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradveil.client.guard import Guard as Guard
    from gradveil.client.guard import defend_update as defend_update
    from gradveil.client.guard import protect as protect

__version__ = "0.1.0"
__all__ = ["Guard", "__version__", "defend_update", "protect"]


def __getattr__(name: str) -> Any:
    """Loads the public names when first asked for: `import gradveil` alone stays light, without torch."""
    if name in __all__:
        from gradveil.client import guard as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
