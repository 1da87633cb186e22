"""Kills commands at random moments, goes on with them, and compares what they leave with that of an unbroken run.

    python scripts/kills.py --count 100 --seed 0

Each command runs for real, in a folder and with a cache of its own: an audit, an audit of saved exchanges, a training
with a checkpoint and taps, a sweep, a leaderboard, a download; and two at once in one folder. Every process group gets
SIGKILL at a random moment after it began to write or, every other time, in the middle of a file. After each kill, every
file that has its final name must be whole, and nothing of the command may live on. Then it is started again, killed
again or not, and brought to its end: it must not be refused, and its files must be those of the unbroken run, no more,
no fewer and of equal content. Times are not compared, for they differ from run to run.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # one thread: what is forked from here starts without locks that others hold

import argparse
import hashlib
import importlib
import io
import itertools
import json
import multiprocessing
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gradveil.assets import CATALOGUE, Asset, Package
from gradveil.cli.main import COMMANDS, run
from gradveil.core.locks import LOCK, holder

ATTACK = "ig:iterations=20,restarts=2"
AUDIT = {
    "data": "mnist-samples", "model": "mlp", "images": 2, "gallery": 10, "attacks": [ATTACK, "analytic"],
    "defenses": ["none", "noise:sigma=0.1", "clip:bound=1", "sparsify:rate=0.5"], "budget": "quick", "device": "cpu",
}  # fmt: skip
TRAINING = {
    "data": "mnist-samples", "model": "mlp", "clients": 3, "rounds": 30, "batch_size": 8, "epochs": 1,
    "checkpoint_every": 3, "defense": "noise:sigma=0.01", "tap": ["*@2", "0@*"], "device": "cpu",
}  # fmt: skip
STUDY = {
    "base": {name: value for name, value in AUDIT.items() if name not in ("defenses", "device")},
    "grid": {"seed": [0, 1], "defenses": ["none", "noise:sigma=0.1"]},
}
SETTING = f"""
from gradveil.lab.leaderboard import SETTINGS, Setting

