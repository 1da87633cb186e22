"""Sweeps on Ray: the same results as on workers, from a cluster that may lose a machine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradveil.lab.sweeps import status_of
from lab.sweeps.sweeps import alive, of_seeds, results, sweep, sweeping, until, written

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs pip install 'gradveil[ray]'"),
]

STUDY = of_seeds(10)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same forty cases by two workers."""
    folder = tmp_path_factory.mktemp("swept")
    assert sweep(written(folder, STUDY), "--out", folder / "out", "--workers", 2).returncode == 0
    return folder / "out"


@pytest.fixture
def machines() -> Iterator[subprocess.Popen[str]]:
    """Two, of one core each: what they print first is their address, and a line kills the second."""
    program = [sys.executable, str(Path(__file__).with_name("two_machines.py"))]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.communicate(timeout=60)


def test_a_cluster_of_its_own_gives_what_workers_give_and_leaves_no_process(swept: Path, tmp_path: Path) -> None:
    before = processes_of_ray()
    done = sweep(written(tmp_path, STUDY), "--out", tmp_path / "out", "--ray", "local", "--workers", 2, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["done"] == 40
    assert results(tmp_path / "out") == results(swept)
    assert until(lambda: processes_of_ray() <= before, 30)


def test_what_a_machine_had_when_it_was_killed_is_done_by_the_other(
    swept: Path, tmp_path: Path, machines: subprocess.Popen[str]
) -> None:
    assert machines.stdin is not None
    assert machines.stdout is not None
    study, out, address = written(tmp_path, STUDY), tmp_path / "out", machines.stdout.readline().strip()
    with sweeping(study, "--out", out, "--ray", address) as process:
        assert until(lambda: (out / "study.json").exists() and both_work(out), 120)
        machines.stdin.write("\n")
        machines.stdin.flush()
        assert machines.stdout.readline() == "killed\n"
        assert len(results(out)) < 40
        _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert results(out) == results(swept)
    assert not list(out.glob("*/failed.json"))


def both_work(out: Path) -> bool:
    """Whether results have come, and two batches are under way."""
    now = status_of(out)
    return now.done > 0 and len(now.running) > 4


def processes_of_ray() -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            name, pid = path.read_text().strip(), int(path.parent.name)
        except OSError:
            continue
        if name.startswith(("raylet", "gcs_server", "ray::")) and alive(pid):
            found.add(pid)
    return found


def test_a_cluster_loads_the_file_that_was_loaded_here(tmp_path: Path) -> None:
    (tmp_path / "of_mine.py").write_text(
        "from gradveil.defenses import DEFENSES, Defense\n\n"
        "@DEFENSES.register('of-mine')\nclass OfMine(Defense): ...\n\nclass Other(Defense): ...\n"
    )
    study = written(tmp_path, {"base": of_seeds(1)["base"], "grid": {"defenses": ["of-mine", "of_mine:Other"]}})
    loaded, out = tmp_path / "of_mine.py", tmp_path / "out"
    done = sweep(study, "--out", out, "--ray", "local", "--workers", 1, "--load", loaded)
    assert done.returncode == 0, done.stderr
    cases = [json.loads(path.read_text())["case"] for path in out.glob("*/result.json")]
    assert sorted(case["defenses"] for case in cases) == [["of-mine"], ["of_mine:Other"]]
