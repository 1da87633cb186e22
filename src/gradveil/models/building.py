"""From a spec such as ``lenet:init=wide``, ``mypackage.nets:small`` or ``imprint > lenet`` to a model seen to work."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError
from gradveil.core.registry import Registry, split_spec
from gradveil.core.seeding import isolated
from gradveil.core.types import Domain
from gradveil.models.fronts import fronted, joined, split_front
from gradveil.models.imported import in_one_line, is_import_path, registry_of, split_import_path
from gradveil.models.registry import MODELS


def build(spec: str, domain: Domain, *, seed: int) -> nn.Module:
    """A model in eval mode, initialised from ``seed`` alone; torch's global generator is left as it was.

    >>> digits = Domain(channels=1, height=28, width=28, classes=10, mean=(0.13,), std=(0.31,))
    >>> sum(p.numel() for p in build("lenet:init=wide", digits, seed=0).parameters())
    17038
    """
    front, behind = split_front(spec)
    name, registry, local = _resolve(behind)
    with isolated(seed, "model", name):
        model = registry.build(local, domain).eval()
        # Inside the isolation, because lazy layers draw their weights at the first forward pass.
        _check(model, name, domain)
    return model if front is None else fronted(front, model, domain, seed=seed)


def canonical(spec: str) -> str:
    """The one spelling of a spec that digests and rows use: options sorted, values in Python's short form.

    >>> canonical("vit: dim=64, depth=02")
    'vit:depth=2,dim=64'
    """
    front, behind = split_front(spec)
    name, registry, local = _resolve(behind)
    _, colon, options = registry.canonical(local).partition(":")
    model = name + colon + options
    return model if front is None else joined(front, model)


def _resolve(spec: str) -> tuple[str, Registry[nn.Module], str]:
    """The name of a model, the registry that builds it, and its spec there."""
    if not is_import_path(spec):
        return split_spec(spec)[0], MODELS, spec
    path, options = split_import_path(spec)
    return path, registry_of(path, options), f"factory:{options}"


def example(module: nn.Module, domain: Domain) -> Tensor:
    """One black image [1, C, H, W] on the device and in the precision of the module."""
    like = next(module.parameters(), torch.empty(0))
    return torch.zeros(1, *domain.shape, device=like.device, dtype=like.dtype)


def _check(model: nn.Module, name: str, domain: Domain) -> None:
    inputs = example(model, domain)
    try:
        with torch.no_grad():
            outputs = model(inputs)
    except Exception as error:
        raise GradveilError(f"model {name} cannot take inputs {list(inputs.shape)}: {in_one_line(error)}") from error
    if not isinstance(outputs, Tensor) or outputs.shape != (1, domain.classes):
        came = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise GradveilError(f"model {name} must give scores [1, {domain.classes}] for one input, but gave {came}")
    if not any(p.requires_grad for p in model.parameters()):
        raise GradveilError(f"model {name} has no trainable parameters, so there is no gradient to share")
