"""Image operations against Pillow, one image at a time, and policies made of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from exchanges import SAMPLES
from gradveil import models
from gradveil.client import SimulatedClient
from gradveil.core.errors import GradveilError
from gradveil.core.streams import Stream
from gradveil.core.types import Batch, Recipe
from gradveil.data import load
from gradveil.defenses import DEFENSES, ats
from gradveil.defenses.ats import KINDS, LIBRARY, transformed

COLOUR = SAMPLES.batch(range(24)).inputs
GREY = load("mnist-samples").batch(range(24)).inputs
BOTH = pytest.mark.parametrize("images", [COLOUR, GREY], ids=["colour", "grey"])
LEVEL = 1 / 255


def every(images: Tensor, amount: float) -> Tensor:
    return torch.full((len(images),), amount)


def by_pillow(images: Tensor, operation: Callable[[Image.Image], Image.Image]) -> Tensor:
    """The oracle: one picture at a time, in 8 bits."""
    pictures = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
    done = [operation(Image.fromarray(p if p.shape[2] == 3 else p[..., 0])) for p in pictures]
    stacked = torch.from_numpy(np.stack([np.asarray(one).reshape(*pictures.shape[1:]) for one in done]))
    return stacked.permute(0, 3, 1, 2) / 255


def affine(
    *entries: float, resample: Image.Resampling = Image.Resampling.NEAREST
) -> Callable[[Image.Image], Image.Image]:
    return lambda p: p.transform(p.size, Image.Transform.AFFINE, entries, resample)


EXACT = {
    "invert": (ats.invert, 0, ImageOps.invert),
    "posterize 6": (ats.posterize, 6, lambda p: ImageOps.posterize(p, 6)),
    "posterize 1": (ats.posterize, 1, lambda p: ImageOps.posterize(p, 1)),
    "solarize 142.2": (ats.solarize, 142.2, lambda p: ImageOps.solarize(p, 142.2)),  # type: ignore[arg-type]
    "solarize 256": (ats.solarize, 256, lambda p: ImageOps.solarize(p, 256)),
    "equalize": (ats.equalize, 0, ImageOps.equalize),
}


@BOTH
@pytest.mark.parametrize("name", EXACT)
def test_operations_in_whole_levels_are_pillows(name: str, images: Tensor) -> None:
    operation, amount, pillow = EXACT[name]
    torch.testing.assert_close(operation(images, every(images, amount)), by_pillow(images, pillow))


ROUNDED = {
    "autocontrast": (ats.autocontrast, 0, ImageOps.autocontrast, 1),
    "brightness": (ats.brightness, 0.4, lambda p: ImageEnhance.Brightness(p).enhance(1.4), 1),
    "contrast": (ats.contrast, 0.3, lambda p: ImageEnhance.Contrast(p).enhance(1.3), 2),
    "less contrast": (ats.contrast, -0.3, lambda p: ImageEnhance.Contrast(p).enhance(0.7), 2),
    "sharpness": (ats.sharpness, 0.5, lambda p: ImageEnhance.Sharpness(p).enhance(1.5), 2),
    "less sharpness": (ats.sharpness, -0.5, lambda p: ImageEnhance.Sharpness(p).enhance(0.5), 2),
    "colour": (ats.colour, 0.5, lambda p: ImageEnhance.Color(p).enhance(1.5), 2),
    "less colour": (ats.colour, -0.5, lambda p: ImageEnhance.Color(p).enhance(0.5), 2),
}


@BOTH
@pytest.mark.parametrize("name", ROUNDED)
def test_operations_in_fractions_are_pillows_up_to_its_rounding(name: str, images: Tensor) -> None:
    operation, amount, pillow, levels = ROUNDED[name]
    away = operation(images, every(images, amount)) - by_pillow(images, pillow)
    assert away.abs().max() < (levels + 0.01) * LEVEL
    assert away.abs().mean() < 0.7 * LEVEL


MOVED = {
    "shift_x": (ats.shift_x, 0.28, affine(1, 0, 0.28 * 32, 0, 1, 0)),
    "shift_x back": (ats.shift_x, -0.45, affine(1, 0, -0.45 * 32, 0, 1, 0)),
    "shift_y": (ats.shift_y, 0.15, affine(1, 0, 0, 0, 1, 0.15 * 32)),
    "shift_y back": (ats.shift_y, -0.1, affine(1, 0, 0, 0, 1, -0.1 * 32)),
}


@pytest.mark.parametrize("name", MOVED)
def test_shifts_are_pillows(name: str) -> None:
    operation, amount, pillow = MOVED[name]
    torch.testing.assert_close(operation(COLOUR, every(COLOUR, amount)), by_pillow(COLOUR, pillow))


@pytest.mark.parametrize("degrees", [6.7, -20.0, 90.0])
def test_rotation_is_pillows(degrees: float) -> None:
    expected = by_pillow(COLOUR, lambda p: p.rotate(degrees, fillcolor=(128, 128, 128)))
    differs = (ats.rotate(COLOUR, every(COLOUR, degrees)) - expected).abs().amax(dim=1) > 1e-6
    assert differs.float().mean() < 0.005, "Pillow counts in fixed point: a few pixels fall to the neighbour"


@pytest.mark.parametrize(
    ("operation", "entries"),
    [(ats.shear_x, (1, 0.1667, 0, 0, 1, 0)), (ats.shear_y, (1, 0, 0, -0.1667, 1, 0))],
)
def test_shears_are_pillows_up_to_its_cubic(operation: ats.Operation, entries: tuple[float, ...]) -> None:
    expected = by_pillow(COLOUR, affine(*entries, resample=Image.Resampling.BICUBIC))
    away = (operation(COLOUR, every(COLOUR, entries[1] + entries[3])) - expected).abs()
    assert away.mean() < 2 * LEVEL, "the two cubics differ in their slope at the nodes"
    nearer = (operation(COLOUR, every(COLOUR, -entries[1] - entries[3])) - expected).abs().mean()
    assert away.mean() < 0.1 * nearer, "the other way round it is another picture"


IDENTITY = {"posterize": 8.0, "solarize": 256.0}
PARAMETRIC = sorted(set(KINDS) - {"autocontrast", "equalize", "invert"})


@BOTH
@pytest.mark.parametrize("name", PARAMETRIC)
def test_no_amount_changes_nothing(name: str, images: Tensor) -> None:
    torch.testing.assert_close(KINDS[name].operation(images, every(images, IDENTITY.get(name, 0.0))), images)


@BOTH
@pytest.mark.parametrize("name", KINDS)
def test_operations_keep_shape_range_and_argument(name: str, images: Tensor) -> None:
    before = images.clone()
    amounts = torch.linspace(0.01, 1, len(images)) * (KINDS[name].amount(9) or 1)
    changed = KINDS[name].operation(images, amounts)
    assert changed.shape == images.shape
    assert changed.dtype == images.dtype
    assert changed.min() >= 0
    assert changed.max() <= 1
    assert torch.equal(images, before)
    if (name, images.shape[1]) != ("colour", 1):
        assert not torch.allclose(changed, images)


@BOTH
@pytest.mark.parametrize("name", KINDS)
def test_each_image_is_changed_by_its_own_amount(name: str, images: Tensor) -> None:
    amounts = torch.linspace(-1, 1, 24) if KINDS[name].signed else torch.linspace(0, 8, 24)
    together = KINDS[name].operation(images, amounts)
    apart = torch.cat([KINDS[name].operation(images[i : i + 1], amounts[i : i + 1]) for i in range(len(images))])
    torch.testing.assert_close(together, apart)


def test_what_operations_are_for() -> None:
    nothing = every(COLOUR, 0)
    torch.testing.assert_close(ats.invert(ats.invert(COLOUR, nothing), nothing), COLOUR)
    moved = ats.shift_x(COLOUR, every(COLOUR, 8 / 32))
    torch.testing.assert_close(moved[..., :24], COLOUR[..., 8:])
    assert moved[..., 24:].eq(0).all()
    assert torch.equal(ats.rotate(COLOUR, every(COLOUR, 180)), COLOUR.flip(2, 3))
    assert ats.rotate(COLOUR, every(COLOUR, 45))[:, :, 0, 0].unique().tolist() == [pytest.approx(128 / 255)]
    stretched = ats.autocontrast(COLOUR, nothing)
    assert stretched.amin(dim=(2, 3)).eq(0).all()
    assert stretched.amax(dim=(2, 3)).eq(1).all()
    assert ats.colour(COLOUR, every(COLOUR, -1)).std(dim=1).max() < 1e-6, "grey"
    assert ats.contrast(COLOUR, every(COLOUR, -1)).flatten(1).std(dim=1).max() < 1e-6, "flat"


def test_a_flat_picture_survives_stretching_and_tiny_ones_smoothing() -> None:
    flat = torch.full((2, 3, 8, 8), 0.25)
    for operation in (ats.autocontrast, ats.equalize):
        assert torch.equal(operation(flat, every(flat, 0)), flat)
    tiny = COLOUR[:, :, :2, :2]
    assert torch.equal(ats.sharpness(tiny, every(tiny, 0.5)), tiny)


def test_crop_and_mirror() -> None:
    right, down = torch.full((24,), 3), torch.full((24,), -2)
    mirrored = torch.arange(24) % 2 == 0
    found = ats.crop_and_mirror(COLOUR, right, down, mirrored)
    expected = torch.zeros_like(COLOUR)
    expected[:, :, 2:, :-3] = COLOUR[:, :, :-2, 3:]
    torch.testing.assert_close(found[1::2], expected[1::2])
    torch.testing.assert_close(found[::2], expected[::2].flip(3))


def test_the_library_is_the_published_one() -> None:
    assert len(LIBRARY) == 50
    assert [LIBRARY[i] for i in (3, 1, 7, 43, 18)] == [
        ("shift_x", 9), ("contrast", 6), ("shift_y", 2), ("shift_y", 3), ("contrast", 7),
    ]  # fmt: skip
    assert [KINDS["posterize"].amount(m) for m in range(10)] == [8, 8, 7, 7, 6, 6, 5, 5, 4, 4]
    assert KINDS["solarize"].amount(9) == 0
    assert KINDS["rotate"].amount(9) == 30
    assert KINDS["shift_x"].amount(9) == pytest.approx(150 / 331)


def test_the_page_lists_the_library() -> None:
    page = (Path(__file__).parents[2] / "docs" / "defenses" / "ats.md").read_text()
    rows = [line.strip("|").split("|")[1:] for line in page.splitlines() if re.match(r"\| [0-4]?0 \|", line)]
    assert [cell.strip() for row in rows for cell in row] == [f"{name} {magnitude}" for name, magnitude in LIBRARY]


def test_a_policy_is_its_sub_policies_in_order() -> None:
    """3-1-7: sideways by 150/331 of the width, contrast down by a third, up by two ninths of 150/331."""
    signs = torch.tensor([[1, -1, 1]]).expand(24, -1)
    expected = ats.shift_x(COLOUR, every(COLOUR, 150 / 331))
    expected = ats.contrast(expected, every(COLOUR, -0.5 * 6 / 9))
    expected = ats.shift_y(expected, every(COLOUR, 150 / 331 * 2 / 9))
    torch.testing.assert_close(transformed(COLOUR, (3, 1, 7), signs), expected)


def test_every_image_gets_one_of_the_policies_with_signs_of_its_own() -> None:
    """4,000 copies of one picture: two policies (invert, shift) of which one has a sign, so three outcomes."""
    one = COLOUR[:1].expand(4000, -1, -1, -1)
    found = DEFENSES.build("ats:policy=29_3").on_inputs(one, Stream.seeded(0))
    outcomes = [ats.invert(COLOUR[:1], torch.zeros(1))]
    outcomes += [ats.shift_x(COLOUR[:1], torch.tensor([sign * 150 / 331])) for sign in (1.0, -1.0)]
    shares = [(found - outcome).flatten(1).abs().amax(dim=1).lt(1e-6).float().mean().item() for outcome in outcomes]
    assert sum(shares) == pytest.approx(1)
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.03)


def test_crop_moves_by_up_to_four_pixels_and_mirrors_half() -> None:
    """Under a policy that does nothing (28: solarize from level 256 on) only the crop is left."""
    white = torch.ones(4000, 1, 16, 32)
    white[..., 16:] = 0.5
    found = DEFENSES.build("ats:policy=28,crop=true").on_inputs(white, Stream.seeded(0))
    black_above = found[:, 0, :8].eq(0).all(dim=2).sum(dim=1)
    assert black_above.unique().tolist() == [0, 1, 2, 3, 4]
    assert (black_above == 4).float().mean().item() == pytest.approx(1 / 9, abs=0.02)
    mirrored = found[:, 0, 8, 8] == 0.5
    assert mirrored.float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert torch.equal(found[:, 0, 8, 8] == 1, ~mirrored)
    assert torch.equal(DEFENSES.build("ats:policy=28").on_inputs(white, Stream.seeded(0)), white)


@BOTH
def test_the_same_generator_gives_the_same_images(images: Tensor) -> None:
    defense, asked = DEFENSES.build("ats:crop=true"), images.clone().requires_grad_()
    first, second, other = (defense.on_inputs(asked, Stream.seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(asked, images)
    assert first.shape == images.shape
    assert not first.requires_grad
    assert first.min() >= 0
    assert first.max() <= 1


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(sends="delta", epochs=2, batch_size=2)], ids=["FedSGD", "FedAvg"])
def test_a_client_trains_on_the_transformed_images(recipe: Recipe) -> None:
    module, batch = models.build("lenet", SAMPLES.domain, seed=0), SAMPLES.batch(range(4))
    defense = DEFENSES.build("ats")
    sent = SimulatedClient(module, recipe=recipe).model.params
    reply = SimulatedClient(module, recipe=recipe, defense=defense).reply(sent, batch, Stream.seeded(5)).update
    same = Batch(defense.on_inputs(batch.inputs, Stream.seeded(5)), batch.labels)
    expected = SimulatedClient(module, recipe=recipe).reply(sent, same, Stream.seeded(6)).update
    plain = SimulatedClient(module, recipe=recipe).reply(sent, batch, Stream.seeded(6)).update
    for name in reply:
        torch.testing.assert_close(reply[name], expected[name])
    assert any(not torch.allclose(reply[name], plain[name]) for name in reply)


@pytest.mark.parametrize(
    "policy", ["", "50", "3-", "3--1", "a", "-1", "3_", "_3", "3-1-7 43", "03", "²", "0-" * 10 + "0", "9" * 5000]
)
def test_a_policy_that_cannot_be_is_refused(policy: str) -> None:
    with pytest.raises(GradveilError, match=r"defense ats: policy is numbers from 0 to 49"):
        ats.ATS(policy=policy)


def test_a_policy_in_a_spec_has_one_spelling() -> None:
    assert DEFENSES.canonical("ats: policy=3-1-7_43-18-18 + noise") == "ats:policy=3-1-7_43-18-18+noise"
    assert DEFENSES.build("ats:policy=0").policies == ((0,),)  # type: ignore[attr-defined]
    assert DEFENSES.build("ats").policies == ((3, 1, 7), (43, 18, 18))  # type: ignore[attr-defined]
