"""Vocabulary: types, named-tensor arithmetic, registries, seeding, progress, errors."""
