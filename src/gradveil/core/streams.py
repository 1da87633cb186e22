"""Random numbers that nobody can compute back: every draw of a defense comes from a ChaCha20 stream.

Torch's generators are made for statistics. The state of the one on the CPU is linear in its outputs: an adversary who
knows some thousand entries of a gradient solves for it and subtracts the rest of the noise. ChaCha20 is a cipher: who
tells its output from chance breaks it. The bytes are the same on every device.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gradveil.core.errors import GradveilError
from gradveil.core.types import Params

Kind = Literal["gaussian", "laplace"]
GRID = 2.0**-16
"""Noised values are multiples of this share of the noise's deviation, rounded down to a power of two."""
_ZEROS = bytes(2**20)
_BLOCK = 2**15
_BLOCKS_ON_GPU = 2**9
"""Numbers are made in blocks that a core's cache holds. A GPU makes many at once, and temporary tensors stay small."""
_UNIT = 2.0**-63


class Stream:
    """An endless stream of random numbers. Make one with :meth:`secret` or, for audits and tests, :meth:`seeded`.

    A secret stream takes a new key for every draw. So threads, forks and copies share nothing, and what its process
    holds now tells nothing about earlier draws. In a seeded stream, each draw has a number, which is its nonce.
    """

    def __init__(self, key: bytes | None = None, draws: int = 0) -> None:
        self._key = key
        self._numbers = itertools.count(draws)  # counts in one step, as no lock survives a fork
        self.draws = draws
        """How many draws were made."""

    @property
    def repeatable(self) -> bool:
        return self._key is not None

    @classmethod
    def secret(cls) -> Stream:
        """Keyed by the operating system: what protects real data."""
        return cls()

    @classmethod
    def seeded(cls, seed: int, *path: str | int) -> Stream:
        """The same numbers for the same seed and path. For audits, studies and tests: it protects nothing."""
        return cls(hashlib.sha256(json.dumps(["gradveil stream", seed, *path]).encode()).digest())

    def words(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """[count] int64 in which every bit is random: one draw."""
        device = torch.device(device)
        if not 0 <= count < 2**35:
            raise GradveilError(f"one draw has at most 2**35 numbers, not {count}")
        if torch._C._functorch.maybe_current_level() is not None:
            raise GradveilError("a defense drew inside of torch.func, where every lane would get the same noise")
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise GradveilError("a defense drew inside of a CUDA graph, whose replays would repeat the noise")
        number = next(self._numbers)
        self.draws = number + 1
        key = secrets.token_bytes(32) if self._key is None else self._key
        # the block counter, which starts at 0, and 96 bits that no other draw of this key has
        nonce = bytes(4) + number.to_bytes(12, "little")
        if device.type == "cuda" and find_spec("triton") is not None:
            from gradveil.core.chacha import cuda_words

            found: Tensor = cuda_words(key, nonce, count, device)
            return found
        return _cpu_words(key, nonce, count).to(device)

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Independent N(0, 1) entries of this shape, of the type and on the device of ``like``."""
        return self._drawn(shape, like, "gaussian")

    def laplace(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Independent Laplace entries of variance 1."""
        return self._drawn(shape, like, "laplace")

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Independent entries from [0, 1), of as many bits as their type holds exactly."""
        bits = 1 - round(math.log2(torch.finfo(like.dtype).eps))
        words = self.words(math.prod(shape), like.device) >> (64 - bits)
        found: Tensor = (words & (2**bits - 1)).to(like.dtype).mul_(2.0**-bits)
        return found.view(torch.Size(shape))

    def exponential(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Independent entries of an exponential distribution of mean 1."""
        drawn = _open_uniform(self.words(math.prod(shape), like.device)).log_().neg_()
        return drawn.to(like.dtype).view(torch.Size(shape))

    def signs(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """-1 or 1 in every entry: as good as normal numbers in long sums, and 64 from a word."""
        size, device = math.prod(shape), like.device
        drawn = self.words(size // 64 + 1, device).view(torch.uint8)
        of_byte = 2.0 * (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1) - 1
        return of_byte.to(like.dtype).index_select(0, drawn.int()).flatten()[:size].view(torch.Size(shape))

    def integers(self, below: int, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """Whole numbers from 0 to ``below`` - 1. Uneven by at most ``below`` / 2**63."""
        if not 1 <= below <= 2**40:
            raise GradveilError(f"whole numbers are drawn below 1 to 2**40, not {below}")
        return (self.words(math.prod(shape), device) & (2**63 - 1)).remainder_(below).view(torch.Size(shape))

    def permutation(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """The numbers from 0 to ``count`` - 1 in random order."""
        return self.words(count, device).argsort()

    def noised(self, tree: Params, deviation: float, kind: Kind = "gaussian") -> Params:
        """``tree`` plus noise of this standard deviation, rounded to a grid that does not depend on ``tree``.

        Floating-point noise has gaps, and where x + noise can be tells of x (Mironov, CCS 2012). So the sum is made in
        float64 and rounded to multiples of a power of two near ``GRID`` times the deviation: 2**36 values of the noise
        fall on each. What is done to it afterwards needs no second look at ``tree``.
        """
        if deviation == 0:
            return {name: tensor.detach().clone() for name, tensor in tree.items()}
        # the power of two next below GRID times the deviation; far from where a quotient by it would be infinite
        step, sent = math.ldexp(GRID, max(math.frexp(deviation)[1] - 1, -870)), dict(tree)
        alike: dict[tuple[torch.device, torch.dtype], list[str]] = defaultdict(list)
        for name, tensor in tree.items():
            alike[tensor.device, tensor.dtype].append(name)
        for (device, dtype), names in alike.items():  # side by side: one draw for all of them
            flat = torch.cat([tree[name].detach().reshape(-1) for name in names])
            for place, drawn in self._standard(len(flat), device, kind):
                flat[place] = drawn.mul_(deviation).add_(flat[place]).div_(step).round_().mul_(step).to(dtype)
            parts = torch.split(flat, [tree[name].numel() for name in names])
            sent |= {name: part.view(tree[name].shape) for name, part in zip(names, parts, strict=True)}
        return sent

    def _drawn(self, shape: Sequence[int], like: Tensor, kind: Kind) -> Tensor:
        found = torch.empty(torch.Size(shape), dtype=like.dtype, device=like.device)
        flat = found.view(-1)
        for place, drawn in self._standard(found.numel(), like.device, kind):
            flat[place] = drawn.to(like.dtype)
        return found

    def _standard(self, count: int, device: torch.device, kind: Kind) -> Iterator[tuple[slice, Tensor]]:
        """Float64 entries of mean 0 and variance 1, part by part, and where they belong. One draw in all.

        Box and Muller's pairs take 64 bits for the length and 64 for the angle, so that tails reach 9.4 deviations. The
        two of a pair lie half a block apart, on every device.
        """
        words = self.words(count + count % 2, device)
        whole = len(words) // _BLOCK * _BLOCK
        size = _BLOCK * (torch.get_num_threads() if device.type == "cpu" else _BLOCKS_ON_GPU)
        for start, stop in [*((i, min(i + size, whole)) for i in range(0, whole, size)), (whole, len(words))]:
            if start < stop:
                part = words[start:stop].view(-1, 2, min(_BLOCK, stop - start) // 2)
                if kind == "laplace":
                    drawn = _open_uniform(part).log_().mul_(0.5**0.5).copysign_(part.double())
                else:
                    length = _open_uniform(part[:, 0]).log_().mul_(-2).sqrt_()
                    angle = (part[:, 1] & (2**63 - 1)).double().mul_(2 * math.pi * _UNIT)
                    drawn = torch.stack([length * angle.cos(), length.mul_(angle.sin_())], dim=1)
                yield slice(start, min(stop, count)), drawn.view(-1)[: count - start]

    def __reduce__(self) -> tuple[Any, ...]:
        return Stream, (self._key, self.draws)


def _open_uniform(words: Tensor) -> Tensor:
    """Float64 from (0, 1]: 63 random bits each, with all the precision that float64 has near 0."""
    return (words & (2**63 - 1)).double().add_(0.5).mul_(_UNIT)


def _cpu_words(key: bytes, nonce: bytes, count: int) -> Tensor:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    found = np.empty(count, np.int64)
    left, cipher = memoryview(found.data).cast("B"), Cipher(ChaCha20(key, nonce), None).encryptor()
    while left:
        size = min(len(_ZEROS), len(left))
        cipher.update_into(_ZEROS[:size], left[:size])
        left = left[size:]
    return torch.from_numpy(found)
