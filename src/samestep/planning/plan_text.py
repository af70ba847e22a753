"""A plan as a person reads it: a table of ranks, then what to do, and why.

ranks   data parallel      pipeline        hybrid     fastest                 speed-up   efficiency   limited by
    1         84.7 ms                                 1 process                    1.00        100 %   computing
    2         98.7 ms       54.3 ms             -     2 stages, 2 micro-…          1.56         78 %   computing
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from samestep.planning.planner import KINDS, Planner, ScalingPoint
from samestep.planning.step import WORDS, PredictedStep
from samestep.text import bytes_text, seconds_text

__all__: list[str] = []

HALF = 0.5  # efficiency below which ranks are said to cost more than they give
TITLES = {"data": "data parallel", "pipeline": "pipeline", "hybrid": "hybrid"}


def table(planner: Planner, points: Sequence[ScalingPoint]) -> list[str]:
    rows = [("ranks", *TITLES.values(), "fastest", "speed-up", "efficiency", "limited by")]
    rows += [_row(planner, one) for one in points]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(_cell(row, column, widths[column]) for column in range(len(row))).rstrip() for row in rows]


def verdict(planner: Planner, points: Sequence[ScalingPoint]) -> list[str]:
    """Returns sentences: what is fastest, when data parallel is the wrong answer, and when ranks no longer pay."""
    last = points[-1]
    said = []
    if last.best is None:
        reasons = "; ".join(dict.fromkeys(f"{TITLES.get(kind, kind)}: {one}" for kind, one in _unfit(last)))
        said = [f"Nothing fits {last.ranks} ranks. {reasons}."]
    if all(one.best is None for one in points):
        return said
    return [*_fastest(planner, points), *said, *_wrong(planner, last), *_too_many(planner, points)]


def detail(step: PredictedStep, planner: Planner) -> list[str]:
    """Returns what a step goes into, and how to set it up."""
    shares = {name: seconds for name, seconds in step.parts.shares().items() if abs(seconds) >= 0.001 * step.seconds}
    order = sorted(shares, key=lambda name: -shares[name])
    lines = [
        f"{step.layout}: {seconds_text(step.seconds)} a step ({_between(step)}), {step.rate:,.0f} samples a second"
    ]
    lines += [
        f"  {seconds_text(shares[name]):>9}  {_percent(shares[name] / step.seconds):>3} %  {WORDS[name]}"
        for name in order
    ]
    if step.algorithm:
        buckets = ", ".join(map(bytes_text, step.buckets))
        hidden = f", {100 * step.hidden:.0f} % of it beside the backward" if step.layout.stages == 1 else ""
        lines.append(f"  all-reduce: {step.algorithm}, buckets of {buckets}{hidden}")
    if step.ends:
        lines.append(f"  stages of layers up to {', '.join(map(str, step.ends))}")
    room = f" of {bytes_text(planner.memory)}" if planner.memory < float("inf") else ""
    lines.append(f"  memory: {bytes_text(step.memory)}{room} on the fullest device, as far as tensors go")
    return lines


def smallest_near_best(steps: Sequence[PredictedStep | str | None]) -> PredictedStep | None:
    """Returns of steps in the order of their ranks the first that is within 1 % of the fastest."""
    found = [one for one in steps if isinstance(one, PredictedStep)]
    most = max((one.rate for one in found), default=0.0)
    return next((one for one in found if one.rate >= 0.99 * most), None)


def speed_up(planner: Planner, step: PredictedStep) -> float:
    return step.rate / planner.single_process.rate


def efficiency(planner: Planner, step: PredictedStep) -> float:
    return speed_up(planner, step) / step.layout.ranks


def _row(planner: Planner, point: ScalingPoint) -> tuple[str, ...]:
    cells = [_time(point.steps.get(kind)) for kind in KINDS]
    best = point.best
    if best is None:
        return (str(point.ranks), *cells, "nothing fits", "", "", "")
    if point.ranks == 1:
        cells[0] = seconds_text(best.seconds)
    share = f"{100 * efficiency(planner, best):.0f} %"
    return (
        str(point.ranks),
        *cells,
        str(best.layout),
        f"{speed_up(planner, best):.2f}",
        share,
        WORDS[best.bottleneck()],
    )


def _cell(row: Sequence[str], column: int, width: int) -> str:
    return row[column].ljust(width) if column in (4, 7) else row[column].rjust(width)


def _percent(share: float) -> str:
    """Returns a share in whole percents; of nothing, none that is below 0."""
    return f"{round(100 * share)}"


def _time(one: PredictedStep | str | None) -> str:
    return seconds_text(one.seconds) if isinstance(one, PredictedStep) else "" if one is None else "-"


def _between(step: PredictedStep) -> str:
    return f"{seconds_text(step.low)} to {seconds_text(step.high)}"


def _unfit(point: ScalingPoint) -> Iterator[tuple[str, str]]:
    return ((kind, one) for kind, one in point.steps.items() if isinstance(one, str))


def _fastest(planner: Planner, points: Sequence[ScalingPoint]) -> Iterator[str]:
    found = [one.best for one in points if one.best is not None]
    best = max(found, key=lambda one: one.rate)
    times = speed_up(planner, best)
    yield (
        f"Fastest: {best.layout}, {seconds_text(best.seconds)} a step of {best.samples} samples, {times:.2f} times "
        f"one process, {100 * efficiency(planner, best):.0f} % of {best.layout.ranks} times as much."
    )
    chosen = smallest_near_best(found)
    if chosen is not None and chosen is not best:
        yield (
            f"Within 1 % of that with fewer ranks: {chosen.layout}, {seconds_text(chosen.seconds)} a step; "
            "the details below are of these."
        )


def _wrong(planner: Planner, last: ScalingPoint) -> Iterator[str]:
    """When data parallel is no answer, or another way is a better one."""
    data, best = last.steps.get("data"), last.best
    if isinstance(data, str) and last.ranks > 1 and best is not None:
        yield f"Data parallel training on {last.ranks} ranks is not possible: {data}."
    elif isinstance(data, PredictedStep) and data.rate < planner.single_process.rate:
        yield (
            f"Data parallel training is the wrong answer here: {data.layout} give {data.rate:,.0f} samples a second, "
            f"one process {planner.single_process.rate:,.0f}; what they lose is {WORDS[data.bottleneck()]}."
        )
    elif isinstance(data, PredictedStep) and best is not None and best.rate > 1.1 * data.rate:
        yield (
            f"Data parallel training alone is not the best answer: {best.layout} give {best.rate / data.rate:.2f} "
            f"times as many samples a second on the same {last.ranks} ranks."
        )


def _too_many(planner: Planner, points: Sequence[ScalingPoint]) -> Iterator[str]:
    """From how many ranks on more give nothing, or less than they cost."""
    found = [one.best for one in points if one.best is not None]
    peak = max(found, key=lambda one: one.rate)
    if peak is not found[-1]:
        yield (
            f"More than {peak.layout.ranks} ranks make it slower: {found[-1].layout.ranks} give {found[-1].rate:,.0f} "
            f"samples a second, {peak.layout.ranks} give {peak.rate:,.0f}."
        )
    paying = [one for one in found if efficiency(planner, one) >= HALF]
    if paying and paying[-1] is not found[-1] and paying[-1].layout.ranks < peak.layout.ranks:
        yield f"Beyond {paying[-1].layout.ranks} ranks, each gives less than half of what one process does."
