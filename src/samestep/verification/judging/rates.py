"""At which learning rates the script alone has stepped, by how often its schedule has moved on until then.

    2 ranks        step 0   s s   step 1   s s   step 2        s   a step of the schedule
    one process    step 0   s     step 1   s     step 2

Some libraries move a schedule on once for each rank, since it was written for the batches of one process. Then the
rates after as many steps of the schedule are compared, not those at the same step.
"""

from __future__ import annotations

from samestep.verification.findings import Finding
from samestep.verification.judging.record import Rank, Record

__all__: list[str] = []


def schedule_steps(rank: Rank) -> dict[int, int]:
    """Returns event -> how often schedules have moved on before that optimizer step."""
    moved, told = 0, {}
    for event in rank.of("step", "rates", "scheduler"):
        if event["kind"] == "scheduler":
            moved += 1
        else:
            told[event["event"]] = moved
    return told


class Rates:
    """Those of the script alone.

    Attributes:
        scheduled: event -> how often schedules have moved on before.
    """

    def __init__(self, alone: Rank) -> None:
        self._rates = {event["event"]: event["rates"] for event in alone.of("rates")}
        self._optimizers = {event["event"]: event["optimizer"] for event in alone.of("rates")}
        self._kept = {event["event"] for event in alone.of("step")}
        self.scheduled = schedule_steps(alone)

    def at(self, event: int, moved: int, size: int) -> list[float]:
        """Returns the rates to which those of `size` ranks are held at a step; none where they are not known.

        Args:
            event: the step.
            moved: how often the ranks' schedules had moved on.
            size: how many ranks there are.
        """
        own = self.scheduled.get(event)
        if own is None or moved == own or moved != size * own:
            return self._rates[event] if event in self._kept else []
        alike = [one for one, steps in self.scheduled.items() if steps == moved]
        mine = self._optimizers[event]
        return next((self._rates[one] for one in alike if self._optimizers[one] == mine), [])


def counted_in_parts(record: Record) -> Finding:
    """Returns the note on schedules that move on once for each rank."""
    return Finding(
        code="learning-rate-differs",
        severity="note",
        property="control",
        where=record.ranks[0].of("scheduler")[0]["where"],
        cause=f"{record.size} ranks move the schedule on {record.size} times where one process does once: it counts "
        "batches of one rank, so it is as long as the epochs only if its length was counted in these",
        fix=None,
    )