audit = { ({**AUDIT, "unfit": "leave out"} | {"attacks": [ATTACK]})!r}
training = { ({**TRAINING, "rounds": 6} | {"tap": []})!r}
del audit["defenses"], audit["device"], training["defense"], training["device"]
SETTINGS["tiny-mlp-b1"] = Setting("tiny-mlp-b1", "A setting for kills", audit, training)
"""
FILES = {
    "audit.yaml": json.dumps(AUDIT),  # which is YAML too
    "other.yaml": json.dumps({**AUDIT, "model": "lenet", "attacks": [ATTACK]}),
    "training.yaml": json.dumps(TRAINING),
    "study.yaml": json.dumps(STUDY),
    "setting.py": SETTING,
}
TIMES = frozenset({"started", "seconds", "round_seconds", "way", "each", "graph", "strategy"})
"""What may differ from run to run: times, and in the one folder where it is not fixed, the way that was fastest."""
PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}")
SECONDS = 300.0
"""A command that takes longer than this has hung."""
MAIN = "gradveil.cli.main"


@dataclass(frozen=True)
class Scenario:
    """Commands that run in one folder: one after another where nothing is killed, otherwise at once."""

    commands: tuple[str, ...]
    refusable: bool = False
    """Whether the second of two may end with exit code 2, because the first writes there."""
    prepared: str | None = None
    """What is run in the folder before, and never killed."""
    own_cache: bool = False
    """Whether its cache begins empty; otherwise it remembers which way of the engine was fastest."""
    compared: str = ""
    """Where the files lie that have to be equal."""


BOARD = "leaderboard --load setting.py --setting tiny-mlp-b1 --out board --work"
SCENARIOS = {
    "audit": Scenario(("audit audit.yaml --out out --resume",)),
    "train": Scenario(("train training.yaml --out out --resume",)),
    "sweep": Scenario(("sweep study.yaml --out out --workers 2",)),
    "leaderboard": Scenario((f"{BOARD} work none noise:sigma=0.1",)),
    "assets": Scenario(("assets get toy",), own_cache=True),
    "observed": Scenario(
        (f"audit --observations trained --attack {ATTACK} --gallery 10 --budget quick --out out --resume",),
        prepared="train training.yaml --out trained --rounds 3 --algorithm fedsgd --batch-size 2",
    ),
    "two audits": Scenario(("audit audit.yaml --out out --resume",) * 2, refusable=True),
    "two trainings": Scenario(("train training.yaml --out out --resume",) * 2, refusable=True),
    "two sweeps": Scenario(("sweep study.yaml --out out --workers 1",) * 2, refusable=True),
    "two boards": Scenario((f"{BOARD} work1 none", f"{BOARD} work2 noise:sigma=0.1")),
    "two downloads": Scenario(("assets get toy",) * 2, own_cache=True),
    "one cache": Scenario(
        ("audit audit.yaml --out one --resume", "audit other.yaml --out two --resume"),
        own_cache=True,
        compared="cache",
    ),
}


@dataclass
class Tally:
    """What came of one scenario."""

    kills: int = 0
    at_writes: int = 0
    """Kills while a file was being written."""
    midway: int = 0
    """Kills after the command had written some whole file since it was started."""
    chains: int = 0
    """Runs that were killed once or more, and then brought to their end."""
    refused: int = 0
    """Second processes that ended with one line, because another wrote into the folder."""
    remainders: dict[str, int] = field(default_factory=dict)
    """What kills left half-written, by its kind; all of it was gone in the end, or there is a problem."""
    problems: list[str] = field(default_factory=list)


class Started:
    """A command that runs, in a process group of its own. ``warm``: forked from here, with everything loaded."""

    def __init__(self, command: str, place: Path, *, warm: bool) -> None:
        self.command, self.log = command, place.with_name(f"{place.name}-{time.monotonic_ns()}.log")
        environment = {"GRADVEIL_CACHE": str(place / "cache"), "GRADVEIL_OFFLINE": str(int("assets" not in command))}
        self._process: BaseProcess | subprocess.Popen[bytes]
        if warm:
            self._process = FORK.Process(target=_become, args=(command, place, self.log, environment))
            self._process.start()
            return
        load = "from gradveil.cli.main import *; from gradveil.assets import *"
        program = ["-c", f"{load}; CATALOGUE['toy'] = {TOY!r}; run()"] if "toy" in command else ["-m", MAIN]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *program, *command.split()], cwd=place, env={**os.environ, **environment},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode if isinstance(self._process, BaseProcess) else self._process.poll()

    def kill(self) -> bool:
        """SIGKILL to the process group; whether it was alive until then."""
        assert self._process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self.ended() == -signal.SIGKILL

    def ended(self) -> int | None:
        """The exit code of a command that is waited for; None, and it is killed, if it does not end."""
        if not until(lambda: self.code is not None, SECONDS):
            self.kill()
            return None
        return self.code

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace").strip()


def _become(command: str, place: Path, log: Path, environment: dict[str, str]) -> None:
    """The command itself, in a forked process."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.chdir(place)
    os.environ.update(environment)
    sys.argv = ["gradveil", *command.split()]
    run()


