"""One rank as whoever watches it sees it: its pipe, its stacks, its progress record."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from samestep import progress
from samestep.launch.rank.control import RankPipe
from samestep.launch.rank.user_code import SERVED, place_in, text_of


class RankProcess:
    """A rank's process, a child of this one or not; `stacks` and `record` are descriptors."""

    def __init__(self, rank: int, pid: int, pipe: RankPipe, stacks: int, record: int) -> None:
        self.rank, self.pid, self.pipe = rank, pid, pipe
        self.stacks, self.record = stacks, record
        self._read = 0  # bytes of the stacks

    def receive(self, take: Callable[[str, dict[str, Any]], object]) -> bool:
        messages, more = self.pipe.receive()
        for message in messages:
            take(message.pop("kind"), message)
        return more

    def progress(self) -> progress.Progress:
        return progress.read(self.record)

    def new_stacks(self) -> bytes:
        size = os.fstat(self.stacks).st_size
        text = os.pread(self.stacks, size - self._read, self._read)
        self._read = size
        return text

    def position(self) -> tuple[bytes, dict[str, Any]]:
        """Returns the stacks that it was asked for, and the message that tells the user's own line in them."""
        stacks = self.new_stacks()
        serving = SERVED if self.progress().serving else None
        where, source = place_in(stacks.decode(errors="replace"), serving)
        return stacks, {"rank": self.rank, "where": where, "source": source}

    def place_of_death(self, show: Callable[[bytes], object]) -> tuple[str | None, str | None]:
        """Shows the stacks that it died with; returns the user's own line in them, or in its record."""
        stacks = self.new_stacks()
        if stacks:
            show(stacks)
        place, record = place_in(stacks.decode(errors="replace")), self.progress()
        return (record.site, text_of(record.site)) if place[0] is None and record.in_collective else place

    def end_message(self, code: int, death: dict[str, Any]) -> dict[str, Any]:
        """Returns what the supervisor is told when it has ended; `death` is a FailureRecord, `code` as usual."""
        record = self.progress()
        ended = {"rank": self.rank, "pid": self.pid, "code": code, "death": death}
        return {**ended, "step": record.step, "collectives": record.entered}
