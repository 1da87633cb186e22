"""Where model families register themselves. A factory takes the domain, and its options by keyword."""

from __future__ import annotations

from torch import nn

from gradveil.core.registry import Registry

MODELS: Registry[nn.Module] = Registry("model")