def until(condition: Callable[[], object], seconds: float, pause: float = 0.01) -> bool:
    """Wait for it; whether it came."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


class Campaign:
    """Scenarios, each with the files of its unbroken run, and kills at the moments that a seed draws."""

    def __init__(self, home: Path, draw: random.Random, *, warm: bool) -> None:
        self.home, self.draw, self.warm = home, draw, warm
        self.tallies: dict[str, Tally] = {}
        self._whole: dict[str, tuple[dict[str, object], float]] = {}

    @property
    def kills(self) -> int:
        return sum(tally.kills for tally in self.tallies.values())

    @property
    def problems(self) -> list[str]:
        return [problem for tally in self.tallies.values() for problem in tally.problems]

    def chain(self, name: str, most: int) -> None:
        """Kill the commands of a scenario up to ``most`` times, bring them to their end, and compare."""
        scenario, tally = SCENARIOS[name], self.tallies.setdefault(name, Tally())
        wanted, seconds = self._whole[name] if name in self._whole else self._unbroken(name)
        place = self._place(name, scenario)
        tally.chains += 1
        for _ in range(self.draw.randint(1, most)):
            if not self._cycle(scenario, place, seconds, tally):
                break  # it came to its end before its time
        for command in dict.fromkeys(scenario.commands):
            last = Started(command, place, warm=self.warm)
            if last.ended() != 0:
                tally.problems.append(f"{name}: {command} ended with {last.code} after kills: {last.said[-300:]}")
        found = contents(place / scenario.compared)
        differing = sorted(path for path in found.keys() | wanted.keys() if found.get(path) != wanted.get(path))
        if differing:
            tally.problems.append(f"{name}: after kills these differ from an unbroken run: {', '.join(differing[:5])}")
        else:
            shutil.rmtree(place)

    def _cycle(self, scenario: Scenario, place: Path, seconds: float, tally: Tally) -> bool:
        """Start all commands of a scenario, kill one or all; whether any was alive to be killed."""
        before = written(place)
        started = [Started(command, place, warm=self.warm) for command in scenario.commands]
        # Most of a short command is its start: three of four kills wait until it has written something.
        begun = working if self.draw.random() < 0.25 else lambda place: written(place) != before
        until(lambda: begun(place) or all(one.code is not None for one in started), SECONDS)
        time.sleep(self.draw.uniform(0, 0.8 * seconds))
        at_write = self.draw.random() < 0.5 and until(lambda: partial(place), seconds / 2, pause=0.002)
        alive = [one for one in started if one.code is None]
        victims = alive if self.draw.random() < 0.5 else alive[:: self.draw.choice((1, -1))][:1]
        killed = sum(one.kill() for one in victims)
        tally.kills += killed
        tally.at_writes += killed if at_write else 0
        tally.midway += killed if written(place) != before else 0
        survivors = [one for one in started if one not in victims]
        for one in survivors:
            refused = one.ended() == 2 and scenario.refusable and "is in use already" in one.said
            tally.refused += refused
            if not refused and one.code != 0:
                tally.problems.append(f"{one.command} beside another ended with {one.code}: {one.said[-300:]}")
            elif refused and "\n" in one.said:
                tally.problems.append(f"{one.command} beside another said more than a line: {one.said[-300:]}")
        if not until(lambda: not alive_in(place), 10, pause=0.05):
            tally.problems.append(f"{scenario.commands[0]}: a process lives on after its group was killed")
        for left in partial(place):
            kind = "unfinished download" if left.is_dir() else "temporary file"
            tally.remainders[kind] = tally.remainders.get(kind, 0) + 1
        tally.problems += [f"after a kill: {complaint}" for complaint in damaged(place)]
        return killed > 0

    def _unbroken(self, name: str) -> tuple[dict[str, object], float]:
        """The files of a scenario that nobody kills, and for how many seconds its first command goes on writing."""
        scenario, spans = SCENARIOS[name], []
        place = self._place(name, scenario, whole=True)
        for command in scenario.commands:
            one = Started(command, place, warm=self.warm)
            before = written(place)
            until(lambda: written(place) != before or one.code is not None, SECONDS)  # noqa: B023
            began = time.monotonic()
            if one.ended() != 0:
                raise SystemExit(f"{name}: {command} ended with {one.code}, and nobody killed it: {one.said}")
            spans.append(time.monotonic() - began)
        self._whole[name] = contents(place / scenario.compared), spans[0]
        return self._whole[name]

    def _place(self, name: str, scenario: Scenario, *, whole: bool = False) -> Path:
        """A folder to run a scenario in, with what it reads."""
        kept = self.home / f"{name.replace(' ', '-')}-whole"
        place = kept if whole else Path(tempfile.mkdtemp(prefix=f"{name.replace(' ', '-')}-", dir=self.home))
        place.mkdir(exist_ok=True)
        for path, text in FILES.items():
            (place / path).write_text(text)
        if scenario.prepared and whole:
            Started(scenario.prepared, place, warm=self.warm).ended()
        elif scenario.prepared:
            shutil.copytree(kept / "trained", place / "trained")
        if not whole and not scenario.own_cache and (kept / "cache").exists():
            shutil.copytree(kept / "cache", place / "cache", dirs_exist_ok=True)
        return place


def below(place: Path) -> Iterator[Path]:
    """All folders and files below a folder, while others may remove some; ``rglob`` would stop there."""
    for parent, folders, files in os.walk(place):
        yield from (Path(parent, name) for name in (*folders, *files))


def working(place: Path) -> bool:
    """Whether some process has claimed a folder of a scenario."""
    return any(holder(lock.parent) is not None for lock in below(place) if lock.name == LOCK)


def written(place: Path) -> dict[str, int]:
    """When each file below a folder that has its final name was written."""
    found = {}
    for path in below(place):
        with suppress(FileNotFoundError):  # it may be gone by now
            if path.name != LOCK and not PARTIAL.fullmatch(path.name) and path.is_file():
                found[str(path)] = path.stat().st_mtime_ns
    return found


def partial(place: Path) -> list[Path]:
    """What is being written below a folder, or was when its writer was killed."""
    return [path for path in below(place) if PARTIAL.fullmatch(path.name) or path.name.startswith(".fetch-")]


def alive_in(place: Path) -> bool:
    """Whether a process works in a folder or below it; only Linux tells."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if Path(os.readlink(process / "cwd")).is_relative_to(place):
                return True
    return False


