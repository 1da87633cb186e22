from __future__ import annotations

import builtins
import ctypes
import itertools
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from gradveil.core.errors import GradveilError, NotAvailableError
from gradveil.defenses import accounting
from gradveil.defenses.accounting import Guarantee, Ledger, guarantee

pytest.importorskip("dp_accounting")


def ledger_of(*entries: tuple[float, float, int]) -> Ledger:
    ledger = Ledger()
    for entry in entries:
        ledger.add(*entry)
    return ledger


def delta_of_one_step(sigma: float, rate: float, epsilon: float) -> float:
    """The exact delta of one sampled step, by integration, whichever of the two neighbours is the one without."""

    def mixed(x: float) -> float:
        return float((1 - rate) * norm.pdf(x, 0, sigma) + rate * norm.pdf(x, 1, sigma))

    def plain(x: float) -> float:
        return float(norm.pdf(x, 0, sigma))

    ends, found = (-12 * sigma, 1 + 12 * sigma), []
    for one, other in ((mixed, plain), (plain, mixed)):
        over = quad(
            lambda x, p=one, q=other: max(0.0, p(x) - math.exp(epsilon) * q(x)), *ends, limit=500, points=[0, 1]
        )
        found.append(over[0])
    return max(found)


@pytest.mark.parametrize("steps", [1, 3, 100])
@pytest.mark.parametrize("sigma", [0.5, 1.1, 8.0, 50.0])
def test_at_rate_one_epsilon_is_exact(sigma: float, steps: int) -> None:
    """Such steps are one Gaussian mechanism, whose delta has a formula (Balle and Wang, ICML 2018)."""
    found, mu = guarantee(sigma=sigma, sample_rate=1, steps=steps), math.sqrt(steps) / sigma

    def delta(epsilon: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))

    assert found.accountant == "gaussian"
    assert delta(found.epsilon) <= 1e-5 * (1 + 1e-6)
    assert delta(found.epsilon * 0.999) > 1e-5


@pytest.mark.parametrize("rate", [0.01, 0.3])
@pytest.mark.parametrize("sigma", [0.5, 1.1, 4.0])
def test_one_sampled_step_is_never_below_the_integral_and_close_to_it(sigma: float, rate: float) -> None:
    epsilon = ledger_of((sigma, rate, 1)).spent(1e-5)
    assert delta_of_one_step(sigma, rate, epsilon) <= 1e-5
    assert delta_of_one_step(sigma, rate, epsilon * 0.98) > 1e-5


@pytest.mark.integration
@pytest.mark.parametrize(
    "entries",
    [
        [(1.1, 0.01, 1000)],
        [(0.6, 0.001, 10_000)],
        [(2.0, 0.1, 500)],
        [(4.0, 0.5, 50)],
        [(1.1, 0.01, 500), (0.8, 0.02, 100)],
        [(1.1, 0.01, 500), (2.0, 1.0, 2)],
    ],
)
def test_epsilon_lies_between_both_ends_of_opacus(entries: list[tuple[float, float, int]]) -> None:
    """Its prv accountant gives a lower end of the true epsilon, its rdp accountant an upper end."""
    opacus = pytest.importorskip("opacus.accountants")
    fine, coarse = opacus.PRVAccountant(), opacus.RDPAccountant()
    fine.history = coarse.history = entries
    for delta in (1e-5, 1e-6):
        found = ledger_of(*entries).guarantee(delta)
        with np.errstate(divide="ignore"):  # at rate 1 it takes the logarithm of 0
            low, estimate, _ = fine._get_dprv(0.01, delta / 1000).compute_epsilon(delta, delta / 1000, 0.01)
        assert low < found.epsilon < coarse.get_epsilon(delta=delta)
        assert found.epsilon == pytest.approx(estimate, rel=0.01)
        assert found.accountant == "pld"


def test_before_any_step_nothing_is_spent_and_no_noise_spends_all() -> None:
    ledger = Ledger()
    assert (ledger.spent(1e-5), ledger.state(), ledger.steps) == (0.0, [], 0)
    ledger.add(1.1, 0.5, steps=0)
    assert (ledger.spent(1e-5), ledger.state()) == (0.0, [])
    ledger.add(0.0, 0.01)
    assert ledger.spent(1e-5) == math.inf
    ledger.add(5.0, 0.01)
    assert ledger.spent(1e-5) == math.inf


