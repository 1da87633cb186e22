"""Randomness that is named, not global: every draw comes from a Generator derived from one seed and a path of names.

Two parts of a run with different paths never share a stream, and adding a part does not shift the others.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_TWISTER = slice(24, 24 + 8 * 624)
"""Where the state of a CPU's generator holds the 624 words of its Mersenne twister, 32 bits of 64 each."""


def derive(seed: int, *path: str | int) -> int:
    """A 63-bit seed that depends on the root seed and every element of the path."""
    text = "\x1f".join([str(seed), *map(str, path)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *path: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A Generator for this path."""
    return torch.Generator(device).manual_seed(derive(seed, *path))


def secret(device: torch.device | str = "cpu") -> torch.Generator:
    """A Generator that nobody can repeat, from the system's entropy: what a defense draws from where it counts.

    ``Generator.seed()`` is not enough on a CPU. Its Mersenne twister takes 32 bits of a seed, and who sees noise longer
    than the gradient can try them all within the hour. So the whole state is drawn.
    """
    rng = torch.Generator(device).manual_seed(secrets.randbits(63))
    if rng.device.type == "cpu":
        state = rng.get_state().numpy().copy()
        state[_TWISTER].view(np.uint64)[:] = np.frombuffer(os.urandom(4 * 624), np.uint32)
        rng.set_state(torch.from_numpy(state))
    return rng


@contextmanager
def isolated(seed: int, *path: str | int) -> Iterator[None]:
    """Run code that only knows torch's global generator (such as module initialisers) and leave it as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive(seed, *path))
        yield
