from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.core import trees
from gradveil.core.atomic import write_atomically
from gradveil.core.errors import BadFileError, GradveilError
from gradveil.core.seeding import derive, generator, isolated
from gradveil.core.tensor_files import read_tensors, write_tensors
from gradveil.core.types import Batch, Recipe


def test_tree_arithmetic_is_that_of_the_flat_vector() -> None:
    rng = generator(0)
    a, b = ({"w": torch.randn(3, 4, generator=rng), "b": torch.randn(5, generator=rng)} for _ in range(2))
    flat_a, flat_b = (torch.cat([t["w"].flatten(), t["b"]]) for t in (a, b))
    assert torch.isclose(trees.dot(a, b), flat_a @ flat_b)
    assert torch.isclose(trees.norm(a), flat_a.norm())
    assert torch.equal(trees.add(a, b, -2.0)["w"], a["w"] - 2 * b["w"])
    assert torch.equal(trees.stack([a, b])["b"][1], b["b"])
    assert torch.equal(trees.added_at_once(a, b, -2.0)["w"], torch.add(a["w"], b["w"], alpha=-2.0))
    assert trees.all_finite(a)
    assert not trees.all_finite({**a, "b": a["b"] * torch.nan})


def test_an_error_about_a_file_does_not_pass_on_what_steers_a_terminal() -> None:
    assert str(BadFileError("x: unknown 'a\nb\x1b[2Jé'")) == "x: unknown 'a\\nb\\x1b[2Jé'"


@pytest.mark.parametrize("size", [0, 5, 4096, 2_000_001])
def test_norms_of_long_rows_are_exact(size: int) -> None:
    rows = torch.randn(2, size, generator=generator(3)) ** 3
    exact = torch.linalg.vector_norm(rows.double(), dim=1)
    torch.testing.assert_close(trees.exact_norms(rows).double(), exact, rtol=2e-6, atol=0)


def test_seeds_depend_on_the_whole_path_and_not_on_its_grouping() -> None:
    assert derive(0, "a", 1) == derive(0, "a", 1)
    paths: list[tuple[Any, ...]] = [
        (0,),
        (1,),
        (0, "a"),
        (0, "b"),
        (0, "a", 1),
        (0, "a1"),
        (0, "a", "1", "2"),
        (0, "a", "12"),
    ]
    assert len({derive(*path) for path in paths}) == len(paths)
    assert torch.equal(torch.randn(3, generator=generator(5, "x")), torch.randn(3, generator=generator(5, "x")))


def test_isolated_draws_are_reproducible_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    with isolated(3, "init"):
        first = torch.randn(4)
    with isolated(3, "init"):
        second = torch.randn(4)
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "fields",
    [
        {"lr": 0.0},
        {"lr": float("nan")},
        {"lr": 10**30},
        {"lr": 10**400},
        {"weight_decay": 10**5000},
        {"epochs": -(10**5000), "sends": "delta"},
        {"epochs": 0, "sends": "delta"},
        {"epochs": 2},
        {"batch_size": 4},
        {"batch_size": 0, "sends": "delta"},
        {"sends": "weights"},
        {"momentum": -1.0},
        {"train_mode": "yes"},
    ],
)
def test_an_impossible_recipe_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(GradveilError) as caught:
        Recipe(**fields)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 160


def test_a_batch_has_a_label_for_each_input() -> None:
    with pytest.raises(GradveilError, match="2 inputs but 3 labels"):
        Batch(torch.zeros(2, 3, 4, 4), torch.zeros(3, dtype=torch.int64))


def test_tensor_files_round_trip(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([True, False])}
    write_tensors(tmp_path / "x.safetensors", "thing", tensors, {"note": "né"})
    read, meta = read_tensors(tmp_path / "x.safetensors", "thing")
    assert meta == {"note": "né"}
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x.safetensors", "thing", {"a": torch.zeros(1)}, {})
    with pytest.raises(BadFileError, match="was it renamed"):
        read_tensors(tmp_path / "x.safetensors", "other")


def test_a_file_over_the_limit_is_not_read(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x.safetensors", "thing", {"a": torch.zeros(1000)}, {})
    with pytest.raises(BadFileError, match="too large"):
        read_tensors(tmp_path / "x.safetensors", "thing", max_bytes=1000)


def test_a_tensor_of_too_many_dimensions_is_not_read(tmp_path: Path) -> None:
    """Torch itself raises in isfinite of more than 64, without a word about the file."""
    write_tensors(tmp_path / "x.safetensors", "thing", {"a": torch.zeros([1] * 70)}, {})
    with pytest.raises(BadFileError, match="'a' has more than 16 dimensions"):
        read_tensors(tmp_path / "x.safetensors", "thing")


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.json"
    write_atomically(target, b"old")

    def full_disk(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(GradveilError, match="No space left on device"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("name", ["taken/x.json", "taken/below/x.json", "/"])
def test_a_path_that_cannot_be_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(GradveilError, match="cannot write"):
        write_atomically(tmp_path / name, b"new")
