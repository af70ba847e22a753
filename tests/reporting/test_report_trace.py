"""Traces: what Perfetto is given, checked against the format's own rules."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from itertools import pairwise

import pytest
from made_runs import OWN, T0, Made

from samestep.files import write_atomic
from samestep.reporting.run_log import open_run
from samestep.reporting.trace import LAUNCHER, trace


def events_of(made):
    run = open_run(made.path)
    return json.loads("".join(trace(run, run.attempt(made.attempt))))["traceEvents"]


def boxes(events, name):
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def names(events):
    return {(event["pid"], event.get("tid")): event["args"]["name"] for event in events if event["ph"] == "M"}


def test_every_rank_is_a_process_with_its_threads(tmp_path):
    made = Made(tmp_path, ranks=2, buckets=2)
    made.write()
    told = names(events_of(made))
    assert told[0, None] == "rank 0 on node0"
    assert {told[1, 1], told[1, 2], told[1, 3], told[1, 10]} == {"phases", "collectives", "steps", "buckets"}


def test_pieces_stand_where_they_were(tmp_path):
    made = Made(tmp_path, ranks=2, steps=3)
    made.write()
    forward = [event for event in boxes(events_of(made), "forward") if event["pid"] == 1]
    # a step takes 18 ms, of which the forward begins 1 ms behind the begin
    assert [event["ts"] for event in forward] == pytest.approx([1_000, 19_000, 37_000], abs=2)
    assert {event["dur"] for event in forward} == {4_000}


def test_clocks_of_hosts_are_brought_together(tmp_path):
    made = Made(tmp_path, ranks=2, steps=3, ahead=lambda rank: -7.0 * rank, host=lambda rank: f"node{rank}")
    made.write()
    steps = boxes(events_of(made), "step 2")
    assert [event["ts"] for event in steps] == pytest.approx([18_000, 18_000], abs=2)


def test_what_overlaps_has_threads_of_its_own(tmp_path):
    made = Made(tmp_path, ranks=2, buckets=0)
    made.write()
    buckets = [[0, 10, 0, 0, 50], [1, 10, 10, 10, 30], [2, 10, 20, 60, 70]]
    line = {"steps": 1, "seconds": 0.1, "spent": {}, "spans": [], "more": 0, "buckets": buckets, "work": {}}
    made.append(0, "step", 21, T0 + 1, **line)
    found = events_of(made)
    assert boxes(found, "bucket 0")[0]["tid"] != boxes(found, "bucket 1")[0]["tid"]
    assert boxes(found, "bucket 0")[0]["tid"] == boxes(found, "bucket 2")[0]["tid"]


def test_boxes_of_a_thread_nest(tmp_path):
    made = Made(tmp_path, ranks=2, buckets=5, own=lambda rank, step: OWN | {"backward": 8_000 + 900 * rank})
    made.write()
    threads = defaultdict(list)
    for event in events_of(made):
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for each in threads.values():
        ordered = sorted(each)
        assert all(end <= begin + 0.11 for (_, end), (begin, _) in pairwise(ordered))


def test_the_launchers_words_saves_and_values_are_in_it(tmp_path):
    made = Made(tmp_path, values=lambda rank, step: {"loss": 1.5} if step < 3 else {"loss": "nan"})
    made.write()
    made.say("straggler", "rank 1 is slow", 1)
    made.append(0, "checkpoint", 4, T0 + 0.1, seconds=0.2, path="x", bytes=5, reason=None)
    found = events_of(made)
    assert [event["args"]["text"] for event in found if event["pid"] == LAUNCHER and event["ph"] == "i"] == [
        "rank 1 is slow"
    ]
    assert boxes(found, "checkpoint 4")[0]["dur"] == 200_000
    assert [event["args"] for event in found if event["ph"] == "C" and event["pid"] == 0] == [{"loss": 1.5}] * 2


def test_numbers_that_are_none_make_no_broken_file(tmp_path):
    made = Made(tmp_path)
    made.write()
    line = {"steps": 1, "seconds": math.inf, "spent": {"data": math.nan}, "spans": [["data", math.nan, -4]], "more": 0}
    made.append(0, "step", 21, math.nan, **line, buckets=[[0, math.inf, math.nan, 1, 2]], work={"samples": 10**400})
    made.append(0, "pipeline", 3, schedule="x", stages=1, actions=[["F", 1, 10**400, 0, 10**400]])
    text = "".join(trace(open_run(tmp_path), open_run(tmp_path).attempt(0)))
    json.loads(text, parse_constant=pytest.fail)


def test_a_name_that_ends_in_gz_is_compressed(tmp_path):
    write_atomic(tmp_path / "trace.json.gz", ["[1,", "2]"])
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes())) == [1, 2]
