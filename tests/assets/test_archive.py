"""Unpacking refuses everything an archive could use to write where or what it should not."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from gradveil.assets.fetching import extract
from gradveil.core.errors import BadFileError


def keep_all(path: str) -> str:
    return path


def write_tar(path: Path, *members: tarfile.TarInfo, content: bytes = b"content") -> Path:
    with tarfile.open(path, "w:gz") as tarred:
        for member in members:
            member.size = len(content) if member.isreg() else 0
            tarred.addfile(member, io.BytesIO(content))
    return path


def write_zip(path: Path, *names: str, content: bytes = b"content") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name in names:
            zipped.writestr(name, content)
    return path


def test_chosen_members_are_written(tmp_path: Path) -> None:
    for archive in (
        write_zip(tmp_path / "a.whl", "top/x.bin", "top/sub/y.bin", "other.txt"),
        write_tar(tmp_path / "a.tgz", *map(tarfile.TarInfo, ["top/x.bin", "top/sub/y.bin", "other.txt"])),
    ):
        target = tmp_path / f"out-{archive.suffix}"
        extract(archive, target, kept_path=lambda p: p.removeprefix("top/") if p != "other.txt" else None, limit=14)
        found = {p.relative_to(target).as_posix(): p.read_bytes() for p in target.rglob("*") if p.is_file()}
        assert found == {"x.bin": b"content", "sub/y.bin": b"content"}


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/evil", "a\\..\\..\\evil", "C:evil"])
def test_a_path_out_of_the_target_is_refused(tmp_path: Path, name: str) -> None:
    for archive in (write_zip(tmp_path / "a.whl", name), write_tar(tmp_path / "a.tgz", tarfile.TarInfo(name))):
        with pytest.raises(BadFileError, match="unsafe path"):
            extract(archive, tmp_path / "target", kept_path=keep_all, limit=100)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tgz", "a.whl"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_special_files_are_refused(tmp_path: Path, kind: bytes) -> None:
    link = tarfile.TarInfo("link")
    link.type, link.linkname = kind, "/etc/passwd"
    with pytest.raises(BadFileError, match="link or special file"):
        extract(write_tar(tmp_path / "a.tgz", link), tmp_path / "target", kept_path=keep_all, limit=100)


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("link")
    info.create_system, info.external_attr = 3, 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as zipped:
        zipped.writestr(info, "/etc/passwd")
    with pytest.raises(BadFileError, match="link or special file"):
        extract(tmp_path / "a.whl", tmp_path / "target", kept_path=keep_all, limit=100)


def test_a_bomb_is_stopped_at_the_limit(tmp_path: Path) -> None:
    zeros = bytes(50_000_000)
    bomb = tarfile.TarInfo("zeros")
    for archive in (
        write_zip(tmp_path / "a.whl", "zeros", content=zeros),
        write_tar(tmp_path / "a.tgz", bomb, content=zeros),
    ):
        assert archive.stat().st_size < 100_000
        with pytest.raises(BadFileError, match="more than expected"):
            extract(archive, tmp_path / f"out{archive.suffix}", kept_path=keep_all, limit=3_000_000)
        assert (tmp_path / f"out{archive.suffix}" / "zeros").stat().st_size <= 3_000_000


def test_the_limit_is_for_all_members_together(tmp_path: Path) -> None:
    archive = write_zip(tmp_path / "a.whl", "one", "two")
    with pytest.raises(BadFileError, match="more than expected"):
        extract(archive, tmp_path / "target", kept_path=keep_all, limit=13)


@pytest.mark.parametrize("name", ["a.whl", "a.tgz"])
def test_a_truncated_archive_is_refused(tmp_path: Path, name: str) -> None:
    content = bytes(range(256)) * 64
    whole = (
        write_zip(tmp_path / name, "x", content=content)
        if name == "a.whl"
        else write_tar(tmp_path / name, tarfile.TarInfo("x"), content=content)
    )
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(BadFileError, match="cannot be unpacked"):
        extract(whole, tmp_path / "target", kept_path=keep_all, limit=1 << 20)
