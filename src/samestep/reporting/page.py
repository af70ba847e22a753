"""A run as one page of HTML: it opens without a network, asks for nothing, and obeys nobody's text.

template   every text is escaped, and without control characters
charts     their data is JSON in an element that no browser executes, without < > & and line separators
scripts    two, named by their digests in the page's security policy: no other one runs, whatever a run is called

Charts and tables are short, however long the run was.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import numpy as np

from samestep.errors import UsageError
from samestep.events import PHASES
from samestep.reporting.analysis import RunAnalysis
from samestep.reporting.run_log import RankLog, json_safe
from samestep.reporting.status import program
from samestep.reporting.summary import Summary, checkpoints, clock
from samestep.reporting.timeline import MOST_CURVES, STACKED, Curve, Gantt, course, curves, ends, moments, ranges
from samestep.text import escape_lines, format_bytes, format_duration, format_number, format_percent, spans

EVEN = 0.005  # of the mean: ranks that have so much more have as much
MOST_ROWS = 256  # of a table
MOST_HEATED = 128  # ranks in the heat map
NONE = "-"
FINDING = ("code", "severity", "rank", "step", "tensor", "factor", "where", "cause", "fix")
LEAST_SHOWN = 0.0005  # of a step

Row = list[str]

_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def check_library() -> None:
    """Refuses a page before anything is read where plotly, which draws the charts, is not installed."""
    if find_spec("plotly") is None:
        raise UsageError("a report needs plotly: pip install 'samestep[report]'")


def render_page(analysis: RunAnalysis, summary: Summary) -> str:
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    def plain(value: Any) -> Any:
        return escape_lines(value) if isinstance(value, str) and not hasattr(value, "__html__") else value

    environment = Environment(autoescape=True, finalize=plain, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"code": _with_code, "share": format_percent}
    library, code = get_plotlyjs(), _asset("page.js")
    return environment.from_string(_asset("page.html")).render(
        **_shown(analysis, summary),
        policy=_policy(library, code),
        style=_trusted(_asset("page.css")),
        data=_trusted(embedded(_charts(analysis))),
        library=_trusted(packed(library)),
        code=_trusted(code),
    )


def packed(text: str) -> str:
    """Returns a script as a page carries it: compressed, in base 85 without "<"; page.js unpacks it.

    The library alone would be 4.8 MB of a page; so it is 1.8.
    """
    return base64.b85encode(zlib.compress(text.encode(), 9)).decode("ascii").replace("<", ",")


def embedded(data: Any) -> str:
    r"""Returns data as JSON that may stand in a page.

    >>> embedded({"a": "</script>"})
    '{"a":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.translate(_ESCAPES)


def _shown(analysis: RunAnalysis, summary: Summary) -> dict[str, Any]:
    logged = {name for log in analysis.logs for line in log.values for name in line["values"]}
    return {
        "title": program(analysis.run.about),
        "analysis": analysis,
        "told": summary,
        "parts": _parts(analysis),
        "undrawn": max(0, len(logged) - MOST_CURVES),
        "ranks": _rank_rows(analysis),
        "shares": _shares(analysis),
        "ledger": _ledger_words(analysis),
        "calls": _calls(analysis),
        "saves": _saves(analysis),
        "findings": [{key: one.get(key) for key in FINDING} for one in analysis.run.findings[:MOST_ROWS]],
        "said": [
            [clock(one["t"]), str(one["attempt"]), one["kind"], one["text"]]
            for one in analysis.run.launcher_events[-MOST_ROWS:]
        ],
        "machines": _machines(analysis),
        "facts": list(_facts(analysis)),
        "most": MOST_ROWS,
        "on_gpu": any(log.machine.get("device") not in ("cpu", None) for log in analysis.logs),
    }


def _policy(*scripts: str) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    rest = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {rest}"


def _with_code(text: str) -> Any:
    """A sentence in which `what stands between backquotes` is set as code."""
    from markupsafe import escape

    return _trusted(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(escape_lines(text)))))


