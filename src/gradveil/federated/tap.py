"""A tap on the line: saves what chosen clients replied in chosen rounds as the adversary would have it.

Beside each observation, in a file of its own, lies the truth: the private examples behind the reply.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

from torch import nn

from gradveil.core.atomic import open_file
from gradveil.core.errors import GradveilError
from gradveil.core.tensor_files import write_tensors
from gradveil.federated.case import Training
from gradveil.federated.rounds import Federation, RoundExchange, participants
from gradveil.threat import Observation, observe, save_observations, threat_model

_SPEC = re.compile(r"(\d+|\*)@(\d+|\*)")
_FILE, _TRUTH = ".safetensors", ".truth.safetensors"


def taps(spec: str, client: int, number: int) -> bool:
    """Whether a tap names the exchange of a client in a round.

    >>> taps("*@3", 7, 3), taps("0@*", 7, 3)
    (True, False)
    """
    parts = _SPEC.fullmatch(spec)
    if parts is None:
        raise GradveilError(f"cannot read the tap {spec!r}; write CLIENT@ROUND, such as 0@1, *@1 or 3@*")
    return parts[1] in ("*", str(client)) and parts[2] in ("*", str(number))


def tapped(case: Training) -> frozenset[tuple[int, int]]:
    """The (client, round) pairs that a case wants saved; who takes part when is known beforehand."""
    there = {
        (client, number)
        for number in range(1, case.rounds + 1 if case.tap else 1)
        for client in participants(case.clients, case.per_round, seed=case.seed, round_number=number)
    }
    found: set[tuple[int, int]] = set()
    for spec in case.tap:
        matching = {pair for pair in there if taps(spec, *pair)}
        if not matching:
            number = spec.partition("@")[2]
            who = ", ".join(map(str, sorted(c for c, n in there if str(n) == number)))
            hint = f"in round {number} there are {who}" if who else "clients count from 0, rounds from 1"
            raise GradveilError(f"tap {spec}: no such client takes part in such a round; {hint}")
        found |= matching
    return frozenset(found)


class Tap:
    """Saves exchanges into a folder. ``view`` makes of one what the adversary has of it.

    A training that is resumed does some rounds again and replaces their taps. Where a stranger counts the rounds,
    ``overwrite=False`` keeps every tap.
    """

    def __init__(
        self,
        folder: Path,
        module: nn.Module,
        view: Callable[..., Observation],
        *,
        overwrite: bool = True,
    ) -> None:
        self._folder, self._module, self._view, self._overwrite = folder, module, view, overwrite

    @classmethod
    def on(cls, federation: Federation, folder: Path, *, overwrite: bool = True) -> Tap:
        """A tap on the exchanges of a training."""
        case = federation.case
        view = partial(
            observe,
            model=case.model,
            domain=federation.train.domain,
            recipe=case.recipe,
            defense=case.defense,
            threat=threat_model(case.threat),
        )
        return cls(folder, federation.module, view, overwrite=overwrite)

    def __call__(self, one: RoundExchange) -> None:
        module = copy.deepcopy(self._module)
        module.load_state_dict(one.sent.buffers, strict=False)
        seen = self._view(
            module=module, sent=one.sent.params, reply=one.update, batch=one.batch, batch_size=one.examples
        )
        name = f"round-{one.round_number:04d}-client-{one.client:04d}"
        with nullcontext(name) if self._overwrite else new_name(self._folder, name) as chosen:
            if one.batch is not None and one.index is not None:
                private = {"inputs": one.batch.inputs, "labels": one.batch.labels, "index": one.index}
                write_tensors(self._folder / f"{chosen}{_TRUTH}", "truth", private, {})
            save_observations(self._folder / f"{chosen}{_FILE}", [seen])


@contextmanager
def new_name(folder: Path, name: str) -> Iterator[str]:
    """``name``, or ``name-2`` and so on if the folder has such a tap. While it is written, nobody else gets the name.

    Raises:
        GradveilError: if nothing can be written into the folder.
    """
    for number in itertools.count(1):
        chosen = name if number == 1 else f"{name}-{number}"
        mark = folder / f".{chosen}.taken"
        try:
            os.close(open_file(mark, os.O_WRONLY | os.O_EXCL))
        except OSError as error:
            if isinstance(error, FileExistsError) and folder.is_dir():  # another process is at it
                continue
            raise GradveilError(f"cannot write {folder / chosen}: {error.strerror}") from error
        try:
            if not any(os.path.lexists(folder / f"{chosen}{ending}") for ending in (_FILE, _TRUTH)):
                yield chosen
                return
        finally:
            with suppress(OSError):
                mark.unlink()
