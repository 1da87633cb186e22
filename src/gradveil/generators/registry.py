"""Generators by name: ``build("cifar10")``, ``build("progan-128:size=64")``, ``build("file:path=my.safetensors")``."""

from __future__ import annotations

from gradveil.core.progress import SILENT, Progress
from gradveil.core.registry import Registry
from gradveil.generators.base import Generator

GENERATORS: Registry[Generator] = Registry("generator")
"""Factories take the progress of a possible download; their keyword-only arguments are the options of the spec."""


def build(spec: str, *, progress: Progress = SILENT) -> Generator:
    """The generator that a spec names, in eval mode and with weights that ask for no gradient.

    >>> digits = build("mnist")
    >>> digits.latent, digits.shape, digits.classes
    (128, (1, 28, 28), 10)
    >>> build("cifar10:size=16").shape
    (3, 16, 16)
    """
    return GENERATORS.build(spec, progress).eval().requires_grad_(False)
