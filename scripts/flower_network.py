"""A Flower network on this machine: a SuperLink and its SuperNodes as real processes, all of which end with it.

Every process gets a session of its own, so that Ctrl-C reaches this one alone, and inherits FLWR_HOME, a folder of this
network: by that its children are known too, those of Ray included, which leave their process group.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from flower_keys import Keys, make_keys, make_node_key

HOST = "127.0.0.1"
PROGRAMS = Path(sys.executable).parent
NAME = "loopback"
COLOR = re.compile(r"\x1b\[[0-9;]*m")
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "COLUMNS": "200",
}


class NetworkError(Exception):
    """Something on the network did not come up or did not end in time; says where its log is."""


@dataclass(frozen=True)
class Ended:
    """How a run ended, as the SuperLink tells it, and what it printed."""

    status: str
    log: str
    seconds: float

    @property
    def good(self) -> bool:
        return self.status == "finished:completed"


class Network:
    """Processes of Flower on loopback, with their files in ``folder``. Leaving the ``with`` ends every one of them."""

    def __init__(self, folder: Path, *, simulated: int | None = None, tls: bool = False, auth: bool = False) -> None:
        if auth and not tls:
            raise NetworkError("Flower authenticates nodes over TLS only: add --tls")
        self.folder, self.simulated, self.auth = folder.resolve(), simulated, auth
        self.home, self.logs = self.folder / "home", self.folder / "logs"
        for path in (self.home, self.logs):
            path.mkdir(parents=True, exist_ok=True)
        self.address = f"{HOST}:{free_port()}"
        self.keys: Keys | None = make_keys(self.folder / "keys") if tls else None
        programs = f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}"  # programs of Flower start others
        self.environment = {**os.environ, **QUIET, "FLWR_HOME": str(self.home), "PATH": programs}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (self.home / "config.toml").write_text(self._connection())

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start_link(self) -> None:
        """Start the SuperLink, or start it again, and wait until it answers."""
        host, _, port = self.address.partition(":")
        kind = ["--simulation"] if self.simulated else ["--database", str(self.folder / "state.db")]
        auth = ["--enable-supernode-auth"] if self.auth else []
        self._start("superlink", ["flower-superlink", "--host", host, "--port", port, *kind, *auth, *self._serving()])
        self.wait("superlink", self._answers, 60)

    def register(self, key: Path) -> None:
        """Tell the SuperLink about a node's public key."""
        self._flwr("supernode", "register", str(key.with_name(f"{key.name}.pub")), NAME)

    def start_node(
        self,
        place: int,
        *,
        of: int,
        key: Path | None = None,
        root: Path | None = None,
        config: str = "",
        registered: bool = True,
    ) -> None:
        """Start the SuperNode that holds share ``place``; other keys and certificates stand in for the right ones."""
        node = ["--superlink", self.address, "--host", HOST, "--port", str(free_port()), *self._serving()]
        if self.keys is not None:
            node += ["--root-certificates", str(root or self.keys.authority)]
        if self.auth:
            key = key or make_node_key(self.folder / "keys" / f"node-{place}")
            if registered:
                self.register(key)
            node += ["--auth-supernode-private-key", str(key)]
        node += ["--node-config", f"partition-id={place} num-partitions={of} {config}".strip()]
        self._start(f"node-{place}", ["flower-supernode", *node])

    def submit(self, app: Path, run_config: str = "") -> str:
        """Hand an app in and return the number of the run."""
        given = ["--run-config", run_config] if run_config else []
        said = json.loads(self._flwr("run", str(app), NAME, "--format", "json", *given))
        if "run-id" not in said:
            raise NetworkError(f"the run was not taken: {said.get('error-message', said)}")
        return str(said["run-id"])

    def follow(self, run: str, timeout: float) -> Ended:
        """Wait for a run to end."""
        started = time.monotonic()
        while not (status := self.status(run)).startswith("finished"):
            if time.monotonic() - started > timeout:
                self._flwr("stop", run, NAME)
                raise NetworkError(f"the run did not end within {timeout:.0f} s: see {self.logs}")
            if self.processes["superlink"].poll() is not None:
                raise NetworkError(f"the SuperLink ended before the run: see {self.logs / 'superlink.log'}")
            time.sleep(1)
        return Ended(status, COLOR.sub("", self._flwr("log", run, NAME, "--show")), time.monotonic() - started)

    def status(self, run: str) -> str:
        found = json.loads(self._flwr("list", NAME, "--run-id", run, "--format", "json"))
        return str(found["runs"][0]["status"])

    def log_of(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def wait(self, name: str, ready: Callable[[], bool], seconds: float) -> None:
        """Until something is ready, or the process behind it has ended, or it took too long."""
        until = time.monotonic() + seconds
        while not ready():
            if self.processes[name].poll() is not None or time.monotonic() > until:
                tail = "\n".join(self.log_of(name).splitlines()[-5:])
                raise NetworkError(f"{name} is not ready; the end of {self.logs / name}.log:\n{tail}")
            time.sleep(0.25)

    def kill(self, name: str) -> None:
        """End one process at once, and its children with it."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """End everything: politely, then by force, then whatever is left of this network."""
        running = list(self.processes.values())
        self.processes.clear()
        for process in running[::-1]:
            _signal(process.pid, signal.SIGTERM)
        until = time.monotonic() + 8
        for process in running:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(process.pid, signal.SIGKILL)
                process.wait()
        while left := descendants(self.home):
            for pid in left:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.1)

    def _start(self, name: str, command: list[str]) -> None:
        log: IO[bytes]
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(PROGRAMS / command[0]), *command[1:]],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _flwr(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(PROGRAMS / "flwr"), *arguments], env=self.environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=120, check=False, start_new_session=True,
        )  # fmt: skip
        if done.returncode != 0:
            raise NetworkError(f"flwr {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def _serving(self) -> list[str]:
        """Options of whoever listens: every SuperNode does too, for the process that runs its ClientApp."""
        if self.keys is None:
            return ["--insecure"]
        return [
            "--ssl-ca-certfile", str(self.keys.authority),
            "--ssl-certfile", str(self.keys.certificate),
            "--ssl-keyfile", str(self.keys.key),
        ]  # fmt: skip

    def _connection(self) -> str:
        lines = [f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{self.address}"']
        lines.append("insecure = true" if self.keys is None else f'root-certificates = "{self.keys.authority}"')
        if self.simulated:
            lines.append(f"options.num-supernodes = {self.simulated}")
            lines.append("options.backend.client-resources.num-cpus = 1")
            lines.append("options.backend.init-args.num-cpus = 2")
        return "\n".join(lines) + "\n"

    def _answers(self) -> bool:
        scheme = "http" if self.keys is None else "https"
        trusted = None if self.keys is None else ssl.create_default_context(cafile=str(self.keys.authority))
        try:
            with urllib.request.urlopen(f"{scheme}://{self.address}/health", timeout=2, context=trusted) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def descendants(home: Path) -> list[int]:
    """Every process that has this folder for its FLWR_HOME, where /proc tells (Linux), without this one."""
    mark, found = f"FLWR_HOME={home}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or somebody else's
            continue
    return [pid for pid in found if pid != os.getpid()]


def _signal(pid: int, number: Any) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
