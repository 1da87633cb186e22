"""What is known of a model from guards before: privacy does not come back, and statistics stay the client's own."""

from __future__ import annotations

import hashlib
import threading
import weakref

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gradveil.core.trees import bits_of, differing
from gradveil.core.types import Params
from gradveil.defenses.accounting import Ledger

_MOST = 10_000
"""Buffers that are remembered, the newest: some hundred rounds of a large model."""
_lock = threading.Lock()
_pasts: weakref.WeakKeyDictionary[nn.Module, Past] = weakref.WeakKeyDictionary()
"""By layer, because a model that is protected again may be in a wrapper."""
_stored: dict[StorageWeakRef, Past] = {}
"""By where parameters are stored, because they may be in other layers by then."""


class Past:
    """What earlier guards of a model knew: the privacy that was spent, and which statistics are of the client's own."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._server: dict[tuple[object, ...], Tensor] = {}
        """By a buffer as training left it, in digest: what the server had sent in its place."""

    @classmethod
    def of(cls, model: nn.Module) -> Past:
        """That of the layers and parameters of a model; if these have several, all that was spent."""
        layers = [layer for layer in model.modules() if any(True for _ in layer.parameters())]
        places = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]  # type: ignore[no-untyped-call]
        with _lock:
            found = [*map(_pasts.get, layers), *map(_stored.get, places)]
            known = list({id(past): past for past in found if past is not None}.values())
            past = known[0] if len(known) == 1 else cls()
            for one in known if len(known) > 1 else []:
                past.ledger.merge(one.ledger)
                past._server |= one._server
            for layer in layers:
                _pasts[layer] = past
            for place in [place for place in _stored if place.expired()]:  # type: ignore[no-untyped-call]
                del _stored[place]
            _stored.update(dict.fromkeys(places, past))
        return past

    def note(self, now: Params, sent: Params) -> None:
        """Remember buffers as training left them, and what the server had sent.

        Not counters: a server may send the number of steps that a client made as well.
        """
        for name in differing(now, {name: buffer for name, buffer in sent.items() if name in now}):
            if now[name].dim() or now[name].is_floating_point():
                self._server[self._key(now[name])] = sent[name]
        for key in list(self._server)[:-_MOST]:
            del self._server[key]

    def is_own(self, buffer: Tensor) -> bool:
        return self._key(buffer) in self._server

    def served(self, buffer: Tensor) -> Tensor:
        return self._server.get(self._key(buffer), buffer).detach().clone()

    @staticmethod
    def _key(buffer: Tensor) -> tuple[object, ...]:
        bits = bits_of(buffer.cpu().contiguous())
        return buffer.shape, buffer.dtype, hashlib.sha256(bits.numpy().tobytes()).digest()
