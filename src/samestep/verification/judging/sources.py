"""Finds the line at which a difference between ranks begins: draws, hashes of texts, writes to parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

from samestep.verification.findings import Finding
from samestep.verification.judging.causes import located
from samestep.verification.judging.record import Record

_SOON = 1  # windows behind a step in which what it has begun with may have been written


@dataclass
class Sources:
    """The draws, hashes and writes of the ranks, recorded once more.

    `are_alike`: whether texts had the same hashes on all ranks of this run, which they had not before.
    """

    ranks: Record
    are_alike: bool

    @cached_property
    def _recorded(self) -> list[dict[str, Any]]:
        kept = [(rank.number, one["kept"]) for rank in self.ranks.ranks for one in rank.of("sources")]
        return [self.ranks.value(*each) for each in kept if each[1] is not None]

    def of_samples(self, finding: Finding, still_found: bool) -> Finding:
        """Returns a finding about samples with the line that makes ranks differ, where one is found.

        Args:
            finding: that ranks use samples twice, or never, or have other ones.
            still_found: whether it was found in this run too.
        """
        if self.are_alike and not still_found:
            hashes = [where for one in self._recorded for where in one["hashes"]]
            why = "where texts have one hash on all ranks it does not occur: hash(), or the order of a set, decides"
            return _at(finding, next(iter(hashes), finding.where), why)
        if (where := self._drawn_by_one()) is not None:
            why = "one rank alone draws random numbers here, and is ahead of the others from then on"
            return _at(finding, where, why)
        return finding

    def _drawn_by_one(self) -> str | None:
        """The innermost line, on the way to the first draw that only one of two ranks makes, that it alone comes by."""
        first, *others = [[lines for _, lines in one["draws"]] for one in self._recorded] or [[]]
        for other in others:
            known = [{line for lines in each for line in lines} for each in (first, other)]
            for mine, theirs in zip_longest(first, other, fillvalue=()):
                if mine != theirs:
                    own = [line for line in mine if line not in known[1]]
                    return next(iter(own or [line for line in theirs if line not in known[0]]), None)
        return None

    def of_initial(self, finding: Finding) -> Finding:
        """Returns a finding about parameters before the first step with the line that wrote to them last.

        What some ranks alone come by is preferred. What was written before a wrapper has made the ranks equal, or no
        line of a running script has written, is not kept.
        """
        writes = [
            dict.fromkeys(where for window, where in _writes(each, finding) if window <= 0) for each in self._recorded
        ]
        everywhere = [where for where in writes[0] if all(where in each for each in writes)] if writes else []
        some = [where for each in writes for where in each if where not in everywhere]
        if some:
            return _at(finding, some[-1], "this line writes to it, and not every rank comes by it")
        return _at(finding, everywhere[-1], "this line writes to it") if everywhere else finding

    def of_parameters(self, finding: Finding) -> Finding:
        """Returns a finding about parameters with the line that writes to them behind its step, where one is found."""
        until = (finding.step or 0) + _SOON
        places = [where for each in self._recorded for window, where in _writes(each, finding) if window <= until]
        return _at(finding, places[-1], "this line writes to it") if places else finding


def _writes(recorded: dict[str, Any], finding: Finding) -> list[tuple[int, str]]:
    """The windows and lines in which one rank has written to the tensor of a finding."""
    writes: list[tuple[int, str]] = recorded["writes"].get(finding.tensor or "", [])
    return writes


def _at(finding: Finding, where: str | None, why: str) -> Finding:
    """Returns a finding with a line, and why, also where the line is that of the finding."""
    if where is None or where == finding.where:
        return replace(finding, cause=f"{finding.cause}; {why}")
    return located(finding, where, why)
