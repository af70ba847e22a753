"""Letters through the key-value store of the process group: one rank writes, rank 0 looks, and nobody waits.

    rank 1    set  samestep-check/0.3/1      (optimizer 0, the fourth letter, of rank 1)
    rank 0    check … /0.3/1, 0.3/2, 0.3/3   all there: get, compare, delete

There is no collective in it, so it can neither change the order of the script's own nor hang with them. A rank that is
far behind, or gone, leaves letters of others unread: each has KEPT places, used in turn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from samestep.verification.checking.letters import (
    EVERY,
    Detail,
    Farewell,
    Letter,
    read_detail,
    read_farewell,
    read_letter,
    written,
)

__all__: list[str] = []

KEPT = 64  # letters of a rank for an optimizer
_PATIENCE = timedelta(seconds=5)  # for the store to answer
_PARTING_S = 2.0  # that rank 0 waits for the others to end
_LOOK_S = 0.005
_MOST_LOOKS_APART = 64  # steps


class Post:
    """One rank's side.

    Args:
        store: the process group's own.
        rank: this one.
        size: how many there are.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store.clone()  # with a connection of its own: nothing that waits in the script's stands before it
        self._store.set_timeout(_PATIENCE)
        self._rank = rank
        self._size = size
        self._pending: deque[tuple[Letter, Detail]] = deque(maxlen=KEPT)
        self._rests = 0  # steps until the next look
        self._pause = 0

    @classmethod
    def of_process_group(cls) -> Post | None:
        """Returns one, or None where there is no process group, no store, or nobody else."""
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
            return None
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        return None if store is None else cls(store, dist.get_rank(), dist.get_world_size())

    def send(self, letter: Letter, detail: Detail) -> None:
        """Writes a letter; rank 0 keeps its own."""
        if self._rank == 0:
            self._pending.append((letter, detail))
            self._rests = self._pause = 0
            return
        place = _place(letter)
        self._store.set(f"{place}/{self._rank}/detail", written(detail))
        self._store.set(f"{place}/{self._rank}", written(letter))

    def received(self) -> tuple[list[Letter], Callable[[int], Detail | None]] | None:
        """Returns the letters of all ranks for the first step of which all are there, in rank order; only on rank 0."""
        if not self._pending or self._rests:
            self._rests = max(0, self._rests - 1)
            return None
        place = _place(self._pending[0][0])
        keys = [f"{place}/{rank}" for rank in range(1, self._size)]
        if not self._store.check(keys):
            self._pause = min(2 * self._pause + 1, _MOST_LOOKS_APART)
            self._rests = self._pause
            return None
        self._pause = 0
        letter, detail = self._pending.popleft()
        letters = [letter, *map(read_letter, self._values(keys))]
        if len({one.step for one in letters}) > 1:  # somebody has used the place again: too far apart
            return None
        return letters, lambda rank: detail if rank == 0 else self._detail(f"{place}/{rank}/detail")

    def forget(self, letters: list[Letter]) -> None:
        """Makes the places of letters that have been compared free."""
        for rank in range(1, self._size):
            for end in ("", "/detail"):
                self._store.delete_key(f"{_place(letters[0])}/{rank}{end}")

    def _values(self, keys: list[str]) -> list[bytes]:
        """Returns what lies there; a file as a store has no way to ask for all at once."""
        if self._store.has_extended_api():
            return list(self._store.multi_get(keys))
        return [self._store.get(key) for key in keys]

    def _detail(self, key: str) -> Detail | None:
        return read_detail(self._store.get(key)) if self._store.check([key]) else None

    def part(self, farewell: Farewell) -> list[Farewell] | None:
        """Tells how this rank has ended; on rank 0 returns how all have, None where one has not come for so long."""
        if self._rank:
            self._store.set(f"{_PREFIX}/farewell/{self._rank}", written(farewell))
            return None
        keys = [f"{_PREFIX}/farewell/{rank}" for rank in range(1, self._size)]
        until = time.monotonic() + (_PARTING_S if farewell.well else 0.0)
        while not self._store.check(keys):
            if time.monotonic() >= until:
                return None
            time.sleep(_LOOK_S)
        return [farewell, *map(read_farewell, self._values(keys))]

    def hurry(self) -> None:
        """Lets the next look come at once."""
        self._rests = 0


_PREFIX = "samestep-check"


def _place(letter: Letter) -> str:
    return f"{_PREFIX}/{letter.optimizer}.{letter.step // EVERY % KEPT}"
