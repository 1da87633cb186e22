"""Randomness that is named, not global: every draw comes from a Generator derived from one seed and a path of names.

Two parts of a run with different paths never share a stream, and adding a part does not shift the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(seed: int, *path: str | int) -> int:
    """A 63-bit seed that depends on the root seed and every element of the path."""
    text = "\x1f".join([str(seed), *map(str, path)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *path: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A Generator for this path."""
    return torch.Generator(device).manual_seed(derive(seed, *path))


@contextmanager
def isolated(seed: int, *path: str | int, device: torch.device | None = None) -> Iterator[None]:
    """Run code that only knows torch's global generators (such as module initialisers) and leave them as they were.

    They are that of the CPU and, where code draws on a GPU (such as dropout there), that of this ``device``.
    """
    drawing = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=drawing):
        torch.default_generator.manual_seed(derive(seed, *path))
        for gpu in drawing:
            torch.cuda.default_generators[gpu.index or 0].manual_seed(derive(seed, *path))
        yield
