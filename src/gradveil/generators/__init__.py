"""Generators: from a latent code to images, the prior of generative attacks."""

from gradveil.generators.base import Generator
from gradveil.generators.dcgan import DCGAN
from gradveil.generators.store import (
    GENERATORS,
    Resized,
    build,
    draw_sheet,
    load_generator,
    resized,
    save_generator,
)

__all__ = [
    "DCGAN",
    "GENERATORS",
    "Generator",
    "Resized",
    "build",
    "draw_sheet",
    "load_generator",
    "resized",
    "save_generator",
]