def contents(place: Path) -> dict[str, object]:
    """Every file below a folder but for locks: what it holds, without times."""
    return {
        path.relative_to(place).as_posix(): _content(path)
        for path in sorted(below(place))
        if path.is_file() and path.name not in (LOCK, "strategies.lock")
    }


def _content(path: Path) -> object:
    if path.suffix == ".json":
        return _timeless(json.loads(path.read_text()))
    if path.suffix == ".html":
        return path.read_text().rstrip().endswith("</html>")  # it shows times, and is made of the JSON beside it
    if path.suffix == ".md":
        return re.sub(r"[\d.]+x", "", path.read_text())
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(part) for key, part in value.items() if key not in TIMES}
    return [_timeless(part) for part in value] if isinstance(value, list) else value


def damaged(place: Path) -> Iterator[str]:
    """What is wrong with files that have their final name: a reader would take them for whole."""
    for path in below(place):
        if not path.is_file() or PARTIAL.fullmatch(path.name) or any(part.startswith(".fetch-") for part in path.parts):
            continue
        try:
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    list(file.keys())
            elif path.suffix == ".html" and not path.read_text().rstrip().endswith("</html>"):
                yield f"{path} is cut short"
        except (ValueError, SafetensorError) as error:
            yield f"{path}: {error}"
    if (place / "cache").is_dir():
        for folder in (place / "cache").glob("toy-*"):
            if {path.name for path in folder.iterdir()} != {"a.bin", "SHA256SUMS"}:
                yield f"{folder} is there, but not whole"


