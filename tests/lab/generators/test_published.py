"""Generators that others published: small random ones draw what plain code draws; bad files are one line."""

from __future__ import annotations

import argparse
import io
import json
import random
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gradveil import generators
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.seeding import generator as seeded
from gradveil.lab.generators.biggan import WIDTHS, BigGAN, load_biggan
from gradveil.lab.generators.progan import load_progan
from gradveil.lab.generators.stylegan2 import StyleGAN2, load_stylegan2
from lab.generators import published

Made = Callable[[], dict[str, Tensor]]
KINDS = [
    pytest.param(published.biggan, "biggan", id="biggan"),
    pytest.param(published.stylegan2, "stylegan2", id="stylegan2"),
]


def codes(count: int, latent: int) -> Tensor:
    return torch.randn(count, latent, generator=torch.Generator().manual_seed(0))


def test_biggan_draws_what_its_layout_says(tmp_path: Path) -> None:
    tensors = published.biggan()
    save_file(tensors, tmp_path / "big.safetensors")
    z, labels = codes(3, 3), torch.tensor([0, 4, 2])
    for truncation, row in ((1.0, 50), (0.4, 20)):
        model = load_biggan(tmp_path / "big.safetensors", truncation=truncation)
        with torch.no_grad():
            drawn, wanted = model.decode(z, labels), published.draw_biggan(tensors, z, labels, row)
        assert drawn.shape == (3, 3, 128, 128)
        assert wanted.std() > 0.05
        assert ((wanted > 0.02) & (wanted < 0.98)).float().mean() > 0.9
        torch.testing.assert_close(drawn, wanted, atol=1e-4, rtol=0)


def test_biggan_has_the_stages_of_gifd() -> None:
    with torch.device("meta"):
        model = BigGAN(side=256, latent=128, classes=1000, width=128)
    assert len(model.stages) == 13
    assert model.stages[8] == "attention"
    assert model.shape == (3, 256, 256)
    # The published network has 55.9 million weights, 144 thousand of them in a convolution whose output is dropped.
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(55.8e6, rel=0.01)
    assert all(2 ** (len(widths) + 1) == side for side, widths in WIDTHS.items())


def test_biggan_truncates_codes(tmp_path: Path) -> None:
    save_file(published.biggan(), tmp_path / "big.safetensors")
    drawn = load_biggan(tmp_path / "big.safetensors", truncation=0.5).codes(2000, seeded(0))
    assert 0.9 < drawn.abs().max() <= 1
    assert drawn.std() == pytest.approx(0.5 * 0.88, abs=0.02)  # a normal cut at two deviations has 0.88 of one


def test_stylegan2_draws_what_its_layout_says(tmp_path: Path) -> None:
    tensors = published.stylegan2()
    torch.save({"g_ema": tensors, "latent_avg": torch.zeros(6)}, tmp_path / "style.pt")
    model, z = load_stylegan2(tmp_path / "style.pt"), codes(3, 6)
    with torch.no_grad():
        drawn, wanted = model.decode(z), published.draw_stylegan2(tensors, z)
    assert drawn.shape == (3, 3, 16, 16)
    assert wanted.std() > 0.05
    torch.testing.assert_close(drawn, wanted, atol=1e-5, rtol=0)