def test_the_order_of_adding_changes_nothing() -> None:
    entries = [(1.1, 0.01, 30), (2.0, 1.0, 1), (1.1, 0.02, 5), (1.1, 0.01, 7)]
    ledgers = [ledger_of(*order) for order in itertools.permutations(entries)]
    assert {json.dumps(ledger.state()) for ledger in ledgers} == {"[[1.1, 0.01, 37], [1.1, 0.02, 5], [2.0, 1.0, 1]]"}
    assert len({ledger.spent(1e-5) for ledger in ledgers}) == 1


def test_steps_are_counted_one_by_one_as_all_at_once() -> None:
    one_by_one = Ledger()
    for _ in range(200):
        one_by_one.add(1.1, 0.05)
    assert one_by_one.state() == [[1.1, 0.05, 200]]
    assert one_by_one.spent(1e-5) == guarantee(sigma=1.1, sample_rate=0.05, steps=200).epsilon


def test_more_steps_less_noise_and_a_higher_rate_cost_more() -> None:
    base = ledger_of((1.1, 0.05, 100)).spent(1e-5)
    for worse in [(1.1, 0.05, 150), (1.0, 0.05, 100), (1.1, 0.07, 100), (1.1, 1.0, 100)]:
        assert ledger_of(worse).spent(1e-5) > base
    assert ledger_of((1.1, 0.05, 100)).spent(1e-7) > base
    assert ledger_of((1.1, 0.05, 100), (3.0, 0.05, 50)).spent(1e-5) > base


@pytest.mark.integration
def test_epsilon_grows_with_every_step() -> None:
    found = [ledger_of((1.1, 0.02, steps)).spent(1e-5) for steps in (1, 2, 5, 10, 11, 12, 100, 101, 1000, 1001)]
    assert found == sorted(found)


def test_a_state_survives_a_file() -> None:
    ledger = ledger_of((1.1, 0.01, 500), (0.7, 1, 3), (1e-300, 1e-300, 1))
    again = Ledger.restored(json.loads(json.dumps(ledger.state())))
    assert again.state() == ledger.state()
    again.add(1.1, 0.01)
    ledger.add(1.1, 0.01)
    assert again.spent(1e-5) == ledger.spent(1e-5)


def test_ledgers_of_the_same_data_merge() -> None:
    ledger = ledger_of((1.1, 0.01, 500), (2.0, 1.0, 1))
    ledger.merge(ledger_of((1.1, 0.01, 100), (3.0, 1.0, 2)))
    assert ledger.state() == [[1.1, 0.01, 600], [2.0, 1.0, 1], [3.0, 1.0, 2]]
    assert ledger.steps == 603


@pytest.mark.parametrize(
    "state",
    [
        None,
        "[]",
        {"steps": 3},
        7,
        [3],
        ["abc"],
        [[1.1, 0.1]],
        [[1.1, 0.1, 1, 1]],
        [[1.1, 0.1, -1]],
        [[1.1, 0.1, 1.0]],
        [[1.1, 0.1, True]],
        [[1.1, 0.1, 10**5000]],
        [[10**5000, 0.1, 1]],
        [[-1.0, 0.1, 1]],
        [[math.nan, 0.1, 1]],
        [[math.inf, 0.1, 1]],
        [[True, 0.1, 1]],
        [["1.1", 0.1, 1]],
        [[1.1, 0.0, 1]],
        [[1.1, 1.1, 1]],
        [[1.1, math.nan, 1]],
        [[1.1, None, 1]],
        [[1.1, 0.1, 1], [[1.1], 0.1, 1]],
        [[1.1, 0.1, "x\n" * 1000]],
    ],
)
def test_a_state_that_is_none_is_refused_in_one_short_line(state: object) -> None:
    with pytest.raises(GradveilError) as caught:
        Ledger.restored(state)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 160


