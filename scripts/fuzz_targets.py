"""Every loader of files from outside, with a good folder of its files to spoil.

``ORIGINALS`` makes the good folders once; a target names one of them and what reads it. The names of files stand for
their formats, as :mod:`fuzz_mutations` knows them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # which the first optimizer of a process loads: that takes seconds
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from gradveil import models
from gradveil.assets import CATALOGUE, Asset, Package, asset_folder, fetch, read_numpy_pickle, verify
from gradveil.assets.fetching import extract
from gradveil.attacks import load_reconstructions
from gradveil.auditing import make_case, make_observed_case, read_case, run_case, run_observed, score_again
from gradveil.auditing.saved import read_folders
from gradveil.auditing.verdict import costs
from gradveil.cli.main import app
from gradveil.core.atomic import write_json
from gradveil.core.environment import environment
from gradveil.core.errors import GradveilError
from gradveil.data import load
from gradveil.engine import strategy
from gradveil.federated import make_training, read_training, run_training
from gradveil.generators import DCGAN, load_generator, save_generator
from gradveil.lab.generators.progan import read_tfjs
from gradveil.lab.generators.published import read_checkpoint
from gradveil.lab.generators.stylegan2 import StyleGAN2, _published, load_stylegan2
from gradveil.lab.generators.training import Schedule, Trainer
from gradveil.lab.leaderboard import read_entries, render_leaderboard
from gradveil.lab.reproduce import measured_file, page, plan, reproduction
from gradveil.lab.sweeps import ResultFolder, make_study, queue_of, read_study, status_of
from gradveil.report import render, render_trainings
from gradveil.threat import load_observations

CASE = {"data": "mnist-samples", "model": "mlp:hidden=8,depth=1", "defenses": ["none"], "attacks": ["ig:iterations=1"],
        "images": 1, "gallery": 10, "restarts": 1, "device": "cpu"}  # fmt: skip
TRAINING: dict[str, Any] = {
    "data": "mnist-samples", "model": "mlp:hidden=8,depth=1", "clients": 2, "rounds": 1, "batch_size": 1,
    "algorithm": "fedsgd", "tap": ["0@1"], "device": "cpu",
}  # fmt: skip
TAP = "taps/round-0001-client-0000.safetensors"
FAST = ["--attack", "analytic", "--gallery", "10", "--restarts", "1", "--budget", "quick"]
_LEADERBOARD = Path(__file__).parents[1] / "docs" / "leaderboard" / "results"


def _audit(folder: Path) -> None:
    run_case(make_case(dict(CASE)), folder)


def _training(folder: Path) -> None:
    run_training(make_training(dict(TRAINING)), folder)


def _reconstruction(folder: Path) -> None:
    _audit(folder / "audit")
    found = next((folder / "audit").glob("rows/*/reconstruction.safetensors"))
    shutil.copy(found, folder / "reconstruction.safetensors")
    shutil.rmtree(folder / "audit")


def _cases(folder: Path) -> None:
    recipe = {"sends": "delta", "lr": 0.1, "epochs": 2, "batch_size": 1}
    (folder / "case.yaml").write_text(json.dumps({**CASE, "recipe": recipe, "threat": "C+labels", "seed": 3}))
    (folder / "training.yaml").write_text(json.dumps({**TRAINING, "partition": "dirichlet:alpha=0.5", "lr": 0.1}))
    grids = {"base": {"model": "mlp", "images": 2}, "grid": {"defenses": ["none", "clip:bound=1"], "recipe.lr": [0.1]}}
    (folder / "study.yaml").write_text(json.dumps({**grids, "exclude": [{"defenses": "none", "recipe.lr": 0.1}]}))


def _leaderboard(folder: Path) -> None:
    for path in sorted(_LEADERBOARD.glob("*/*.json"))[::40]:
        (folder / "results" / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / "results" / path.parent.name)


def _digits() -> DCGAN:
    return DCGAN(channels=1, height=28, width=28, classes=10, latent=4, features=4)


def _generator(folder: Path) -> None:
    save_generator(folder / "own.safetensors", _digits(), {"data": "mnist-samples", "steps": 2})
    begun = _trainer()
    begun.iteration(begun.draws(0))
    begun.save(folder / "checkpoint.safetensors")


def _trainer() -> Trainer:
    pixels = load("mnist-samples")
    images = (pixels.batch(range(8)).inputs * 255).round().byte()
    return Trainer(_digits(), images, pixels.labels[:8], Schedule(steps=2, batch=2, critic_steps=1))


def _checkpoint(folder: Path) -> None:
    tensors = {"first.weight": torch.randn(3, 2), "first.bias": torch.randn(3), "count": torch.tensor(1)}
    save_file(tensors, folder / "own.safetensors")
    torch.save({"g_ema": tensors, "steps": 3}, folder / "own.zip")
    os.rename(folder / "own.zip", folder / "own.pt")
    shutil.copy(folder / "own.pt", folder / "own.zip")


def _stylegan(folder: Path) -> None:
    state = StyleGAN2(style=6, mapping=2, widths=(5, 4, 3)).state_dict()
    tensors = {_published(name): torch.rand_like(tensor) for name, tensor in state.items()}
    save_file(tensors, folder / "own.safetensors")
    torch.save({"g_ema": tensors}, folder / "own.pt")


def _observed(folder: Path) -> None:
    _training(folder / "training")
    case = {"observations": [str(folder / "training")], "attacks": ["analytic"], "gallery": 10, "device": "cpu"}
    run_observed(make_observed_case(case), folder / "audit")


def _cifar100(folder: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, (2, 3072), dtype=np.uint8)
    for name, content in {
        "train": {"data": data, "fine_labels": [1, 99]},
        "meta": {"fine_label_names": [f"class {i}" for i in range(100)]},
    }.items():
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def _cifar(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        data = rng.integers(0, 256, (2, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": [1, 9]}, protocol=2))


def _idx(folder: Path) -> None:
    for stem, packed in (("train", False), ("t10k", True)):
        images = struct.pack(">BBBBIII", 0, 0, 8, 3, 2, 28, 28) + bytes(range(256)) * 6 + bytes(32)
        labels = struct.pack(">BBBBI", 0, 0, 8, 1, 2) + b"\1\2"
        for name, content in ((f"{stem}-images-idx3-ubyte", images), (f"{stem}-labels-idx1-ubyte", labels)):
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(content) if packed else content)


def _photos(folder: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (24, 20, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a maker"
    for place, suffix in enumerate(("jpg", "png", "bmp", "ppm", "tif", "webp")):
        (folder / f"class{place % 2}").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / f"class{place % 2}" / f"x.{suffix}", exif=exif)
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(folder / "class0" / "deep.png")
    Image.fromarray(pixels).convert("P").save(folder / "class1" / "palette.png")


def _tfjs(folder: Path) -> None:
    entries = [{"name": "a/kernel", "dtype": "float32", "shape": [2, 3]}, {"name": "b", "dtype": "int32", "shape": [1]}]
    write_json(folder / "model.json", {"weightsManifest": [{"paths": ["group1-shard1of1.bin"], "weights": entries}]})
    (folder / "group1-shard1of1.bin").write_bytes(bytes(28))


def _lpips(folder: Path) -> None:
    layers = {f"Conv_{i}": {"kernel": np.ones((1, 1, 2, 2), np.float32), "bias": np.zeros(2)} for i in range(2)}
    (folder / "vgg16.ckpt").write_bytes(pickle.dumps({"VGG16_0": layers, "NetLinLayer_0": {"Conv_0": layers}}))


def _state(folder: Path) -> None:
    state = models.build(TRAINING["model"], load("mnist-samples").domain, seed=0).state_dict()
    save_file(state, folder / "state.safetensors")
    save_file({name: tensor + 0.01 for name, tensor in state.items()}, folder / "previous.safetensors")


def _archives(folder: Path) -> None:
    with zipfile.ZipFile(folder / "toy.whl", "w") as zipped, tarfile.open(folder / "toy.tgz", "w:gz") as tarred:
        for name, content in {"toy/data/a.bin": b"a" * 1000, "toy/data/sub/b.txt": b"b", "toy/code.py": b"c"}.items():
            zipped.writestr(name, content)
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tarred.addfile(info, io.BytesIO(content))


def _strategies(folder: Path) -> None:
    known = {"way": "vmap", "each": 4, "graph": True}
    write_json(folder / "strategies.json", {"a key": known, "another": {**known, "way": "loop"}})


STUDY = {"base": dict(CASE), "grid": {"seed": [0, 1]}}


def _results(folder: Path) -> None:
    study, results = make_study("fuzz", STUDY), ResultFolder(folder)
    results.save_study(study)
    done, failed = study.entries
    draft = results.draft(done.digest)
    audit = run_case(make_case(dict(CASE)), draft).as_json()
    result = {"kind": "audit", "title": done.title, "case": done.case.as_json(), "environment": audit["environment"]}
    results.publish(done.digest, draft, {**result, "together": [done.digest], "rows": audit["rows"]}, 1.0)
    results.save_failure(failed, "no luck", "all that was said", alone=True)
    results.pack(folder)
    (folder / ".lock").write_text(json.dumps({"pid": 1, "host": "x", "running": [], "workers": 2}))


def _measured(folder: Path) -> None:
    """What a reproduction measured by functions, and one of its cases."""
    for name in ("censor-overhead", "ggl-fig13"):
        for table, lines in plan(reproduction(name), "small").pairs():
            for fields in [one for planned in lines for one in planned.fields][:3]:
                figures = {column.metric: 1.5 for column in table.columns}
                write_json(
                    measured_file(folder, table.title, fields), {"figures": figures, "environment": environment("cpu")}
                )


def _toy() -> Asset:
    listing = f"{hashlib.sha256(b'a').hexdigest()}  a.bin\n{hashlib.sha256(b'b').hexdigest()}  sub/b.txt\n"
    source = Package("pip", "toy", "1.0", "toy-1.0-py3-none-any.whl")
    known = replace(CATALOGUE["mnist"], name="toy", title="a toy", source=source, archive_sha256="0" * 64)
    return replace(known, manifest_sha256=hashlib.sha256(listing.encode()).hexdigest())


def _cache(folder: Path) -> None:
    (folder / "toy-00000000" / "sub").mkdir(parents=True)
    (folder / "toy-00000000" / "a.bin").write_bytes(b"a")
    (folder / "toy-00000000" / "sub" / "b.txt").write_bytes(b"b")
    sums = [(b"a", "a.bin"), (b"b", "sub/b.txt")]
    text = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for content, name in sums)
    (folder / "toy-00000000" / "SHA256SUMS").write_text(text)


ORIGINALS: dict[str, Callable[[Path], None]] = {
    "audit": _audit, "training": _training, "reconstruction": _reconstruction, "cases": _cases,
    "leaderboard": _leaderboard, "generator": _generator, "checkpoint": _checkpoint, "cifar": _cifar,
    "cifar100": _cifar100, "stylegan": _stylegan, "observed": _observed, "idx": _idx,
    "photos": _photos, "tfjs": _tfjs, "lpips": _lpips, "state": _state, "archives": _archives,
    "strategies": _strategies, "results": _results, "measured": _measured, "cache": _cache,
}  # fmt: skip


def _command(*arguments: str) -> Callable[[Path], Any]:
    """A command line on the folder, in this process; ``DIR`` stands for the folder."""

    def run(folder: Path) -> Any:
        words = [word.replace("DIR", str(folder)) for word in arguments]
        done = CliRunner().invoke(app, words)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        if done.exit_code not in (0, 2, 3):
            raise AssertionError(f"exit code {done.exit_code}")
        return done

    return run


def _photo_batch(folder: Path) -> None:
    images = load(f"folder:path={folder},size=16")
    for place in range(len(images)):
        try:
            images.batch([place])
        except GradveilError:
            continue


def _parsed(folder: Path) -> None:
    for name, make in (("case", make_case), ("training", make_training), ("case", make_observed_case)):
        try:
            make(read_case(folder / f"{name}.yaml"))
        except GradveilError as error:
            _one_line(error)
    read_study(folder / "study.yaml")


def _one_line(error: GradveilError) -> None:
    if "\n" in str(error) or len(str(error)) > 3000:
        raise AssertionError(f"not one line: {str(error)[:200]!r}")


def _expected(_found: Any) -> Any:
    return {"first.weight": (3, 2), "first.bias": (3,), "count": ()}


def _checkpoints(folder: Path) -> None:
    for name in ("own.safetensors", "own.pt", "own.zip"):
        try:
            read_checkpoint(folder / name, _expected, parts=("g_ema",))
        except GradveilError as error:
            _one_line(error)


def _styles(folder: Path) -> None:
    for name in ("own.safetensors", "own.pt"):
        try:
            load_stylegan2(folder / name)
        except GradveilError as error:
            _one_line(error)


def _resumed_trainer(folder: Path) -> None:
    try:
        load_generator(folder / "own.safetensors")
    except GradveilError as error:
        _one_line(error)
    _trainer().load(folder / "checkpoint.safetensors")


def _unpacked(folder: Path) -> None:
    def kept(path: str) -> str | None:
        below = path.removeprefix("toy/data/")
        return below if path.startswith("toy/data/") and below.endswith((".bin", ".txt")) else None

    for name in ("toy.whl", "toy.tgz"):
        try:
            extract(folder / name, folder / f"out-{name}", kept_path=kept, limit=100_000)
        except GradveilError as error:
            _one_line(error)
    written = [path for path in folder.rglob("*") if path.is_symlink() or "out-" in str(path)]
    if any(path.is_symlink() and path.name not in ("toy.whl", "toy.tgz") for path in written):
        raise AssertionError("a link was unpacked")
    if sum(path.stat().st_size for path in written if path.is_file() and "out-" in str(path)) > 200_000:
        raise AssertionError("more was unpacked than the limit")


def _ways(folder: Path) -> None:
    os.environ["GRADVEIL_CACHE"] = str(folder)
    for key in ("a key", "another", "unknown"):
        try:
            strategy._kept(key, ["vmap", "loop"])
        except GradveilError as error:
            _one_line(error)


def _sweep(folder: Path) -> None:
    study = make_study("fuzz", STUDY)
    queue_of(study, ResultFolder(folder), retry=False).status()
    for entry in study.entries:
        ResultFolder(folder).seconds(entry.digest)
    status_of(folder)


def _pages(folder: Path) -> None:
    for name in ("censor-overhead", "ggl-fig13"):
        page(plan(reproduction(name), "small"), folder)


def _asset(folder: Path) -> None:
    os.environ["GRADVEIL_CACHE"], CATALOGUE["toy"] = str(folder), _toy()
    try:
        assert asset_folder("toy").parent == folder
        verify("toy")
        fetch("toy")
    finally:
        del CATALOGUE["toy"]


def _exchanges(folder: Path) -> None:
    read_folders(make_observed_case({"observations": [str(folder)]}))


def _priced(folder: Path) -> None:
    costs([str(folder)])
    read_training(folder)


TARGETS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "observations": ("training", lambda folder: load_observations(folder / TAP)),
    "reconstructions": ("reconstruction", lambda folder: load_reconstructions(folder / "reconstruction.safetensors")),
    "exchanges and truth": ("training", _exchanges),
    "report": ("audit", render),
    "score": ("audit", score_again),
    "audit resumed": ("audit", lambda folder: run_case(make_case(dict(CASE)), folder, resume=True)),
    "training resumed": ("training", lambda folder: run_training(make_training(dict(TRAINING)), folder, resume=True)),
    "costs": ("training", _priced),
    "trainings compared": ("training", lambda folder: render_trainings([folder], folder / "page.html")),
    "cases and studies": ("cases", _parsed),
    "leaderboard": ("leaderboard", lambda folder: read_entries(folder)),
    "leaderboard page": ("leaderboard", render_leaderboard),
    "generators": ("generator", _resumed_trainer),
    "checkpoints": ("checkpoint", _checkpoints),
    "cifar": ("cifar", lambda folder: load(f"cifar10:path={folder}")),
    "cifar test": ("cifar", lambda folder: load(f"cifar10:path={folder},split=test")),
    "cifar100": ("cifar100", lambda folder: load(f"cifar100:path={folder}")),
    "stylegan2": ("stylegan", _styles),
    "observed audit scored": ("observed", lambda folder: score_again(folder / "audit")),
    "idx": ("idx", lambda folder: load(f"mnist:path={folder}")),
    "idx packed": ("idx", lambda folder: load(f"mnist:path={folder},split=test")),
    "photographs": ("photos", _photo_batch),
    "tfjs": ("tfjs", read_tfjs),
    "numpy pickles": ("lpips", lambda folder: read_numpy_pickle(folder / "vgg16.ckpt")),
    "archives": ("archives", _unpacked),
    "strategies": ("strategies", _ways),
    "results of a sweep": ("results", _sweep),
    "reproduction pages": ("measured", _pages),
    "assets": ("cache", _asset),
    "gradveil attack": ("training", _command("attack", f"DIR/{TAP}", "--attack", "analytic", "--out", "DIR/found")),
    "gradveil audit CASE": ("cases", _command("audit", "DIR/case.yaml", *FAST, "--images", "1", "--batch-size", "1",
        "--data", "mnist-samples", "--model", "mlp:hidden=8,depth=1", "--epochs", "1", "--mini-batch", "1",
        "--defense", "none", "--every", "1", "--device", "cpu", "--out", "DIR/out")),
    "gradveil audit --observations": ("training", _command("audit", "--observations", "DIR", *FAST,
        "--out", "DIR/out")),
    "gradveil audit --training": ("training", _command("audit", *FAST, "--data", "mnist-samples", "--model", "mlp",
        "--defense", "none", "--images", "1", "--training", "DIR", "--out", "DIR/out")),
    "gradveil report": ("audit", _command("report", "DIR")),
    "gradveil score": ("audit", _command("score", "DIR", "--metric", "psnr")),
    "gradveil train --resume": ("training", _command("train", "--out", "DIR", "--resume", "--rounds", "1",
        "--data", "mnist-samples", "--clients", "2", "--batch-size", "1", "--model", "mlp:hidden=8,depth=1")),
    "gradveil train --compare": ("training", _command("train", "--compare", "DIR", "--out", "DIR/page.html")),
    "gradveil inspect": ("state", _command("inspect", "DIR/state.safetensors", "--previous", "DIR/previous.safetensors",
        "--model", "mlp:hidden=8,depth=1", "--data", "mnist-samples")),
    "gradveil inspect OBSERVATION": ("training", _command("inspect", f"DIR/{TAP}")),
    "gradveil sweep --status": ("results", _command("sweep", "--status", "--out", "DIR")),
    "gradveil leaderboard": ("leaderboard", _command("leaderboard", "--out", "DIR")),
    "gradveil generator show": ("generator", _command("generator", "show", "file:path=DIR/own.safetensors",
        "--rows", "1", "--out", "DIR/sheet.png")),
}  # fmt: skip
