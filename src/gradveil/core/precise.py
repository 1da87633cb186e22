"""How a GPU computes: plain float32, and the fastest kernels for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Plain float32: torch lets convolutions round to TF32 by itself, which changes gradients by percents."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


@contextlib.contextmanager
def kernels_tried() -> Iterator[None]:
    """Let cuDNN try its kernels: for second derivatives the one of its own rule can be 25 times too slow."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
