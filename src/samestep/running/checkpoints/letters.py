"""What ranks tell rank 0's thread while all of them train: letters in the store on which they met.

Threads must not talk through a process group: their messages would fall between those of the training. The store's
client is locked while somebody waits in it, so the threads have one of their own, and look instead of waiting.

    rank 1   beat, beat, beat, …  letter ─┐           nobody waits long for the letter of a rank
    rank 0   its own file, …              └► read     that does not even beat
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

from samestep.errors import RendezvousError
from samestep.runtime.store_messages import decode_message

__all__: list[str] = []

FILE = {"size": int, "sha256": str}
FORMS = ({"error": str}, {"file": FILE, "places": dict[str, list[int]]})

SILENCE_S = 30.0  # without a beat; a rank that writes beats meanwhile
_HURRIED_S = 5.0  # the same where this rank leaves because of an error, which may well be that rank's end
_BEAT_S = 1.0
_LOOK_S = 0.02


def told(value: bytes, rank: int) -> dict[str, Any]:
    """Returns a letter; what is none is the error of one."""
    try:
        letter: dict[str, Any] = decode_message(value, *FORMS, of=f"rank {rank}'s part of a checkpoint")
    except RendezvousError as error:
        return {"error": str(error)}
    return letter


class Letters:
    """The letters of some ranks to the first.

    Args:
        rank: of this process.
        about: what they are about; nobody else in this store uses such a name.
    """

    def __init__(self, rank: int, about: str) -> None:
        self._rank = rank
        self._about = about
        self._patience = SILENCE_S
        met: Any = _get_default_store()  # torch's stubs lack clone()
        self._store = met.clone()

    def send(self, number: int, write: Callable[[], dict[str, Any]]) -> None:
        """Sends what `write` returns, the letter of this number, and beats until then."""
        ended = threading.Event()
        beat = threading.Thread(target=self._beat, args=(number, ended), name="samestep-beat", daemon=True)
        beat.start()
        try:
            letter = write()
        finally:
            ended.set()
            beat.join()
        self._store.set(self._name(number, self._rank), json.dumps(letter))

    def collect(self, number: int, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Returns the letter of this number of each of `ranks`; {"error": why} of one that is silent."""
        letters: dict[int, dict[str, Any]] = {}
        heard = dict.fromkeys(ranks, (0, time.monotonic()))
        while missing := [rank for rank in ranks if rank not in letters]:
            for rank in missing:
                if self._store.check([self._name(number, rank)]):
                    letters[rank] = self._taken(number, rank)
                    continue
                beats = self._store.add(f"{self._name(number, rank)}/beat", 0)
                if beats != heard[rank][0]:
                    heard[rank] = (beats, time.monotonic())
                elif time.monotonic() - heard[rank][1] > self._patience:
                    letters[rank] = {"error": f"no heartbeat for {self._patience:g} s"}
            time.sleep(_LOOK_S)
        return letters

    def hurry(self) -> None:
        """Lets :meth:`collect` wait no longer for a silent rank than this rank has, which is leaving."""
        self._patience = min(self._patience, _HURRIED_S)

    def _taken(self, number: int, rank: int) -> dict[str, Any]:
        name = self._name(number, rank)
        letter: dict[str, Any] = told(self._store.get(name), rank)
        for key in (name, f"{name}/beat"):
            self._store.delete_key(key)
        return letter

    def _beat(self, number: int, ended: threading.Event) -> None:
        with contextlib.suppress(RuntimeError):  # of a store that is gone, with whom the letter was for
            while not ended.wait(_BEAT_S):
                self._store.add(f"{self._name(number, self._rank)}/beat", 1)

    def _name(self, number: int, rank: int) -> str:
        return f"samestep/checkpoint/{self._about}/{number}/{rank}"
