"""Waits for a host in place of one that was lost, between two attempts of a run: `--lost-host wait`.

    lost --> the others' ranks are ended --> missing --an agent comes in--> examined as at first --> all ranks again
                                              |   ^                             |
        the time is up, or a signal: stop <---+   +--- said why, and waited on <+ does not fit

Where agents come in is a door (samestep.launch.doors). The hosts that are left keep their agents, with all that these
have imported. torchrun's agents meet anew as well, and do not say whether anybody is missing, nor who.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from samestep.errors import RendezvousError, SamestepError
from samestep.launch.cluster import HostRanks
from samestep.launch.doors import Door
from samestep.launch.head import Controller, Host, Interruption, from_afar
from samestep.launch.loop import Loop
from samestep.launch.wire import Listener

__all__: list[str] = []


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a wait has led to: the parts of all hosts; else why there are none, or the signal that has ended it."""

    parts: tuple[HostRanks, ...] = ()
    reason: str | None = None
    signal: int | None = None


class Replacement:
    """Brings back the hosts that a run has lost.

    Args:
        head: of the run.
        door: where they come in; None where there is this host alone, whose agent is forked.
        examine: returns the parts of all hosts of the head, after all checks; warnings go to its argument.
        seconds: how long to wait.
        say: tells a person one line.
    """

    def __init__(
        self,
        head: Controller,
        door: Door | None,
        examine: Callable[[Callable[[str], None]], Sequence[HostRanks]],
        seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self._head = head
        self._door = door
        self._examine = examine
        self._seconds = seconds
        self._say = say

    def bring_back(self, prepare: Callable[[tuple[HostRanks, ...]], object]) -> Outcome:
        """Waits until nobody is missing, and all have been examined and prepared.

        Args:
            prepare: lets the hosts of these parts get ready.
        """
        self._late = self._broken_off = False
        self._new: set[int] = set()  # who has come in
        self._turned: set[int] = set()  # who was turned away
        self._said: set[str] = set()
        try:
            with self._head.between_attempts() as loop:
                alarm = loop.at(self._seconds, partial(self._too_late, loop))
                try:
                    with self._opened(loop):
                        return self._complete(loop, prepare)
                finally:
                    alarm.cancel()
        except Interruption as signal:
            return Outcome(signal=signal.args[0])
        except RendezvousError as error:  # somebody else has the port by now
            return Outcome(reason=f"not started again: no replacement can come in: {error}")

    @contextmanager
    def _opened(self, loop: Loop) -> Iterator[None]:
        if self._door is None:
            yield
            return
        with self._door.opened(loop) as listener:
            loop.watch(listener.fileno(), partial(self._welcome, loop, listener))
            try:
                yield
            finally:
                loop.forget(listener.fileno())

    def _complete(self, loop: Loop, prepare: Callable[[tuple[HostRanks, ...]], object]) -> Outcome:
        while True:
            try:
                if not self._fill(loop):
                    return self._nobody()
                parts = tuple(self._examine(lambda _: None))  # its warnings were shown at the start
                prepare(parts)
                return Outcome(parts=parts)
            except SamestepError as fault:
                self._broken_off = True
                if not self._missing() and not self._turn_away(str(fault)):
                    return Outcome(reason=f"not started again: {fault}")

    def _missing(self) -> dict[int, Host]:
        return {number: host for number, host in enumerate(self._head.hosts) if host.gone}

    def _fill(self, loop: Loop) -> bool:
        """Returns whether nobody is missing any more, before the time is up."""
        while missing := self._missing():
            if self._late:
                return False
            for number, host in missing.items():
                self._seek(number, host)
            if self._missing():
                loop.run()
        if self._broken_off:
            self._head.settle()
        return True

    def _seek(self, number: int, host: Host) -> None:
        if host.address is None:
            self._tell(f"the agent of this host, {host.host}, has ended: starting another")
            self._head.reopen(host)
            self._new.add(number)
            return
        assert self._door is not None
        if number not in self._turned:
            limit = f"for up to {self._seconds:g} s (--join-timeout)"
            self._tell(f"host {host.host} is lost ({host.fault}): {self._door.awaited(number, host, limit)}")
        self._door.seek(number, host)

    def _welcome(self, loop: Loop, listener: Listener) -> None:
        assert self._door is not None
        while (link := listener.accept()) is not None:
            number, new = link.peer_about.get("index"), from_afar(link)
            lost = self._missing().get(number) if isinstance(number, int) else None
            reason = self._door.objection(new)
            if reason is None and (number is None or lost is None):
                reason = f"number {number} is not missing"
            if number is None or lost is None or reason is not None:
                self._tell(f"note: {new.host} joined and was rejected: {reason}")
                self._door.turn_away(new, str(reason))
                link.close()
            elif self._door.came(number, new):
                self._head.replace(lost, new)
                self._new.add(number)
                self._turned.discard(number)
                loop.stop()
            else:
                link.close()

    def _turn_away(self, reason: str) -> bool:
        """Lets those go who have come, for they do not fit; returns whether there were any."""
        turned, self._new = {number for number in self._new if self._head.hosts[number].address is not None}, set()
        for number in turned:
            assert self._door is not None
            self._tell(f"note: {self._head.hosts[number].host} cannot take the place: {reason}")
            self._door.turn_away(self._head.hosts[number], reason)
            self._head.let_go(self._head.hosts[number], reason)
            self._door.failed(number, reason)
        self._turned |= turned
        return bool(turned)

    def _nobody(self) -> Outcome:
        missing = self._missing()
        names = ", ".join(host.host for host in missing.values())
        told = f"no replacement came within {self._seconds:g} s for host {names}"
        reasons = {} if self._door is None else self._door.reasons
        why = "; ".join(dict.fromkeys(reasons[number] for number in missing if number in reasons))
        return Outcome(reason=f"not started again: {told}{f' ({why})' if why else ''}")

    def _too_late(self, loop: Loop) -> None:
        self._late = True
        loop.stop()

    def _tell(self, text: str) -> None:
        """Says a thing once, however often it happens."""
        if text not in self._said:
            self._said.add(text)
            self._say(text)
