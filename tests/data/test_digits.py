"""MNIST and its kin from idx files, plain and gzipped, whole and broken."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradveil.core.errors import BadFileError, GradveilError
from gradveil.data import load
from gradveil.data.digits import read_idx

IMAGES = torch.arange(3 * 28 * 28).remainder(251).view(3, 28, 28).to(torch.uint8)
LABELS = torch.tensor([7, 0, 9], dtype=torch.uint8)


def idx_bytes(array: Tensor) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.numpy().tobytes()


def write_pair(folder: Path, stem: str, *, zipped: bool = False, labels: Tensor = LABELS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in ((f"{stem}-images-idx3-ubyte", IMAGES), (f"{stem}-labels-idx1-ubyte", labels)):
        content = idx_bytes(array)
        (folder / (name + ".gz" if zipped else name)).write_bytes(gzip.compress(content) if zipped else content)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("name", "below"), [("mnist", ""), ("mnist", "MNIST/raw"), ("fashion-mnist", "FashionMNIST/raw")]
)
def test_both_splits_are_found_and_read(tmp_path: Path, name: str, below: str, zipped: bool) -> None:
    write_pair(tmp_path / below, "train", zipped=zipped)
    write_pair(tmp_path / below, "t10k", zipped=zipped, labels=LABELS.flip(0))
    train, test = load(f"{name}:path={tmp_path}"), load(f"{name}:path={tmp_path},split=test")
    assert train.labels.tolist() == [7, 0, 9]
    assert test.labels.tolist() == [9, 0, 7]
    assert train.domain.shape == (1, 28, 28)
    torch.testing.assert_close(train.batch([2]).inputs, IMAGES[2:, None].float() / 255)


@pytest.mark.parametrize(
    ("variant", "classes", "label", "name"),
    [
        ("byclass", 62, 61, "z"),
        ("bymerge", 47, 46, "t"),
        ("balanced", 47, 36, "a"),
        ("letters", 26, 26, "z"),
        ("digits", 10, 9, "9"),
        ("mnist", 10, 9, "9"),
    ],
)
@pytest.mark.parametrize("below", ["EMNIST/raw", "gzip"])
def test_emnist_is_turned_upright_and_named(
    tmp_path: Path, variant: str, classes: int, label: int, name: str, below: str
) -> None:
    stored = torch.tensor([label, 1, 1], dtype=torch.uint8)
    write_pair(tmp_path / below, f"emnist-{variant}-test", zipped=below == "gzip", labels=stored)
    read = load(f"emnist:path={tmp_path},variant={variant},split=test")
    assert len(read.class_names) == classes
    assert read.class_names[int(read.labels[0])] == name
    torch.testing.assert_close(read.batch([0]).inputs[0, 0], IMAGES[0].T.float() / 255)


@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    zipped=st.booleans(),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_idx_round_trip(tmp_path: Path, shape: list[int], seed: int, zipped: bool) -> None:
    array = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    path = tmp_path / ("a.gz" if zipped else "a")
    path.write_bytes(gzip.compress(idx_bytes(array)) if zipped else idx_bytes(array))
    assert torch.equal(read_idx(path, dimensions=len(shape)), array)


WHOLE = idx_bytes(IMAGES)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is no idx file of 3 dimensions: it begins , not 00000803"),
        (b"\x89PNG" + WHOLE[4:], "it begins 89504e47, not 00000803"),
        (idx_bytes(LABELS), "it begins 00000801, not 00000803"),
        (WHOLE[:9], "ends within its header"),
        (WHOLE[:-1], "is truncated: it should hold 2352 bytes"),
        (WHOLE + b"x", "longer than its header says"),
        (WHOLE[:4] + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 28), "more than any data set of its kind"),
    ],
)
def test_a_broken_idx_file_is_explained(tmp_path: Path, content: bytes, complaint: str) -> None:
    for path, stored in ((tmp_path / "a", content), (tmp_path / "a.gz", gzip.compress(content))):
        path.write_bytes(stored)
        with pytest.raises(BadFileError, match=complaint) as caught:
            read_idx(path, dimensions=3)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "spoilt",
    [b"not gzip at all", gzip.compress(WHOLE)[:-20], gzip.compress(WHOLE)[:30]],
    ids=["no gzip", "no end", "head only"],  # not the bytes: they hold the time, and workers must agree on names
)
def test_broken_gzip_is_explained(tmp_path: Path, spoilt: bytes) -> None:
    (tmp_path / "a.gz").write_bytes(spoilt)
    with pytest.raises(BadFileError, match=r"a\.gz"):
        read_idx(tmp_path / "a.gz", dimensions=3)


def test_images_and_labels_must_agree(tmp_path: Path) -> None:
    write_pair(tmp_path, "train", labels=LABELS[:2])
    with pytest.raises(BadFileError, match="holds 3 images but its label file 2 labels"):
        load(f"mnist:path={tmp_path}")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match=r"holds no train-images-idx3-ubyte, plain or \.gz, there or in MNIST/raw"):
        load(f"mnist:path={tmp_path}")


@pytest.mark.network
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_fetched_sets_have_their_known_statistics(name: str) -> None:
    train, test = load(name), load(f"{name}:split=test")
    assert (len(train), len(test)) == (60_000, 10_000)
    pixels = train.batch(range(60_000)).inputs
    assert float(pixels.mean()) == pytest.approx(train.mean[0], abs=1e-4)
    assert float(pixels.std()) == pytest.approx(train.std[0], abs=1e-4)
    first_labels = {"mnist": [7, 2, 1, 0, 4], "fashion-mnist": [9, 2, 1, 1, 6]}
    assert test.labels[:5].tolist() == first_labels[name]
