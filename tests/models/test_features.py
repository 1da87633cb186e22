"""Public features: a small network of the same layout against plain PyTorch, the real weights, and what is kept."""

from __future__ import annotations

import stat
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from gradveil import models
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.progress import Silent, Task
from gradveil.core.types import Params
from gradveil.data import load
from gradveil.domains import Images
from gradveil.models import Functional, PublicFeatures, efficientnet, encoded, features
from gradveil.models.efficientnet import EfficientNetLite
from gradveil.models.features import Resize
from gradveil.models.scattering import Scattering

SPEC = "features:backbone=efficientnet-lite0+efficientnet-lite2,pca=6"
STAGES = ((3, 1), (3, 2), (5, 2), (3, 2), (5, 1), (5, 2), (3, 1))
"""Side of the filters and stride, as in the real network."""


def made_up(seed: int) -> Params:
    """A state dict of the layout of EfficientNet-Lite, a few channels wide; the fourth stage has two blocks."""
    rng, found = torch.Generator().manual_seed(seed), {}

    def layer(name: str, norm: str, out: int, into: int, side: int) -> None:
        found[f"{name}.weight"] = torch.randn(out, into, side, side, generator=rng) / (into * side * side) ** 0.5
        found[f"{norm}.weight"] = 1 + 0.2 * torch.rand(out, generator=rng)
        found[f"{norm}.bias"] = 0.3 + 0.1 * torch.randn(out, generator=rng)
        found[f"{norm}.running_mean"] = 0.1 * torch.randn(out, generator=rng)
        found[f"{norm}.running_var"] = 0.5 + torch.rand(out, generator=rng)

    layer("_conv_stem", "_bn0", 4, 3, 3)
    into, number = 4, 0
    for stage, (side, _) in enumerate(STAGES):
        for _ in range(2 if stage == 3 else 1):
            out, at, wide = 5 + stage, f"_blocks.{number}", into if stage == 0 else 2 * into
            if stage:
                layer(f"{at}._expand_conv", f"{at}._bn0", wide, into, 1)
            layer(f"{at}._depthwise_conv", f"{at}._bn1", wide, 1, side)
            layer(f"{at}._project_conv", f"{at}._bn2", out, wide, 1)
            into, number = out, number + 1
    layer("_conv_head", "_bn1", 12, into, 1)
    return found


