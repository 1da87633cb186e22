"""The common face of data sets: in memory, in files, and around a user's own Dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from gradveil.core.errors import BadFileError, GradveilError
from gradveil.data import DATASETS, FileImages, ImageSet, MemoryImages, from_dataset, load
from gradveil.domains import Images

PIXELS = torch.randint(0, 256, (6, 3, 5, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
CLASSES = ("a", "b", "c")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)


class Own(Dataset[tuple[Tensor, int]]):
    """As a user would write it: no targets, labels only by reading."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(LABELS[index])


@pytest.fixture(params=["memory", "files", "own"])
def images(request: pytest.FixtureRequest, tmp_path: Path) -> ImageSet:
    if request.param == "memory":
        return MemoryImages(name="set", images=PIXELS, labels=LABELS, class_names=CLASSES, mean=MEAN, std=STD)
    if request.param == "own":
        return from_dataset(Own(PIXELS.float() / 255), name="set", class_names=CLASSES, mean=MEAN, std=STD)
    files = tuple(tmp_path / f"{i}.png" for i in range(len(PIXELS)))
    for file, pixels in zip(files, PIXELS, strict=True):
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file)
    return FileImages(name="set", files=files, labels=LABELS, class_names=CLASSES, mean=MEAN, std=STD, size=(5, 4))


def test_batches_are_the_stored_pixels_in_the_unit_range(images: ImageSet) -> None:
    assert len(images) == 6
    assert images.domain == Images(3, 5, 4, classes=3, mean=MEAN, std=STD)
    batch = images.batch([4, 0, 4])
    assert batch.inputs.dtype == torch.float32
    torch.testing.assert_close(batch.inputs, PIXELS[[4, 0, 4]].float() / 255)
    assert batch.labels.tolist() == [1, 0, 1]


def test_subset_keeps_the_order_asked_for(images: ImageSet) -> None:
    chosen = images.subset(torch.tensor([5, 2, 3])).subset([2, 0])
    assert chosen.labels.tolist() == [0, 2]
    torch.testing.assert_close(chosen.batch(range(2)).inputs, PIXELS[[3, 5]].float() / 255)
    assert chosen.domain == images.domain
    assert len(images) == 6


def test_empty_batch_has_the_shape_of_a_batch(images: ImageSet) -> None:
    assert images.batch([]).inputs.shape == (0, 3, 5, 4)
    assert len(images.subset([])) == 0


@pytest.mark.parametrize("indices", [[6], [-1], torch.tensor([0, 100])])
def test_indices_out_of_range_are_named(images: ImageSet, indices: list[int]) -> None:
    with pytest.raises(GradveilError, match="set has 6 images, numbered from 0: there is no"):
        images.batch(indices)


@pytest.mark.parametrize("indices", [torch.ones(6, dtype=torch.bool), [0.5], [[0, 1]]])
def test_what_is_no_list_of_indices_is_refused(images: ImageSet, indices: Tensor) -> None:
    with pytest.raises(GradveilError, match="flat list of whole numbers"):
        images.subset(indices)


def test_labels_must_fit_the_classes() -> None:
    with pytest.raises(GradveilError, match="label 2 is out of range; there are 2 classes"):
        MemoryImages(name="set", images=PIXELS, labels=LABELS, class_names=("a", "b"), mean=MEAN, std=STD)
    with pytest.raises(GradveilError, match="6 images but 5 labels"):
        MemoryImages(name="set", images=PIXELS, labels=LABELS[:5], class_names=CLASSES, mean=MEAN, std=STD)


def test_files_are_cropped_around_the_middle_and_scaled(tmp_path: Path) -> None:
    wide = np.zeros((40, 120), dtype=np.uint8)
    wide[:, 28:92] = 200  # the middle third, and the neighbours that smoothing looks at
    Image.fromarray(wide).save(tmp_path / "wide.png")
    grey = FileImages(
        name="set", files=(tmp_path / "wide.png",), labels=LABELS[:1], class_names=("a",), mean=(0.5,), std=(0.5,),
        size=(8, 8),
    )  # fmt: skip
    torch.testing.assert_close(grey.batch([0]).inputs, torch.full((1, 1, 8, 8), 200 / 255))


