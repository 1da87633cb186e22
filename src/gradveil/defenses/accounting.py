"""How much privacy was spent: a ledger of noisy steps, and the (epsilon, delta) that they come to together.

One entry of the ledger is a Gaussian mechanism: noise of sigma times what one example can change, on examples that
were drawn independently with probability ``sample_rate`` (Poisson sampling). Who cannot promise such draws, kept
secret, adds steps at rate 1. Two data sets are neighbours if one of them lacks one example.

Google's ``dp-accounting`` counts. Every epsilon here is an upper bound (docs/decisions/0015).
"""

from __future__ import annotations

import functools
import logging
import math
import os
import secrets
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradveil.core.errors import GradveilError, NotAvailableError

Entry = tuple[float, float, int]
"""Sigma, sample rate, number of steps."""

MOST_STEPS = 10**15
"""Of one entry: above, numbers of steps are no longer exact as floats."""
FINE_EPSILON = 1e5
"""Up to which epsilon by RDP the finer count is tried: above, nobody is promised anything."""
FINE_STEPS = 1e11
"""Times delta: up to so many steps the rounding of the finer count stays far below a hundredth of delta."""
GRID, COARSEST = 2**20, 0.05
"""Points that a privacy loss distribution may have, and the interval between them that is fine enough for any."""
DISTINCT = 32
"""Sampled mechanisms that are counted as they are; more of them are first rounded to fewer that cost more."""
LOWEST_RATE, HIGHEST_SIGMA = 1e-9, 1e6
"""Lower rates and more noise are counted as these."""


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta) differential privacy towards one example that takes part or not, and how it was counted.

    ``accountant`` is gaussian (exact, all steps at rate 1), pld (privacy loss distribution) or rdp (Renyi, looser).
    """

    epsilon: float
    delta: float
    accountant: str


class Ledger:
    """The noisy steps that were taken on one client's data. Safe to use from several threads, and after a fork.

    >>> ledger = Ledger()
    >>> ledger.add(1.1, 0.01, steps=600)
    >>> ledger.add(1.1, 0.01, steps=400)
    >>> ledger.state()
    [[1.1, 0.01, 1000]]
    """

    def __init__(self) -> None:
        self._runs: dict[str, dict[tuple[float, float], int]] = {}
        self._processes: dict[int, tuple[str, threading.Lock]] = {}
        self._process()  # now: forks that are made before the first step tell this process from theirs

    def add(self, sigma: float, sample_rate: float, steps: int = 1) -> None:
        """Enter steps with noise of ``sigma`` times what one example can change."""
        sigma, sample_rate, steps = _checked(sigma, sample_rate, steps)
        if steps:
            run, lock = self._process()
            with lock:
                own = self._runs.setdefault(run, {})
                own[sigma, sample_rate] = own.get((sigma, sample_rate), 0) + steps

    def history(self) -> dict[str, list[list[float | int]]]:
        """The steps of each run that had a part in a training, for a checkpoint."""
        with self._process()[1]:
            return {
                run: [[*key, steps] for key, steps in sorted(own.items())] for run, own in self._runs.items() if own
            }

    def recall(self, history: object) -> None:
        """Take in what a checkpoint says of all runs: what was spent stays spent, and counts once.

        Raises:
            GradveilError: if this is not what :meth:`history` gave.
        """
        if not isinstance(history, dict) or not all(isinstance(run, str) for run in history):
            raise GradveilError(f"a privacy history maps runs to their steps, not {_shown(history)}")
        restored = {run: Ledger.restored(state)._entries() for run, state in history.items()}
        with self._process()[1]:
            for run, entries in restored.items():
                known = self._runs.setdefault(run, {})
                for sigma, sample_rate, steps in entries:
                    known[sigma, sample_rate] = max(steps, known.get((sigma, sample_rate), 0))

    def merge(self, other: Ledger) -> None:
        """Enter all steps of another ledger that were taken on the same data."""
        for sigma, sample_rate, steps in other._entries():
            self.add(sigma, sample_rate, steps)

    @property
    def run(self) -> str:
        """Names the process that adds to this ledger, so that its steps are never counted twice."""
        return self._process()[0]

    @property
    def steps(self) -> int:
        """How many steps were entered, whatever their noise."""
        return sum(steps for _, _, steps in self._entries())

    def spent(self, delta: float) -> float:
        """Epsilon of all steps together, never too small; 0 before the first, infinite if one had no noise."""
        return self.guarantee(delta).epsilon

    def guarantee(self, delta: float) -> Guarantee:
        """Epsilon of all steps together, and how it was counted."""
        check_delta(delta)
        return _counted(self._entries(), delta)

    def power(self, level: float) -> float:
        """How likely one example's part can make what has probability ``level`` without it: never too small.

        >>> ledger = Ledger()
        >>> ledger.add(1.0, 1.0)
        >>> round(ledger.power(0.01), 3)
        0.092
        """
        if not 0 <= level <= 1:
            raise GradveilError(f"a level is from 0 to 1, not {_shown(level)}")
        return _powers(self._entries(), level)

    def advantage(self) -> float:
        """The most that one example's part can change the probability of anything: never too small."""
        return _advantage(self._entries())

    def state(self) -> list[list[float | int]]:
        """[sigma, sample rate, steps] of each mechanism, whatever the order of adding; a JSON file can hold it."""
        return [list(entry) for entry in self._entries()]

    @classmethod
    def restored(cls, state: object) -> Ledger:
        """A ledger from what :meth:`state` gave, perhaps by way of a file.

        Raises:
            GradveilError: if this is no such state.
        """
        if not isinstance(state, list | tuple):
            raise GradveilError(f"a privacy ledger is a list of [sigma, sample rate, steps], not {_shown(state)}")
        ledger = cls()
        for entry in state:
            if not isinstance(entry, list | tuple) or len(entry) != 3:
                raise GradveilError(f"a privacy ledger holds [sigma, sample rate, steps], not {_shown(entry)}")
            ledger.add(*entry)
        return ledger

    def _process(self) -> tuple[str, threading.Lock]:
        """The run and the lock of this process.

        A fork gets its own of both: under its parent's run its steps would be taken for those of the parent, and a
        thread that held the lock is not there to release it. ``setdefault`` is one step, so threads get the same.
        """
        number = os.getpid()
        return self._processes.get(number) or self._processes.setdefault(
            number, (secrets.token_hex(8), threading.Lock())
        )

    def _entries(self) -> tuple[Entry, ...]:
        with self._process()[1]:
            total: Counter[tuple[float, float]] = Counter()
            for own in self._runs.values():
                total.update(own)
        return tuple((*mechanism, steps) for mechanism, steps in sorted(total.items()))


