"""What is shown of what strangers wrote, and what ranks read in a store that is open to others: for test_fuzz.py.

A target draws what somebody writes, has samestep read or show it, and asserts that nothing of it is obeyed.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from rich.console import Console

from samestep.checkpoints import sharded_save
from samestep.cli.doctor import shown
from samestep.collectives import segments
from samestep.data.once import _beside, _is_done
from samestep.doctor import hosts
from samestep.doctor.finding import from_remote
from samestep.events import KINDS
from samestep.planning import profile, settings
from samestep.replicas import culprits
from samestep.reporting import summary as summaries
from samestep.reporting.analysis import analyse
from samestep.reporting.live.app import WatchApp
from samestep.reporting.live.log_tail import open_latest
from samestep.reporting.live.model import ViewState
from samestep.reporting.page import render_page
from samestep.reporting.run_log import open_run
from samestep.runtime.membership import Card
from samestep.runtime.store_messages import decode_message, matches_type
from samestep.schema import parse_object
from samestep.verification.online import exchange

MARKUP = "<img src=x onerror=alert(1)>"
NASTY = [
    "\x1b[2J\x1b]0;owned\x07",
    f'"{MARKUP}',
    "</script><script>alert(1)</script>",
    "\u202e\x9b2J",
    "a\r\nb",
]
nasty = st.sampled_from(NASTY)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | nasty,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12) | nasty, inner, max_size=4),
    max_leaves=12,
)
GOOD = {  # of each field, what a rank writes
    **dict.fromkeys(("host", "python", "torch", "backend", "device", "path", "reason", "why"), st.just("word") | nasty),
    **dict.fromkeys(("phase", "operation", "site", "text", "schedule"), st.just("word") | nasty),
    **dict.fromkeys(("pid", "size", "threads", "steps", "bytes", "lines", "stages"), st.integers(0, 9)),
    "seconds": st.floats(0, 9),
    "spent": st.dictionaries(st.sampled_from(["data", "forward", "backward", "wait", "save"]) | nasty, st.floats(0, 3)),
    "spans": st.lists(st.tuples(st.sampled_from(["forward", "wait"]) | nasty, st.integers(0, 99), st.integers(0, 99))),
    "more": st.integers(0, 3),
    "buckets": st.lists(st.lists(st.integers(0, 99), min_size=3, max_size=3), max_size=3),
    "work": st.dictionaries(st.sampled_from(["samples", "tokens"]) | nasty, st.integers(0, 99), max_size=2),
    "values": st.dictionaries(st.just("loss") | nasty, st.floats() | st.just("nan") | nasty, max_size=3),
    "actions": st.lists(st.lists(st.integers(0, 9) | nasty, max_size=6), max_size=3),
    "error": st.none() | nasty,
    "ranks": st.lists(st.integers(0, 3), max_size=3),
}  # fmt: skip


@st.composite
def events(draw, kind):
    """A line of one kind, most of it as a rank writes it."""
    fields = {name: draw(GOOD[name] | json_values) for name in KINDS[kind]}
    head = {"v": 1, "t": 1e9 + draw(st.integers(0, 99)), "rank": draw(st.integers(0, 1)), "attempt": 0, "kind": kind}
    return json.dumps({**head, "step": draw(st.integers(0, 9)), **fields})


def run_directory(data, folder):
    """A run whose ranks and launcher write what they like."""
    logs = folder / "0" / "node"
    logs.mkdir(parents=True)
    kinds = ["begin", *data.draw(st.lists(st.sampled_from([*KINDS, "step", "step"]), max_size=8))]
    lines = [data.draw(events(kind)) for kind in kinds]
    (logs / "rank0.events.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")
    (logs / "rank0.out").write_text(data.draw(nasty | st.text(max_size=40)), encoding="utf-8", errors="surrogatepass")
    about = {"program": ["train.py"], "ranks": 2, "started": 1e9, "hosts": ["node"]}
    told = st.fixed_dictionaries({}, optional={name: json_values | st.just(about[name]) for name in about})
    (folder / "run.json").write_text(json.dumps(data.draw(told)), encoding="utf-8")
    finding = st.fixed_dictionaries({}, optional=dict.fromkeys(("code", "cause", "fix", "where", "rank"), json_values))
    (folder / "findings.jsonl").write_text(json.dumps(data.draw(finding)) + "\n", encoding="utf-8")


def obeyed(text):
    """The letters of a text that a terminal would not show but do."""
    return sorted({letter for letter in text if not letter.isprintable()} - {"\n"})


def reports(data):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        run_directory(data, Path(name))
        patch.setattr("plotly.offline.get_plotlyjs", str)  # 4 MB that no test reads
        analysis = analyse(open_run(Path(name)))
        told = summaries.summary(analysis, 2e9)
        page = render_page(analysis, told)
        json.dumps(summaries.as_json(analysis, told))
        assert MARKUP not in page
        assert page.lower().count("<script") == page.lower().count("</script>") == SCRIPTS
        assert obeyed("\n".join(summaries.lines(told))) == []


SCRIPTS = 3  # of a page: plotly, its own, and the data


def pictures(data):
    with tempfile.TemporaryDirectory() as name:
        run_directory(data, Path(name))
        screen = io.StringIO()
        console = Console(file=screen, width=100, highlight=False, markup=False, emoji=False, color_system=None)
        WatchApp(open_latest(Path(name)), console, ViewState(rank=None)).once()
        assert obeyed(screen.getvalue()) == []


def doctors_of_others(data):
    line = st.fixed_dictionaries({}, optional=dict.fromkeys(("check", "text", "effect", "fix", "host"), json_values))
    lines = data.draw(st.lists(line.flatmap(lambda one: st.just({**one, "level": "error"})) | json_values, max_size=4))
    found = hosts._parsed([data.draw(st.text(max_size=30)), json.dumps({"v": 1, "lines": lines})])
    assert found is not None
    told = shown(list(from_remote("node\x1b[2J", found)), wrong=False, coloured=False)
    assert obeyed("\n".join(told)) == []


def settings_files(data):
    text = data.draw(st.text('processesbuckets = 1.e"[]\n', max_size=60) | st.text(max_size=60))
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "settings.toml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        found = settings.load(path)
    assert found.processes is None or found.processes > 0


PROFILE = {"v": profile.VERSION, "layers": {"8": [{}]}, "gradients": [{}], "sizes": [{}]}


def profiles(data):
    given = st.fixed_dictionaries({}, optional={name: json_values | st.just(PROFILE[name]) for name in PROFILE})
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "profile.json"
        path.write_text(json.dumps(data.draw(given | json_values)), encoding="utf-8")
        profile.load(path)


LETTERS = [
    (Card,),
    (tuple[str | None, int],),
    (tuple[int, int],),
    sharded_save._REPORTS,
    culprits.FINDINGS,
    (exchange.StepSummary,),
    (exchange.SummaryDetail,),
    (exchange.FinalSummary,),
]
DIGESTS = {"w": "a"}
LETTER = {"bad": None, "error": "full", "digests": DIGESTS, "well": True, "steps": [1]}
good_letters = st.sampled_from(
    [[0, "m", None], ["m", 1], [None, 1], [1, 2], {"error": "full"}, {"digests": DIGESTS}, {"bad": None}]
)
near_letters = st.fixed_dictionaries({}, optional={name: json_values | st.just(LETTER[name]) for name in LETTER})
raw = st.binary(max_size=300) | st.integers(1, 200_000).map(lambda depth: b"[" * depth)


def letters_in_the_store(data):
    forms = data.draw(st.sampled_from(LETTERS))
    value = data.draw(raw | (near_letters | json_values | good_letters).map(lambda one: json.dumps(one).encode()))
    told = decode_message(value, *forms, of="rank 1")
    assert any(matches_type(told, form) for form in forms)


def summaries_of_a_check(data):
    kind = data.draw(st.sampled_from([exchange.StepSummary, exchange.SummaryDetail, exchange.FinalSummary]))
    exchange.decode(data.draw(raw | (near_letters | json_values).map(lambda one: json.dumps(one).encode())), kind)


def parts_of_a_checkpoint(data):
    """What is none is an error of that rank's, which rank 0 raises."""
    told = sharded_save.parse_report(
        data.draw(raw | (near_letters | good_letters).map(lambda one: json.dumps(one).encode())), 1
    )
    assert "error" in told or set(told) == {"digests"}


numbers = st.sampled_from([os.getpid(), "self", "../..", "../../etc/passwd", -1, None, True]) | st.integers(0, 40)


def descriptors(data):
    """Whatever process and number stand in the store, no file of this user's is mapped."""
    with tempfile.TemporaryFile() as file:
        file.write(b"mine" * 1024)
        file.flush()
        number = data.draw(numbers | st.just(file.fileno()))
        assert segments.open_segment(data.draw(numbers), number, data.draw(st.sampled_from([1, 4096]))) is None


def handshakes(data):
    line = data.draw(raw | json_values.map(lambda one: json.dumps(one).encode()))
    try:
        assert isinstance(parse_object(line), dict)
    except ValueError:
        return


def markers_of_once(data):
    with tempfile.TemporaryDirectory() as name:
        target = Path(name) / "data"
        _beside(target, "done").write_text(json.dumps(data.draw(json_values)), encoding="utf-8")
        assert _is_done(target) in {True, False}


DRAWN = [reports, pictures]  # whole pages and screens
MORE = [
    *DRAWN,
    doctors_of_others,
    settings_files,
    profiles,
    letters_in_the_store,
    summaries_of_a_check,
    parts_of_a_checkpoint,
    descriptors,
    handshakes,
    markers_of_once,
]
