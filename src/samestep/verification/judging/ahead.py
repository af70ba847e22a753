"""When a batch is used, where somebody loads ahead of the training.

    loaded      b0 b1 │    b2 │    b3 │         what wants to know which batch is the last looks one ahead,
    backward       b0 │    b1 │    b2 │ b3      and what counts a step's tokens first, a whole step
    window          0 │     1 │     2 │  3

A DataLoader tells when it yields. Where a pass has as many backward passes as batches, each batch is that of its own.
"""

from __future__ import annotations

from itertools import groupby

from samestep.verification.journal import Event

__all__: list[str] = []

Pass = tuple[str, int]


def settled(events: list[Event]) -> list[Event]:
    """Returns a rank's events with each training batch in the window in which it is used.

    Such batches also have "loaded", the window in which they were loaded. Passes over two DataLoaders at once, and
    passes with more or fewer backward passes than batches, stay as they are.
    """
    evaluated = {(event["key"], event["number"]) for event in events if event["kind"] == "evaluated"}
    told = [event for event in events if event["kind"] == "backward" or _is_training(event, evaluated)]
    done = {(event["key"], event["number"]) for event in events if event["kind"] == "passed"}
    used: dict[int, Event] = {}
    seen: set[Pass | None] = set()
    for name, group in groupby(told, _Naming().of):
        stretch = list(group)
        if name is not None and name not in seen and _is_one_each(stretch, complete=name in done):
            used |= _moved(stretch)
        seen.add(name)
    return [used.get(id(event), event) for event in events]


class _Naming:
    """Counts a backward pass to the pass over the data whose batch was loaded last."""

    def __init__(self) -> None:
        self._last: Pass | None = None

    def of(self, event: Event) -> Pass | None:
        if event["kind"] == "batch":
            self._last = event["key"], event["number"]
        return self._last


def _is_training(event: Event, evaluated: set[Pass]) -> bool:
    return event["kind"] == "batch" and event["training"] and (event["key"], event["number"]) not in evaluated


def _is_one_each(stretch: list[Event], *, complete: bool) -> bool:
    """Whether every batch has its backward pass; of a pass that was cut short, all but those loaded ahead."""
    ahead = [0]
    for event in stretch:
        ahead.append(ahead[-1] + (1 if event["kind"] == "batch" else -1))
    if min(ahead) < 0:
        return False
    first = next((index for index, event in enumerate(stretch) if event["kind"] == "backward"), len(stretch))
    return ahead[-1] == 0 if complete else max(ahead) <= ahead[first]


def _moved(stretch: list[Event]) -> dict[int, Event]:
    batches = [event for event in stretch if event["kind"] == "batch"]
    backwards = [event for event in stretch if event["kind"] == "backward"]
    pairs = zip(batches, backwards, strict=False)  # the last ones may have been loaded for nothing
    return {id(batch): {**batch, "loaded": batch["window"], "window": one["window"]} for batch, one in pairs}
