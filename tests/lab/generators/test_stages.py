"""Every generator can be entered at every stage, and works under the transforms that searches use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from gradveil.core.errors import GradveilError
from gradveil.core.seeding import generator as seeded
from gradveil.core.seeding import isolated
from gradveil.generators import DCGAN, Generator, Resized
from gradveil.lab.generators.biggan import load_biggan
from gradveil.lab.generators.progan import load_progan
from gradveil.lab.generators.stylegan2 import load_stylegan2
from lab.generators import published


def dcgan(_folder: Path, classes: int | None = 3) -> Generator:
    with isolated(0, "dcgan"):
        model = DCGAN(channels=1, height=28, width=26, classes=classes, latent=4, features=2)
        for norm in (model.code_norm, model.norm8, model.norm16):
            torch.nn.init.normal_(norm.scale, 1.0, 0.5)
            torch.nn.init.uniform_(norm.shift)  # above zero, so that few features are cut off
    return model


def progan(folder: Path) -> Generator:
    published.progan(folder)
    return load_progan(folder, latent=6, widths=(5, 4, 3))


def biggan(folder: Path) -> Generator:
    save_file(published.biggan(), folder / "big.safetensors")
    return load_biggan(folder / "big.safetensors")


def stylegan2(folder: Path) -> Generator:
    save_file(published.stylegan2(), folder / "style.safetensors")
    return load_stylegan2(folder / "style.safetensors")


MAKERS: dict[str, Callable[[Path], Generator]] = {
    "dcgan": dcgan,
    "dcgan without classes": lambda folder: dcgan(folder, None),
    "progan": progan,
    "biggan": biggan,
    "stylegan2": stylegan2,
    "resized": lambda folder: Resized(progan(folder), 6),
}


@pytest.fixture(params=MAKERS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Generator:
    """In double precision, so that tolerances are about the arithmetic and not about rounding."""
    return MAKERS[request.param](tmp_path).double().eval().requires_grad_(False)


def draws(model: Generator, count: int) -> tuple[Tensor, Tensor | None]:
    labels = None if model.classes is None else torch.arange(count) % model.classes
    return model.codes(count, seeded(0, "test")).double(), labels


def test_images_are_in_range_and_follow_the_code(model: Generator) -> None:
    z, labels = draws(model, 3)
    images = model(z, labels)
    assert images.shape == (3, *model.shape)
    assert 0 <= images.min() < images.max() <= 1
    assert (images[0] - images[1]).abs().mean() > 1e-3
    assert torch.equal(images, model(z, labels))


@pytest.mark.integration
def test_every_stage_can_be_entered(model: Generator) -> None:
    z, labels = draws(model, 2)
    images = model.decode(z, labels)
    assert model.until(z, model.stages[0], labels) is z
    for name in model.stages:
        inner = model.until(z, name, labels)
        torch.testing.assert_close(model.onward(inner, name, labels), images)
    with pytest.raises(GradveilError, match="no stage 'nowhere'; its stages: "):
        model.onward(z, "nowhere")


def test_a_batch_is_its_examples(model: Generator) -> None:
    z, labels = draws(model, 3)
    one_by_one = [model.decode(z[i : i + 1], None if labels is None else labels[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(model.decode(z, labels), torch.cat(one_by_one))


def test_it_maps_over_codes_and_over_weights(model: Generator) -> None:
    z, labels = draws(model, 2)
    wanted = torch.zeros(2) if labels is None else labels
    state: dict[str, Tensor] = dict(model.named_parameters())
    pairs = {name: torch.stack([tensor, 1.1 * tensor]) for name, tensor in state.items()}

    def drawn(weights: dict[str, Tensor], code: Tensor, label: Tensor) -> Tensor:
        image: Tensor = functional_call(model, weights, (code[None], None if labels is None else label[None]))
        return image[0]

    together = vmap(drawn)(pairs, z, wanted)
    second = {name: 1.1 * tensor for name, tensor in state.items()}
    apart = torch.stack([drawn(state, z[0], wanted[0]), drawn(second, z[1], wanted[1])])
    torch.testing.assert_close(together, apart)
    assert (together[1] - drawn(state, z[1], wanted[1])).abs().mean() > 1e-4, "other weights draw another image"


@pytest.mark.integration
def test_slopes_of_many_problems_come_together(model: Generator) -> None:
    z, labels = draws(model, 3)
    wanted = torch.zeros(3) if labels is None else labels

    def brightness(code: Tensor, label: Tensor) -> Tensor:
        return model.decode(code[None], None if labels is None else label[None]).square().sum()

    apart = torch.stack([grad(brightness)(code, label) for code, label in zip(z, wanted, strict=True)])
    torch.testing.assert_close(vmap(grad(brightness))(z, wanted), apart)


@pytest.mark.integration
def test_derivatives_forwards_and_backwards_agree(model: Generator) -> None:
    z, labels = draws(model, 2)
    along, against = torch.randn_like(z), torch.randn(2, *model.shape, dtype=z.dtype)
    forwards = jvp(lambda code: model.decode(code, labels), (z,), (along,))[1]
    backwards = grad(lambda code: (model.decode(code, labels) * against).sum())(z)
    assert float((forwards * against).sum()) == pytest.approx(float((backwards * along).sum()), rel=1e-6)
    step = 1e-6
    moved = model.decode(z + step * along, labels) - model.decode(z - step * along, labels)
    # as a whole: a pixel whose way lies across a kink may differ
    assert (moved / (2 * step) - forwards).norm() < 0.02 * forwards.norm()


def test_labels_are_shares_of_classes(tmp_path: Path) -> None:
    for make in (dcgan, biggan):
        model = make(tmp_path).eval().requires_grad_(False)
        assert model.classes is not None
        z, shares = model.codes(2, seeded(0)), torch.eye(model.classes)[:2]
        assert torch.equal(model.decode(z, torch.tensor([0, 1])), model.decode(z, shares))
        even = torch.full((2, model.classes), 1 / model.classes)
        assert torch.equal(model.decode(z), model.decode(z, even))
        assert not torch.equal(model.decode(z), model.decode(z, shares))


def test_a_generator_without_classes_takes_labels_and_ignores_them(tmp_path: Path) -> None:
    model = progan(tmp_path).requires_grad_(False)
    z = model.codes(2, seeded(0))
    assert torch.equal(model.decode(z, torch.tensor([1, 2])), model.decode(z))


def test_resizing_averages_areas(tmp_path: Path) -> None:
    model = progan(tmp_path).requires_grad_(False)
    z = model.codes(2, seeded(0))
    blocks = model.decode(z).view(2, 3, 4, 4, 4, 4).mean(dim=(3, 5))
    torch.testing.assert_close(Resized(model, 4).decode(z), blocks)
    assert torch.equal(Resized(model, 16).decode(z), model.decode(z))
    for size in (0, 17):
        with pytest.raises(GradveilError, match=f"size is from 1 to the side of square images, not {size}"):
            Resized(model, size)
    with pytest.raises(GradveilError, match="of 28x26"):
        Resized(dcgan(tmp_path), 26)


def test_smaller_images_are_the_middle_of_a_larger_one(tmp_path: Path) -> None:
    model = dcgan(tmp_path).eval()
    whole = DCGAN(channels=1, height=32, width=32, classes=3, latent=4, features=2).eval()
    whole.load_state_dict(model.state_dict())
    z, labels = model.codes(2, seeded(0)), torch.tensor([0, 2])
    torch.testing.assert_close(model.decode(z, labels), whole.decode(z, labels)[..., 2:30, 3:29])
