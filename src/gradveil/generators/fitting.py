"""From a data set to a file: trains a generator with checkpoints and a sheet of draws beside the result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradveil.core.atomic import write_atomically
from gradveil.core.errors import GradveilError
from gradveil.core.progress import SILENT, Progress
from gradveil.core.seeding import isolated
from gradveil.data import DATASETS, ImageSet, load
from gradveil.generators.dcgan import DCGAN
from gradveil.generators.sheet import draw_sheet
from gradveil.generators.storage import save_generator
from gradveil.generators.training import Schedule, Trainer

_AT_ONCE = 1000


def fit(
    data: str,
    out: Path,
    schedule: Schedule,
    *,
    latent: int = 128,
    features: int = 128,
    kernel: int = 4,
    device: str = "cpu",
    resume: bool = False,
    progress: Progress = SILENT,
    stop: AbstractContextManager[Callable[[], bool]] | None = None,
) -> DCGAN | None:
    """Train on the train split that ``data`` names and write the generator to ``out``.

    At every tenth of the way a checkpoint and a sheet of draws are written beside it. ``stop`` is entered for the
    training alone and gives what is asked after each step: if it says so, a checkpoint is left and the result is None;
    ``resume`` then goes on to the same result.
    """
    checkpoint, picture = beside(out)
    _refuse_to_overwrite(out, checkpoint, resume)
    _refuse_other_splits(data)
    images = load(data, progress=progress)
    channels, height, width = images.shape
    sizes = {"latent": latent, "features": features, "kernel": kernel}
    with isolated(schedule.seed, "generator"):
        model = DCGAN(channels=channels, height=height, width=width, classes=len(images.class_names), **sizes)
    trainer = Trainer(model, _pixels(images).to(device), images.labels.to(device), schedule)
    if resume:
        trainer.load(checkpoint)

    def keep(trainer: Trainer) -> None:
        trainer.save(checkpoint)
        write_atomically(picture, draw_sheet(trainer.result(batches=5)))

    with stop or nullcontext(lambda: False) as asked:
        trainer.run(progress, keep, asked)
        if trainer.done < schedule.steps:
            trainer.save(checkpoint)
            return None
    result = trainer.result()
    result.card = _card(images, data, schedule)
    save_generator(out, result, result.card)
    write_atomically(picture, draw_sheet(result))
    checkpoint.unlink(missing_ok=True)
    return result


def beside(out: Path) -> tuple[Path, Path]:
    """Where the checkpoint and the sheet of draws of a result go."""
    if out.suffix != ".safetensors":
        raise GradveilError(f"a generator is written to a file that ends in .safetensors, not {out.name!r}")
    return out.with_suffix(".checkpoint.safetensors"), out.with_suffix(".png")


def _refuse_to_overwrite(out: Path, checkpoint: Path, resume: bool) -> None:
    if out.exists():
        raise GradveilError(f"{out} is there already: delete it, or write to another file")
    if resume and not checkpoint.exists():
        raise GradveilError(f"there is no checkpoint {checkpoint} to go on from: leave --resume out")
    if not resume and checkpoint.exists():
        raise GradveilError(f"{checkpoint} is of a training under way: go on with --resume, or delete it")


def _refuse_other_splits(data: str) -> None:
    if DATASETS.parse(data)[1].get("split", "train") != "train":
        raise GradveilError("a generator learns from the train split alone, or it would know what attacks look for")


def _pixels(images: ImageSet) -> Tensor:
    """All images as bytes [n, C, H, W]."""
    parts = [images.batch(range(at, min(at + _AT_ONCE, len(images)))).inputs for at in range(0, len(images), _AT_ONCE)]
    return torch.cat([(part * 255).round().byte() for part in parts])


def _card(images: ImageSet, data: str, schedule: Schedule) -> dict[str, Any]:
    return {"data": data, "trained_on": images.name, "images": len(images), "method": "WGAN-GP", **asdict(schedule)}
