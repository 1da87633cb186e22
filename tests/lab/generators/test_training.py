"""Training: the defining properties of WGAN-GP's step, resuming to the same result, and the command around it."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.tensor_files import read_tensors, write_tensors
from gradveil.data import load
from gradveil.generators import DCGAN, build
from gradveil.lab.generators.training import KIND, Schedule, Trainer, fit

TINY: dict[str, Any] = {"latent": 4, "features": 4}
DIGITS = load("mnist-samples")
PIXELS = (DIGITS.batch(range(100)).inputs * 255).round().byte()


def trainer(schedule: Schedule) -> Trainer:
    torch.manual_seed(0)
    model = DCGAN(channels=1, height=28, width=28, classes=10, **TINY)
    return Trainer(model, PIXELS, DIGITS.labels, schedule)


def test_the_critic_climbs_the_objective_of_wgan_gp() -> None:
    """One critic step moves along the gradient of the published objective, computed here by plain means."""
    own = trainer(Schedule(steps=1, batch=6, critic_steps=1, lr=1e-3))
    draws = own.draws(0)
    before = {name: p.detach().clone() for name, p in own.critic.named_parameters()}
    real, labels = PIXELS[draws.index[0]] / 255, DIGITS.labels[draws.index[0]]
    with torch.no_grad():
        drawn = own.model.decode(draws.codes[0], labels)
    share = draws.mixes[0].view(-1, 1, 1, 1)
    between = (real * (1 - share) + drawn * share).requires_grad_()
    lengths = [
        torch.autograd.grad(own.critic(between[i : i + 1], labels[i : i + 1]).sum(), between, create_graph=True)[
            0
        ].norm()
        for i in range(6)
    ]
    penalty = torch.stack([(length - 1) ** 2 for length in lengths]).mean()
    objective = own.critic(real, labels).mean() - own.critic(drawn, labels).mean() - 10 * penalty
    slopes = torch.autograd.grad(objective, list(own.critic.parameters()))
    own.critic_step(draws, 0)
    for (name, parameter), slope in zip(own.critic.named_parameters(), slopes, strict=True):
        clear = slope.abs() > 1e-4  # Adam's first step goes by the sign alone
        moved = torch.sign(parameter - before[name])
        assert bool((moved == torch.sign(slope))[clear].all()), name


@pytest.mark.integration
def test_training_tells_real_from_drawn_and_then_closes_the_gap() -> None:
    own = trainer(Schedule(steps=1, batch=16, critic_steps=1, lr=2e-3))
    codes, labels = own.draws(0).codes[0], DIGITS.labels[:16]

    def verdict() -> float:
        with torch.no_grad():
            return float(own.critic(own.model.decode(codes, labels), labels).mean())

    for step in range(40):
        own.critic_step(own.draws(step), 0)
    assert float(own.critic_gap) > 1.0
    before = verdict()
    own.schedule = Schedule(steps=1, batch=16, critic_steps=1, lr=2e-3)
    own.critic_optimizer.param_groups[0]["lr"] = torch.tensor(0.0)  # the critic stands still
    for step in range(20):
        own.iteration(own.draws(step))
    assert verdict() > before + 0.5


@pytest.mark.integration
def test_an_interrupted_training_resumes_to_the_same_result(tmp_path: Path) -> None:
    schedule = Schedule(steps=6, batch=4, critic_steps=2, flip=True)
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    assert fit("mnist-samples", whole, schedule, **TINY) is not None
    stop = Stop(after=4)
    assert fit("mnist-samples", parts, schedule, **TINY, stop=stop) is None
    assert not parts.exists()
    assert read_tensors(tmp_path / "parts.checkpoint.safetensors", KIND)[1]["done"] == 4
    assert fit("mnist-samples", parts, schedule, **TINY, resume=True) is not None
    assert parts.read_bytes() == whole.read_bytes()
    assert (tmp_path / "parts.png").read_bytes() == (tmp_path / "whole.png").read_bytes()
    assert not list(tmp_path.glob("*.checkpoint.safetensors")), "nothing is left to resume"
    card = build(f"file:path={parts}").card
    assert (card["data"], card["images"], card["steps"], card["flip"]) == ("mnist-samples", 100, 6, True)


class Stop:
    """Says stop after so many steps."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __enter__(self) -> Stop:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    schedule, path = Schedule(steps=4, batch=2, critic_steps=1), tmp_path / "c.safetensors"
    trainer(schedule).save(path)  # before the first step there are no moments yet
    with pytest.raises(BadFileError, match="lacks a part"):
        trainer(schedule).load(path)
    begun = trainer(schedule)
    begun.iteration(begun.draws(0))
    begun.save(path)
    trainer(schedule).load(path)
    with pytest.raises(BadFileError, match="of another training"):
        trainer(Schedule(steps=5, batch=2, critic_steps=1)).load(path)
    other = trainer(schedule)
    other.images = 255 - other.images
    with pytest.raises(BadFileError, match="of another training"):
        other.load(path)
    tensors, meta = read_tensors(path, KIND)
    write_tensors(path, KIND, tensors, meta | {"done": 5})
    with pytest.raises(BadFileError, match="does not say how far"):
        trainer(schedule).load(path)


