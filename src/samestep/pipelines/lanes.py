"""What every picture of a step shows, whatever draws it: a lane for each rank, boxes in it, and their colours."""

from __future__ import annotations

from samestep.schedule.simulate import Span, Timeline

__all__: list[str] = []

COLOURS = {  # told apart by the colour-blind too: Okabe and Ito
    "F": ("forward", "#56B4E9"),
    "B": ("backward", "#E69F00"),
    "I": ("backward, inputs", "#E69F00"),
    "W": ("backward, weights", "#009E73"),
    "message": ("message", "#999999"),
}
PART_COLOURS = ("#0072B2", "#F0E442", "#CC79A7", "#999999", "#D55E00")
PARTS_TITLE = "where a step's time goes"
AXIS_TITLE = "ms from the step's begin"
ROW = 46  # pixels of a rank


def title(name: str, timeline: Timeline) -> str:
    """Returns what stands above a step.

    >>> from samestep.schedule.fill_drain import fill_drain
    >>> from samestep.schedule.simulate import Costs, simulate
    >>> title("predicted", simulate(fill_drain(2, 3), Costs.even(2, forward=1, backward=2)))
    'predicted: 12000.00 ms, 25 % idle'
    """
    return f"{name}: {1e3 * timeline.seconds:.2f} ms, {100 * timeline.idle:.0f} % idle"


def boxes(timeline: Timeline, kind: str) -> list[Span]:
    """Returns what is drawn in the colour of a kind of action, or of messages; nothing that takes no time."""
    return [
        span
        for span in timeline.spans
        if kind == ("message" if span.target is not None else span.action.kind) and span.end > span.begin
    ]
