"""Small packages in the form of each client, and the catalogue entries that pin them."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile

from gradveil.assets import Asset, Package

PAYLOAD = {"a.bin": bytes(range(256)) * 400, "sub/b.txt": b"second file\n"}

SOURCES = {
    "pip": Package("pip", "toy", "1.0", "toy-1.0-py3-none-any.whl"),
    "npm": Package("npm", "toy", "1.0.0", "toy-1.0.0.tgz"),
}
ROOTS = {"pip": "toy/data/", "npm": "package/toy/data/"}


def wheel(files: dict[str, bytes]) -> bytes:
    """A wheel with these files and the few that make it one."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as zipped:
        for path, content in files.items():
            zipped.writestr(path, content)
        zipped.writestr("toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        zipped.writestr("toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        zipped.writestr("toy-1.0.dist-info/RECORD", "")
    return stream.getvalue()


def tarball(files: dict[str, bytes]) -> bytes:
    """An npm package with these files and the one that makes it one."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tarred:
        for path, content in ({"package/package.json": b'{"name": "toy", "version": "1.0.0"}'} | files).items():
            info = tarfile.TarInfo(path)
            info.size = len(content)
            tarred.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def toy(client: str, files: dict[str, bytes]) -> tuple[Asset, bytes]:
    """An archive that holds ``files`` below the root, beside others that are not to be kept; and its entry."""
    placed = {ROOTS[client] + path: content for path, content in files.items()}
    placed |= {ROOTS[client] + "notes.md": b"not kept", "elsewhere/c.bin": b"not kept either"}
    archive = wheel(placed) if client == "pip" else tarball(placed)
    listing = "".join(f"{hashlib.sha256(files[path]).hexdigest()}  {path}\n" for path in sorted(files))
    asset = Asset(
        name="toy",
        title="a toy",
        source=SOURCES[client],
        archive_sha256=hashlib.sha256(archive).hexdigest(),
        archive_bytes=len(archive),
        root=ROOTS[client],
        keep=("*.bin", "sub/*.txt"),
        kept_bytes=sum(map(len, files.values())),
        manifest_sha256=hashlib.sha256(listing.encode()).hexdigest(),
        licence="CC0-1.0",
        licence_note="made by the test",
    )
    return asset, archive