def guarantee(*, sigma: float, sample_rate: float, steps: int, delta: float = 1e-5) -> Guarantee:
    """What so many equal steps come to."""
    ledger = Ledger()
    ledger.add(sigma, sample_rate, steps)
    return ledger.guarantee(delta)


def check_delta(delta: float) -> None:
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 < delta < 1:
        raise GradveilError(f"delta is above 0 and below 1, not {_shown(delta)}")


def check_rate(sample_rate: float) -> None:
    if isinstance(sample_rate, bool) or not isinstance(sample_rate, int | float) or not 0 < sample_rate <= 1:
        raise GradveilError(f"sample_rate is above 0 and at most 1, not {_shown(sample_rate)}")


def _checked(sigma: float, sample_rate: float, steps: int) -> Entry:
    if isinstance(sigma, bool) or not isinstance(sigma, int | float) or not 0 <= sigma <= _LARGEST:
        raise GradveilError(f"sigma is a finite number of at least 0, not {_shown(sigma)}")
    check_rate(sample_rate)
    if type(steps) is not int or not 0 <= steps <= MOST_STEPS:
        raise GradveilError(f"steps is a whole number from 0 to {MOST_STEPS}, not {_shown(steps)}")
    return float(sigma), float(sample_rate), steps


_LARGEST = float.fromhex("0x1.fffffffffffffp+1023")


