"""Generators by name: ``build("cifar10")``, ``build("progan-128:size=64")``, ``build("file:path=my.safetensors")``.

Two ship with the package, files hold those that users trained: weights in half precision, the options that build the
architecture, and a card. Others are factories of the entry points ``gradveil.generators``.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.progress import SILENT, Progress
from gradveil.core.registry import Registry
from gradveil.core.seeding import generator as seeded
from gradveil.core.tensor_files import Shapes, read_tensors, write_tensors
from gradveil.core.types import Json
from gradveil.generators.base import Generator
from gradveil.generators.dcgan import DCGAN

GENERATORS: Registry[Generator] = Registry("generator", group="gradveil.generators")
"""Factories take the progress of a possible download; their keyword-only arguments are the options of the spec."""

PUBLISHED = {
    "biggan": "gradveil.lab.generators.biggan:biggan",
    "progan-128": "gradveil.lab.generators.progan:progan_128",
    "stylegan2": "gradveil.lab.generators.stylegan2:stylegan2",
}
"""The entry points of this project itself, for a tree of sources that is not installed as it is now."""
for _name, _path in PUBLISHED.items():
    GENERATORS.register_path(_name, _path)

KIND = "generator"
COLUMNS = 10
"""Draws in a row of a sheet."""
_LARGEST = {"channels": 16, "height": 32, "width": 32, "classes": 10_000, "latent": 4096, "features": 1024, "kernel": 4}


def build(spec: str, *, progress: Progress = SILENT) -> Generator:
    """The generator that a spec names, in eval mode and with weights that ask for no gradient.

    >>> digits = build("mnist")
    >>> digits.latent, digits.shape, digits.classes
    (128, (1, 28, 28), 10)
    >>> build("cifar10:size=16").shape
    (3, 16, 16)
    """
    return GENERATORS.build(spec, progress).eval().requires_grad_(False)


@GENERATORS.register("cifar10")
def cifar10(_progress: Progress, *, size: int | None = None) -> Generator:
    """DCGAN of the ten classes of CIFAR-10, 32x32, shipped: trained on the train split."""
    return resized(_shipped("cifar10"), size)


@GENERATORS.register("mnist")
def mnist(_progress: Progress, *, size: int | None = None) -> Generator:
    """DCGAN of the ten digits of MNIST, 28x28 grey, shipped: trained on the train split."""
    return resized(_shipped("mnist"), size)


@GENERATORS.register("untrained")
def untrained(_progress: Progress, *, channels: int = 3, size: int = 32, seed: int = 0) -> Generator:
    """DCGAN with random weights, which has learned nothing: the control for what a generator's training adds."""
    model = DCGAN(channels=channels, height=size, width=size)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=rng) * (2 / weight[0].numel()) ** 0.5)
    return model


@GENERATORS.register("file")
def file(_progress: Progress, *, path: str, size: int | None = None) -> Generator:
    """Your own, as written by `gradveil generator train`."""
    return resized(load_generator(Path(path).expanduser()), size)


def _shipped(name: str) -> Generator:
    with resources.as_file(resources.files("gradveil.generators") / "weights" / f"{name}.safetensors") as path:
        return load_generator(path)


class Resized(Generator):
    """Images of another generator as [C, size, size]: each pixel is the mean of the area that it covers.

    For attacks on private images that are smaller than the drawn ones.
    """

    def __init__(self, inner: Generator, size: int) -> None:
        super().__init__()
        channels, height, width = inner.shape
        if height != width or not 1 <= size <= height:
            raise GradveilError(
                f"generator: size is from 1 to the side of square images, not {size} of {height}x{width}"
            )
        self.inner = inner
        self.latent, self.classes, self.stages, self.card = inner.latent, inner.classes, inner.stages, inner.card
        self.shape = (channels, size, size)

    def stage(self, name: str, features: Tensor, wanted: Tensor | None) -> Tensor:
        out = self.inner.stage(name, features, wanted)
        return F.adaptive_avg_pool2d(out, self.shape[1:]) if name == self.stages[-1] else out

    def codes(self, count: int, rng: torch.Generator) -> Tensor:
        return self.inner.codes(count, rng)


def resized(generator: Generator, size: int | None) -> Generator:
    """The generator itself where no size is asked for."""
    return generator if size is None else Resized(generator, size)


def save_generator(path: Path, model: DCGAN, card: Mapping[str, Any]) -> None:
    """Write a trained generator; ``card`` says what it was trained on, how long, and how good it is."""

    def halved(name: str, tensor: Tensor) -> Tensor:
        """Statistics stay as they are, because their range is wider than their use."""
        return tensor if "running" in name or not tensor.is_floating_point() else tensor.half()

    tensors = {name: halved(name, tensor) for name, tensor in model.state_dict().items()}
    write_tensors(path, KIND, tensors, {"architecture": "dcgan", "options": model.options, "card": dict(card)})


def load_generator(path: Path) -> DCGAN:
    """The generator of a file in eval mode, with its card.

    A file is hostile until checked: options are whole numbers within reason, and shapes are compared before anything
    is loaded.
    """

    def check(meta: Json, shapes: Shapes) -> None:
        options = meta.get("options")
        if meta.get("architecture") != "dcgan" or not isinstance(options, dict) or options.keys() != _LARGEST.keys():
            raise BadFileError(f"{path}: its header names no generator that is known here")
        for name, largest in _LARGEST.items():
            value = options[name]
            if not (name == "classes" and value is None) and (type(value) is not int or not 1 <= value <= largest):
                raise BadFileError(f"{path}: its header has an impossible {name!r}")
        try:
            with torch.device("meta"):
                wanted = {name: tuple(tensor.shape) for name, tensor in DCGAN(**options).state_dict().items()}
        except (GradveilError, RuntimeError) as error:
            raise BadFileError(f"{path}: its header is impossible: {error}") from None
        for name in sorted(wanted.keys() | shapes.keys()):
            if wanted.get(name) != shapes.get(name):
                raise BadFileError(f"{path}: tensor {name!r} does not fit the architecture that its header names")

    tensors, meta = read_tensors(path, KIND, check=check)
    model = DCGAN(**meta["options"])
    model.load_state_dict(tensors)
    card = meta.get("card")
    model.card = card if isinstance(card, dict) else {}
    return model.eval().requires_grad_(False)


def draw_sheet(generator: Generator, *, rows: int = 10, seed: int = 0, progress: Progress = SILENT) -> bytes:
    """A PNG of ``rows`` times ten images; the seed decides the codes. With classes, each column is one of them.

    Other than three channels are shown as grey.
    """
    device = next(generator.parameters()).device
    codes = generator.codes(rows * COLUMNS, seeded(seed, "sheet")).to(device).view(rows, COLUMNS, -1)
    labels = torch.arange(COLUMNS, device=device) % (generator.classes or 1)
    drawn = []
    with torch.no_grad(), progress.task("drawing", rows) as task:
        for row in codes:
            drawn.append(generator.decode(row, labels).cpu())
            task.advance()
    images = torch.stack(drawn)
    grey = images if images.shape[2] == 3 else images.mean(dim=2, keepdim=True)
    pixels = (grey * 255).round().byte().permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2).numpy()
    png = io.BytesIO()
    Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[..., 0]).save(png, format="PNG")
    return png.getvalue()