@pytest.mark.parametrize("delta", [0, 1, -1e-5, 2.0, math.nan, math.inf, True, "1e-5", None])
def test_a_delta_out_of_range_is_refused(delta: Any) -> None:
    for ledger in (Ledger(), ledger_of((1.1, 1.0, 1))):
        with pytest.raises(GradveilError, match="delta is above 0 and below 1"):
            ledger.spent(delta)


@pytest.mark.integration
@settings(max_examples=60, deadline=None)
@given(
    entries=st.lists(
        st.tuples(
            st.floats(0, 1e308),
            st.one_of(st.just(1.0), st.floats(5e-324, 1.0)),
            st.one_of(st.integers(0, 2000), st.integers(0, 10**15)),
        ),
        max_size=3,
    ),
    delta=st.floats(5e-324, 0.999),
)
def test_epsilon_is_a_number_whatever_was_entered(entries: list[tuple[float, float, int]], delta: float) -> None:
    ledger = ledger_of(*entries)
    epsilon = ledger.spent(delta)
    assert epsilon >= 0  # false for NaN
    without_sampling = ledger_of(*((sigma, 1.0, steps) for sigma, _, steps in entries))
    assert epsilon <= without_sampling.spent(delta)


def test_sampling_never_costs_more_not_even_by_a_rounding_error() -> None:
    """At rate 1 steps of one sigma are one entry, sampled at two rates they are two: both must add up alike."""
    for first, second in itertools.product(range(1, 5), repeat=2):
        sampled = ledger_of((1e-110, 0.5, first), (1e-110, 0.25, second)).spent(1e-5)
        assert sampled == ledger_of((1e-110, 1.0, first + second)).spent(1e-5)


@pytest.mark.parametrize(
    ("entry", "accountant"),
    [
        ((1.1, 0.5, 10**6), "rdp"),  # an epsilon in the hundred thousands
        ((1.1, 1e-3, 10**7), "rdp"),  # more steps than the finer count's rounding allows
        ((1e-3, 0.5, 10), "gaussian"),  # so little noise that sampling does not help
    ],
)
def test_where_the_finer_count_cannot_be_had_it_says_what_stands_in(
    entry: tuple[float, float, int], accountant: str
) -> None:
    found = ledger_of(entry).guarantee(1e-5)
    assert found.accountant == accountant
    assert 0 < found.epsilon < math.inf


def test_millions_of_steps_take_seconds() -> None:
    ledger_of((1.1, 0.01, 1)).spent(1e-5)  # loads the library
    started, ledger = time.process_time(), Ledger()
    for _ in range(200_000):
        ledger.add(1.3, 0.001)
    for entry in [(1.3, 0.001, 10**6), (1.1, 0.001, 10**7), (1.1, 1e-5, 10**9), (50.0, 1.0, 10**8)]:
        ledger.add(*entry)
        assert 0 < ledger.spent(1e-5) < math.inf
    assert time.process_time() - started < 30


@pytest.mark.integration
def test_noise_that_changes_at_every_step_is_counted_from_above() -> None:
    ledger, started = Ledger(), time.process_time()
    for number in range(5000):
        ledger.add(1.0 + number / 5000, 0.01 + number * 1e-7)
    epsilon = ledger.spent(1e-5)
    assert time.process_time() - started < 60
    assert ledger_of((2.0, 0.01, 5000)).spent(1e-5) < epsilon < ledger_of((0.9, 0.011, 5000)).spent(1e-5)
    halves = ledger_of((1.0, 0.0105, 2500), (1.5, 0.0105, 2500))  # each half no better than its own noise
    assert epsilon < 1.1 * halves.spent(1e-5)


def test_threads_lose_no_step() -> None:
    ledger = Ledger()

    def work() -> None:
        for _ in range(2000):
            ledger.add(1.1, 1.0)
            ledger.state()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.state() == [[1.1, 1.0, 16_000]]


