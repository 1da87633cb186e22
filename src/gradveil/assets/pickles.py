"""Reads pickles that hold nothing but numpy arrays and plain containers, and refuses every other pickle."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradveil.core.errors import BadFileError

# Asked of numpy itself rather than imported: the module that holds these moved between numpy 1 and 2.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_SCALAR = np.float32(0).__reduce__()[0]

# Exact names, not "anything in numpy": numpy also holds functions that run text as code.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _RECONSTRUCT for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _SCALAR for core in ("core", "_core")},
}


class _NumpyOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


def read_numpy_pickle(path: Path, *, encoding: Literal["ASCII", "latin1", "bytes"] = "ASCII") -> Any:
    """The content of a pickle made of numpy arrays, numbers, text, lists and dicts.

    ``encoding`` says how to read the text of Python 2, as for :class:`pickle.Unpickler`.
    """
    try:
        with path.open("rb") as file:
            return _NumpyOnly(file, encoding=encoding).load()
    except OSError as error:
        raise BadFileError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # a broken pickle may raise nearly anything, as the pickle module's own notes say
        raise BadFileError(f"{path} is not a pickle of plain numpy arrays: {error}") from error