def _shown(value: object) -> str:
    """A value from outside in one short line; a whole number of thousands of digits cannot even be printed."""
    text = "a huge number" if isinstance(value, int) and value.bit_length() > 128 else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@functools.lru_cache(maxsize=1024)
def _counted(entries: tuple[Entry, ...], delta: float) -> Guarantee:
    """The smallest of the upper bounds that can be had.

    Sampling only helps, so that the exact epsilon of the same steps at rate 1 is a bound that always exists.
    """
    if not entries:
        return Guarantee(0.0, delta, "gaussian")
    if any(sigma == 0 for sigma, _, _ in entries):
        return Guarantee(math.inf, delta, "gaussian")
    with np.errstate(all="ignore"):  # what overflows ends in infinity, and another bound stands in for it
        best = Guarantee(_gaussian(entries, delta), delta, "gaussian")
        if best.epsilon == 0 or all(rate == 1 for _, rate, _ in entries):
            return best
        merged = _merged(entries)
        for accountant, bound in (("rdp", _renyi), ("pld", _loss_distribution)):
            epsilon = bound(merged, delta, best.epsilon)
            if epsilon < best.epsilon:  # false for NaN
                best = Guarantee(max(0.0, epsilon), delta, accountant)
    return best


def _gaussian(entries: tuple[Entry, ...], delta: float) -> float:
    """Exact, with every step at rate 1: together such steps are one Gaussian mechanism with noise 1 / mu."""
    mu = _mu(entries)
    if mu > 1000:  # beyond what the exact formula can compute; that of concentrated privacy (Bun and Steinke, 2016)
        return mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta))
    if mu < 1e-300:
        return 0.0
    return float(_library().get_epsilon_gaussian(1 / mu, delta)) * (1 + 1e-9)  # a root is found from either side


def _mu(entries: tuple[Entry, ...]) -> float:
    total: Counter[float] = Counter()  # by sigma: whatever the rates of steps, their sum is rounded in the same way
    for sigma, _, steps in entries:
        total[sigma] += steps
    return math.hypot(*(math.sqrt(steps) / sigma for sigma, steps in total.items()))


@functools.lru_cache(maxsize=1024)
def _powers(entries: tuple[Entry, ...], level: float) -> float:
    """The trade-off function of Gaussian noise, or that of (epsilon, delta) at the best epsilon if it is lower."""
    if any(sigma == 0 for sigma, _, _ in entries):
        return 1.0
    if not entries or level in (0, 1):
        return level
    from scipy.special import ndtr, ndtri

    best = float(ndtr(ndtri(level) + _mu(entries)))
    for epsilon, delta in _tradeoffs(entries):
        best = min(best, math.exp(epsilon) * level + delta)
    return min(1.0, best * (1 + 1e-9))


@functools.lru_cache(maxsize=1024)
def _advantage(entries: tuple[Entry, ...]) -> float:
    if not entries:
        return 0.0
    if any(sigma == 0 for sigma, _, _ in entries):
        return 1.0
    return min(1.0, math.erf(_mu(entries) / math.sqrt(8)) * (1 + 1e-9), *(d for e, d in _tradeoffs(entries) if e == 0))


@functools.lru_cache(maxsize=64)
def _tradeoffs(entries: tuple[Entry, ...]) -> tuple[tuple[float, float], ...]:
    """Pairs of epsilon and delta that sampled steps have together; none where the Gaussian bound is exact."""
    if all(rate == 1 for _, rate, _ in entries):
        return ()
    epsilons = np.concatenate([[0.0], np.geomspace(1e-3, 20, 200)])
    with np.errstate(all="ignore"):
        try:
            whole = _composed(_merged(entries), 1e-6, _gaussian(entries, 1e-6))
            found = [] if whole is None else whole.get_delta_for_epsilon(epsilons)
        except (ArithmeticError, ValueError, MemoryError):
            return ()
    return tuple((float(e), float(d) + 1e-7) for e, d in zip(epsilons, found, strict=False) if math.isfinite(d))


