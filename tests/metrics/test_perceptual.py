"""LPIPS: the published check values with the real weights, and its algebra with weights made up here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data
from torch import Tensor, nn

from gradveil.core.errors import GradveilError, NotAvailableError
from gradveil.metrics import LPIPS
from gradveil.metrics import perceptual as module

Net = Literal["vgg", "alex"]

WIDTHS = {"vgg": [6, 6, 8, 8, 10, 10, 10, 12, 12, 12, 12, 12, 12], "alex": [6, 8, 10, 12, 12]}
STAGES = {"vgg": [2, 2, 3, 3, 3], "alex": [1, 1, 1, 1, 1]}
ALEX_KERNELS = [11, 5, 3, 3, 3]


def made_up_weights(net: Net) -> dict[str, Any]:
    """A narrow network in the layout of the real file."""
    rng = np.random.default_rng(0)
    backbone, channels = {}, 3
    for index, width in enumerate(WIDTHS[net]):
        side = 3 if net == "vgg" else ALEX_KERNELS[index]
        kernel = rng.normal(0, (2 / (side * side * channels)) ** 0.5, (side, side, channels, width))
        backbone[f"Conv_{index}"] = {"kernel": kernel.astype("f4"), "bias": rng.normal(0, 0.1, width).astype("f4")}
        channels = width
    ends = np.cumsum(STAGES[net]) - 1
    heads = {
        f"NetLinLayer_{stage}": {"Conv_0": {"kernel": rng.uniform(0, 1, (1, 1, WIDTHS[net][end], 1)).astype("f4")}}
        for stage, end in enumerate(ends)
    }
    return {"VGG16_0" if net == "vgg" else "AlexNet_0": backbone, **heads}


def by_the_paper(weights: dict[str, Any], net: Net, a: Tensor, b: Tensor) -> Tensor:
    """Equation 1 of the paper, layer by layer, with torch's own modules: the slow and plain way."""
    backbone = weights["VGG16_0" if net == "vgg" else "AlexNet_0"]
    features, total, index = [a, b], torch.zeros(len(a)), 0
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    features = [((2 * f - 1) - shift.view(1, 3, 1, 1)) / scale.view(1, 3, 1, 1) for f in features]
    for stage, convs in enumerate(STAGES[net]):
        if stage > 0 and (net == "vgg" or stage < 3):
            features = [nn.MaxPool2d(2 if net == "vgg" else 3, 2)(f) for f in features]
        for _ in range(convs):
            kernel = torch.from_numpy(backbone[f"Conv_{index}"]["kernel"]).permute(3, 2, 0, 1)
            out, into, side, _ = kernel.shape
            stride, padding = (4, 2) if side == 11 else (1, side // 2)
            layer = nn.Conv2d(into, out, side, stride, padding)
            layer.load_state_dict({"weight": kernel, "bias": torch.from_numpy(backbone[f"Conv_{index}"]["bias"])})
            features = [layer(f).relu() for f in features]
            index += 1
        unit = [f / (f.norm(dim=1, keepdim=True) + 1e-10) for f in features]
        head = torch.from_numpy(weights[f"NetLinLayer_{stage}"]["Conv_0"]["kernel"]).view(1, -1, 1, 1)
        total = total + (head * (unit[0] - unit[1]) ** 2).sum(1).mean((1, 2)).detach()
    return total


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> dict[str, Any]:
        return made_up_weights("vgg" if path.name == "vgg16.ckpt" else "alex")

    monkeypatch.setattr(module, "fetch", lambda name, **_: Path(name))
    monkeypatch.setattr(module, "read_numpy_pickle", read)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("net", ["vgg", "alex"])
def test_distance_is_that_of_the_paper(net: Net) -> None:
    a, b = torch.rand(3, 3, 36, 40), torch.rand(3, 3, 36, 40)
    torch.testing.assert_close(LPIPS(net).distance(a, b), by_the_paper(made_up_weights(net), net, a, b))


@pytest.mark.usefixtures("small")
def test_pairwise_equals_distance_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    lpips, a, b = LPIPS(), torch.rand(5, 3, 32, 32), torch.rand(7, 3, 32, 32)
    whole = lpips.pairwise(a, b)
    monkeypatch.setattr(module, "_PIXELS_AT_ONCE", 3 * 32 * 32)
    monkeypatch.setattr(module, "_FLOATS_HELD", 2 * lpips._embed(a[:1]).numel())
    torch.testing.assert_close(lpips.pairwise(a, b), whole)
    for column, image in enumerate(b):
        torch.testing.assert_close(
            whole[:, column], lpips.distance(a, image.expand(5, -1, -1, -1)), rtol=1e-4, atol=1e-5
        )


@pytest.mark.usefixtures("small")
def test_grey_images_count_as_three_equal_channels() -> None:
    lpips, a, b = LPIPS(), torch.rand(2, 1, 28, 28), torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(lpips.distance(a, b), lpips.distance(a.repeat(1, 3, 1, 1), b.repeat(1, 3, 1, 1)))


@pytest.mark.usefixtures("small")
def test_images_it_cannot_take() -> None:
    with pytest.raises(GradveilError, match="sides of 31 or more, not 28x28"):
        LPIPS("alex").distance(torch.rand(1, 3, 28, 28), torch.rand(1, 3, 28, 28))
    with pytest.raises(GradveilError, match="2 channels"):
        LPIPS().distance(torch.rand(1, 2, 32, 32), torch.rand(1, 2, 32, 32))


def test_without_weights_it_is_not_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path))
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    with pytest.raises(NotAvailableError, match="lpips"):
        LPIPS()


def photograph(array: np.ndarray) -> Tensor:
    small = np.asarray(Image.fromarray(array).resize((256, 256)))
    return torch.from_numpy(small / 255).float().permute(2, 0, 1)[None]


@pytest.mark.network
@pytest.mark.parametrize(("net", "noise", "other"), [("vgg", 0.414, 0.763), ("alex", 0.384, 0.725)])
def test_check_values_of_the_real_weights(net: Net, noise: float, other: float) -> None:
    lpips, astronaut, coffee = LPIPS(net), photograph(data.astronaut()), photograph(data.coffee())
    # Sigma 0.2 on [-1, 1] is 0.1 here.
    noisy = astronaut + 0.1 * torch.randn(astronaut.shape, generator=torch.Generator().manual_seed(0))
    assert float(lpips.distance(astronaut, astronaut)) == 0
    assert float(lpips.distance(astronaut, noisy)) == pytest.approx(noise, abs=0.01)
    assert float(lpips.distance(astronaut, coffee)) == pytest.approx(other, abs=0.01)
    table = lpips.pairwise(astronaut, torch.cat([astronaut, noisy, coffee]))[0]
    assert table.tolist() == pytest.approx([0, noise, other], abs=0.01)


@pytest.mark.usefixtures("small")
def test_what_is_remembered_is_not_embedded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lpips, few, gallery = LPIPS("vgg"), torch.rand(2, 3, 16, 16), torch.rand(7, 3, 16, 16)
    fresh = lpips.pairwise(few, gallery)
    lpips.remember(gallery)
    counted: list[int] = []
    embed = lpips._embed
    monkeypatch.setattr(lpips, "_embed", lambda images: counted.append(len(images)) or embed(images))
    torch.testing.assert_close(lpips.pairwise(few, gallery), fresh)
    assert 7 not in counted
    torch.testing.assert_close(lpips.pairwise(few, gallery + 0), fresh)
    assert 7 in counted, "another tensor is embedded"
