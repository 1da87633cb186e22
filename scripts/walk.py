"""Lists the functions of Gradveil through which one private image passes; docs/architecture.md has its figures.

    python scripts/walk.py audit      an image from `gradveil audit` to report.html
    python scripts/walk.py protect    a step of a guarded loop, and the update that leaves
    python scripts/walk.py train      a round of `gradveil train --defense dp`

What is followed: every tensor that holds the image, and what becomes of it: outputs of the model, update, reply,
observation, what a search found, reconstruction, scores, row, audit, page. A function is on the walk if it returns one
of these, or if it keeps or writes one that it got. These are not on it:

- helpers of core/, which know nothing of the field;
- constructors, validators of records and closures: they belong to the function that calls or contains them;
- functions that return what they got or an item of it, as hooks do that a defense or an attack leaves as they are;
- functions that only look, and return a word, a number, a verdict or a tensor of scores;
- the inside of the search, where the update is compared with guesses thousands of times: counted apart.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

import gradveil
from gradveil import models
from gradveil.attacks import Reconstruction
from gradveil.attacks.parts.search import Found
from gradveil.auditing import Audit
from gradveil.auditing.audit import ImageScore, Judgement, Ranking
from gradveil.auditing.sources import Exchange
from gradveil.cli.main import app
from gradveil.client import Reply
from gradveil.core.types import Params
from gradveil.data import load
from gradveil.metrics.scores import Scores
from gradveil.threat import Observation

ROOT = Path(gradveil.__file__).parent
DATA, MODEL = "mnist-samples", "mlp:hidden=16"
MADE_OF_IT = (
    Reply,
    Observation,
    Exchange,
    Found,
    Reconstruction,
    Scores,
    ImageScore,
    Judgement,
    Ranking,
    Audit,
)
WRITERS = {"write_tensors": "tensors", "write_atomically": "content", "write_json": "value"}
"""Functions of core/ that write files, and the argument that they write."""
SEARCHES = ("_Batch.ready", "Adam.run")
"""Here guesses are made and compared with the update."""


@dataclass
class Walk:
    """Follows an image while ``with walk:`` lasts."""

    image: Tensor
    """[C, H, W]."""
    names: set[str]
    """Of the parameters of the model that is trained."""
    touching: set[str] = field(default_factory=set)
    """Every function that got or returned any of it, those that are not on the walk too."""
    searching: set[str] = field(default_factory=set)
    """Functions that were called inside the search."""
    _called: dict[str, str] = field(default_factory=dict)
    """Every other function, in the order of the first calls, with what it got and returned of the image."""
    _inside: int = 0
    _got: dict[int, tuple[list[Any], str]] = field(default_factory=dict)
    """By frame, the arguments of the calls that have not returned yet, and what they hold."""
    _updates: list[Tensor] = field(default_factory=list)

    @property
    def functions(self) -> dict[str, str]:
        """The walk: ``room/file.py function`` in the order of the first calls, with what went in and came out."""
        left_out = ("__init__", "<locals>")
        return {
            name: what
            for name, what in self._called.items()
            if what and not name.startswith("core/") and not any(part in name for part in left_out)
        }

    def follow(self, update: Params) -> None:
        """Take these tensors for computed from the image."""
        self._updates += update.values()

    def __enter__(self) -> Walk:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _see(self, frame: FrameType, event: str, result: Any) -> None:
        code, name = frame.f_code, _name(frame)
        if event not in ("call", "return") or not name:
            return
        if code.co_qualname in SEARCHES:
            self._inside += 1 if event == "call" else -1
        elif self._inside:
            self.searching.add(name)
            return
        if event == "call":
            self._called.setdefault(name, "")
            written = frame.f_locals.get(WRITERS.get(code.co_qualname, ""))
            if isinstance(written, dict | bytes) and frame.f_back is not None and _name(frame.f_back):
                self._called[_name(frame.f_back)] = "-> file"
            count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
            given = [frame.f_locals[one] for one in code.co_varnames[:count] if one not in ("self", "cls")]
            self._got[id(frame)] = (given, next((what for value in given if (what := self._held_by(value))), ""))
            self.touching |= {name} if self._got[id(frame)][1] else set()
            return
        given, got = self._got.pop(id(frame), ([], ""))
        self.touching |= {name} if self._held_by(result) else set()
        if got:  # a gradient, or parameters after a step: whatever is computed from the image or from an update
            direct = result if isinstance(result, tuple) else (result,)
            self._updates += [tensor for one in direct if self._is_named(one) for tensor in one.values()]
        keeper = frame.f_locals.get("self")
        if _is_validator(code.co_name, frame.f_locals.get("cls", type(keeper))):
            return
        if result is None:
            made = "kept" if got and not isinstance(keeper, MADE_OF_IT) and self._held_by(keeper) else ""
        elif got and isinstance(result, Tensor) and (is_functorch_wrapped_tensor(result) or result.requires_grad):
            made = "outputs"
        else:
            made = self._held_by(result, known=[leaf for one in given for leaf in _items(one)])
        if made and (made == "kept" or all(result is not one for one in (*given, keeper))):
            self._called[name] = self._called[name] or f"{got} -> {made}".strip()

    def _held_by(self, value: Any, deep: int = 8, known: Sequence[Any] = ()) -> str:
        """What of the image this is, or holds in its items or fields, leaving out what is known; empty for nothing."""
        if isinstance(value, MADE_OF_IT):
            return "" if any(value is one for one in known) else type(value).__name__
        if isinstance(value, Tensor):
            return "image" if self._is_image(value) else ""
        if isinstance(value, np.ndarray):
            return "pixels" if value.ndim == 4 and value.dtype == np.uint8 else ""
        if isinstance(value, str | bytes):
            return "page" if (b"data:image" if isinstance(value, bytes) else "data:image") in value else ""
        if self._is_named(value):
            return "update" if self._is_update(value) else ""
        if isinstance(value, dict):
            value = list(value.values())
        elif type(value).__module__.startswith("gradveil") and not isinstance(value, type | nn.Module):
            value = list(getattr(value, "__dict__", {}).values())
        if not isinstance(value, list | tuple) or deep == 0:
            return ""
        return next((what for one in value[:32] if (what := self._held_by(one, deep - 1, known))), "")

    def _is_image(self, tensor: Tensor) -> bool:
        tensor = _plain(tensor)
        if tensor.shape[-3:] != self.image.shape or tensor.dtype != self.image.dtype:
            return False
        return bool((tensor.detach().reshape(-1, *self.image.shape) == self.image).flatten(1).all(dim=1).any())

    def _is_named(self, value: Any) -> bool:
        named = isinstance(value, dict) and value.keys() == self.names
        return named and all(isinstance(tensor, Tensor) for tensor in value.values())

    def _is_update(self, tree: Params) -> bool:
        """Whether one of its tensors was seen to be computed from the image, alone or stacked with others."""
        flat = _plain(next(iter(tree.values()))).detach().flatten()
        return any(torch.equal(flat, _plain(known).detach().flatten()) for known in self._updates)


def _name(frame: FrameType) -> str:
    """``room/file.py function``; empty if it is none of Gradveil's, or has no name."""
    file = frame.f_code.co_filename
    ours = file.startswith(str(ROOT)) and file.endswith(".py") and not frame.f_code.co_name.startswith("<")
    return f"{Path(file).relative_to(ROOT)} {frame.f_code.co_qualname}" if ours else ""


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_validator(name: str, record: type) -> bool:
    """Whether pydantic calls it while a record is made."""
    decorators = getattr(record, "__pydantic_decorators__", None)
    return decorators is not None and (name in decorators.model_validators or name in decorators.field_validators)


