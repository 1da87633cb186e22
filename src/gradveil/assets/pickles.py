"""Reads pickles that hold nothing but numpy arrays and plain containers, and refuses every other pickle."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from gradveil.core.errors import BadFileError
from gradveil.core.reading import check_plain

# Asked of numpy itself rather than imported: the module that holds it moved between numpy 1 and 2.
_SCALAR = np.float32(0).__reduce__()[0]
# Stands for np.ndarray, which the file must not get hold of: called, it makes an array over any bytes.
_NDARRAY = object()
_PLAIN = re.compile(r"[biufcSU][1-9]\d{0,7}")
"""How numpy names a type of numbers or text: the kind and the size."""


def _array(kind: object, *_shape_and_type: object) -> np.ndarray[Any, Any]:
    """An array to be filled by what follows in the file, which states shape and type once more."""
    if kind is not _NDARRAY:
        raise pickle.UnpicklingError("it holds an array of a class of its own")
    return np.empty(0)


def _dtype(name: str | bytes, *_align_and_copy: object) -> np.dtype[Any]:
    name = _text(name)
    if not _PLAIN.fullmatch(name):
        raise pickle.UnpicklingError(f"its arrays hold more than numbers and text: {name[:20]!r}")
    return np.dtype(name, copy=True)  # its byte order may be set; that of numpy's own may not


def _encoded(text: str, codec: str) -> bytes:
    """Bytes, as the protocols before 3 write them."""
    if codec != "latin1":
        raise pickle.UnpicklingError(f"it asks for the codec {codec!r}")
    return text.encode("latin1")


# Exact names, not "anything in numpy": numpy also holds functions that run text as code.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encoded,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _SCALAR for core in ("core", "_core")},
}


class _NumpyOnly(pickle._Unpickler):
    """The unpickler in Python: the one in C sets the state of an object without asking, and numpy trusts a state."""

    stack: list[Any]
    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if isinstance(made, np.dtype):
            made.__setstate__(_dtype_state(made, state))  # type: ignore[attr-defined]
        elif type(made) is np.ndarray:
            made.__setstate__(_array_state(state))
        else:
            raise pickle.UnpicklingError(f"it sets the state of a {type(made).__name__}")

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]


def _dtype_state(dtype: np.dtype[Any], state: Any) -> Any:
    """The state that numpy itself gives a type of this name and byte order; a file may only say the same.

    Sizes, fields and flags of its own would have numpy read raw bytes as objects, or beyond the end of an array.
    """
    version, order, *rest = state
    own = dtype.newbyteorder(_text(order)).__reduce__()[2]  # type: ignore[arg-type]
    if (version, _text(order), *rest) != own:
        raise pickle.UnpicklingError("its arrays hold more than numbers and text")
    return own


def _array_state(state: Any) -> Any:
    version, shape, dtype, fortran, data = state
    data = data.encode("latin1") if isinstance(data, str) else data  # the bytes of Python 2
    if not isinstance(dtype, np.dtype) or not isinstance(data, bytes):
        raise pickle.UnpicklingError("it holds an array that is not made of bytes")
    # Made once more by the constructor, which knows every shape that cannot be; setting a state lets some pass.
    if np.ndarray(shape, dtype, data).nbytes != len(data):
        raise pickle.UnpicklingError("it holds an array of another size than its shape says")
    return version, shape, dtype, bool(fortran), data


def _text(said: str | bytes) -> str:
    return said.decode("latin1") if isinstance(said, bytes) else said


def read_numpy_pickle(path: Path, *, encoding: Literal["ASCII", "latin1", "bytes"] = "ASCII") -> Any:
    """The content of a pickle made of numpy arrays, numbers, text, lists and dicts.

    ``encoding`` says how to read the text of Python 2, as for :class:`pickle.Unpickler`.
    """
    try:
        check_plain(path)
        with path.open("rb") as file:
            return _NumpyOnly(file, encoding=encoding).load()
    except OSError as error:
        raise BadFileError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # a broken pickle may raise nearly anything, as the pickle module's own notes say
        why = " ".join(str(error).split()) or type(error).__name__
        raise BadFileError(f"{path} is not a pickle of plain numpy arrays: {why}") from error
