"""Gradient matching by an adversary who knows the defense, and the counter-move against each."""

from gradveil.attacks.informed.attack import Informed
from gradveil.attacks.informed.moves import COUNTER_MOVES, CounterMove, answers

__all__ = ["COUNTER_MOVES", "CounterMove", "Informed", "answers"]
