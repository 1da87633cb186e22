"""CIFAR in the layout torchvision leaves on disk, written by the test; and the fetched sheets."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradveil.core.errors import BadFileError, GradveilError
from gradveil.data import load

PER_BATCH = 4


def write_batch(path: Path, seed: int, label_key: str, labels: list[int]) -> np.ndarray[Any, Any]:
    data = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({"data": data, label_key: labels, "filenames": ["x.png"] * len(labels)}, protocol=3))
    return data


@pytest.fixture
def cifar10_root(tmp_path: Path) -> Path:
    for i in range(1, 6):
        write_batch(tmp_path / "cifar-10-batches-py" / f"data_batch_{i}", i, "labels", [i, 0, 9, i])
    write_batch(tmp_path / "cifar-10-batches-py" / "test_batch", 6, "labels", [3, 8])
    return tmp_path


@pytest.mark.parametrize("below", ["", "cifar-10-batches-py"])
def test_cifar10_batches_are_joined_in_order(cifar10_root: Path, below: str) -> None:
    train = load(f"cifar10:path={cifar10_root / below},split=train")
    assert len(train) == 5 * PER_BATCH
    assert train.labels.tolist() == [label for i in range(1, 6) for label in (i, 0, 9, i)]
    data = np.random.default_rng(2).integers(0, 256, (PER_BATCH, 3072), dtype=np.uint8)
    # As the batches are documented: the first 1024 values are red, row by row.
    red_corner, blue_end = data[1, 0] / 255, data[1, 3071] / 255
    image = train.batch([PER_BATCH + 1]).inputs[0]
    assert float(image[0, 0, 0]) == pytest.approx(red_corner)
    assert float(image[2, 31, 31]) == pytest.approx(blue_end)
    assert float(image[0, 1, 0]) == pytest.approx(data[1, 32] / 255)


def test_cifar10_test_split(cifar10_root: Path) -> None:
    test = load(f"cifar10:path={cifar10_root},split=test")
    assert test.labels.tolist() == [3, 8]
    assert [test.class_names[i] for i in test.labels] == ["cat", "ship"]
    assert test.domain.shape == (3, 32, 32)


def test_cifar100_takes_fine_labels_and_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    write_batch(folder / "train", 0, "fine_labels", [99, 0])
    write_batch(folder / "test", 1, "fine_labels", [5])
    names = [f"thing {i}" for i in range(100)]
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": names, "coarse_label_names": []}, protocol=3))
    train = load(f"cifar100:path={tmp_path}")
    assert train.class_names == tuple(names)
    assert train.labels.tolist() == [99, 0]
    assert len(load(f"cifar100:path={folder},split=test")) == 1


def test_python_2_batches_are_read(tmp_path: Path) -> None:
    # The published files are pickles of Python 2, whose byte strings appear as text. Written out by hand: protocol 1
    # with the opcode of such a string, U.
    pixels = bytes(range(256)) * 12
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01(K\x01M\x00\x0ctcnumpy\ndtype\n"
        b"(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    )
    blob = b"T" + len(pixels).to_bytes(4, "little") + pixels
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "test_batch").write_bytes(b"}(U\x06labels](K\x06eU\x04data" + array + blob + b"tbu.")
    test = load(f"cifar10:path={tmp_path},split=test")
    assert test.labels.tolist() == [6]
    torch.testing.assert_close(test.batch([0]).inputs.flatten()[:256], torch.arange(256) / 255)


def test_a_malicious_batch_is_refused_and_not_run(cifar10_root: Path) -> None:
    trace = cifar10_root / "it-ran"
    (cifar10_root / "cifar-10-batches-py" / "test_batch").write_bytes(b"cos\nmkdir\n(S'%s'\ntR." % bytes(trace))
    with pytest.raises(BadFileError, match=r"test_batch is not a pickle of plain numpy arrays: it asks for os\.mkdir"):
        load(f"cifar10:path={cifar10_root},split=test")
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"data": np.zeros((2, 3072), np.uint8)}, "has no entry 'labels'"),
        ([1, 2], "has no entry 'data'"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "one whole number per image"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": ["a", "b"]}, "one whole number per image"),
        ({"data": np.zeros((2, 100), np.uint8), "labels": [1, 2]}, r"not an array of bytes \[n, 3072\]"),
        ({"data": np.zeros((2, 3072)), "labels": [1, 2]}, r"not an array of bytes \[n, 3072\]"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 10]}, "label 10 is out of range"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2**70]}, "label 11805916207174113034 is out of range"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, -1]}, "label -1 is out of range"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, True]}, "one whole number per image"),
    ],
)
def test_a_batch_of_another_kind_is_explained(cifar10_root: Path, content: Any, complaint: str) -> None:
    (cifar10_root / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(content, protocol=3))
    with pytest.raises(GradveilError, match=complaint):
        load(f"cifar10:path={cifar10_root},split=test")


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match="data_batch_1 does not exist"):
        load(f"cifar10:path={tmp_path}")


@pytest.mark.network
def test_fetched_cifar10_has_its_known_statistics() -> None:
    train, test = load("cifar10"), load("cifar10:split=test")
    assert torch.bincount(train.labels).tolist() == [5000] * 10
    assert torch.bincount(test.labels).tolist() == [1000] * 10
    pixels = test.batch(range(10000)).inputs
    # The test set's own figures lie within a hundredth of the training set's.
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(test.mean), atol=0.01, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(test.std), atol=0.01, rtol=0)
    # The order of the published test batch, which every paper that gives indices relies on.
    assert test.labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
