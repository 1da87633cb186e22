"""Sends spoilt files through every loader and command: no traceback, no hang, no more than 2 GB.

Run ``python scripts/fuzz.py --count 20000``. Every file follows from ``--seed`` and its number, so that
``--only NUMBER`` repeats one. Files are loaded in worker processes, which are started anew after a crash.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SECONDS, PATIENCE = 10, 60
"""What one file may take of the processor, and by the clock before its worker is killed."""
MEMORY = 2 * 2**30
PROCESS_EVERY = 1000
"""Every so many files, one also goes through a command in a process of its own."""


class TooLongError(BaseException):
    """The file is a hang. Not an Exception, so that no loader takes it for damage."""


@dataclass(frozen=True)
class Finding:
    """A file that did something else than load or be refused in one line."""

    number: int
    target: str
    change: str
    what: str

    def __str__(self) -> str:
        return f"{self.number} {self.target} [{self.change[:300]}]\n    {self.what}"


def make_originals(folder: Path) -> None:
    """The good folders that are spoilt, each made by the code that writes such files."""
    from fuzz_targets import ORIGINALS

    for name, make in ORIGINALS.items():
        (folder / name).mkdir(parents=True)
        make(folder / name)


def target_of(number: int) -> str:
    """Targets take turns. Commands, which load the same files in more time, come up less often."""
    from fuzz_targets import TARGETS

    loaders = [name for name in TARGETS if not name.startswith("gradveil")]
    turns = [*loaders * 8, *(name for name in TARGETS if name not in loaders)]
    return turns[number * 31 % len(turns)]


def try_one(number: int, seed: int, originals: Path, scratch: Path) -> Finding | None:
    """Spoil the files of one number, load them, and say what went wrong."""
    from fuzz_mutations import spoil
    from fuzz_targets import TARGETS

    from gradveil.core.errors import GradveilError

    name = target_of(number)
    original, load = TARGETS[name]
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(originals / original, scratch)
    try:
        change = spoil(scratch, random.Random(f"{seed} {number}"))
    except Exception as error:
        return Finding(
            number, name, "the fuzzer itself", f"{type(error).__name__}: {error} {_where(error.__traceback__)}"
        )
    before = os.environ.get("GRADVEIL_CACHE")
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE / 2)
    try:
        load(scratch)
    except GradveilError as error:
        if len(str(error).splitlines()) != 1 or len(str(error)) > 3000:
            return Finding(number, name, change, f"not one line: {str(error)[:300]!r}")
    except TooLongError:
        return Finding(number, name, change, f"hangs: {_where(sys.exc_info()[2])}")
    except Exception as error:
        where = _where(error.__traceback__)
        return Finding(number, name, change, f"{type(error).__name__}: {str(error)[:300]} {where}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.environ["GRADVEIL_CACHE"] = before or str(scratch.parent / "cache")
    return None


def _where(trace: Any) -> str:
    ours = [f for f in traceback.extract_tb(trace) if "site-packages" not in f.filename]
    frames = [f for f in ours if "gradveil" in f.filename or "fuzz" in f.filename]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-4:]))


def serve(pipe: Connection, seed: int, originals: Path, scratch: Path) -> None:
    """A worker: numbers in, findings out, with the memory that it has held at most."""
    import torch

    def too_long(*_: object) -> None:
        raise TooLongError

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(GRADVEIL_OFFLINE="1", GRADVEIL_CACHE=str(scratch.parent / "cache"))
    os.chdir(scratch.parent)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for one in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(one, too_long)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    parent = os.getppid()
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # a fork begins with what its parent holds
    while True:
        while not pipe.poll(1):
            if os.getppid() != parent:  # it was killed, and nobody asks any more
                return
        number = pipe.recv()
        found = try_one(number, seed, originals, scratch)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if found is None and most > max(MEMORY, begun + MEMORY // 8):
            found = Finding(number, target_of(number), "", f"holds {most / 2**30:.1f} GB")
        pipe.send((found, most))


class Worker:
    """A process that loads files one by one, and is started anew when it died, hung or grew."""

    def __init__(self, seed: int, originals: Path, scratch: Path) -> None:
        self._given = (seed, originals, scratch)
        scratch.parent.mkdir(parents=True, exist_ok=True)
        self._process: Any = None
        self.number: int | None = None
        self.most = 0

    def give(self, number: int) -> None:
        if self._process is None:
            self.pipe, other = multiprocessing.Pipe()
            self._process = multiprocessing.get_context("fork").Process(target=serve, args=(other, *self._given))
            self._process.start()
            other.close()
        self.number, self._since = number, time.monotonic()
        self.pipe.send(number)

    @property
    def overdue(self) -> bool:
        return time.monotonic() > self._since + PATIENCE

    def result(self) -> Finding | None:
        """What came of the number; a death or a silence is a finding."""
        assert self.number is not None
        name = target_of(self.number)
        try:
            if not self.pipe.poll(max(0.0, self._since + PATIENCE - time.monotonic())):
                self.stop()
                return Finding(self.number, name, "", f"hangs: no sign of life for {PATIENCE} s")
            found, self.most = self.pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code, self._process = self._process.exitcode, None
            return Finding(self.number, name, "", f"the process ended with {code}")
        if found is not None and "holds" in found.what:
            self.stop()
        return found  # type: ignore[no-any-return]

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def in_a_process(number: int, seed: int, originals: Path, scratch: Path) -> Finding | None:
    """The same kind of file through the command itself: exit 0, 2 or 3, one line, no traceback."""
    from fuzz_mutations import spoil
    from fuzz_targets import TAP

    commands = [
        ("audit", ["report", "DIR"]),
        ("training", ["attack", f"DIR/{TAP}", "--attack", "analytic", "--out", "DIR/found"]),
        ("audit", ["score", "DIR"]),
        ("cases", ["sweep", "DIR/study.yaml", "--status", "--out", "DIR/nothing"]),
        ("training", ["train", "--out", "DIR", "--resume", "--rounds", "1"]),
    ]
    original, words = commands[number // PROCESS_EVERY % len(commands)]
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(originals / original, scratch)
    change = spoil(scratch, random.Random(f"process {seed} {number}"))
    command = [sys.executable, "-m", "gradveil.cli.main", *(word.replace("DIR", str(scratch)) for word in words)]
    environment = {**os.environ, "GRADVEIL_OFFLINE": "1", "GRADVEIL_CACHE": str(scratch.parent / "cache")}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=2 * PATIENCE,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(number, "process " + words[0], change, "hangs")
    last = done.stderr.strip().splitlines()[-1:] or [""]
    good = done.returncode in (0, 3) or (done.returncode == 2 and last[0].startswith("gradveil: "))
    if good and "Traceback" not in done.stderr:
        return None
    return Finding(number, "process " + words[0], change, f"exit {done.returncode}: {done.stderr[-300:]!r}")


def fuzz(
    count: int, seed: int, folder: Path, *, workers: int = 1, first: int = 0, processes: bool = True
) -> Iterator[tuple[int, int, Finding | None]]:
    """Load so many spoilt files; yields the number that is done, the memory held and the finding, one by one."""
    import fuzz_targets  # noqa: F401  (before the workers are forked from here)

    originals = folder / "originals"
    made = multiprocessing.get_context("fork").Process(target=make_originals, args=(originals,))
    made.start()
    made.join()
    if made.exitcode != 0:
        raise RuntimeError("the good files could not be made")
    crew = [Worker(seed, originals, folder / f"worker{i}" / "files") for i in range(workers)]
    waiting, done = iter(range(first, first + count)), 0
    try:
        for worker in crew:
            worker.number = next(waiting, None)
            if worker.number is not None:
                worker.give(worker.number)
        while busy := [worker for worker in crew if worker.number is not None]:
            ready = wait([worker.pipe for worker in busy], timeout=1)
            for worker in [one for one in busy if one.pipe in ready or one.overdue]:
                number = worker.number
                assert number is not None
                found, done = worker.result(), done + 1
                yield done, worker.most, found
                if processes and number % PROCESS_EVERY == 0:
                    yield done, worker.most, in_a_process(number, seed, originals, folder / "process" / "files")
                worker.number = next(waiting, None)
                if worker.number is not None:
                    worker.give(worker.number)
    finally:
        for worker in crew:
            worker.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="how many files (20,000)")
    parser.add_argument("--seed", type=int, default=0, help="decides every change")
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--only", type=int, help="load the file of this number alone, here, with its traceback")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    options = parser.parse_args()
    started, findings, shown = time.monotonic(), [], 0.0
    with tempfile.TemporaryDirectory(prefix="gradveil-fuzz-") as name:
        folder = Path(name)
        if options.only is not None:
            return _repeat(options.only, options.seed, folder)
        most = 0
        for done, held, found in fuzz(
            options.count, options.seed, folder, workers=options.workers, first=options.first
        ):
            most = max(most, held)
            if found is not None:
                findings.append(found)
                print(found, flush=True)
            if time.monotonic() - shown > 10 or done == options.count:
                shown = time.monotonic()
                rate = done / (shown - started)
                left = (options.count - done) / rate
                print(f"{done} of {options.count} files, {len(findings)} findings, {rate:.0f} a second, "
                      f"{left:.0f} s left", file=sys.stderr, flush=True)  # fmt: skip
    kinds = Counter(found.what.partition("<")[0].partition(" ")[0] for found in findings)
    print(f"{options.count} files in {time.monotonic() - started:.0f} s, at most {most / 2**30:.2f} GB held: "
          f"{len(findings)} findings {dict(kinds) or ''}")  # fmt: skip
    return 1 if findings else 0


def _repeat(number: int, seed: int, folder: Path) -> int:
    from fuzz_mutations import spoil
    from fuzz_targets import ORIGINALS, TARGETS

    original, load = TARGETS[target_of(number)]
    os.environ.update(GRADVEIL_OFFLINE="1", GRADVEIL_CACHE=str(folder / "cache"))
    (folder / "files").mkdir()
    ORIGINALS[original](folder / "files")
    print(target_of(number), spoil(folder / "files", random.Random(f"{seed} {number}")))
    print(load(folder / "files"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