def in_a_fork(work: Callable[[], object], fork: Callable[[], int] = os.fork) -> Any:
    """What a function returns in a forked process, by way of JSON, as a checkpoint would be handed back."""
    reader, writer = os.pipe()
    child = fork()
    if child == 0:
        try:
            signal.alarm(20)  # in case that it waits for a lock
            os.write(writer, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return json.loads(found)


def history_after(ledger: Ledger, steps: int) -> object:
    ledger.add(1.1, 1.0, steps)
    return ledger.history()


@pytest.mark.parametrize("fork", [os.fork, ctypes.PyDLL(None).fork], ids=["by Python", "behind Python's back"])
def test_steps_of_forks_count_in_the_process_that_made_them(fork: Callable[[], int]) -> None:
    """Each round trains in a process of its own, and the parent goes on from its checkpoint."""
    ledger = Ledger()
    ledger.add(2.0, 1.0)
    for number in range(1, 4):
        history = in_a_fork(lambda: history_after(ledger, 10), fork)
        for _ in range(2):  # the second time it counts no more
            ledger.recall(history)
        assert ledger.state() == [[1.1, 1.0, 10 * number], [2.0, 1.0, 1]]


def test_forks_of_one_process_and_forks_of_forks_all_count_in_another_process() -> None:
    ledger, other = ledger_of((1.1, 1.0, 5)), Ledger()
    run = ledger.run

    def forked() -> object:
        ledger.add(1.1, 1.0, 10)
        return [in_a_fork(lambda: history_after(ledger, 100)), history_after(ledger, 1000), ledger.run]

    grandchild, child, of_child = in_a_fork(forked)
    sibling, of_sibling = in_a_fork(lambda: [history_after(ledger, 10_000), ledger.run])
    assert ledger.run == run
    assert len({run, of_child, of_sibling}) == 3
    for history in (grandchild, sibling, child, ledger.history()):
        other.recall(history)
    assert other.state() == [[1.1, 1.0, 11_115]]


def test_a_fork_that_does_nothing_and_an_older_history_change_nothing() -> None:
    ledger = ledger_of((1.1, 1.0, 5))
    before = ledger.history()
    ledger.add(1.1, 1.0, 5)
    ledger.recall(in_a_fork(ledger.history))
    ledger.recall(before)
    assert ledger.state() == [[1.1, 1.0, 10]]


def test_what_a_history_says_of_the_own_run_counts_if_it_is_more() -> None:
    ledger = ledger_of((1.1, 1.0, 5))
    ledger.recall({ledger.run: [[1.1, 1.0, 7], [2.0, 1.0, 1]]})
    assert ledger.state() == [[1.1, 1.0, 7], [2.0, 1.0, 1]]


def test_a_fork_waits_for_no_thread_of_its_parent() -> None:
    ledger, stop = Ledger(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            ledger.add(1.1, 1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            history = in_a_fork(lambda: [ledger.run, history_after(ledger, 3)])
            assert history[1][history[0]] == [[1.1, 1.0, 3]]
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_threads_of_a_fork_share_one_run() -> None:
    ledger = Ledger()

    def forked() -> object:
        threads = [threading.Thread(target=ledger.add, args=(1.1, 1.0)) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ledger.history()

    assert [list(steps) for steps in in_a_fork(forked).values()] == [[[1.1, 1.0, 50]]]


def test_counting_is_silent(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    accounting._counted.cache_clear()
    with caplog.at_level(logging.DEBUG):
        assert ledger_of((8.0, 0.5, 100)).spent(1e-5) < 3  # RDP leaves orders out here
        assert ledger_of((1000.0, 1.0, 1)).spent(1e-5) < 0.01
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def without_the_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = builtins.__import__

    def refusing(name: str, *rest: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "dp_accounting":
            raise ImportError(name)
        return real(name, *rest, **named)

    accounting._counted.cache_clear()
    accounting._library.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refusing)
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("without_the_library")
def test_without_the_library_the_ledger_works_and_counting_says_what_is_missing() -> None:
    ledger = ledger_of((1.1, 0.01, 500))
    assert Ledger.restored(ledger.state()).state() == [[1.1, 0.01, 500]]
    with pytest.raises(NotAvailableError, match="pip install dp-accounting"):
        ledger.spent(1e-5)
    assert Ledger().guarantee(1e-5) == Guarantee(0.0, 1e-5, "gaussian")
