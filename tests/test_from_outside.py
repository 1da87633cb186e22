"""A metric, a defense with its adversary and an attack of somebody else: one file each, and nothing of ours changes.

Each runs in a process of its own, as a person would run it, because what is registered stays for good.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

METRIC = """
from torch import Tensor
from gradveil.metrics import register_metric

@register_metric(
    "worst_pixel", title="Worst pixel", direction="lower", failed=1.0, in_summary="worst", style=".2f",
    meaning="The largest difference between two pixels of the same place.",
)
def worst_pixel(images: Tensor, truth: Tensor) -> Tensor:
    return (images - truth).abs().flatten(1).amax(dim=1)
"""
DEFENSE = """
from __future__ import annotations
from dataclasses import dataclass
from gradveil.core.types import Params
from gradveil.defenses import DEFENSES, Defense, Step

@DEFENSES.register("silenced")
@dataclass(frozen=True, kw_only=True)
class Silenced(Defense):
    '''Sends nothing of one tensor.'''

    tensor: str = "body.0.bias"

    def on_gradient(self, gradient: Params, step: Step) -> Params:
        return gradient | {self.tensor: gradient[self.tensor] * 0}

class Unnamed(Silenced):
    '''The same without a name.'''
"""
ADVERSARY = """
from gradveil.attacks.against import Channel, against
from my_defense import Silenced

@against("silenced", sentence="It compares the other tensors.")
def channel(defense: Silenced, seen) -> Channel:
    return Channel(zeroed=frozenset({defense.tensor}))
"""
ATTACK = """
from collections.abc import Sequence
import torch
from gradveil.attacks import ATTACKS, Attack, Reconstruction

@ATTACKS.register("grey")
class Grey(Attack):
    '''Guesses a grey picture.'''

    def __init__(self, *, level: float = 0.5) -> None:
        self.level = level

    def run(self, seen, *, seeds, progress) -> Sequence[Reconstruction]:
        return [
            Reconstruction.closed_form(
                torch.full((one.batch_size, *one.domain.shape), self.level),
                torch.zeros(one.batch_size, dtype=torch.int64), 0.0,
            )
            for one in seen
        ]
