"""Images as a domain: what is refused, what is drawn, what is natural, and how they are shown."""

from __future__ import annotations

import doctest
import io

import numpy as np
import pytest
import torch
from PIL import Image

from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator
from gradveil.domains import Domain, Images, images, pictures, total_variation
from gradveil.domains.images import NEIGHBORS

DOMAIN = Images(3, 6, 5, classes=4, mean=(0.2, 0.5, 0.7), std=(0.1, 0.2, 0.3))
MEAN, STD = torch.tensor(DOMAIN.mean).view(-1, 1, 1), torch.tensor(DOMAIN.std).view(-1, 1, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"channels": 0},
        {"height": 10**9},
        {"width": 10**5000},
        {"mean": (0.5,)},
        {"mean": (10**30, 0.5, 0.5)},
        {"mean": (10**400, 0.5, 0.5)},
        {"std": (0.0, 1.0, 1.0)},
        {"classes": "ten"},
    ],
)
def test_an_impossible_domain_is_refused(fields: dict[str, object]) -> None:
    good = {"channels": 3, "height": 8, "width": 8, "classes": 10, "mean": (0.5,) * 3, "std": (0.2,) * 3}
    with pytest.raises(GradveilError) as caught:
        Images(**{**good, **fields})  # type: ignore[arg-type]
    assert len(str(caught.value)) < 160


def test_a_domain_without_one_of_its_methods_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        type("Sounds", (Domain,), {"kind": "sounds"})()


def test_images_of_which_only_the_shape_is_known() -> None:
    assert Images.like(torch.zeros(7, 2, 6, 5), classes=3) == Images(2, 6, 5, 3, (0.0, 0.0), (1.0, 1.0))
    with pytest.raises(GradveilError, match="not \\[7, 60\\]"):
        Images.like(torch.zeros(7, 60), classes=3)


def test_moments_broadcast_over_an_example() -> None:
    mean, std = DOMAIN.moments(dtype=torch.float64)
    assert mean.shape == std.shape == (3, 1, 1)
    assert mean.dtype == torch.float64
    assert mean.flatten().tolist() == list(DOMAIN.mean)
    assert std.flatten().tolist() == list(DOMAIN.std)


def test_probes_are_drawn_in_one_piece_so_that_a_seed_keeps_its_meaning() -> None:
    drawn = torch.randn((8, 3, 6, 5), generator=generator(0, "probes"))
    assert torch.equal(DOMAIN.probes(8, generator(0, "probes")), (MEAN + STD * drawn).clamp(0, 1))


def test_stand_ins_are_smoother_than_probes() -> None:
    smooth, rough = (draw(64, generator(0, "draw")) for draw in (DOMAIN.stand_ins, DOMAIN.probes))
    for inputs in (smooth, rough):
        assert DOMAIN.fault(inputs) is None
        torch.testing.assert_close(inputs.mean(dim=(0, 2, 3)), MEAN.flatten(), atol=0.05, rtol=0)
    assert DOMAIN.roughness(smooth) < 0.7 * DOMAIN.roughness(rough)


def test_the_spread_along_a_direction_is_that_of_correlated_pixels() -> None:
    direction = torch.randn(DOMAIN.shape, generator=generator(0, "direction"), dtype=torch.float64)
    places = [(c, y, x) for c in range(3) for y in range(6) for x in range(5)]
    covariance = torch.tensor(
        [
            [DOMAIN.std[c] * DOMAIN.std[d] * NEIGHBORS ** (abs(y - v) + abs(x - u)) for d, v, u in places]
            for c, y, x in places
        ],
        dtype=torch.float64,
    )
    flat = direction.flatten()
    center, spread = DOMAIN.spread_along(direction)
    torch.testing.assert_close(center, flat @ MEAN.double().expand(DOMAIN.shape).flatten())
    torch.testing.assert_close(spread, (flat @ covariance @ flat).sqrt())


def test_total_variation_of_a_step_and_of_nothing() -> None:
    step = torch.zeros(1, 1, 4, 4)
    step[..., 2:] = 1.0
    assert total_variation(step).item() == pytest.approx(1 / 3)
    assert total_variation(torch.full((1, 3, 4, 4), 0.7)).item() == 0


def test_blank_images_have_no_energy_and_no_roughness() -> None:
    blank = DOMAIN.blank(2)
    assert DOMAIN.fault(blank) is None
    assert DOMAIN.energy(blank) == DOMAIN.roughness(blank) == 0
    assert DOMAIN.energy(blank + 0.1).item() == pytest.approx(blank.numel() * 0.01)


def test_what_is_not_valid_becomes_so() -> None:
    inputs = torch.full((1, 3, 6, 5), torch.nan)
    inputs[0, 0], inputs[0, 1] = -3.0, torch.inf
    valid = DOMAIN.valid(inputs)
    assert DOMAIN.fault(valid) is None
    assert valid.amax(dim=(0, 2, 3)).tolist() == [0.0, 1.0, 0.5]


@pytest.mark.parametrize("value", [-0.01, 1.01, torch.nan, torch.inf])
def test_pixels_outside_are_a_fault(value: float) -> None:
    inputs = DOMAIN.blank(2)
    inputs[1, 2, 3, 4] = value
    assert DOMAIN.fault(inputs) == "pixels outside [0, 1]"


@pytest.mark.parametrize("shape", [(3, 6, 5), (2, 3, 5, 6), (2, 1, 6, 5), (2, 90)])
def test_another_shape_is_a_fault(shape: tuple[int, ...]) -> None:
    assert DOMAIN.fault(torch.zeros(shape)) == f"inputs of shape {shape}"


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_images_are_shown_side_by_side(channels: int) -> None:
    inputs = torch.rand(2, channels, 6, 5, generator=generator(0, "shown", channels))
    levels = np.asarray(Image.open(io.BytesIO(Images.like(inputs, classes=1).show(inputs))))
    wanted = (torch.cat([*inputs], dim=2) * 255).round().byte().numpy()
    assert np.array_equal(levels, wanted.transpose(1, 2, 0) if channels == 3 else wanted[0])


def test_the_examples_in_docstrings_run() -> None:
    assert doctest.testmod(images) == (0, 2)
    assert doctest.testmod(pictures) == (0, 2)
