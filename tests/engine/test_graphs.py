"""Captured work gives what the work itself gives."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradveil.engine.graphs import CudaGraphCache, Graph, cuda_settings, without_tf32

FLAGS: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def roots(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return given["a"].sum(), {name: tensor.abs().sqrt() for name, tensor in given.items()}


def numbers(device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3, 4, generator=rng).to(device) for name in ("a", "b")}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_every_call_has_its_own_result(device: str) -> None:
    replayed = CudaGraphCache(roots)
    found = [replayed(numbers(device, seed)) for seed in range(5)]
    for seed, result in enumerate(found):
        torch.testing.assert_close(result, roots(numbers(device, seed)))
    torch.testing.assert_close(copy.deepcopy(replayed)(numbers(device)), found[0])


@GPU
def test_what_asks_for_a_number_is_called_again_each_time() -> None:
    replayed = CudaGraphCache(lambda given: given["a"] * float(given["b"].sum()))
    for seed in range(4):
        given = numbers("cuda", seed)
        torch.testing.assert_close(replayed(given), given["a"] * given["b"].sum())


@GPU
def test_tensors_come_in_the_order_of_the_capture() -> None:
    graph = Graph(roots, numbers("cuda"))
    with pytest.raises(ValueError, match="order"):
        graph.load(dict(reversed(numbers("cuda").items())))


@GPU
def test_tensors_that_nobody_edits_are_loaded_once() -> None:
    graph, given = Graph(roots, numbers("cuda")), numbers("cuda", 1)
    graph.load(given, edited=False)
    given["a"].mul_(2)  # against what was said: so it is seen that nothing was copied
    graph.load({"a": given["a"], "b": numbers("cuda", 2)["b"]}, edited=False)
    graph.replay()
    torch.testing.assert_close(graph.result(), roots({"a": given["a"] / 2, "b": numbers("cuda", 2)["b"]}))
    graph.load(given)
    graph.replay()
    torch.testing.assert_close(graph.result(), roots(given))


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    before = [flags.allow_tf32 for flags in FLAGS]
    for flags in FLAGS:
        flags.allow_tf32 = True
    yield
    for flags, allowed in zip(FLAGS, before, strict=True):
        flags.allow_tf32 = allowed


@pytest.mark.usefixtures("tf32_allowed")
def test_a_thread_that_ends_leaves_plain_float32_to_others() -> None:
    """The flags are those of the process; no GPU is needed to set them."""
    first, second = without_tf32(), without_tf32()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(flags.allow_tf32 for flags in FLAGS), "the other one still needs it"
    with cuda_settings(tf32=True, benchmark=True):
        assert all(flags.allow_tf32 for flags in FLAGS)
        assert torch.backends.cudnn.benchmark
    assert not any(flags.allow_tf32 for flags in FLAGS)
    second.__exit__(None, None, None)
    assert all(flags.allow_tf32 for flags in FLAGS)
    assert not torch.backends.cudnn.benchmark
