"""The restricted unpickler reads arrays and runs nothing."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradveil.assets import read_numpy_pickle
from gradveil.core.errors import BadFileError


@pytest.mark.parametrize("protocol", range(5))
def test_arrays_in_plain_containers_come_back(tmp_path: Path, protocol: int) -> None:
    content = {"conv": {"kernel": np.arange(6.0).reshape(2, 3), "bias": np.float32(3)}, "names": ["a", 1, None]}
    path = tmp_path / "weights.ckpt"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    read = read_numpy_pickle(path)
    np.testing.assert_array_equal(read["conv"]["kernel"], content["conv"]["kernel"])
    assert read["conv"]["bias"] == 3
    assert read["names"] == content["names"]


@pytest.mark.parametrize("kind", ["?", "u1", "<i8", ">i2", "<f2", ">f8", "c8", "S3", "<U2", ">U2"])
def test_numbers_and_text_of_every_kind_come_back(tmp_path: Path, kind: str) -> None:
    array = np.asfortranarray(np.arange(600).reshape(2, 300).astype(kind))
    path = tmp_path / "arrays.ckpt"
    path.write_bytes(pickle.dumps([array, array[0], array[1, 1], array[:0]], protocol=3))
    for read, written in zip(read_numpy_pickle(path), [array, array[0], array[1, 1], array[:0]], strict=True):
        np.testing.assert_array_equal(read, written)
        assert read.dtype.newbyteorder("=") == written.dtype.newbyteorder("=")


@pytest.mark.parametrize(
    "payload",
    [
        b"cos\nsystem\n(S'touch %s'\ntR.",
        b'cbuiltins\neval\n(S\'__import__("os").mkdir("%s")\'\ntR.',
        b'cnumpy.testing._private.utils\nrunstring\n(S\'__import__("os").mkdir("%s")\'\n(dtR.',
    ],
    ids=["os.system", "eval", "numpy's own way to run text"],
)
def test_code_is_refused_and_not_run(tmp_path: Path, payload: bytes) -> None:
    path, trace = tmp_path / "evil.ckpt", tmp_path / "it-ran"
    path.write_bytes(payload % os.fsencode(trace))
    with pytest.raises(BadFileError, match=r"not a pickle of plain numpy arrays: it asks for"):
        read_numpy_pickle(path)
    assert not trace.exists()
    pickle.loads(path.read_bytes())  # what a plain unpickler does with it
    assert trace.exists()


def test_a_class_of_its_own_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.ckpt"
    path.write_bytes(pickle.dumps(Path("x")))
    with pytest.raises(BadFileError, match="pathlib"):
        read_numpy_pickle(path)


class Call:
    """Pickled as a call of a function, and of ``__setstate__`` on what it gives."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


RECONSTRUCT, SCALAR = np.empty(0).__reduce__()[0], np.float32(0).__reduce__()[0]
OBJECT = np.dtype("O")


def filled(dtype: Any, data: Any, shape: tuple[int, ...] = (1,)) -> Call:
    return Call(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, shape, dtype, False, data))


def stated(name: str, *state: Any) -> Call:
    return Call(np.dtype, (name, False, True), state)


REFUSED = {
    "an array over raw bytes": Call(np.ndarray, ((1,), OBJECT, b"AAAAAAAA")),
    "an array of numbers over raw bytes": Call(np.ndarray, ((1,), np.dtype("u1"), b"AAAAAAAA")),
    "objects hidden in a field": filled(stated("V8", 3, "|", None, ("a",), {"a": (OBJECT, 0)}, 8, 1, 1), b"A" * 8),
    "objects by name": filled(OBJECT, [1]),
    "fields": filled(np.dtype([("a", "u1")]), b"A"),
    "flags of objects": filled(stated("u8", 3, "<", None, None, None, -1, -1, 1), b"A" * 8),
    "a subarray": filled(stated("u8", 3, "<", (np.dtype("u1"), (9,)), None, None, -1, -1, 0), b"A" * 8),
    "a negative size": filled(stated("S8", 3, "|", None, None, None, -8, 1, 0), b"A" * 8),
    "text longer than its name says": Call(
        RECONSTRUCT.__self__.scalar, (stated("S8", 3, "|", None, None, None, 2**40, 1, 0), b"A" * 8)
    ),
    "negative dimensions": filled(np.dtype("u1"), b"A" * 6, (-2, -3)),
    "dimensions beyond any memory": filled(np.dtype("u1"), b"", (0, 2**62, 2**62)),
    "more numbers than bytes": filled(np.dtype("f8"), b"A" * 8, (2,)),
    "an array of numbers in a list": filled(np.dtype("f8"), [1.0]),
}


def test_an_array_that_is_not_plain_is_refused(tmp_path: Path) -> None:
    """In a process of its own, which such a file could end: numpy would follow any address that it states."""
    for name, content in REFUSED.items():
        (tmp_path / name).write_bytes(pickle.dumps({"data": content}, protocol=4))
    (tmp_path / "a state for a function").write_bytes(b"cnumpy.core.multiarray\n_reconstruct\n}b.")
    program = """
import pathlib, sys
from gradveil.assets import read_numpy_pickle
from gradveil.core.errors import BadFileError
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    try:
        print(path.name, "was read:", read_numpy_pickle(path))
    except BadFileError as error:
        print(error)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    for said, name in zip(ended.stdout.splitlines(), sorted([*REFUSED, "a state for a function"]), strict=True):
        assert said.startswith(f"{tmp_path / name} is not a pickle of plain numpy arrays: ")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=r"cannot read .*absent\.ckpt"):
        read_numpy_pickle(tmp_path / "absent.ckpt")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_spoilt_pickle_is_read_or_refused_but_never_worse(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps({"a": np.arange(5), "b": [1, 2.5, "x"]}, protocol=3))
    spoilt = whole[: data.draw(st.integers(0, len(whole)))]
    for _ in range(data.draw(st.integers(0, 3)) if spoilt else 0):
        spoilt[data.draw(st.integers(0, len(spoilt) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "spoilt.ckpt"
    path.write_bytes(spoilt)
    with suppress(BadFileError):
        read_numpy_pickle(path)
