"""Generators: from a latent code to images, the prior of generative attacks."""

from gradveil.generators import biggan, progan, shipped, stylegan2  # noqa: F401  (each registers its generators)
from gradveil.generators.base import Generator
from gradveil.generators.registry import GENERATORS, build
from gradveil.generators.resized import Resized
from gradveil.generators.sheet import draw_sheet
from gradveil.generators.storage import load_generator, save_generator

__all__ = ["GENERATORS", "Generator", "Resized", "build", "draw_sheet", "load_generator", "save_generator"]