def test_files_are_not_overwritten_and_test_images_not_learnt(tmp_path: Path) -> None:
    schedule, out = Schedule(steps=1), tmp_path / "g.safetensors"
    with pytest.raises(GradveilError, match="train split alone"):
        fit("mnist:split=test", out, schedule)
    with pytest.raises(GradveilError, match=r"ends in .safetensors, not 'g.pt'"):
        fit("mnist-samples", tmp_path / "g.pt", schedule)
    with pytest.raises(GradveilError, match=r"no checkpoint .* leave --resume out"):
        fit("mnist-samples", out, schedule, resume=True)
    out.with_suffix(".checkpoint.safetensors").touch()
    with pytest.raises(GradveilError, match="go on with --resume, or delete it"):
        fit("mnist-samples", out, schedule)
    out.touch()
    with pytest.raises(GradveilError, match="is there already"):
        fit("mnist-samples", out, schedule)


Ran = tuple[int, str, str]
TYPER = "ignore::DeprecationWarning"  # of its own use of Click


@pytest.fixture
def gradveil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """The command in this process, in a folder of its own: exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module("gradveil.cli.main")

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["gradveil", "generator", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.run()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run


SLOW = ["train", "--data", "mnist-samples", "--out", "g.safetensors", "--steps", "400", "--batch-size", "4",
        "--features", "4", "--latent", "4", "--critic-steps", "1", "--device", "cpu"]  # fmt: skip


@pytest.mark.integration
def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gradveil.cli.main", "generator", *SLOW]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "g.png").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "go on with the same command and --resume" in said
    assert "Traceback" not in said
    assert set(os.listdir(tmp_path)) == {"g.checkpoint.safetensors", "g.png"}
    assert 0 < read_tensors(tmp_path / "g.checkpoint.safetensors", KIND)[1]["done"] < 400


@pytest.mark.integration
@pytest.mark.filterwarnings(TYPER)
def test_the_command_trains_and_shows(gradveil: Callable[..., Ran], tmp_path: Path) -> None:
    code, said, complaints = gradveil(*SLOW, "--steps", "3", "--kernel", "2")
    assert code == 0, complaints
    assert said.splitlines() == ["generator: g.safetensors", "draws: g.png"]
    code, said, complaints = gradveil("show", "file:path=g.safetensors,size=14", "--out", "sheet.png", "--rows", "2")
    assert code == 0, complaints
    assert "codes of 4 to images of 1x14x14" in said
    assert "stages: code, 8x8, 16x16, image" in said
    assert "steps: 3" in said
    with Image.open(tmp_path / "sheet.png") as sheet, Image.open(tmp_path / "g.png") as grid:
        assert (sheet.size, sheet.mode) == ((140, 28), "L")
        assert grid.size == (280, 280)


@pytest.mark.filterwarnings(TYPER)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "cifar", "--out", "x.png"], "did you mean cifar10"),
        (["show", "file:path=none", "--out", "x.png"], "there is no file none"),
        (["train", "--data", "mnist-samples", "--out", "x.pt"], "ends in .safetensors"),
        (["train", "--data", "mnist-samples", "--out", "x.safetensors", "--device", "tpu"], "device is cpu or cuda"),
        (["train", "--data", "mnist-samples", "--out", "x.safetensors", "--kernel", "3"], "a kernel of 2 or 4"),
        (["train", "--data", "mnist-samples", "--out", "x.safetensors", "--steps", "0"], "at least one step"),
        (["train", "--data", "mnist-samples", "--out", "x.safetensors", "--lr", "nan"], "a rate above 0"),
        (["train", "--data", "mnist-samples", "--out", "x.safetensors", "--lr", "inf"], "a rate above 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, gradveil: Callable[..., Ran], tmp_path: Path
) -> None:
    code, _, complaint = gradveil(*arguments)
    assert code == 2
    assert words in complaint
    assert len(complaint.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
