"""Private data stays with its owner: files are written in one place, for nobody else to read, whatever the umask."""

from __future__ import annotations

import ast
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import gradveil
from gradveil.core.atomic import make_folder, open_file, write_atomically
from gradveil.core.errors import GradveilError
from gradveil.lab.reproduce import plan, run_plan
from lab.reproduce.test_reproductions import tiny

SOURCE = Path(gradveil.__file__).parent
WRITES = {"core/atomic.py"}
CACHE_OF_PUBLIC_ASSETS = {"assets/fetching.py"}
MAKING = {
    "write_text", "write_bytes", "mkdir", "makedirs", "touch", "mkfifo", "mknod", "mkstemp", "NamedTemporaryFile",
    "symlink_to", "hardlink_to", "extractall", "save_file", "savez", "savez_compressed", "savetxt", "tofile", "memmap",
    "savefig", "imsave", "FileHandler",
}  # fmt: skip
HARMLESS = {"rmtree", "which", "get_terminal_size", "disk_usage", "ignore_patterns"}


def makes_a_file(call: ast.Call) -> bool:
    """Whether a call makes a file or a folder by its own means. Pictures that are saved into a buffer do not."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    texts = [x.value for x in given if isinstance(x, ast.Constant) and isinstance(x.value, str)]
    if given and ast.unparse(given[0]) == "os.devnull":
        return False
    if (owner, name) == ("os", "open"):
        return any(flag in ast.unparse(call) for flag in ("O_CREAT", "O_WRONLY", "O_RDWR", "O_TRUNC", "O_APPEND"))
    if name in ("open", "ZipFile", "TarFile"):
        return any(len(text) <= 4 and set(text) & set("wax+") for text in texts)
    if name == "save":
        return owner in ("torch", "np", "numpy") or bool(given and isinstance(given[0], ast.BinOp | ast.JoinedStr))
    return name in MAKING or (owner == "shutil" and name not in HARMLESS)


def writers(source: str) -> list[int]:
    """Lines that make files or folders."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and makes_a_file(node)]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_files_are_written_in_one_place(path: Path) -> None:
    if path.relative_to(SOURCE).as_posix() not in WRITES | CACHE_OF_PUBLIC_ASSETS:
        assert not writers(path.read_text()), "use gradveil.core.atomic"


@pytest.mark.parametrize(
    "line",
    [
        "path.write_text('x')",
        "path.open('xb')",
        "open(path, mode='w')",
        "with gzip.open(path, 'wb') as file: ...",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "shutil.copyfile(a, b)",
        "folder.mkdir()",
        "torch.save(state, path)",
        "image.save(folder / 'x.png')",
        "zipfile.ZipFile(path, 'w')",
    ],
)
def test_a_writer_is_caught(line: str) -> None:
    assert writers(line)


@pytest.mark.parametrize("line", ["path.open('rb')", "open(os.devnull, 'w')", "image.save(buffer, 'PNG')", "x.copy()"])
def test_a_reader_is_not(line: str) -> None:
    assert not writers(line)


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.lstat().st_mode))


@pytest.mark.parametrize("umask", [0, 0o22, 0o77, 0o777])
def test_the_umask_does_not_matter(umask: int, tmp_path: Path) -> None:
    given, made = tmp_path / "given", tmp_path / "given" / "one" / "two"
    given.mkdir()
    given.chmod(0o755)
    (given / "old").touch(mode=0o666)
    before = os.umask(umask)
    try:
        write_atomically(made / "file", b"private")
        write_atomically(given / "old", b"private")
        make_folder(given / "three")
        os.close(open_file(given / "lock", os.O_RDWR))
    finally:
        os.umask(before)
    assert {mode(path) for path in (made / "file", given / "old", given / "lock")} == {"0o600"}
    assert {mode(path) for path in (made, made.parent, given / "three")} == {"0o700"}
    assert mode(given) == "0o755", "what was there keeps its mode"


def test_the_cache_of_public_assets_may_be_shared(tmp_path: Path) -> None:
    before = os.umask(0o22)
    try:
        write_atomically(tmp_path / "cache" / "file", b"public", shared=True)
    finally:
        os.umask(before)
    assert (mode(tmp_path / "cache"), mode(tmp_path / "cache" / "file")) == ("0o755", "0o644")


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("kept")
    for name in ("result", "log"):
        (tmp_path / name).symlink_to(other)
    write_atomically(tmp_path / "result", b"new")
    with pytest.raises(OSError, match="link or no plain file"):
        open_file(tmp_path / "log", os.O_WRONLY | os.O_TRUNC)
    assert (other.read_text(), (tmp_path / "result").read_bytes()) == ("kept", b"new")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(GradveilError, match=r"cannot make the folder .*taken/x: Not a directory$"):
        make_folder(tmp_path / "taken" / "x")


