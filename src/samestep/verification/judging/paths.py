"""Finds the line at which a rank takes the number out of a tensor by which it then takes another path than the others.

    rank 0    …  guard.py:44 item 2.31   train.py:97 step       the same lines until a number differs,
    rank 1    …  guard.py:44 item 3.07   train.py:92 forward    and other ones behind it

Lines that only one rank ever comes by are left out, as `if rank == 0:` makes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from samestep.verification.findings import Finding
from samestep.verification.judging.causes import UNREACHED, located
from samestep.verification.judging.record import Record
from samestep.verification.judging.storage import OWN_NUMBER
from samestep.verification.recording.paths import RATES

Place = tuple[str, str]  # line, function
Path = dict[int, list[tuple[Place, Any]]]  # by window


@dataclass(frozen=True)
class Paths:
    """The paths of rank 0 and of another process, which `of` names: "rank 1" or "one process"."""

    first: Path
    other: Path
    of: str

    @classmethod
    def of_ranks(cls, record: Record) -> Iterator[Paths]:
        """Yields rank 0's beside each other rank's."""
        paths = [_path(record, place) for place in range(record.size)]
        for rank, other in zip(record.ranks[1:], paths[1:], strict=True):
            yield cls(*_without_own(paths[0], other), of=f"rank {rank.number}")

    @classmethod
    def with_one_process(cls, record: Record, alone: Record) -> Paths:
        """Returns rank 0's beside that of one process."""
        return cls(*_without_own(_path(record, 0), _path(alone, 0)), of="one process")

    def located(self, finding: Finding, until: int | None) -> Finding:
        """Returns a finding with the line of the number, where one is found.

        Args:
            finding: about rates, or about what was decided.
            until: the last window that is looked at; None for all.
        """
        if finding.cause.endswith(OWN_NUMBER):
            where, does = self._taken_last((finding.step or 0) + 1), "what is saved depends on it"
        elif finding.code == "learning-rate-differs":
            where, does = self._before_rates(until), "steps with other rates"
        else:
            where, does = self._before_parting(until), "goes another way"
            if where is None and finding.cause.endswith(UNREACHED):
                where, does = self._before_step((until or 1) - 1), "its gradients may be multiplied by it"
        why = f"rank 0 takes another number out of a tensor at this line than {self.of}, and {does}"
        return located(finding, where, why)

    def _before_step(self, window: int) -> str | None:
        """The last number that differs in a window before its first backward pass."""
        entries = self.first.get(window, [])
        until = next((place for place, (one, _) in enumerate(entries) if one[1] == "backward"), None)
        return None if until is None else self._last_number(window, until)

    def _taken_last(self, window: int) -> str | None:
        """The last line before a window's first backward pass whose last number differs; they may loop unlike often."""
        numbers = []
        for entries in (self.first.get(window, []), self.other.get(window, [])):
            before = itertools.takewhile(lambda entry: entry[0][1] != "backward", entries)
            numbers.append({place: value for place, value in before if value is not None and place != RATES})
        mine, theirs = numbers
        apart = [place[0] for place, value in mine.items() if place in theirs and theirs[place] != value]
        return apart[-1] if apart else None

    @property
    def part_for_good(self) -> bool:
        """Whether they never go the same way again."""
        windows = self.first.keys() & self.other.keys()
        return bool(windows) and self._parts_at(max(windows)) is not None

    def _before_parting(self, until: int | None) -> str | None:
        """The last number that differs before one of them takes a step that the other leaves out.

        Where both take the same steps, before the ways part for good, or part last.
        """
        windows = sorted(window for window in self.first.keys() & self.other.keys() if until is None or window <= until)
        apart = {window: place for window in windows if (place := self._parts_at(window)) is not None}
        if not apart:
            return None
        skips = [window for window in apart if _backwards(self.first[window]) != _backwards(self.other[window])]
        window = min(skips, default=max(apart))
        while not skips and window - 1 in apart:
            window -= 1
        return self._last_number(window, apart[window])

    def _parts_at(self, window: int) -> int | None:
        """How many places both come by in a window before they go on at different ones; None where they do not."""
        mine, theirs = self.first[window], self.other[window]
        pairs = zip(mine, theirs, strict=False)
        first = next((place for place, (one, two) in enumerate(pairs) if one[0] != two[0]), None)
        return first if first is not None else None if len(mine) == len(theirs) else min(len(mine), len(theirs))

    def _before_rates(self, until: int | None) -> str | None:
        """The last number that differs before rates do."""
        for window in sorted(self.first.keys() & self.other.keys()):
            if until is not None and window > until:
                return None
            for place, (one, two) in enumerate(zip(self.first[window], self.other[window], strict=False)):
                if RATES in (one[0], two[0]) and one != two:
                    return self._last_number(window, place)
                if one[0] != two[0]:
                    break
        return None

    def _last_number(self, window: int, until: int) -> str | None:
        before = [(number, len(self.first[number])) for number in (window - 1,) if number in self.first]
        found = None
        for number, length in [*before, (window, until)]:
            for one, two in zip(self.first[number][:length], self.other.get(number, [])[:length], strict=False):
                if one[0] == two[0] != RATES and one[1] != two[1] and one[1] is not None and two[1] is not None:
                    found = one[0][0]
        return found


def _backwards(entries: list[tuple[Place, Any]]) -> int:
    return sum(place[1] == "backward" for place, _ in entries)


def _path(record: Record, place: int) -> Path:
    if place >= len(record.ranks):
        return {}
    rank = record.ranks[place]
    kept = [event["kept"] for event in rank.of("path") if event["kept"] is not None]
    if not kept:
        return {}
    path = record.value(rank.number, kept[-1])
    places = [tuple(one) for one in path["places"]]
    return {
        window: [(places[number], value) for number, value in entries] for window, entries in path["windows"].items()
    }


def _without_own(first: Path, other: Path) -> tuple[Path, Path]:
    """Leaves out the places that only one of two processes ever comes by."""
    known = [{place for entries in path.values() for place, _ in entries} for path in (first, other)]
    both = (known[0] & known[1]) | {RATES}
    mine, theirs = (
        {window: [entry for entry in entries if entry[0] in both] for window, entries in path.items()}
        for path in (first, other)
    )
    return mine, theirs
