"""Generators: from a latent code to images, the prior of generative attacks."""

from gradveil.generators.base import Generator

__all__ = ["Generator"]