"""
FILES = {"my_metric": METRIC, "my_defense": DEFENSE, "my_adversary": ADVERSARY, "my_attack": ATTACK}
TINY = ["--data", "mnist-samples", "--model", "mlp:hidden=8,depth=1", "--images", "2", "--gallery", "10"]
LOADED = [word for name in FILES for word in ("--load", f"{name}.py")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / f"{name}.py").write_text(content)
    return tmp_path


def gradveil(folder: Path, *arguments: str, code: int = 0) -> str:
    """What a command printed; of one that fails, its one line."""
    command = [sys.executable, "-m", "gradveil.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, check=False)
    assert done.returncode == code, done.stderr
    assert not code or done.stderr.count("\n") == 1
    return done.stderr if code else done.stdout


@pytest.mark.integration
def test_somebody_elses_metric_defense_adversary_and_attack(folder: Path) -> None:
    attacks = ["--attack", "grey:level=0.25", "--attack", "informed:iterations=2,restarts=1"]
    case = [*TINY, *attacks, "--defense", "none", "--defense", "silenced", "--out", "a"]
    assert "worst" in gradveil(folder, "audit", *LOADED, *case)
    audit = json.loads((folder / "a" / "audit.json").read_text())
    assert audit["case"]["attacks"][0] == "grey:level=0.25"
    assert all(0.5 < row["worst_pixel"] <= 1 for row in audit["rows"])
    assert all(0.5 < image["worst_pixel"] <= 1 for row in audit["rows"] for image in row["per_image"])
    (informed,) = (row for row in audit["rows"] if row["attack"].startswith("informed") and row["defense"] != "none")
    assert informed["counter_moves"] == {"silenced": "It compares the other tensors."}
    page = (folder / "a" / "report.html").read_text()
    assert "Worst pixel&nbsp;" in page
    assert "The largest difference between two pixels" in page

    gradveil(folder, "report", "a")
    assert "Worst pixel" not in (folder / "a" / "report.html").read_text(), "nobody told it what the numbers mean"
    unknown = gradveil(folder, "score", "a", code=2)
    assert unknown.startswith("gradveil: ")
    assert "(your own: add --load FILE.py)" in unknown
    scored = gradveil(folder, "score", "a", *LOADED, "--metric", "worst_pixel")
    assert len(scored.splitlines()) == len(audit["rows"])
    assert json.loads((folder / "a" / "audit.json").read_text())["rows"] == audit["rows"]


@pytest.mark.integration
def test_a_class_by_its_import_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    own = ["--defense", "my_defense:Unnamed:tensor=body.0.weight", "--attack", "my_attack:Grey"]
    gradveil(folder, "audit", *TINY, *own, "--out", "a")
    case = json.loads((folder / "a" / "audit.json").read_text())["case"]
    assert (case["defenses"], case["attacks"]) == (["my_defense:Unnamed:tensor=body.0.weight"], ["grey"])
    refused = gradveil(folder, "score", "a", "--load", "my_attack", code=2)
    assert "defense 'my_defense:Unnamed' is code that is not loaded" in refused
    gradveil(folder, "score", "a", "--load", "my_defense", "--load", "my_attack.py")

    (folder / "case.yaml").write_text(json.dumps({**case, "device": "cpu"}))
    refused = gradveil(folder, "audit", "case.yaml", "--load", "my_attack", "--out", "b", code=2)
    assert "is code that is not loaded: if you trust it, add --load my_defense, or the file it is in" in refused
    gradveil(folder, "audit", "case.yaml", "--load", "my_attack", "--load", "my_defense", "--out", "b")

    training = ["train", *TINY[:4], "--clients", "2", "--rounds", "1", "--out", "t"]
    gradveil(folder, *training, "--defense", "my_defense:Unnamed")
    refused = gradveil(folder, "train", "--out", "t", "--resume", "--rounds", "2", code=2)
    assert "defense 'my_defense:Unnamed' is code that is not loaded" in refused
    gradveil(folder, "train", "--out", "t", "--resume", "--rounds", "2", "--load", "my_defense.py")


@pytest.mark.integration
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_workers_of_a_sweep_load_it_too(start: str, folder: Path) -> None:
    study = {
        "base": {
            "data": "mnist-samples", "model": "mlp:hidden=8,depth=1", "images": 1, "gallery": 10, "device": "cpu",
            "attacks": ["grey"],
        },
        "grid": {"defenses": ["none", "silenced", "my_defense:Unnamed"]},
    }  # fmt: skip
    (folder / "study.yaml").write_text(json.dumps(study))
    (folder / "start.py").write_text(
        f"from gradveil.lab.commands import sweep\nsweep.start_of_workers = lambda on_gpu: {start!r}\n"
        "from gradveil.cli.main import run\nif __name__ == '__main__':\n    run()\n"
    )
    command = [sys.executable, "start.py", "sweep", "study.yaml", "--workers", "1", "--out", "out"]
    loaded = [word for name in ("my_attack", "my_defense", "my_metric") for word in ("--load", f"{name}.py")]
    done = subprocess.run([*command, *loaded], capture_output=True, text=True, timeout=300, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(path.read_text()) for path in (folder / "out").glob("*/audit.json")]
    assert {row["defense"] for one in results for row in one["rows"]} == {"none", "silenced", "my_defense:Unnamed"}
    assert all(row["worst_pixel"] is not None for one in results for row in one["rows"])


def test_a_metric_takes_no_name_of_a_row() -> None:
    from gradveil.auditing.audit import Row
    from gradveil.metrics import METRICS, register_metric

    assert "digest" in Row.model_fields
    for name in ("psnr", "digest", "no name"):
        with pytest.raises(ValueError, match=f"metric {name!r} is no name, or the name of something else"):
            register_metric(name, title="x", direction="lower", meaning="x", failed=1.0)(lambda a, _: a)
    assert METRICS["psnr"].title == "PSNR"


def test_an_adversary_takes_the_place_of_none() -> None:
    from gradveil.attacks.against import Channel, against

    with pytest.raises(ValueError, match="somebody attacks 'noise' already"):
        against("noise")(lambda *_: Channel())