def _merged(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The same steps as fewer mechanisms, or as some that cost more.

    All steps at rate 1 are one mechanism. If there are still many different ones, sigma is rounded down and the rate
    up, to powers of 1.05 or of more. Beyond ``LOWEST_RATE`` and ``HIGHEST_SIGMA`` rounding errors would decide.
    """
    entries = tuple((min(sigma, 1e100), rate, steps) for sigma, rate, steps in entries)  # squares stay finite
    whole = [math.sqrt(steps) / sigma for sigma, rate, steps in entries if rate == 1]
    merged = {(1 / math.hypot(*whole), 1.0): 1} if whole else {}
    sampled: Counter[tuple[float, float]] = Counter()
    for sigma, rate, steps in entries:
        if rate < 1:
            sampled[min(sigma, HIGHEST_SIGMA), max(rate, LOWEST_RATE)] += steps
    together, width = sampled, math.log(1.05)
    while len(together) > DISTINCT:
        together = Counter()
        for (sigma, rate), steps in sampled.items():
            less = min(sigma, math.exp(width * math.floor(math.log(sigma) / width)))
            more = min(1.0, max(rate, math.exp(width * math.ceil(math.log(rate) / width))))
            together[less, more] += steps
        width *= 2
    return tuple((*mechanism, steps) for mechanism, steps in sorted({**together, **merged}.items()))


def _renyi(entries: tuple[Entry, ...], delta: float, _known: float) -> float:
    """By Renyi differential privacy: cheap and loose, for any number of steps."""
    library = _library()
    counting = library.rdp.RdpAccountant()
    try:
        for sigma, rate, steps in entries:
            event = library.GaussianDpEvent(sigma)
            counting.compose(event if rate == 1 else library.PoissonSampledDpEvent(rate, event), steps)
        rounding = 1e-14 * sum(steps for _, _, steps in entries)
        return float(counting.get_epsilon(delta)) + rounding
    except (ArithmeticError, ValueError):
        return math.inf


def _loss_distribution(entries: tuple[Entry, ...], delta: float, known: float) -> float:
    """By privacy loss distributions: tight, where their grid can be fine enough."""
    try:
        whole = _composed(entries, delta, known)
        return math.inf if whole is None else float(whole.get_epsilon_for_delta(0.99 * delta))  # the rest for rounding
    except (ArithmeticError, ValueError, MemoryError):
        return math.inf


def _composed(entries: tuple[Entry, ...], delta: float, known: float) -> Any:
    """The privacy loss distribution of all steps, rounded up onto a grid; None where no grid is fine enough.

    Its interval is a tenth of the deviation of one step's loss, or less where few steps with little noise make up
    epsilon. On any grid the result is an upper bound.
    """
    total = sum(steps for _, _, steps in entries)
    if known > FINE_EPSILON or total > FINE_STEPS * delta:
        return None
    variance = sum(steps * rate**2 * math.expm1(min(50.0, sigma**-2)) for sigma, rate, steps in entries) / total
    reach = max(2 * known, *(10 / sigma + 0.5 / sigma**2 for sigma, _, _ in entries))
    interval = max(reach / GRID, min(math.sqrt(variance) / 10, known / 5000, COARSEST))
    if interval > math.sqrt(variance):
        return None
    interval = 2.0 ** math.floor(math.log2(interval))  # so that the next steps find the same distributions again
    parts = [_distribution(sigma, rate, interval).self_compose(steps) for sigma, rate, steps in entries]
    return functools.reduce(lambda one, other: one.compose(other), parts)


@functools.lru_cache(maxsize=8)
def _distribution(sigma: float, rate: float, interval: float) -> Any:
    """Of one step: it takes longer than composing many."""
    make = _library().pld.privacy_loss_distribution.from_gaussian_mechanism
    return make(sigma, sampling_prob=rate, value_discretization_interval=interval)


@functools.cache
def _library() -> Any:
    try:
        import dp_accounting  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise NotAvailableError("counting epsilon needs dp-accounting: pip install dp-accounting") from error
    # It logs every order that it leaves out. Others count in its place.
    logging.getLogger("absl").addFilter(lambda record: record.module != "rdp_privacy_accountant")
    return dp_accounting
