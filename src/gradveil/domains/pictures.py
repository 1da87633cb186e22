"""Images as a reader sees them: pixels, and ever smaller encodings of them. It works without torch.

A page may hold thousands of pictures, and noise does not compress. So there is a ladder of encodings, of which the
first is exact.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

LARGEST_SIDE = 128
"""Of a picture on a page; those in files may be larger."""
LARGEST_STORED = 4096
Pixels = NDArray[np.uint8]


def is_picture_shape(shape: Sequence[int]) -> bool:
    """Whether tensors of this shape, [n, C, H, W], can be shown: in gray or in color, and not too large."""
    return len(shape) == 4 and shape[1] in (1, 3) and all(1 <= side <= LARGEST_STORED for side in shape[2:])


def as_pixels(images: NDArray[np.floating]) -> Pixels:
    """Images [n, C, H, W] in [0, 1] as bytes [n, H, W, C]."""
    pixels: Pixels = np.rint(images.clip(0, 1) * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    return pixels


def shown_size(width: int, height: int, *, near: int) -> tuple[int, int]:
    """How large a picture is shown, in page pixels: a whole multiple of its own size where it is small.

    >>> shown_size(32, 32, near=96), shown_size(28, 28, near=96), shown_size(224, 112, near=96)
    ((96, 96), (84, 84), (128, 64))
    """
    longest = max(width, height)
    scale = min(max(1, round(near / longest)), LARGEST_SIDE / longest)
    return max(1, round(width * scale)), max(1, round(height * scale))


def data_address(png: bytes) -> str:
    """A PNG file as an address that a page can show without a file beside it."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


@dataclass(frozen=True)
class Encoding:
    """How pictures are stored: sides of at most ``side`` pixels, at most ``colors`` colors. None is as it was."""

    side: int | None = None
    colors: int | None = None

    def fitted(self, side: int) -> Encoding:
        """The same for pictures of this many pixels a side, which may be small enough already.

        >>> Encoding(side=64, colors=32).fitted(28)
        Encoding(side=None, colors=32)
        """
        return self if self.side is None or side > self.side else Encoding(None, self.colors)

    def words(self) -> str:
        """What pictures lost, for a reader; empty when nothing."""
        parts = [f"{self.side} pixels a side"] if self.side else []
        parts += [f"{self.colors} colors"] if self.colors else []
        return " and ".join(parts)

    def png(self, pixels: Pixels) -> bytes:
        """One picture [H, W, C] as a PNG file."""
        image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        if self.side and max(image.size) > self.side:
            image.thumbnail((self.side, self.side), Image.Resampling.BOX)
        if self.colors:
            image = image.quantize(self.colors, dither=Image.Dither.NONE)
        buffer = io.BytesIO()
        image.save(buffer, "PNG", compress_level=9)
        return buffer.getvalue()


ENCODINGS = (
    Encoding(),
    Encoding(side=128),
    Encoding(side=128, colors=128),
    Encoding(side=64, colors=64),
    Encoding(side=32, colors=32),
    Encoding(side=16, colors=16),
)