def _toy() -> tuple[Asset, bytes]:
    """A package that pip can fetch, and its entry in the catalogue."""
    payload, stream = random.Random(0).randbytes(4_000_000), io.BytesIO()
    with zipfile.ZipFile(stream, "w") as zipped:
        zipped.writestr("toy/a.bin", payload)
        zipped.writestr("toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        zipped.writestr("toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        zipped.writestr("toy-1.0.dist-info/RECORD", "")
    listing = f"{hashlib.sha256(payload).hexdigest()}  a.bin\n"
    asset = Asset(
        name="toy", title="a toy", source=Package("pip", "toy", "1.0", "toy-1.0-py3-none-any.whl"),
        archive_sha256=hashlib.sha256(stream.getvalue()).hexdigest(), archive_bytes=len(stream.getvalue()), root="toy/",
        keep=("*.bin",), kept_bytes=len(payload), manifest_sha256=hashlib.sha256(listing.encode()).hexdigest(),
        licence="CC0-1.0", licence_note="made for kills",
    )  # fmt: skip
    return asset, stream.getvalue()


FORK = multiprocessing.get_context("fork")
TOY, ARCHIVE = _toy()


class Registry(BaseHTTPRequestHandler):
    """Serves the toy to pip, in a second or so: a download that a kill can meet."""

    def do_GET(self) -> None:
        page = f'<!DOCTYPE html><html><body><a href="/{TOY.source.archive}">{TOY.source.archive}</a></body></html>'
        content = ARCHIVE if self.path.endswith(".whl") else page.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream" if content is ARCHIVE else "text/html")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with suppress(ConnectionError):  # the client was killed, as is the intention
            for at in range(0, len(content), 200_000):
                self.wfile.write(content[at : at + 200_000])
                time.sleep(0.05)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def registry() -> Iterator[None]:
    """A registry on this machine, and pip set up for it and for nothing else."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    process = FORK.Process(target=server.serve_forever)
    process.start()
    for name in [name for name in os.environ if name.upper().startswith("PIP_") or name.upper().endswith("_PROXY")]:
        del os.environ[name]
    os.environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"http://127.0.0.1:{server.server_port}/simple"}
    CATALOGUE["toy"] = TOY
    try:
        yield
    finally:
        process.kill()
        process.join()
        server.server_close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many kills in all")
    parser.add_argument("--seed", type=int, default=0, help="decides who is killed when")
    parser.add_argument("--only", action="append", choices=SCENARIOS, help="only this scenario; may be repeated")
    parser.add_argument("--most", type=int, default=6, help="at most so many kills of one run before it is compared")
    parser.add_argument("--warm", action="store_true", help="fork commands from this process: saves their loading")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    chosen = parser.parse_args()
    names = chosen.only or list(SCENARIOS)
    if chosen.warm:
        for place, _ in COMMANDS.values():
            importlib.import_module(place.partition(":")[0])
    with tempfile.TemporaryDirectory(prefix="gradveil-kills-") as folder, registry():
        campaign = Campaign(Path(folder), random.Random(chosen.seed), warm=chosen.warm)
        for name in itertools.cycle(names):
            done, told, began = campaign.kills, len(campaign.problems), time.monotonic()
            if done >= chosen.count:
                break
            campaign.chain(name, min(chosen.most, chosen.count - done))
            print(f"{campaign.kills:4d} kills; {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            for problem in campaign.problems[told:]:
                print(f"     {problem}", file=sys.stderr, flush=True)
    return _report(campaign, as_json=chosen.json)


def _report(campaign: Campaign, *, as_json: bool) -> int:
    """Print what came of it; the exit code."""
    if as_json:
        print(json.dumps({name: asdict(tally) for name, tally in campaign.tallies.items()}))
    else:
        print("scenario         kills midway in writes  runs  refused problems  left by kills")
        for name, one in campaign.tallies.items():
            left = ", ".join(f"{count} {what}" for what, count in one.remainders.items())
            kills = f"{one.kills:6d} {one.midway:6d} {one.at_writes:9d}"
            numbers = f"{kills} {one.chains:5d} {one.refused:8d} {len(one.problems):8d}"
            print(f"{name:15s} {numbers}  {left}".rstrip())
        print(f"{campaign.kills} kills, {len(campaign.problems)} problems", *campaign.problems, sep="\n")
    return 1 if campaign.problems else 0


if __name__ == "__main__":
    sys.exit(main())
