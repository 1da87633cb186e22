"""Attacks by a dishonest server, which crafts what it broadcasts. Importing this package registers all of them."""

from gradveil.attacks.active import fishing, imprint, trap  # noqa: F401  (each registers its own)
