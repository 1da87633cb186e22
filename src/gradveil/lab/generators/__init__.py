"""Generators beyond the shipped ones: training, quality, and adapters for published checkpoints."""
