"""The restricted unpickler reads arrays and runs nothing."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradveil.assets import read_numpy_pickle
from gradveil.core.errors import BadFileError


@pytest.mark.parametrize("protocol", [3, 4])
def test_arrays_in_plain_containers_come_back(tmp_path: Path, protocol: int) -> None:
    content = {"conv": {"kernel": np.arange(6.0).reshape(2, 3), "bias": np.float32(3)}, "names": ["a", 1, None]}
    path = tmp_path / "weights.ckpt"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    read = read_numpy_pickle(path)
    np.testing.assert_array_equal(read["conv"]["kernel"], content["conv"]["kernel"])
    assert read["conv"]["bias"] == 3
    assert read["names"] == content["names"]


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
