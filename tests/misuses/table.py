"""The table of misuses, how one is entered and how it is judged."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradveil.core.errors import GradveilError
from guarded import LR, NOISE, Loop, Marked

Must = Literal["refused", "defended"]


@dataclass(frozen=True)
class Misuse:
    name: str
    must: Must
    hold: Callable[[Loop], None]
    under: tuple[str, ...]


TABLE: list[Misuse] = []


def misuse(name: str, must: Must, *, under: tuple[str, ...] = ("marks", "noise")) -> Callable[[Any], Any]:
    """Enter a function into the table. Noise is told by its size, so only where steps are of the gradient's size."""

    def enter(hold: Callable[[Loop], None]) -> Callable[[Loop], None]:
        TABLE.append(Misuse(name, must, hold, under))
        return hold

    return enter


def verdict(hold: Callable[[Loop], None], under: str) -> tuple[str, str]:
    """Refused, defended or silent, and the error or the tensor that shows it. Any other exception is raised."""
    loop = Loop(Marked() if under == "marks" else NOISE)
    refused: list[GradveilError] = []
    try:
        hold(loop)
    except GradveilError as error:
        refused.append(error)
    if hasattr(loop, "guard"):
        late = loop.ask()
        loop.guard.close()
        if not any(left.how == "guard.update()" for left in loop.left):
            refused += late
    if problem := loop.bareness():
        return "silent", problem
    for one in refused:
        assert re.fullmatch(r"[^\n]{20,400}", str(one)), f"not one line: {one}"
    return ("refused", str(refused[0])) if refused else ("defended", "")


def in_thread(call: Callable[[], None]) -> None:
    """Run a call in a thread of its own, and raise here what it raised there."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def move(model: nn.Module, gradient: Mapping[str, Tensor]) -> None:
    """A bare step by hand."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.sub_(LR * gradient[name])


def saved(*things: Any) -> Any:
    """Through a file, whole."""
    file = io.BytesIO()
    torch.save(things, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
