"""An attack on noise: gradient entries that are known to be zero show the noise, and the noise shows its generator.

Torch's generator on a CPU is a Mersenne Twister. Each bit that it puts out is a sum over GF(2) of the 19,937 bits of
its state, so some 20,000 known bits give the state by elimination, and the state gives all other noise. It does not
help that the whole state was random. Noise that protects has to come from a generator without such equations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

STATE_BITS = 19_937
"""The 624 words of the state less 31 bits of the first one, which no draw depends on."""

SURPLUS = 200
"""Equations beyond the unknowns. Bits of another origin fulfil them all with a chance of 2 ** -SURPLUS."""

Words = NDArray[np.uint32]
Rows = NDArray[np.uint64]


def stream_positions(size: int) -> NDArray[np.int64]:
    """Which output of the generator each entry of ``torch.randn(size)`` is made of, for 16 entries or more.

    Torch draws the last 16 entries again where the size is no multiple of 16.
    """
    positions = np.arange(size)
    if size % 16:
        positions[-16:] = np.arange(size, size + 16)
    return positions


def known_bits(normals: NDArray[np.float64]) -> tuple[Words, Words]:
    """The bits of the uniforms behind whole blocks of 16 normals that are certain.

    Torch turns 16 uniforms of 24 bits into 16 normals: entry j is radius(u[j]) * cos(angle(u[j + 8])) and entry j + 8
    the sine. Both normals of a pair together give both uniforms back, up to the rounding of float32.

    Args:
        normals: observed noise divided by its sigma, [blocks, 16].

    Returns:
        The uniforms as integers of 24 bits, [blocks, 16], and a mask of the bits that are certain.
    """
    cosine, sine = normals[:, :8], normals[:, 8:]
    radius = -np.expm1(-(cosine**2 + sine**2) / 2)
    angle = np.arctan2(sine, cosine) / (2 * np.pi) % 1
    uniforms = np.concatenate([radius, angle], axis=1) * 2**24
    # The largest errors in millions of draws with AVX-512, AVX2 and neither are 2.5 and 1.3.
    return _agreed_bits(uniforms, np.repeat([4.0, 2.0], 8), 24)


def known_bits_of_lengths(cosines: NDArray[np.float64], sines: NDArray[np.float64]) -> tuple[Words, Words]:
    """The same for the normals of a stream of Gradveil, from pairs [n] that it makes of one length and one angle.

    Returns:
        Of each word that gave a length the upper 32 bits, as far as they are known, and a mask of those that are.
    """
    lengths = np.exp(-(cosines**2 + sines**2) / 2) * 2**31
    # Noise is rounded to 2 ** -16 deviations, which moves a length by 2 ** -17 * 2 ** 0.5 and this value by less.
    return _agreed_bits(lengths, np.array(2.0**15), 31)


def _agreed_bits(values: NDArray[np.float64], slack: NDArray[np.float64], width: int) -> tuple[Words, Words]:
    """The bits, of integers with so many, above the highest one in which the ends of the interval differ."""
    lowest, highest = np.floor(values - slack).astype(np.int64), np.ceil(values + slack).astype(np.int64)
    unsure = np.frexp((lowest ^ highest).astype(np.float64))[1]
    mask = np.where((lowest >= 0) & (highest < 2**width), (2**width - 1) >> unsure << unsure, 0)
    return (lowest & mask).astype(np.uint32), mask.astype(np.uint32)


def recovered_state(positions: NDArray[np.int64], values: Words, masks: Words) -> Words | None:
    """The state of a Mersenne Twister just before output 0, from bits of its outputs.

    Args:
        positions: which outputs are known, in ascending order.
        values: their known bits.
        masks: which bits these are.

    Returns:
        The 624 words of the state, or None if there are too few equations or if they contradict each other.
    """
    enough = np.searchsorted(np.cumsum(_bits(masks).sum(1)), STATE_BITS + SURPLUS) + 1
    solution = _solution(_equations(positions[:enough], values[:enough], masks[:enough]))
    if solution is None:
        return None
    bits = np.roll(np.concatenate([solution, np.zeros(31, np.uint8)]), 32).reshape(624, 32)
    return np.packbits(bits, axis=1).view(">u4").astype(np.uint32)[:, 0]


def predicted_noise(state: Words, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """The normals of float32 that torch draws from a state, one tensor after the other."""
    rng = generator_at(state)
    return [torch.randn(shape, generator=rng) for shape in shapes]


def generator_at(state: Words) -> torch.Generator:
    """A generator of torch in this state: its bytes hold the 624 words, 32 of 64 bits each, from byte 24 on."""
    rng = torch.Generator().manual_seed(0)
    held = rng.get_state().numpy().copy()
    held[24 : 24 + 8 * 624].view(np.uint64)[:] = state
    rng.set_state(torch.from_numpy(held))
    return rng


def _equations(positions: NDArray[np.int64], values: Words, masks: Words) -> Rows:
    """Each known bit as a row of the packed matrix [equations, 312]: bits of the state, then the value of the bit.

    The first word of the state comes last. All but its highest bit play no role, and the value takes the place of the
    first of those.
    """
    state = np.zeros((624, 32, 312), np.uint64)  # [words, bits from the highest one, 64 columns each]
    columns = (np.arange(624 * 32) - 32) % (624 * 32)
    columns = columns[columns < STATE_BITS]
    word, bit = np.divmod((columns + 32) % (624 * 32), 32)
    state[word, bit, columns // 64] = np.uint64(1) << (columns % 64).astype(np.uint64)
    rows = []
    for start in range(0, int(positions.max(initial=-1)) + 1, 624):
        _twist(state)
        chosen = (positions >= start) & (positions < start + 624)
        taken = _bits(masks[chosen])
        found = _tempered(state[positions[chosen] - start])[taken]
        found[:, STATE_BITS // 64] |= _bits(values[chosen])[taken].astype(np.uint64) << np.uint64(STATE_BITS % 64)
        rows.append(found)
    return np.concatenate(rows) if rows else np.zeros((0, 312), np.uint64)


def _bits(words: Words) -> NDArray[np.bool_]:
    """[n] -> [n, 32], the highest bit first."""
    return np.unpackbits(words.astype(">u4")[:, None].view(np.uint8), axis=1).astype(bool)


def _twist(state: Rows) -> None:
    """The recurrence of the Mersenne Twister on rows in the place of bits."""
    constant = np.flatnonzero(_bits(np.array([0x9908B0DF], np.uint32)))
    for low, high in ((0, 227), (227, 454), (454, 623), (623, 624)):  # no word is read before it is up to date
        following, far = state[(low + 1) % 624 :][: high - low], (low + 397) % 624
        mixed = state[far : far + high - low].copy()
        mixed[:, 1] ^= state[low:high, 0]  # the highest bit of this word and the others of the next, shifted by one
        mixed[:, 2:] ^= following[:, 1:-1]
        for place in constant:
            mixed[:, place] ^= following[:, -1]
        state[low:high] = mixed


def _tempered(words: Rows) -> Rows:
    """The tempering of the Mersenne Twister on rows in the place of bits."""
    words = words.copy()
    words[:, 11:] ^= words[:, :-11].copy()
    for shift, mask in ((7, 0x9D2C5680), (15, 0xEFC60000)):
        kept = _bits(np.array([mask], np.uint32))[0]
        shifted = np.zeros_like(words)
        shifted[:, :-shift] = words[:, shift:]
        words[:, kept] ^= shifted[:, kept]
    words[:, 18:] ^= words[:, :-18].copy()
    return words


def _solution(rows: Rows) -> NDArray[np.uint8] | None:
    """Solve by elimination over GF(2), 64 columns at a time (the method of the four Russians).

    Within 64 columns it is decided which rows are pivots, and which pivots each row below needs. Then each row below
    gets the sum of its pivots out of tables, which hold all sums of eight pivots.
    """
    for start in range(0, STATE_BITS, 64):
        width, block = min(64, STATE_BITS - start), start // 64
        column, order = rows[start:, block].copy(), np.arange(len(rows) - start)
        needs = np.zeros_like(column)
        for pivot in range(width):
            having = column[pivot:] >> np.uint64(pivot) & np.uint64(1)
            if not having.any():
                return None  # this bit of the state stays open
            first = pivot + int(having.argmax())
            swap = [first, pivot]
            column[swap[::-1]], needs[swap[::-1]], order[swap[::-1]] = column[swap], needs[swap], order[swap]
            having[[0, first - pivot]] = having[[first - pivot, 0]]
            column[pivot + 1 :] ^= having[1:] * column[pivot]
            needs[pivot + 1 :] |= having[1:] << np.uint64(pivot)
        moved = np.flatnonzero(order != np.arange(len(order)))
        rows[start + moved] = rows[start + order[moved]]
        pivots = rows[start : start + width, block:]
        for pivot in range(width):
            pivots[(needs[:width] >> np.uint64(pivot) & np.uint64(1)).astype(bool)] ^= pivots[pivot]
        tables = np.zeros((8, 256, pivots.shape[1]), np.uint64)
        for pivot in range(width):
            table, size = tables[pivot // 8], 1 << pivot % 8
            table[size : 2 * size] = table[:size] ^ pivots[pivot]
        entries = needs.astype("<u8")[width:, None].view(np.uint8).T.astype(np.intp)
        sums, terms = np.empty((2, 256, pivots.shape[1]), np.uint64)
        for low in range(0, len(needs) - width, 256):  # the buffers stay in the cache
            part = rows[start + width + low :, block:][:256]
            sums[:] = 0
            for table, entry in zip(tables, entries[:, low : low + 256], strict=True):
                sums[: len(part)] ^= np.take(table, entry, axis=0, out=terms[: len(part)], mode="clip")
            part ^= sums[: len(part)]
    if (rows[STATE_BITS:, -1] != 0).any():
        return None  # these rows have no unknown left: 0 = 1
    # From the last unknown to the first; the value of an equation counts as one more unknown that is 1.
    solution = np.zeros(312, np.uint64)
    solution[-1] = np.uint64(1) << np.uint64(STATE_BITS % 64)
    for unknown in reversed(range(STATE_BITS)):
        odd = int(np.bitwise_xor.reduce(rows[unknown] & solution)).bit_count() % 2
        solution[unknown // 64] |= np.uint64(odd) << np.uint64(unknown % 64)
    return np.unpackbits(solution.view(np.uint8), bitorder="little")[:STATE_BITS]


def impossible(observed: NDArray[np.floating], true: float) -> NDArray[np.bool_]:
    """Which observed numbers no floating-point noise can make of this true one (Mironov, CCS 2012).

    Where the sum is smaller than its parts, it has the last places of its parts, and those beyond are zero.
    """
    number = observed.dtype.type
    nearest = (observed.astype(np.longdouble) - number(true)).astype(observed.dtype)
    found = np.ones(len(observed), bool)
    for noise in (nearest, np.nextafter(nearest, number(-np.inf)), np.nextafter(nearest, number(np.inf))):
        found &= number(true) + noise != observed
    return found