def _trusted(text: str) -> Any:
    """Our own text, or one that is escaped already."""
    from markupsafe import Markup

    return Markup(text)  # noqa: S704


def _asset(name: str) -> str:
    return files("samestep.reporting").joinpath("assets", name).read_text(encoding="utf-8")


# --- charts: their data as JSON can hold it ------------------------------------------------------------


def _charts(analysis: RunAnalysis) -> dict[str, Any]:
    phases = course(analysis.table)
    text = {
        "moments": [vars(each) for each in moments(analysis.table, analysis.logs)],
        "course": {
            "steps": phases.steps,
            "phases": {name: _milliseconds(phases.phases[name]) for name in PHASES if name in phases.phases},
            "slowest": _milliseconds(phases.slowest),
        },
        "heat": _heat(analysis),
        "curves": [asdict(each) for each in _curves(analysis)],
        "gantts": [_gantt(each) for each in analysis.gantts],
    }
    clean: dict[str, Any] = json_safe(text)
    return clean


def _curves(analysis: RunAnalysis) -> list[Curve]:
    """The attempt's own first; then what earlier ones had logged."""
    earlier = [number for number in analysis.run.attempts if number < analysis.number][-3:]
    found = curves(analysis.logs)
    for each in reversed(earlier):
        found += curves(analysis.run.attempt(each))
    return found


def _milliseconds(values: Sequence[float]) -> list[float]:
    return [round(1e3 * value, 4) for value in values]


