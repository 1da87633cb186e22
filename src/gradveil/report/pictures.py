"""Saved pictures as PNG data for the page, as exact as the page's weight allows.

A page may hold thousands of pictures, and noise does not compress. So there is a ladder of ever smaller encodings: the
first, exact one that fits the budget is taken, and the page says which it was.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError, safe_open

from gradveil.core.errors import BadFileError
from gradveil.core.reading import check_plain

Pixels = NDArray[np.uint8]
LARGEST_SIDE = 4096
BUDGET = 11_500_000
"""Characters of base64 on one page; text and curves of the largest report fit beside it in 15 MB."""


@dataclass(frozen=True)
class Rung:
    """How pictures are stored: sides of at most ``side`` pixels, at most ``colors`` colors. None is as it was."""

    side: int | None = None
    colors: int | None = None

    def fitted(self, side: int) -> Rung:
        """The same for pictures of this many pixels a side, which may be small enough already.

        >>> Rung(side=64, colors=32).fitted(28)
        Rung(side=None, colors=32)
        """
        return self if self.side is None or side > self.side else Rung(None, self.colors)

    def words(self) -> str:
        """What pictures lost, for a reader; empty when nothing."""
        parts = [f"{self.side} pixels a side"] if self.side else []
        parts += [f"{self.colors} colors"] if self.colors else []
        return " and ".join(parts)


LADDER = (
    Rung(),
    Rung(side=128),
    Rung(side=128, colors=128),
    Rung(side=64, colors=64),
    Rung(side=32, colors=32),
    Rung(side=16, colors=16),
)


def read(path: Path, kind: str, *, picked: Sequence[int]) -> Pixels:
    """Pictures of a safetensors file with ``inputs`` [n, C, H, W] in [0, 1], by position, as [len(picked), H, W, C].

    The file's header says what it is: "truth" or "reconstruction". That, and kind and shape of the tensor, are checked
    before any pixel is read.
    """
    try:
        check_plain(path)  # a pipe would be waited for
        with safe_open(path, framework="numpy") as file:
            _check_kind(path, kind, file.metadata())
            if "inputs" not in file.keys():  # noqa: SIM118 (not a mapping)
                raise BadFileError(f"{path} holds no pictures; the file is damaged")
            inputs = file.get_slice("inputs")
            _check_shape(path, inputs.get_dtype(), tuple(inputs.get_shape()), picked)
            values = np.concatenate([inputs[at : at + 1] for at in picked])
    except FileNotFoundError:
        raise BadFileError(f"{path} is missing; the audit folder is not complete, run the audit again") from None
    except OSError as error:
        raise BadFileError(f"cannot read {path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise BadFileError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if not np.isfinite(values).all():
        raise BadFileError(f"{path} holds values that are not finite; pictures are in [0, 1]")
    pixels: Pixels = np.rint(values.clip(0, 1) * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    return pixels


def _check_kind(path: Path, kind: str, header: Mapping[str, str] | None) -> None:
    try:
        found = json.loads((header or {})["gradveil"])["kind"]
    except (KeyError, TypeError, ValueError, RecursionError):
        raise BadFileError(f"{path} was not written by Gradveil: its header does not say what it holds") from None
    if found != kind:
        raise BadFileError(f"{path} holds {str(found)[:40]!r}, not {kind!r}: was it renamed?")


def _check_shape(path: Path, dtype: str, shape: tuple[int, ...], picked: Sequence[int]) -> None:
    if (
        dtype != "F32"
        or len(shape) != 4
        or shape[1] not in (1, 3)
        or not all(1 <= side <= LARGEST_SIDE for side in shape[2:])
    ):
        raise BadFileError(f"{path}: pictures should be float32 [n, 1 or 3, H, W], not {dtype} {list(shape)}")
    if not all(0 <= at < shape[0] for at in picked):
        raise BadFileError(
            f"{path} holds {shape[0]} pictures, not all that the audit lists; the folder is not complete"
        )


def encode_all(
    names: Iterable[str], read_one: Callable[[str], Pixels], *, side: int, budget: int = BUDGET
) -> tuple[dict[str, list[str]], Rung]:
    """Each file's pictures as data addresses, and the rung of the ladder they stand on.

    The page holds equal pictures once, so they weigh once. A rung is left as soon as it is over the budget, so the cost
    of trying is bounded; the last one is taken as it comes. ``side`` is that of the pictures.
    """
    wanted = list(names)
    *rungs, last = dict.fromkeys(rung.fitted(side) for rung in LADDER)
    for rung in rungs:
        encoded = _encode_within(wanted, read_one, rung, budget)
        if encoded is not None:
            return encoded, rung
    return {name: [_png(pixels, last) for pixels in read_one(name)] for name in wanted}, last


def _encode_within(
    names: Sequence[str], read_one: Callable[[str], Pixels], rung: Rung, budget: int
) -> dict[str, list[str]] | None:
    encoded: dict[str, list[str]] = {}
    held: set[str] = set()
    for name in names:
        encoded[name] = [_png(pixels, rung) for pixels in read_one(name)]
        budget -= sum(map(len, set(encoded[name]) - held))
        held.update(encoded[name])
        if budget < 0:
            return None
    return encoded


def _png(pixels: Pixels, rung: Rung) -> str:
    """One picture [H, W, C] as a data address."""
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    if rung.side and max(image.size) > rung.side:
        image.thumbnail((rung.side, rung.side), Image.Resampling.BOX)
    if rung.colors:
        image = image.quantize(rung.colors, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=9)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
