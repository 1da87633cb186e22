"""Faces and photographs as fetched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from gradveil import assets
from gradveil.data import IMAGENET_MEAN, IMAGENET_STD, load
from gradveil.domains import Images

pytestmark = pytest.mark.network


def test_orl_faces_are_labelled_by_person() -> None:
    faces = load("orl-faces:size=none")
    assert faces.domain == Images(1, 112, 92, classes=40, mean=(0.4416,), std=(0.1958,))
    assert torch.bincount(faces.labels).tolist() == [10] * 40
    batch = faces.batch(range(400))
    assert float(batch.inputs.mean()) == pytest.approx(faces.mean[0], abs=1e-4)
    assert float(batch.inputs.std()) == pytest.approx(faces.std[0], abs=1e-4)
    third_of_person_7 = np.asarray(Image.open(assets.fetch("orl-faces") / "s7" / "3.pgm"))
    torch.testing.assert_close(batch.inputs[62, 0], torch.tensor(third_of_person_7) / 255)
    assert faces.class_names[int(batch.labels[62])] == "person 7"
    assert load("orl-faces").domain.shape == (1, 64, 64)


def test_photos_64_go_with_their_labels() -> None:
    photos = load("photos-64")
    assert len(photos) == 500
    assert photos.domain == Images(3, 64, 64, classes=200, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    folder = assets.fetch("photos-64")
    line = (folder / "labels.yml").read_text().splitlines()[0]
    file, label = line.split(": ")
    pixels = torch.from_numpy(np.load(folder / file)).permute(2, 0, 1) / 255
    position = [int(i) for i in range(500) if torch.allclose(photos.batch([i]).inputs[0], pixels)]
    assert photos.labels[position].tolist() == [int(label)]


def test_open_images_have_no_labels() -> None:
    photos = load("open-images:classes=4")
    assert len(photos) == 919
    assert photos.labels.count_nonzero() == 0
    assert photos.class_names == ("unlabelled", "unused 1", "unused 2", "unused 3")
    batch = photos.batch([0, 918])
    assert batch.inputs.shape == (2, 3, 64, 64)
    assert float(batch.inputs.std()) > 0.1
