"""A sheet of draws, ten in a row, to look at; with classes, each column is one class."""

from __future__ import annotations

import io

import torch
from PIL import Image
from torch import Tensor

from gradveil.core.progress import SILENT, Progress
from gradveil.core.seeding import generator as seeded
from gradveil.generators.base import Generator

COLUMNS = 10


def draw_sheet(generator: Generator, *, rows: int = 10, seed: int = 0, progress: Progress = SILENT) -> bytes:
    """A PNG of ``rows`` times ten images; the seed decides the codes."""
    device = next(generator.parameters()).device
    codes = generator.codes(rows * COLUMNS, seeded(seed, "sheet")).to(device).view(rows, COLUMNS, -1)
    labels = torch.arange(COLUMNS, device=device) % (generator.classes or 1)
    drawn = []
    with torch.no_grad(), progress.task("drawing", rows, "rows") as task:
        for row in codes:
            drawn.append(generator.decode(row, labels).cpu())
            task.advance()
    return _png(torch.stack(drawn))


def _png(images: Tensor) -> bytes:
    """Images [rows, columns, C, H, W] in [0, 1] as one picture; other than three channels are shown as grey."""
    grey = images if images.shape[2] == 3 else images.mean(dim=2, keepdim=True)
    pixels = (grey * 255).round().byte().permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[..., 0]).save(file, format="PNG")
    return file.getvalue()
