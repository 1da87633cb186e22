"""What private data is: a domain checks inputs, draws ones that look like them, and shows them in a report.

Names are loaded when first asked for, because pictures serve reports, which are made without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradveil.domains.base import Domain as Domain
    from gradveil.domains.images import Images as Images
    from gradveil.domains.images import total_variation as total_variation

_WHERE = {"base": ("Domain",), "images": ("Images", "total_variation")}
__all__ = [*(name for names in _WHERE.values() for name in names)]


def __getattr__(name: str) -> Any:
    for file, names in _WHERE.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
