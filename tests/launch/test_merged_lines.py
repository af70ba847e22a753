"""Folding loses nothing, repeats nothing and keeps every rank's order."""

from __future__ import annotations

import os
import pty
import re

from hypothesis import given
from hypothesis import strategies as st

from samestep.launch.output.lines import MERGE_WINDOW_S, MOST_HELD, LineMerger


def ranks_of(label, size):
    if label == f"[{size} ranks]":
        return range(size)
    found = []
    for part in re.fullmatch(r"\[ranks? (.*)\]", label)[1].split(", "):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return found


def by_rank(shown, size):
    """What each rank has said, read off the screen."""
    told = {rank: [] for rank in range(size)}
    for line in shown:
        label, _, text = line.decode().partition("] ")
        for rank in ranks_of(label + "]", size):
            told[rank].append(text)
    return told


@given(st.integers(2, 5).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.tuples(
    st.integers(0, size - 1), st.sampled_from("abc"), st.sampled_from([0.0, 0.05, 0.2]))))))  # fmt: skip
def test_every_ranks_lines_are_shown_in_its_own_order(drawn):
    size, said = drawn
    folder, now, shown = LineMerger(size), 0.0, []
    for rank, text, pause in said:
        now += pause
        shown += folder.take(now)
        folder.feed(rank, text.encode(), now)
        assert folder.due() is None or folder.due() <= now + MERGE_WINDOW_S
    shown += folder.take(now, everything=True)
    assert folder.due() is None
    assert by_rank(shown, size) == {rank: [text for who, text, _ in said if who == rank] for rank in range(size)}


def test_what_all_ranks_say_is_shown_once_and_at_once():
    folder = LineMerger(64)
    for rank in range(64):
        folder.feed(rank, b"warning", now=0.0)
    assert folder.take(now=0.0) == [b"[64 ranks] warning"]


def test_what_a_rank_says_alone_waits_no_longer_than_the_hold():
    folder = LineMerger(2)
    folder.feed(1, b"mine", now=5.0)
    assert folder.take(now=5.0 + MERGE_WINDOW_S / 2) == []
    assert folder.due() == 5.0 + MERGE_WINDOW_S
    assert folder.take(now=5.0 + MERGE_WINDOW_S) == [b"[rank 1] mine"]


def test_what_two_ranks_say_twice_is_shown_twice():
    folder = LineMerger(2)
    for rank in (0, 0, 1, 1):
        folder.feed(rank, b"x", now=0.0)
    assert folder.take(now=0.0) == [b"[2 ranks] x", b"[2 ranks] x"]


def test_tracebacks_fold_as_a_whole_and_later_ranks_follow():
    folder, trace = LineMerger(4), [b"Traceback", b"  File", b"ValueError: no"]
    for rank in (0, 2, 1):
        for line in trace:
            folder.feed(rank, line, now=0.0)
    assert folder.take(now=MERGE_WINDOW_S) == [b"[ranks 0-2] " + line for line in trace]
    for line in trace:
        folder.feed(3, line, now=1.0)
    assert folder.take(now=1.001 + MERGE_WINDOW_S) == [b"[rank 3] " + line for line in trace]


def test_memory_is_bounded():
    folder = LineMerger(2)
    for number in range(MOST_HELD + 10):
        folder.feed(0, b"%d" % number, now=0.0)
    assert len(folder.take(now=0.0)) == 10


def test_ranks_of_a_run_are_folded_on_a_terminal_and_not_in_the_files(folder):
    script = folder.script("join()\nmeet()\nsys.stderr.write('the same\\n')\nsys.stderr.write(f'only {rank}\\n')")
    master, slave = pty.openpty()
    process = folder.start("-n", 3, script, stderr=slave, env={"COLUMNS": "100"})
    os.close(slave)
    process.communicate(timeout=60)
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert shown.count("the same") < 3
    assert "[ranks 1-2] the same" in shown
    assert {"only 0", "[rank 1] only 1", "[rank 2] only 2"} <= set(shown.splitlines())  # rank 0 draws by itself
    assert all("the same" in folder.logs()[f"rank{rank}.err"] for rank in range(3))


def test_a_program_that_reads_the_output_finds_every_rank(folder):
    done = folder.run("-n", 3, folder.script("join()\nmeet()\nprint('the same')"))
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] the same" for rank in range(3)]