def by_hand(weights: Params, pictures: Tensor) -> Tensor:
    """The network with plain layers of PyTorch, padded as TensorFlow pads."""

    def layer(x: Tensor, name: str, norm: str, stride: int, bounded: bool) -> Tensor:
        weight = weights[f"{name}.weight"]
        side, (height, width) = weight.shape[-1], x.shape[2:]
        pads = [max(0, (-(-n // stride) - 1) * stride + side - n) for n in (width, height)]
        x = F.pad(x, (pads[0] // 2, -(-pads[0] // 2), pads[1] // 2, -(-pads[1] // 2)))
        x = F.conv2d(x, weight, stride=stride, groups=x.shape[1] // weight.shape[1])
        mean, variance, scale, shift = (
            weights[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        x = F.batch_norm(x, mean, variance, scale, shift, eps=1e-3)
        return x.clamp(0, 6) if bounded else x

    x = layer((pictures - 0.498) / 0.502, "_conv_stem", "_bn0", 2, True)
    number = 0
    for stage, (_, stride) in enumerate(STAGES):
        for place in range(2 if stage == 3 else 1):
            at, before = f"_blocks.{number}", x
            if stage:
                x = layer(x, f"{at}._expand_conv", f"{at}._bn0", 1, True)
            x = layer(x, f"{at}._depthwise_conv", f"{at}._bn1", stride if place == 0 else 1, True)
            x = layer(x, f"{at}._project_conv", f"{at}._bn2", 1, False)
            x = x + before if place else x
            number += 1
    return layer(x, "_conv_head", "_bn1", 1, True).mean((2, 3))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two small networks in the place of the real ones, a few photographs, and a cache of their own."""
    for seed, name in enumerate(("efficientnet-lite0", "efficientnet-lite2")):
        (tmp_path / name).mkdir()
        torch.save(made_up(seed), tmp_path / name / "weights.pth")
    monkeypatch.setattr(efficientnet, "fetch", lambda name, **_: tmp_path / name)
    monkeypatch.setattr(efficientnet, "SIZES", {"efficientnet-lite0": 40, "efficientnet-lite2": 33})
    monkeypatch.setattr(features, "SIZES", efficientnet.SIZES)
    monkeypatch.setattr(features, "PUBLIC", ("cifar10-samples",))
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("side", [32, 33, 40])
def test_the_network_is_the_one_of_plain_layers(side: int) -> None:
    pictures = torch.rand(3, 3, side, side)
    torch.testing.assert_close(EfficientNetLite("efficientnet-lite0")(pictures), by_hand(made_up(0), pictures))


def test_pictures_are_resized_as_torch_does() -> None:
    pictures = torch.rand(2, 3, 32, 48)
    expected = F.interpolate(pictures, size=(40, 40), mode="bicubic", antialias=True)
    torch.testing.assert_close(Resize(32, 48, 40)(pictures), expected)
    grey = pictures[:, :1]
    torch.testing.assert_close(Resize(32, 48, 40)(grey), Resize(32, 48, 40)(grey.repeat(1, 3, 1, 1)))


@pytest.mark.usefixtures("small")
def test_only_the_head_is_trained_and_features_stand_in_for_pictures() -> None:
    data = load("cifar10-samples").subset(range(5))
    model = models.build(SPEC, data.domain, seed=0)
    assert isinstance(model, PublicFeatures)
    nn.init.normal_(model.head.weight)
    assert set(model.state_dict()) == {"head.weight", "head.bias"} == {n for n, _ in model.named_parameters()}
    seen, batch = encoded(model, data), data.batch(range(5))
    torch.testing.assert_close(seen.norm(dim=1), torch.ones(5))
    torch.testing.assert_close(model(seen), model(batch.inputs))
    one, run = grad(lambda p, x, y: F.cross_entropy(run(p, x[None]), y[None])), Functional(model)
    each = vmap(one, in_dims=(None, 0, 0))(run.params, batch.inputs, batch.labels)
    alone = one(run.params, batch.inputs[2], batch.labels[2])
    torch.testing.assert_close(each["head.weight"][2], alone["head.weight"])


@pytest.mark.usefixtures("small")
def test_public_directions_are_those_of_a_principal_component_analysis() -> None:
    public = load("cifar10-samples")
    model = models.build("features:pca=4,whiten=0.5", public.domain, seed=0)
    assert isinstance(model, PublicFeatures)
    with torch.no_grad():
        seen = model.backbones(public.batch(range(len(public))).inputs).double()
    centred = seen - seen.mean(dim=0)
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    along = (model.directions.double().T @ vectors.flip(1)[:, :4]).abs()
    lengths = (values.flip(0)[:4] / values[-1]).sqrt()
    torch.testing.assert_close(along, torch.diag(lengths**-0.5), atol=2e-3, rtol=1e-3)


@pytest.mark.usefixtures("small")
def test_a_direction_has_the_sign_of_its_largest_entry() -> None:
    model = models.build("features:pca=4,whiten=0", load("cifar10-samples").domain, seed=0)
    assert isinstance(model, PublicFeatures)
    assert (model.directions.gather(0, model.directions.abs().argmax(dim=0, keepdim=True)) > 0).all()


@pytest.mark.usefixtures("small")
def test_photographs_are_shown_as_the_pictures_of_the_domain_are(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    forward = features.Backbones.forward

    def noted(self: features.Backbones, pictures: Tensor) -> Tensor:
        shapes.append(tuple(pictures.shape[1:]))
        return forward(self, pictures)

    monkeypatch.setattr(features.Backbones, "forward", noted)
    domain = Images(channels=1, height=28, width=20, classes=3, mean=(0.5,), std=(0.5,))
    models.build("features:pca=2", domain, seed=0)
    assert set(shapes) == {(1, 28, 20)}


@pytest.mark.usefixtures("small")
def test_with_mirror_a_picture_and_its_mirror_image_are_the_same() -> None:
    data = load("cifar10-samples").subset(range(5))
    shown = data.batch(range(5)).inputs
    plain, both = (models.build(f"features:mirror={each},bias=false", data.domain, seed=0) for each in (False, True))
    assert isinstance(plain, PublicFeatures)
    assert isinstance(both, PublicFeatures)
    torch.testing.assert_close(both.encode(shown), both.encode(shown.flip(-1)), atol=1e-3, rtol=0)
    assert not torch.allclose(plain.encode(shown), plain.encode(shown.flip(-1)), atol=1e-2)
    assert [name for name, _ in both.named_parameters()] == ["head.weight"]
    torch.testing.assert_close(both.alone()(both.encode(shown)), both(shown))


@pytest.mark.usefixtures("small")
def test_long_work_is_reported() -> None:
    titles: list[str] = []

    class Noting(Silent):
        def task(self, title: str, total: float | None) -> AbstractContextManager[Task]:
            titles.append(title)
            return super().task(title, total)

    data = load("cifar10-samples").subset(range(6))
    model = models.build("features:pca=3", data.domain, seed=0, progress=Noting())
    assert isinstance(model, PublicFeatures)
    encoded(model, data, progress=Noting())
    assert titles == ["features of public photographs, once", "public features"]


def test_scattering_hardly_moves_with_a_picture_and_is_blind_to_its_mean_but_in_one_channel() -> None:
    shown, transform = load("cifar10-samples").batch(range(8)).inputs, Scattering()
    seen = transform(shown)
    assert seen.shape == (8, 3 * 81 * 64)
    moved, other = transform(shown.roll(1, -1)), transform(shown.flip(0))
    assert (moved - seen).norm() < (other - seen).norm() / 3
    brighter = (transform(shown + 0.3) - seen).view(8, 3, 81, 64)
    torch.testing.assert_close(brighter[:, :, 0], torch.full((8, 3, 64), 0.3), atol=1e-4, rtol=0)
    assert brighter[:, :, 1:].abs().max() < 1e-4


def test_scattering_sees_stripes_at_their_angle_and_scale() -> None:
    """Against plain sums: a wave along a row of pixels answers to the filter of its own angle most."""
    stripes = 0.5 + 0.5 * torch.cos(torch.arange(32) * torch.pi * 3 / 4).expand(1, 3, 32, 32)
    for picture, angle in ((stripes, 0), (stripes.transpose(-1, -2), 4)):
        first = Scattering()(picture).view(3, 81, 64)[0, 1:17].mean(dim=1)
        assert int(first.argmax()) == angle


@pytest.mark.usefixtures("small")
def test_a_backbone_without_weights_serves_as_well() -> None:
    data = load("cifar10-samples").subset(range(4))
    model = models.build("features:backbone=scattering,pca=8", data.domain, seed=0)
    assert isinstance(model, PublicFeatures)
    torch.testing.assert_close(encoded(model, data).norm(dim=1), torch.ones(4))


@pytest.mark.usefixtures("small")
def test_features_of_private_data_are_kept_for_their_owner_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(features, "KEPT_FROM", 10)
    data = load("cifar10-samples").subset(range(12))
    model = models.build("features", data.domain, seed=0)
    assert isinstance(model, PublicFeatures)
    other = models.build("features:pca=3", data.domain, seed=0)
    assert isinstance(other, PublicFeatures)
    first = encoded(model, data)
    (kept,) = (tmp_path / "cache" / "private").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    monkeypatch.setattr(PublicFeatures, "encode", None)  # a second time nothing is computed
    torch.testing.assert_close(encoded(model, data), first, rtol=0, atol=0)
    with pytest.raises(TypeError):
        encoded(other, data)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("features:backbone=resnet", "resnet"),
        ("features:pca=-1", "pca"),
        ("features:pca=999", "at most"),
        ("features:whiten=2", "whiten"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(spec: str, says: str) -> None:
    with pytest.raises(GradveilError, match=says):
        models.build(spec, load("cifar10-samples").domain, seed=0)


@pytest.mark.usefixtures("small")
def test_a_file_that_is_no_state_dict_is_refused(tmp_path: Path) -> None:
    (tmp_path / "efficientnet-lite0" / "weights.pth").write_bytes(b"no weights")
    with pytest.raises(BadFileError, match="gradveil assets get efficientnet-lite0"):
        EfficientNetLite("efficientnet-lite0")
