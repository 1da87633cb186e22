"""Class-per-folder images in the layouts of ImageNet, CelebA and HAM10000, made small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gradveil.core.errors import BadFileError, GradveilError
from gradveil.data import IMAGENET_MEAN, load
from gradveil.data.sets import _decode


def paint(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (50, 40)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    paint(tmp_path / "n02" / "b.png", (0, 255, 0))
    paint(tmp_path / "n01" / "deep" / "c.PNG", (0, 0, 255), (20, 90))
    paint(tmp_path / "n01" / "a.jpeg", (255, 0, 0))
    (tmp_path / "n01" / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "labels.csv").write_text("not a class")
    return tmp_path


@pytest.mark.parametrize(("name", "size"), [("folder", 64), ("imagenet", 224), ("celeba", 64), ("ham10000", 64)])
def test_classes_are_the_sorted_folders(root: Path, name: str, size: int) -> None:
    images = load(f"{name}:path={root}")
    assert images.class_names == ("n01", "n02")
    assert images.labels.tolist() == [0, 0, 1]
    assert images.domain.shape == (3, size, size)
    assert images.mean == IMAGENET_MEAN
    batch = images.batch([1, 2])
    torch.testing.assert_close(batch.inputs.mean((2, 3)), torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]))


def test_size_is_an_option(root: Path) -> None:
    assert load(f"folder:path={root},size=16").batch([0]).inputs.shape == (1, 3, 16, 16)
    with pytest.raises(GradveilError, match="size must be at least 1 pixel, not 0"):
        load(f"folder:path={root},size=0")


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "CMYK", "LA"])
def test_any_colour_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    (tmp_path / "a").mkdir()
    suffix = "tif" if mode == "CMYK" else "png"
    Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode).save(tmp_path / "a" / f"x.{suffix}")
    torch.testing.assert_close(load(f"folder:path={tmp_path},size=8").batch([0]).inputs, torch.ones(1, 3, 8, 8))


@pytest.mark.parametrize("name", ["little.tif", "big.tif", "scan.png", "scan.pgm"])
@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path, name: str, channels: int) -> None:
    eight = np.arange(256, dtype=np.uint16).reshape(16, 16)
    path = tmp_path / name
    if name == "big.tif":
        Image.frombytes("I;16B", (16, 16), (eight * 257).astype(">u2").tobytes()).save(path)
    else:
        Image.fromarray(eight * 257).save(path)
    pixels = _decode(path, (16, 16), channels=channels)
    assert torch.equal(pixels, torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(channels, -1, -1))


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_an_image_without_a_set_range_is_refused(tmp_path: Path, kind: type) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((8, 8), 1000, dtype=kind)).save(tmp_path / "a" / "x.tif")
    with pytest.raises(BadFileError, match=r"x\.tif has 32 bits per pixel and no set range; save it with 8 bits"):
        load(f"folder:path={tmp_path},size=8").batch([0])


def test_an_image_is_only_read_when_asked_for(root: Path) -> None:
    (root / "n02" / "broken.jpg").write_bytes(b"no image")
    images = load(f"folder:path={root}")
    assert len(images.batch([0, 1, 2])) == 3
    with pytest.raises(BadFileError, match=r"cannot read the image .*broken\.jpg"):
        images.batch([3])


def test_a_folder_without_classes_is_explained(tmp_path: Path) -> None:
    with pytest.raises(GradveilError, match="has no folder per class"):
        load(f"folder:path={tmp_path}")
    paint(tmp_path / "flat.png", (1, 2, 3))
    with pytest.raises(GradveilError, match="has no folder per class"):
        load(f"celeba:path={tmp_path}")


def test_an_empty_class_is_named(root: Path) -> None:
    (root / "n03").mkdir()
    with pytest.raises(GradveilError, match="n03 holds no image; add some or remove that folder"):
        load(f"imagenet:path={root}")


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_upright_however_the_camera_was_held(orientation: int, suffix: str, tmp_path: Path) -> None:
    """The four quarters of the scene are of four colours; what is stored is what a camera held so would store."""
    colours = [[(255, 0, 0), (0, 255, 0)], [(0, 0, 255), (255, 255, 255)]]
    scene = np.array(colours, dtype=np.uint8).repeat(16, axis=0).repeat(16, axis=1)
    stored = {
        1: scene, 2: scene[:, ::-1], 3: scene[::-1, ::-1], 4: scene[::-1], 5: scene.transpose(1, 0, 2),
        6: np.rot90(scene, 1), 7: np.rot90(scene, 2).transpose(1, 0, 2), 8: np.rot90(scene, -1),
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(stored))
    hows: dict[str, dict[str, Any]] = {"jpg": {"quality": 95, "subsampling": 0}, "webp": {"lossless": True}}
    image.save(tmp_path / f"x.{suffix}", exif=exif, **hows.get(suffix, {}))
    shown = _decode(tmp_path / f"x.{suffix}", (32, 32), channels=3)
    torch.testing.assert_close(shown.float(), torch.from_numpy(scene).permute(2, 0, 1).float(), atol=40, rtol=0)


def test_exif_that_cannot_be_read_leaves_the_picture_as_it_is(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), (9, 9, 9)).save(tmp_path / "x.png", exif=b"Exif\0\0MM\0\x2a\xff\xff\xff\xff")
    assert _decode(tmp_path / "x.png", (8, 8), channels=3).unique().tolist() == [9]


def test_a_picture_without_end_is_refused(tmp_path: Path) -> None:
    Image.new("1", (20_000, 20_000)).save(tmp_path / "x.png")
    with pytest.raises(BadFileError, match=r"has over 100,000,000 pixels|exceeds limit"):
        _decode(tmp_path / "x.png", (8, 8), channels=1)
