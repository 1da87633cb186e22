"""Gradveil shows what a federated-learning update gives away about the private data behind it, and stops it."""

__version__ = "0.1.0"