def _heat(analysis: RunAnalysis) -> dict[str, Any] | None:
    table = analysis.table.steady
    edges = ranges(len(table), STACKED)
    if len(table.ranks) < 2 or len(edges) < 2:
        return None
    rows = np.argsort(-analysis.pace.own, kind="stable")
    if len(rows) > MOST_HEATED:
        rows = np.concatenate([rows[: MOST_HEATED // 2], rows[-MOST_HEATED // 2 :]])
    rows = np.sort(rows)
    counts = np.add.reduceat(table.counts, edges[:-1])
    own = np.add.reduceat(table.own * table.counts, edges[:-1], axis=1) / counts
    first = [int(table.steps[edge] - table.counts[edge] + 1) for edge in edges[:-1]]
    return {
        "ranks": [table.ranks[row] for row in rows],
        "of": len(table.ranks),
        "first": first,
        "last": ends(table, edges),
        "percent": np.round(100 * analysis.pace.over(edges)[rows], 1).tolist(),
        "own": np.round(1e3 * own[rows], 3).tolist(),
    }


def _gantt(gantt: Gantt) -> dict[str, Any]:
    boxes = [[box.rank, box.kind, box.stage, box.micro_batch, 1e3 * box.begin, 1e3 * box.end] for box in gantt.boxes]
    return vars(gantt) | {"boxes": boxes, "idle": gantt.idle, "seconds": gantt.seconds}


# --- tables -------------------------------------------------------------------------------------------


def _parts(analysis: RunAnalysis) -> list[dict[str, Any]]:
    shares = [(name, spent, analysis.account.part(spent)) for name, spent in analysis.account.phases.items()]
    return [
        {"name": name, "share": share, "told": f"{format_duration(spent)}, {format_percent(share)}"}
        for name, spent, share in shares
        if share >= LEAST_SHOWN
    ]


def _rank_rows(analysis: RunAnalysis) -> list[Row]:
    """Returns a row for each rank, the slowest ones where there are too many: times of a step, and its work."""
    table, pace = analysis.table.steady, analysis.pace
    data, waits = table.by_rank(table.of_phases("data")), table.by_rank(table.waits)
    rows = {
        rank: [
            format_duration(float(pace.own[row])),
            f"{100 * pace.relative[row]:+.1f} %".replace("-0.0 ", "+0.0 "),
            format_duration(float(data[row])),
            format_duration(float(waits[row])),
        ]
        for row, rank in enumerate(table.ranks)
    }
    shown = sorted(analysis.logs, key=lambda log: -pace.own[table.ranks.index(log.rank)] if log.rank in rows else -1e9)
    return [
        [str(log.rank), log.begin.get("host", log.host), f"{log.step:,}", *rows.get(log.rank, [NONE] * 4), _end(log)]
        for log in sorted(shown[:MOST_ROWS], key=lambda log: log.rank)
    ]


def _end(log: RankLog) -> str:
    if log.end is None:
        return "none"
    return "error: " + str(log.end["error"]) if log.end["error"] else "ended"


def _shares(analysis: RunAnalysis) -> list[Row]:
    if analysis.ledger is None:
        return []
    return [
        [
            str(each.rank),
            format_number(each.samples) if analysis.ledger.unit != "elements" else "not told",
            format_number(each.weight),
            f"{format_number(each.least)} to {format_number(each.most)}",
            str(each.epoch) if analysis.ledger.unit != "elements" else "not told",
        ]
        for each in analysis.ledger.shares[:MOST_ROWS]
    ]


WORK = {
    "samples": "samples",
    "weight": "weight",
    "elements": "numbers in batches (samples are told by samestep.shards alone)",
}


def _ledger_words(analysis: RunAnalysis) -> str:
    ledger = analysis.ledger
    if ledger is None:
        return "The script does not say what each rank had: samestep.shards does."
    if ledger.imbalance is None:
        return "Not all ranks say what they had of the same steps, so it is not compared."
    if len(ledger.shares) < 2:
        return "One rank had all of it."
    if ledger.imbalance < EVEN:
        return f"All ranks have as many {WORK[ledger.unit]}."
    more = format_percent(ledger.imbalance)
    text = f"The rank that has most of a step has {more} more {WORK[ledger.unit]} than the mean"
    if ledger.cost:
        part = format_percent(analysis.account.part(ledger.cost))
        return f"{text}; the times follow, and it costs {format_duration(ledger.cost)} of a step, {part} of it."
    if ledger.follows is None or not ledger.imbalance:
        return f"{text}."
    explained = format_percent(ledger.follows)
    return f"{text}; it explains {explained} of the differences between their times, too little to blame it."


def _calls(analysis: RunAnalysis) -> list[Row]:
    rows = []
    for call in analysis.calls:
        share = format_percent(analysis.account.part(call.seconds))
        times = [format_duration(call.seconds), share, format_duration(call.least)]
        rows.append([call.operation, call.where, *times])
    return rows


def _saves(analysis: RunAnalysis) -> list[Row]:
    """Returns the checkpoints, the last ones where there are too many."""
    return [
        [
            f"{one['step']:,}",
            clock(one["t"]),
            format_duration(max(0.0, min(one["seconds"], 1e9))),
            format_bytes(min(one["bytes"], 1 << 70)),
            one["path"] or NONE,
            one["reason"] or "saved",
        ]
        for one in checkpoints(analysis)[-MOST_ROWS:]
    ]


def _machines(analysis: RunAnalysis) -> list[Row]:
    """Returns the ranks' environments, ranks that are alike in one row."""
    equal: dict[tuple[str, ...], list[int]] = {}
    for log in analysis.logs:
        text = log.begin | log.machine
        keys = ("host", "python", "torch", "backend", "device", "threads")
        row = tuple(NONE if text.get(key) is None else str(text[key]) for key in keys)
        equal.setdefault(row, []).append(log.rank)
    return [[spans(which), *row] for row, which in equal.items()][:MOST_ROWS]


def _facts(analysis: RunAnalysis) -> Iterator[tuple[str, str]]:
    about = analysis.run.about
    yield "run directory", str(analysis.run.path)
    command = about.get("command")
    if isinstance(command, list):
        yield "command", " ".join(map(str, command))
    for name in ("directory", "samestep", "run_id"):
        if about.get(name) is not None:
            yield name.replace("_", " "), str(about[name])
    for name in ("began", "ended"):
        if isinstance(about.get(name), int | float):
            yield name, clock(about[name])
