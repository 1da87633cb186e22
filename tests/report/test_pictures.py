"""Picture files in, PNG out: exact where the budget allows, smaller where not, one line for a file that is not one."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save_file
from skimage.metrics import peak_signal_noise_ratio

from gradveil.core.errors import BadFileError
from gradveil.domains.pictures import ENCODINGS, Encoding, Pixels
from gradveil.report.gallery import encode_all, read_pictures
from report.saved_audit import photographs, save_pictures


def decoded(address: str) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))).convert("RGB"))


def noise(count: int, side: int) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


HEADER = {"gradveil": json.dumps({"kind": "truth"})}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_pictures(tmp_path / "truth.safetensors", "truth", photographs(3))
    return tmp_path / "truth.safetensors"


def test_reads_the_pictures_asked_for(file: Path) -> None:
    expected = np.rint(photographs(3) * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    assert np.array_equal(read_pictures(file, "truth", picked=[0, 1, 2]), expected)
    assert np.array_equal(read_pictures(file, "truth", picked=[2, 0]), expected[[2, 0]])


@pytest.mark.parametrize("at", [3, -1])
def test_pictures_that_are_not_there_are_an_error(file: Path, at: int) -> None:
    with pytest.raises(BadFileError, match="holds 3 pictures, not all that the audit lists"):
        read_pictures(file, "truth", picked=[0, at])


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (None, "was not written by Gradveil"),
        ({"gradveil": "[]"}, "was not written by Gradveil"),
        ({"gradveil": "{"}, "was not written by Gradveil"),
        ({"gradveil": '{"kind": "observation"}'}, "holds 'observation', not 'truth': was it renamed"),
    ],
)
def test_files_that_hold_something_else_are_refused(file: Path, header: dict[str, str] | None, complaint: str) -> None:
    save_file({"inputs": photographs(1)}, file, metadata=header)
    with pytest.raises(BadFileError, match=complaint):
        read_pictures(file, "truth", picked=[0])


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"other": np.zeros(3, np.float32)}, "holds no pictures"),
        ({"inputs": np.zeros((8, 8), np.float32)}, r"\[8, 8\]"),
        ({"inputs": np.zeros((1, 3, 8, 8), np.float64)}, "not F64"),
        ({"inputs": np.zeros((1, 2, 8, 8), np.float32)}, r"\[1, 2, 8, 8\]"),
        ({"inputs": np.zeros((1, 3, 0, 8), np.float32)}, r"\[1, 3, 0, 8\]"),
        ({"inputs": np.zeros((1, 1, 1, 5000), np.float32)}, r"\[1, 1, 1, 5000\]"),
        ({"inputs": np.full((1, 3, 8, 8), np.nan, np.float32)}, "not finite"),
    ],
)
def test_impossible_pictures_are_refused(file: Path, tensors: dict[str, np.ndarray], complaint: str) -> None:
    save_file(tensors, file, metadata=HEADER)
    with pytest.raises(BadFileError, match=complaint):
        read_pictures(file, "truth", picked=[0])


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_gives_pictures_or_one_line(file: Path, data: st.DataObject) -> None:
    whole = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, 300))
    damaged = (
        whole[:at]
        if data.draw(st.booleans())
        else whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :]
    )
    target = file.with_name("damaged.safetensors")
    target.write_bytes(bytes(damaged))
    try:
        message, shape = "", read_pictures(target, "truth", picked=[0, 1, 2]).shape
    except BadFileError as error:
        message, shape = str(error), ()
    assert "\n" not in message
    assert message or len(shape) == 4


def test_small_sets_stay_exact() -> None:
    pixels = noise(4, 32)
    encoded, encoding = encode_all(["a"], lambda _: pixels, side=32)
    assert encoding == Encoding()
    assert encoding.words() == ""
    assert np.array_equal(np.stack([decoded(one) for one in encoded["a"]]), pixels)


@pytest.mark.parametrize("budget", [60_000, 30_000, 15_000])
def test_a_budget_is_kept_with_the_least_loss(budget: int) -> None:
    pixels = noise(10, 64)
    sizes = [
        sum(len(one) for one in encode_all(["a"], lambda _: pixels, side=64, budget=limit)[0]["a"])
        for limit in (10**9, budget)
    ]
    assert sizes[1] <= budget < sizes[0]


def test_equal_pictures_weigh_once() -> None:
    files = {"a": noise(2, 32), "b": noise(2, 32), "c": 255 - noise(2, 32)}
    size = sum(len(one) for one in encode_all(["a"], files.__getitem__, side=32)[0]["a"])
    assert encode_all(["a", "b"], files.__getitem__, side=32, budget=size)[1] == Encoding()
    assert encode_all(["a", "c"], files.__getitem__, side=32, budget=size)[1] != Encoding()


def test_fewer_colors_still_show_the_picture() -> None:
    pixels = np.rint(photographs(4) * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    exact = sum(len(one) for one in encode_all(["a"], lambda _: pixels, side=32)[0]["a"])
    encoded, encoding = encode_all(["a"], lambda _: pixels, side=32, budget=exact - 1)
    assert encoding == Encoding(colors=128)
    shown = np.stack([decoded(one) for one in encoded["a"]])
    assert peak_signal_noise_ratio(pixels, shown) > 35  # at this size no eye tells


def test_the_last_encoding_is_taken_as_it_comes() -> None:
    encoded, encoding = encode_all(["a"], lambda _: noise(2, 64), side=64, budget=0)
    assert encoding == ENCODINGS[-1]
    assert decoded(encoded["a"][0]).shape == (16, 16, 3)