TINY = ["--attack", "ig:iterations=2,restarts=1", "--gallery", "10"]
TRAIN = ["train", "--data", "mnist-samples", "--model", "mlp:hidden=8,depth=1", "--clients", "2", "--batch-size", "2"]
COMMANDS = [
    ["sweep", "study.yaml", "--workers", "1", "--out", "sweep"],
    ["reproduce", "censor-overhead", "--no-run", "--out", "reproduction"],
    ["audit", *TINY, "--images", "1", "--defense", "none", "--out", "new/audit", "--junit", "new/junit/junit.xml"],
    ["audit", *TINY, "--images", "1", "--defense", "none", "--out", "."],
    ["score", "new/audit"],
    ["report", "new/audit"],
    [*TRAIN, "--rounds", "1", "--algorithm", "fedsgd", "--tap", "*@1", "--out", "training"],
    ["train", "--out", "training", "--resume", "--rounds", "2"],
    ["train", "--compare", "training", "--out", "compared/page.html"],
    ["audit", *TINY, "--observations", "training", "--out", "observed"],
    ["attack", "training/taps/round-0001-client-0000.safetensors", "--attack", "ig:iterations=2", "--out", "attack"],
    ["generator", "train", "--data", "mnist-samples", "--steps", "2", "--batch-size", "2", "--features", "4",
     "--latent", "4", "--critic-steps", "1", "--device", "cpu", "--out", "generators/own.safetensors"],
    ["generator", "show", "file:path=generators/own.safetensors", "--rows", "1", "--out", "sheet.png"],
    ["leaderboard", "--out", "leaderboard"],
]  # fmt: skip
MADE = {
    "sweep/study.json", "reproduction/page.md", "new/audit/audit.json", "new/audit/report.html",
    "new/audit/truth.safetensors", "new/junit/junit.xml", "audit.json", "training/train.json",
    "training/checkpoint.safetensors", "training/taps/round-0001-client-0001.truth.safetensors", "compared/page.html",
    "observed/audit.json", "attack/000.png", "generators/own.safetensors", "sheet.png", "leaderboard/README.md",
}  # fmt: skip
RUN = """
import json, sys
from gradveil.cli.main import app
for command in json.load(sys.stdin):
    app(command, standalone_mode=False)
"""


@pytest.mark.integration
@pytest.mark.parametrize("umask", [0, 0o22])
def test_all_that_commands_write_is_for_their_user_alone(umask: int, tmp_path: Path) -> None:
    """One process runs them all, the sweep first, which forks: loading torch takes longer than any of them."""
    work, cache = tmp_path / "work", tmp_path / "cache"
    work.mkdir()
    work.chmod(0o755)
    base = {"data": "mnist-samples", "model": "mlp", "images": 1, "gallery": 10, "attacks": "ig:iterations=2"}
    crossed = {"defenses": ["none", "clip:bound=1"]}
    (work / "study.yaml").write_text(json.dumps({"base": base, "grid": crossed}))
    ours = {work / "study.yaml", work}
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(COMMANDS), text=True, capture_output=True, timeout=300,
        cwd=work, umask=umask, check=False,
        env={**os.environ, "GRADVEIL_CACHE": str(cache), "GRADVEIL_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = {path: mode(path) for path in work.rglob("*") if path not in ours}
    assert {name for name in MADE if not (work / name).exists()} == set()
    assert {str(path): m for path, m in made.items() if m != ("0o700" if path.is_dir() else "0o600")} == {}
    assert len([path for path in made if path.name == "result.json"]) == 2, "the sweep is done"
    assert mode(work) == "0o755", "--out . keeps the mode of a folder that was there"


@pytest.mark.integration
@pytest.mark.parametrize("umask", [0, 0o22])
def test_a_reproduction_is_for_its_user_alone(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        run_plan(plan(tiny(), "small"), tmp_path / "reproduced", start="here")
    finally:
        os.umask(before)
    made = {path: mode(path) for path in tmp_path.rglob("*")}
    assert len([path for path in made if path.name == "result.json"]) == 4
    assert {str(path): m for path, m in made.items() if m != ("0o700" if path.is_dir() else "0o600")} == {}