def test_stylegan2_truncates_towards_the_mean_style(tmp_path: Path) -> None:
    tensors = published.stylegan2()
    save_file(tensors, tmp_path / "style.safetensors")
    model = load_stylegan2(tmp_path / "style.safetensors", truncation=0.3)
    many = torch.stack([published.map_style(tensors, code) for code in codes(4000, 6)])
    torch.testing.assert_close(model.center, many.mean(dim=0), atol=0.1, rtol=0)
    z = codes(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(
            model.decode(z), published.draw_stylegan2(tensors, z, (0.3, model.center)), atol=1e-5, rtol=0
        )


def test_stylegan2_has_the_published_size() -> None:
    with torch.device("meta"):
        model = StyleGAN2(style=512, mapping=8, widths=(512, 512, 512, 512, 512, 256, 128, 64, 32))
    assert model.shape == (3, 1024, 1024)
    assert model.stages == ("code", *(f"{2**k}x{2**k}" for k in range(2, 10)), "image")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(30.4e6, rel=0.01)  # as the authors count


@pytest.mark.parametrize(("make", "name"), KINDS)
def test_both_kinds_of_file_give_the_same(make: Made, name: str, tmp_path: Path) -> None:
    tensors = make()
    save_file(tensors, tmp_path / "a.safetensors")
    torch.save(tensors, tmp_path / "a.pt")
    torch.save({key: tensor.half() for key, tensor in tensors.items()}, tmp_path / "half.pt")
    first, second, half = (
        generators.build(f"{name}:path={tmp_path / file}") for file in ("a.safetensors", "a.pt", "half.pt")
    )
    z = first.codes(2, seeded(0))
    assert torch.equal(first.decode(z), second.decode(z))
    torch.testing.assert_close(half.decode(z), first.decode(z), atol=0.1, rtol=0)
    assert not any(parameter.requires_grad for parameter in first.parameters())
    assert not first.training


@pytest.mark.parametrize(("make", "name"), KINDS)
def test_the_first_wrong_tensor_is_named(make: Made, name: str, tmp_path: Path) -> None:
    good, path = make(), tmp_path / "bad.safetensors"
    key = {"biggan": "generator.layers.3.bn_1.scale.weight_u", "stylegan2": "convs.1.noise.weight"}[name]

    def complaint(tensors: dict[str, Tensor]) -> str:
        save_file(tensors, path)
        with pytest.raises(BadFileError) as caught:
            generators.build(f"{name}:path={path}")
        assert "\n" not in str(caught.value)
        return str(caught.value).removeprefix(f"{path}: ")

    assert complaint({k: v for k, v in good.items() if k != key}) == f"tensor {key!r} is missing"
    assert complaint(good | {key: torch.zeros(77)}) == f"tensor {key!r} is [77], not {list(good[key].shape)}"
    assert complaint(good | {key: torch.zeros(1, 1)}).startswith(f"tensor {key!r} is [1, 1], not of 1 dimension")
    assert complaint(good | {"more": torch.zeros(1)}) == "tensor 'more' has no place in this architecture"
    assert complaint(good | {key: torch.full_like(good[key], torch.nan)}) == f"tensor {key!r} holds NaN or infinity"
    assert "is missing" in complaint({"unrelated": torch.zeros(1)})


@pytest.mark.parametrize(("make", "name"), KINDS)
def test_a_file_of_another_size_is_refused_before_memory_is_taken(make: Made, name: str, tmp_path: Path) -> None:
    """A few bytes may claim a huge tensor by repeating a number; nothing of that size is ever made."""
    grown = {"biggan": "embeddings.weight", "stylegan2": "style.1.weight"}[name]
    torch.save(make() | {grown: torch.zeros(1, 1).expand(2**20, 2**20)}, tmp_path / "huge.pt")
    with pytest.raises(BadFileError, match="fewer numbers than its shape says"):
        generators.build(f"{name}:path={tmp_path / 'huge.pt'}")
    save_file(make() | {grown: torch.zeros(2000, 2000)}, tmp_path / "large.safetensors")
    with pytest.raises(BadFileError, match=r"is .*, not "):
        generators.build(f"{name}:path={tmp_path / 'large.safetensors'}")


def quantised(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch means to drop such tensors, but files of them stay
        return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


RARE: dict[str, Callable[[Tensor], Tensor]] = {
    "without values": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "quantised": quantised,
    "complex": lambda tensor: tensor.to(torch.complex64),
    "float8": lambda tensor: tensor.to(torch.float8_e4m3fn),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of torch, about its own classes
@pytest.mark.parametrize("case", RARE)
def test_a_tensor_that_is_not_plain_numbers_is_named(case: str, tmp_path: Path) -> None:
    good = published.stylegan2()
    bad = good | {"style.1.weight": RARE[case](good["style.1.weight"])}
    torch.save(bad, tmp_path / "rare.pt")
    with pytest.raises(BadFileError, match=r"rare.pt: tensor 'style.1.weight' is sparse, quantised, without values"):
        load_stylegan2(tmp_path / "rare.pt")
    if case in ("complex", "float8"):
        save_file(bad, tmp_path / "rare.safetensors")
        with pytest.raises(BadFileError, match=r"'style.1.weight' is of type (C64|F8_E4M3), which is not read here"):
            load_stylegan2(tmp_path / "rare.safetensors")


def test_a_number_too_large_for_float32_is_refused(tmp_path: Path) -> None:
    good = published.stylegan2()
    torch.save(good | {"style.1.weight": good["style.1.weight"].double() + 1e300}, tmp_path / "large.pt")
    with pytest.raises(BadFileError, match=r"'style.1.weight' holds NaN or infinity"):
        load_stylegan2(tmp_path / "large.pt")


def repacked(path: Path, method: int, pickled: Callable[[bytes], bytes]) -> bytes:
    """The archive of a torch file, packed by another method and with another pickle in it."""
    packed = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, pickled(old.read(name)) if name.endswith("data.pkl") else old.read(name))
    return packed.getvalue()


def test_a_compressed_file_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.pt"
    torch.save({"x": torch.zeros(2**20)}, path)
    path.write_bytes(repacked(path, zipfile.ZIP_DEFLATED, bytes))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was unpacked"))
    with pytest.raises(BadFileError, match=r"bomb.pt is compressed, which torch.save never does"):
        load_stylegan2(path)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_spoilt_pickle_is_read_or_refused_but_never_worse(tmp_path: Path) -> None:
    whole, path, rng = tmp_path / "whole.pt", tmp_path / "spoilt.pt", random.Random(0)
    torch.save(published.stylegan2(), whole)

    def spoilt(content: bytes) -> bytes:
        changed = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)

    refused = 0
    for _ in range(400):
        path.write_bytes(repacked(whole, zipfile.ZIP_STORED, spoilt))
        try:
            load_stylegan2(path)
        except BadFileError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize(
    ("part", "value", "largest"), [("u", 0, "0"), ("v", 0, "0"), ("orig", 0, "0"), ("v", 3e38, ".*")]
)
def test_a_spectral_norm_that_cannot_divide_is_refused(part: str, value: float, largest: str, tmp_path: Path) -> None:
    good, name = published.biggan(), "generator.layers.3.conv_1.weight"
    bad = {f"{name}_u": good[f"{name}_u"] * 1e9, f"{name}_{part}": torch.full_like(good[f"{name}_{part}"], value)}
    torch.save(good | bad, tmp_path / "flat.pt")
    with pytest.raises(BadFileError, match=rf"flat.pt: tensor '{name}_orig' has the largest singular value {largest}"):
        load_biggan(tmp_path / "flat.pt")


def test_files_that_are_not_tensors_are_one_line(tmp_path: Path) -> None:
    torch.save({"g_ema": published.stylegan2(), "args": argparse.Namespace(size=16)}, tmp_path / "code.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    for name in ("text.pt", "text.safetensors"):
        (tmp_path / name).write_bytes(b"not a tensor in sight")
    for name, words in {
        "code.pt": "save them alone", "list.pt": "no tensors by name", "text.pt": "save them alone",
        "text.safetensors": "not a safetensors file", "absent.pt": "there is no file",
    }.items():  # fmt: skip
        with pytest.raises(BadFileError, match=words) as caught:
            load_stylegan2(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_options_are_checked() -> None:
    for name in ("biggan", "stylegan2"):
        with pytest.raises(GradveilError, match=f"{name}: truncation is above 0 and at most 1, not 0"):
            generators.build(f"{name}:path=x,truncation=0")
        with pytest.raises(GradveilError, match=f"needs path=...: write {name}:path=VALUE"):
            generators.build(name)


def test_progan_draws_what_its_layout_says(tmp_path: Path) -> None:
    tensors, z = published.progan(tmp_path), codes(3, 6)
    model = load_progan(tmp_path, latent=6, widths=(5, 4, 3))
    with torch.no_grad():
        drawn, wanted = model.decode(z), published.draw_progan(tensors, z)
    assert drawn.shape == (3, 3, 16, 16)
    assert wanted.std() > 0.05
    torch.testing.assert_close(drawn, wanted, atol=1e-4, rtol=0)


def test_damaged_shards_are_one_line(tmp_path: Path) -> None:
    published.progan(tmp_path)
    shard, listing = tmp_path / "group1-shard3of3.bin", tmp_path / "model.json"
    good, listed = shard.read_bytes(), listing.read_text()

    def complaint() -> str:
        with pytest.raises(BadFileError) as caught:
            load_progan(tmp_path, latent=6, widths=(5, 4, 3))
        return str(caught.value)

    shard.write_bytes(good[:-4])
    assert "end within weight 'module_apply_default/add_14'" in complaint()
    shard.write_bytes(good + b"1234")
    assert "4 bytes more" in complaint()
    shard.unlink()
    assert "group1-shard3of3.bin" in complaint()
    shard.write_bytes(good)
    listing.write_text(listed.replace("group1-shard3of3.bin", "../group1-shard3of3.bin"))
    assert "outside its folder" in complaint()
    listing.write_text(listed.replace("res_1/conv0/bias", "res_9/conv0/bias"))
    assert "holds no weight 'module/g_model/res_1/conv0/bias' of shape [4]" in complaint()
    for broken in ("{", "[]", json.dumps({"weightsManifest": [{"paths": [], "weights": [{"name": "a"}]}]})):
        listing.write_text(broken)
        assert "does not list weights" in complaint()


@pytest.mark.network
def test_the_faces_are_those_of_the_published_weights() -> None:
    """Figures of another program that runs the same graph, for the first two codes of seed 0."""
    faces = generators.build("progan-128")
    z = torch.randn(2, 512, generator=torch.Generator().manual_seed(0))
    inner = faces.until(z, "32x32")
    torch.testing.assert_close(inner.square().mean(dim=1), torch.ones(2, 16, 16), atol=1e-4, rtol=0)
    drawn = faces.onward(inner, "32x32")
    assert drawn.shape == (2, 3, 128, 128)
    assert (float(drawn.min()), float(drawn.max())) == (0.0, 1.0)
    assert drawn.mean(dim=(1, 2, 3)).tolist() == pytest.approx([0.4334, 0.4664], abs=2e-4)
    assert drawn.mean(dim=(0, 2, 3)).tolist() == pytest.approx([0.5903, 0.4185, 0.3409], abs=2e-4)
    assert float(drawn.std()) == pytest.approx(0.3233, abs=2e-4)
    assert drawn[0, :, 64, 64].tolist() == pytest.approx([0.8831, 0.6440, 0.5024], abs=1e-3)
    assert drawn[1, :, 32, 100].tolist() == pytest.approx([0.8196, 0.5265, 0.4034], abs=1e-3)
