"""The latest of files that may be huge: what is read of them, and how much that is."""

from __future__ import annotations

import json
import os

import pytest
from made_runs import T0, Made

from samestep.reporting.live import log_tail
from samestep.reporting.live.log_tail import LatestReader, LogTail, clean, open_latest, trim
from samestep.reporting.run_log import open_run
from samestep.reporting.status import ranks_of


def test_of_a_huge_file_the_first_and_the_last_events_are_read(tmp_path):
    made = Made(tmp_path, ranks=1, steps=5_000)
    made.write()
    assert made.file(0).stat().st_size > 2 * (log_tail.HEAD + log_tail.LAST)
    run = open_latest(tmp_path)
    log = run.ranks[0, 0]
    assert log.begin["host"] == "node0"
    assert log.machine["backend"] == "gloo"
    assert [event["step"] for event in log.steps[-log_tail.LOOK :]] == list(range(5_001 - log_tail.LOOK, 5_001))
    assert log.end is not None
    assert len(log.steps) <= 2 * log_tail.LOOK
    assert run.problems == []


def test_what_is_appended_is_read_once_and_whole(tmp_path):
    made = Made(tmp_path, ranks=1, steps=3, ended=lambda rank: False)
    made.write()
    reader = LatestReader(made.file(0))
    assert [event["kind"] for event in reader.events()] == ["begin", "machine", "step", "step", "step"]
    assert list(reader.events()) == []
    line = json.dumps({"v": 1, "t": T0, "rank": 0, "attempt": 0, "kind": "values", "step": 3, "values": {"loss": 1}})
    with made.file(0).open("a") as file:
        file.write(line[:30])
    assert list(reader.events()) == []
    with made.file(0).open("a") as file:
        file.write(line[30:] + "\n")
    assert [event["values"] for event in reader.events()] == [{"loss": 1}]
    assert reader.torn == 0


def test_of_many_new_steps_the_last_are_read_and_everything_else(tmp_path):
    made = Made(tmp_path, ranks=1, steps=3, ended=lambda rank: False)
    made.write()
    reader = LatestReader(made.file(0))
    list(reader.events())
    step = {"v": 1, "t": T0, "rank": 0, "attempt": 0, "kind": "step", "step": 0, "steps": 1, "seconds": 1.0}
    step |= {"spent": {}, "spans": [["all_reduce", 0, 1, "a.py:3"]], "more": 0, "buckets": [[0, 1, 2, None, 3]]}
    step |= {"work": {}}
    saved = {**step, "kind": "checkpoint", "path": "x", "bytes": 1, "reason": None}
    with made.file(0).open("a") as file:
        for number in range(4, 104):
            file.write(json.dumps(step | {"step": number}, separators=(",", ":")) + "\n")
            if number == 30:
                file.write(json.dumps(saved, separators=(",", ":")) + "\n")
    events = list(reader.events())
    assert [event["step"] for event in events if event["kind"] == "step"] == [4, *range(104 - log_tail.LOOK, 104)]
    assert [event["kind"] for event in events].count("checkpoint") == 1
    assert events[-1]["spans"] == events[-1]["buckets"] == []
    assert events[-1]["work"] == {}
    assert reader.torn == 0


def test_a_file_that_was_begun_anew_is_read_anew(tmp_path):
    made = Made(tmp_path, ranks=1, steps=9)
    made.write()
    reader = LatestReader(made.file(0))
    assert len(list(reader.events())) == 12
    Made(tmp_path, ranks=1, steps=2).write()
    assert len(list(reader.events())) == 5


def test_a_line_without_end_is_dropped(tmp_path):
    file = tmp_path / "rank0.events.jsonl"
    file.write_bytes(b"x" * (3 << 20))
    reader = LatestReader(file)
    for _ in range(5):
        assert list(reader.events()) == []
        with file.open("ab") as more:
            more.write(b"x" * (300 << 10))
    assert reader.torn == 1


def test_what_is_kept_in_memory_has_a_limit(tmp_path):
    made = Made(tmp_path, ranks=1, steps=600, values=lambda rank, step: {"loss": 1.0})
    made.write()
    run = open_latest(tmp_path)
    for number in range(1, 2_000):
        run.launcher_events.append({"number": number})
    trim(run)
    assert len(run.launcher_events) == len(run.ranks[0, 0].values) == log_tail.KEPT


def test_a_run_that_tells_of_millions_of_ranks_is_shown_as_far_as_a_screen_can(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"v": 1, "ranks": 61_496_004}))
    assert len(ranks_of(open_latest(tmp_path), 0)) == 16_384


# --- output -----------------------------------------------------------------------------------------------


def test_the_last_lines_of_output_are_read_and_no_more(tmp_path):
    file = tmp_path / "rank0.out"
    file.write_text("".join(f"line {number}\n" for number in range(100_000)))
    tail = LogTail(file)
    assert tail.read()[-1] == "line 99999"
    assert sum(map(len, tail.lines)) < log_tail.TAIL
    assert tail.lines[0].startswith("line 9")  # not half of one
    with file.open("a") as more:
        more.write("and ")
    assert tail.read()[-1] == "and "
    with file.open("a") as more:
        more.write("more\n")
    assert tail.read()[-1] == "and more"


def test_one_line_longer_than_what_is_read_is_shown_in_part(tmp_path):
    file = tmp_path / "rank0.out"
    file.write_bytes(b"\xff" * (1 << 20))
    (line,) = LogTail(file).read()
    assert len(line) == log_tail.LONGEST


def test_what_is_no_file_has_no_lines(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "absent", tmp_path / ("x" * 300)):
        assert LogTail(path).read() == []


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x07", "link"),
        ("\x1b]0;title without end", ""),
        ("\x1b(Bcharset\x1b7saved\x1bc", "charsetsaved"),
        ("\x1b", "\\x1b"),
        ("\x9b31mred", "red"),
        (" 10%|#   |\r 90%|### |\r", " 90%|### |"),
        ("a\tb", "a   b"),
        ("[red]markup[/red]", "[red]markup[/red]"),
        ("\x00\x07\x7f\u202e", "\\x00\\x07\\x7f\\u202e"),
        ("\x1b[" + "1;" * 5_000, "1;" * 500),
    ],
)
def test_a_line_is_shown_and_never_obeyed(line, shown):
    assert clean(line) == shown
    assert clean(line).isprintable()


def test_a_record_that_is_cut_is_a_problem(tmp_path):
    made = Made(tmp_path)
    made.write()
    (tmp_path / "run.json").write_text('{"command": ["tra', encoding="utf-8")
    assert open_run(tmp_path).problems == ["run.json is cut, or no JSON: what was run, and how it ended, is not known"]