def _plain(tensor: Tensor) -> Tensor:
    """Without the wrappers of torch.func around it."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def of_audit(walk: Walk, folder: Path) -> None:
    """One image, one defense, one attack."""
    options = f"audit --data {DATA} --model {MODEL} --images 1 --defense noise:sigma=0.01 --attack ig:iterations=2"
    with walk:
        app([*options.split(), "--restarts", "1", "--device", "cpu", "--out", str(folder)], standalone_mode=False)


def of_protect(walk: Walk, folder: Path) -> None:
    """One step of a loop, and what leaves."""
    del folder
    model = models.build(MODEL, load(DATA).domain, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = walk.image[None].clone(), torch.tensor([0])
    with walk:
        guard = gradveil.protect(model, optimizer, nn.functional.cross_entropy, defense="clip:bound=1+noise:sigma=0.01")
        guard.loss(model(inputs), labels).backward()
        optimizer.step()
    walk.follow(guard.update())  # torch's step changes parameters in place, where no function returns them
    with walk:
        guard.update()


def of_train(walk: Walk, folder: Path) -> None:
    """One round of two clients."""
    options = f"train --data {DATA} --test {DATA} --model {MODEL} --clients 2 --rounds 1 --defense dp:sigma=1,bound=1"
    with walk:
        app([*options.split(), "--device", "cpu", "--out", str(folder)], standalone_mode=False)


WALKS: dict[str, Callable[[Walk, Path], None]] = {"audit": of_audit, "protect": of_protect, "train": of_train}


def walked(name: str) -> Walk:
    """Run one of the walks."""
    data = load(DATA)
    walk = Walk(data.batch([0]).inputs[0], set(dict(models.build(MODEL, data.domain, seed=0).named_parameters())))
    with tempfile.TemporaryDirectory() as folder:
        WALKS[name](walk, Path(folder) / "out")
    return walk


def main(names: Sequence[str]) -> None:
    for name in names or WALKS:
        walk = walked(name)
        others = f"{len(walk.touching)} touch it at all, {len(walk.searching)} run inside the search"
        print(f"\n{name}: {len(walk.functions)} functions; {others}")
        for number, (function, what) in enumerate(walk.functions.items(), start=1):
            print(f"{number:3} {function:70} {what}")


if __name__ == "__main__":
    main(sys.argv[1:])
