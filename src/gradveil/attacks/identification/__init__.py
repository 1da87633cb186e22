"""Attacks by an adversary who holds candidates: it does not draw the private example, it recognizes it in a list."""

import gradveil.attacks.identification.attack
import gradveil.attacks.identification.fingerprint  # noqa: F401  (each registers its own)
