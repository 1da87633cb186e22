"""ChaCha20 on a GPU, as RFC 8439 has it: each lane computes one block of 64 bytes.

The bytes are those that the CPU's cipher gives for the same key and nonce, which a test holds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS = 128


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _word(start, place, zero):
    return zero + tl.load(start + place).to(tl.uint32, bitcast=True)


@triton.jit
def _kernel(out, start, blocks, lanes: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * lanes + tl.arange(0, lanes)
    zero = (block * 0).to(tl.uint32)
    # the constants, the key, the number of the block, the nonce
    i0, i1, i2, i3 = _word(start, 0, zero), _word(start, 1, zero), _word(start, 2, zero), _word(start, 3, zero)
    i4, i5, i6, i7 = _word(start, 4, zero), _word(start, 5, zero), _word(start, 6, zero), _word(start, 7, zero)
    i8, i9, i10, i11 = _word(start, 8, zero), _word(start, 9, zero), _word(start, 10, zero), _word(start, 11, zero)
    i12, i13, i14, i15 = block.to(tl.uint32), _word(start, 13, zero), _word(start, 14, zero), _word(start, 15, zero)
    x0, x1, x2, x3, x4, x5, x6, x7 = i0, i1, i2, i3, i4, i5, i6, i7
    x8, x9, x10, x11, x12, x13, x14, x15 = i8, i9, i10, i11, i12, i13, i14, i15
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    there, to = block < blocks, out + block * 16
    tl.store(to, (x0 + i0).to(tl.int32, bitcast=True), there)
    tl.store(to + 1, (x1 + i1).to(tl.int32, bitcast=True), there)
    tl.store(to + 2, (x2 + i2).to(tl.int32, bitcast=True), there)
    tl.store(to + 3, (x3 + i3).to(tl.int32, bitcast=True), there)
    tl.store(to + 4, (x4 + i4).to(tl.int32, bitcast=True), there)
    tl.store(to + 5, (x5 + i5).to(tl.int32, bitcast=True), there)
    tl.store(to + 6, (x6 + i6).to(tl.int32, bitcast=True), there)
    tl.store(to + 7, (x7 + i7).to(tl.int32, bitcast=True), there)
    tl.store(to + 8, (x8 + i8).to(tl.int32, bitcast=True), there)
    tl.store(to + 9, (x9 + i9).to(tl.int32, bitcast=True), there)
    tl.store(to + 10, (x10 + i10).to(tl.int32, bitcast=True), there)
    tl.store(to + 11, (x11 + i11).to(tl.int32, bitcast=True), there)
    tl.store(to + 12, (x12 + i12).to(tl.int32, bitcast=True), there)
    tl.store(to + 13, (x13 + i13).to(tl.int32, bitcast=True), there)
    tl.store(to + 14, (x14 + i14).to(tl.int32, bitcast=True), there)
    tl.store(to + 15, (x15 + i15).to(tl.int32, bitcast=True), there)


def cuda_words(key: bytes, nonce: bytes, count: int, device: torch.device) -> Tensor:
    """[count] int64 on a GPU: the key stream for this key and this block counter and nonce of 16 bytes."""
    if any(nonce[:4]):
        raise ValueError("the block counter starts at 0")
    blocks = -(-count // 8)
    if blocks >= 2**32:
        raise ValueError("one nonce serves for 2**32 blocks")
    start = torch.frombuffer(bytearray(b"expand 32-byte k" + key + nonce), dtype=torch.int32)
    found = torch.empty(16 * blocks, dtype=torch.int32, device=device)
    grid: Any = (-(-blocks // _BLOCKS),)
    if blocks:
        with torch.cuda.device(device):
            _kernel[grid](
                found.view(torch.uint32), start.to(device, non_blocking=True).view(torch.uint32), blocks, _BLOCKS
            )
    return found.view(torch.int64)[:count]
