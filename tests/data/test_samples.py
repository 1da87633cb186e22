"""The shipped samples: ready offline, and the real test images they claim to be."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
import torch
from make_samples import to_sheet

from gradveil.data import load
from gradveil.data.registry import from_sheet
from gradveil.domains import Images

SAMPLES = {
    "cifar10": Images(3, 32, 32, classes=10, mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.243, 0.262)),
    "mnist": Images(1, 28, 28, classes=10, mean=(0.1307,), std=(0.3081,)),
}


@pytest.fixture(autouse=True)
def _no_cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shipped samples need neither a cache nor a registry."""
    if "network" not in request.keywords:
        monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "empty"))
        monkeypatch.setenv("GRADVEIL_OFFLINE", "1")


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_go_round_the_classes(name: str) -> None:
    samples = load(f"{name}-samples")
    assert samples.domain == SAMPLES[name]
    assert samples.labels.tolist() == list(range(10)) * 10
    inputs = samples.batch(range(100)).inputs
    assert len(inputs.flatten(1).unique(dim=0)) == 100
    assert (float(inputs.min()), float(inputs.max())) == (0.0, 1.0)


def test_samples_are_small_and_explained() -> None:
    folder = resources.files("gradveil.data") / "samples"
    sizes = {entry.name: len(entry.read_bytes()) for entry in folder.iterdir()}
    assert set(sizes) == {"README.md", "cifar10.json", "cifar10.png", "mnist.json", "mnist.png"}
    assert sum(sizes.values()) < 400_000
    readme = (folder / "README.md").read_text()
    for author in ("Krizhevsky", "LeCun"):
        assert author in readme


@pytest.mark.parametrize("channels", [1, 3])
def test_sheets_keep_every_pixel(channels: int) -> None:
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (30, channels, 5, 7), generator=rng, dtype=torch.uint8)
    assert torch.equal(from_sheet(to_sheet(images), height=5, width=7), images)


@pytest.mark.network
@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_the_test_images_of_their_indices(name: str) -> None:
    about = json.loads((resources.files("gradveil.data") / "samples" / f"{name}.json").read_text())
    samples, test = load(f"{name}-samples"), load(f"{name}:split=test")
    claimed = test.batch(about["indices"])
    shipped = samples.batch(range(100))
    assert torch.equal(shipped.inputs, claimed.inputs)
    assert torch.equal(shipped.labels, claimed.labels)
    for label in range(10):
        firsts = (test.labels == label).nonzero().flatten()[:10]
        assert about["indices"][label::10] == firsts.tolist()