@pytest.mark.parametrize(
    "spoilt", [b"", b"no image", b"\x89PNG\r\n\x1a\n", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n"]
)
def test_unreadable_image_is_named(tmp_path: Path, spoilt: bytes) -> None:
    (tmp_path / "x.png").write_bytes(spoilt)
    broken = FileImages(
        name="set", files=(tmp_path / "x.png",), labels=LABELS[:1], class_names=("a",), mean=MEAN, std=STD, size=(8, 8)
    )
    with pytest.raises(BadFileError, match=r"cannot read the image .*x\.png"):
        broken.batch([0])


def test_truncated_image_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    Image.fromarray(PIXELS[0].permute(1, 2, 0).numpy()).resize((64, 64)).save(path)
    path.write_bytes(path.read_bytes()[:-100])
    broken = FileImages(
        name="set", files=(path,), labels=LABELS[:1], class_names=("a",), mean=MEAN, std=STD, size=(8, 8)
    )
    with pytest.raises(BadFileError, match=r"cannot read the image .*x\.jpg: image file is truncated"):
        broken.batch([0])


def test_own_dataset_uses_targets_without_reading_images() -> None:
    class Counting(Own):
        targets = LABELS.tolist()
        reads = 0

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            Counting.reads += 1
            return super().__getitem__(index)

    wrapped = from_dataset(Counting(PIXELS.float() / 255), name="own", class_names=CLASSES)
    assert wrapped.labels.tolist() == LABELS.tolist()
    assert Counting.reads == 1  # the first example, for its shape
    assert wrapped.mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("dataset", "options", "complaint"),
    [
        (Own(PIXELS.float()), {}, r"leaves \[0, 1\]"),
        (Own(PIXELS.float() / 255 - 0.1), {}, r"leaves \[0, 1\]"),
        (Own(torch.full((6, 3, 5, 4), torch.nan)), {}, r"leaves \[0, 1\]"),
        (Own(PIXELS), {}, "not a float tensor"),
        (TensorDataset(torch.rand(6, 9), LABELS), {}, "not a float tensor"),
        (Own(PIXELS[:0]), {}, "own is empty"),
        (Own(PIXELS.float() / 255), {"labels": [0, 1]}, "6 examples but 2 labels"),
    ],
)
def test_own_dataset_of_another_kind_is_refused(dataset: Own, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(GradveilError, match=complaint):
        from_dataset(dataset, name="own", class_names=CLASSES, **options)


def test_own_dataset_that_contradicts_its_labels_is_caught() -> None:
    wrapped = from_dataset(Own(PIXELS.float() / 255), name="own", class_names=CLASSES, labels=[0] * 6)
    with pytest.raises(GradveilError, match="example 1 has label 1 but 0 was expected"):
        wrapped.batch([0, 1])


def test_own_dataset_of_mixed_sizes_is_caught() -> None:
    class Mixed(Own):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.zeros(3, 4 + index, 4), int(LABELS[index])

    wrapped = from_dataset(Mixed(PIXELS), name="own", class_names=CLASSES)
    with pytest.raises(GradveilError, match=r"example 2 is \[3, 6, 4\], not \[3, 4, 4\]"):
        wrapped.batch([0, 2])


def test_every_data_set_says_what_it_is() -> None:
    expected = "celeba cifar10 cifar10-samples cifar100 emnist fashion-mnist folder ham10000 imagenet mnist"
    expected += " mnist-samples open-images orl-faces photos-64"
    assert list(DATASETS) == sorted(expected.split())
    for name in DATASETS:
        assert DATASETS.summary(name).endswith(".")


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("cifar11", "did you mean .*cifar10"),
        ("cifar10:split=val", "option split is one of train, test"),
        ("cifar100", "needs path="),
        ("folder:path=/nowhere/at/all", r"folder: /nowhere/at/all does not exist; give the folder .* path=FOLDER"),
        ("cifar10:path=/nowhere/at/all", r"cifar10: /nowhere/at/all does not exist"),
        ("mnist:path=/dev/null", r"mnist: /dev/null is not a folder"),
    ],
)
def test_a_spec_that_cannot_be_is_explained(spec: str, complaint: str) -> None:
    with pytest.raises(GradveilError, match=complaint):
        load(spec)
