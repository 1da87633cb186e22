"""The generators that ship, and files of one's own."""

from __future__ import annotations

import doctest
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from gradveil import generators
from gradveil.core.errors import BadFileError, GradveilError, UnknownNameError
from gradveil.core.seeding import generator as seeded
from gradveil.core.tensor_files import read_tensors, write_tensors
from gradveil.data import load
from gradveil.generators import DCGAN, GENERATORS, load_generator, save_generator, store
from gradveil.generators.store import KIND, PUBLISHED

SHIPPED = {"cifar10": ("cifar10-samples", 10_137, 4), "mnist": ("mnist-samples", 2_880, 5)}


@pytest.mark.integration
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_generator_draws_its_classes(name: str) -> None:
    """A class of draws is nearer, in its mean image, to real images of that class than to most others."""
    data, model = load(SHIPPED[name][0]), generators.build(name)
    real = torch.stack([data.batch((data.labels == c).nonzero()[:, 0]).inputs.mean(dim=0) for c in range(10)])
    labels = torch.arange(10).repeat(40)
    images = model.decode(model.codes(400, seeded(0)), labels)
    assert images.shape[1:] == data.domain.shape
    drawn = images.view(40, 10, *data.domain.shape).mean(dim=0)
    distances = torch.cdist(drawn.flatten(1), real.flatten(1))
    places = (distances <= distances.diag()[:, None]).sum(dim=1)
    assert places.float().mean() <= {"cifar10": 3.0, "mnist": 1.2}[name]
    assert images.view(40, 10, -1).std(dim=0).mean() > 0.1, "the draws of one class differ"


@pytest.mark.parametrize("name", SHIPPED)
def test_the_card_says_what_it_was_trained_on(name: str) -> None:
    card = generators.build(name).card
    _, steps, critic_steps = SHIPPED[name]
    assert (card["data"], card["split"], card["licence"]) == (name, "train", "Apache-2.0")
    assert (card["steps"], card["batch"], card["critic_steps"], card["lr"]) == (steps, 128, critic_steps, 2e-4)
    assert {"measured", "hardware", "seconds", "data_source"} <= set(card)


def test_specs(tmp_path: Path) -> None:
    assert set(GENERATORS) == {"biggan", "cifar10", "file", "mnist", "progan-128", "stylegan2", "untrained"}
    assert GENERATORS.canonical("cifar10: size=16") == "cifar10:size=16"
    model = generators.build("mnist:size=14")
    assert model.shape == (1, 14, 14)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(UnknownNameError, match="did you mean cifar10"):
        generators.build("cifar")
    with pytest.raises(GradveilError, match="size is from 1 to the side of square images, not 33 of 32x32"):
        generators.build("cifar10:size=33")
    with pytest.raises(BadFileError, match="there is no file"):
        generators.build(f"file:path={tmp_path / 'none.safetensors'}")


def test_the_examples_are_right() -> None:
    assert doctest.testmod(store) == (0, 3)


def test_a_saved_generator_is_the_same_in_half_precision(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = DCGAN(latent=4, features=2, classes=3).eval(), tmp_path / "mine.safetensors"
    save_generator(path, model, {"data": "mine"})
    again = generators.build(f"file:path={path}")
    z = torch.randn(5, 4)
    torch.testing.assert_close(again.decode(z), model.decode(z), atol=2e-3, rtol=0)
    assert again.card == {"data": "mine"}
    save_generator(tmp_path / "again.safetensors", load_generator(path), again.card)
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    model, path = DCGAN(latent=4, features=2), tmp_path / "bad.safetensors"
    save_generator(path, model, {})
    tensors, meta = read_tensors(path, KIND)
    options = meta["options"]
    for change, words in (
        ({"architecture": "other"}, "no generator that is known here"),
        ({"options": options | {"latent": 10**9}}, "impossible 'latent'"),
        ({"options": options | {"features": 1024}}, "does not fit the architecture"),
        ({"options": options | {"kernel": 3}}, "its header is impossible"),
        ({"options": options | {"kernel": True}}, "impossible 'kernel'"),
        ({"options": {}}, "no generator that is known here"),
    ):
        write_tensors(path, KIND, tensors, meta | change)
        with pytest.raises(BadFileError, match=words) as caught:
            load_generator(path)
        assert "\n" not in str(caught.value)
    write_tensors(path, KIND, tensors | {"code.weight": tensors["code.weight"][:-1]}, meta)
    with pytest.raises(BadFileError, match=r"tensor 'code.weight' does not fit"):
        load_generator(path)
    write_tensors(path, "observation", tensors, meta)
    with pytest.raises(BadFileError, match="holds 'observation', not 'generator'"):
        load_generator(path)


@pytest.mark.integration
def test_published_generators_are_the_entry_points_of_the_project_and_loaded_when_needed() -> None:
    """Also where the sources are used without being installed: the table of paths is the one in pyproject.toml."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["gradveil.generators"] == PUBLISHED
    code = (
        "import sys; from gradveil import generators as g; assert not any('gradveil.lab' in m for m in sys.modules); "
    )
    code += "print(*[g.GENERATORS.get(name).__name__ for name in g.GENERATORS])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["biggan", "cifar10", "file", "mnist", "progan_128", "stylegan2", "untrained"]
