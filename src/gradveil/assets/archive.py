"""Takes chosen files out of an archive without trusting it: no path outside the target, no links, no surplus bytes."""

from __future__ import annotations

import hashlib
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from gradveil.core.errors import BadFileError
from gradveil.core.reading import check_plain

_CHUNK = 1 << 20

Member = tuple[str, bool, Callable[[], IO[bytes] | None]]
"""A path as the archive spells it, whether it is a plain file, and how to open it."""


def extract(archive: Path, target: Path, *, kept_path: Callable[[str], str | None], limit: int) -> None:
    """Write the members that ``kept_path`` places below ``target``; at most ``limit`` bytes in all."""
    left = limit
    try:
        check_plain(archive)
        with _members(archive) as members:
            for path, plain, opened in members:
                _refuse_escape(path, archive)
                place = kept_path(path)
                if place is None:
                    continue
                if not plain:
                    raise BadFileError(f"{archive.name} holds {path!r} as a link or special file; it is not unpacked")
                left -= _write(opened(), target / place, left, archive)
    except BadFileError:
        raise
    except Exception as error:  # a damaged archive may raise nearly anything, from zlib.error to RuntimeError
        raise BadFileError(f"{archive.name} cannot be unpacked: {str(error) or type(error).__name__}") from error


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _members(archive: Path) -> Iterator[Iterator[Member]]:
    """The members in the order of the archive, of a zip (a wheel is one) or a tar."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            yield (_zip_member(zipped, info) for info in zipped.infolist() if not info.is_dir())
    else:
        with tarfile.open(archive) as tarred:
            yield (_tar_member(tarred, info) for info in tarred if not info.isdir())


def _zip_member(zipped: zipfile.ZipFile, info: zipfile.ZipInfo) -> Member:
    kind = (info.external_attr >> 16) & 0o170000  # the Unix file type; 0 where the writer left it out
    return info.filename, kind in (0, 0o100000), lambda: zipped.open(info)


def _tar_member(tarred: tarfile.TarFile, info: tarfile.TarInfo) -> Member:
    return info.name, info.isreg(), lambda: tarred.extractfile(info)


def _refuse_escape(path: str, archive: Path) -> None:
    parts = PurePosixPath(path.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or ":" in path:
        raise BadFileError(f"{archive.name} holds the unsafe path {path!r}; nothing of it is used")


def _write(source: IO[bytes] | None, place: Path, limit: int, archive: Path) -> int:
    """Copy one member and return its size. Sizes are counted as read, never taken from the archive's own headers."""
    assert source is not None  # only plain files come here
    place.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with source, place.open("xb") as file:
        while chunk := source.read(_CHUNK):
            written += len(chunk)
            if written > limit:
                raise BadFileError(f"{archive.name} unpacks to more than expected; it is not the pinned package")
            file.write(chunk)
    return written
