"""The picture of a run: what stands in it is what is in the files, it fits, and nothing in it is obeyed."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from made_runs import OWN, T0, Made
from rich.console import Console

from samestep.reporting.live.log_tail import open_latest
from samestep.reporting.live.model import ViewState, WatchModel
from samestep.reporting.live.render import PHASES, Marks, Renderer
from samestep.reporting.run_log import LOOK, largest_remainder, recent_steps


def drawn(made, width=80, height=24, choice=None, now=T0 + 1, output=(), **marks):
    """Returns the lines of a screen, as a terminal without colours gets them."""
    scene = WatchModel(open_latest(made.path), choice or ViewState(), now)
    return [line.plain for line in Renderer(scene, Marks(colours=False, **marks), width).screen(list(output), height)]


def line_of(lines, text):
    return next(line for line in lines if text in line)


def row_of(lines, rank):
    return next(line for line in lines if re.match(rf".. +{rank} ", line))


RUNNING = {"ended": None, "exit": None}


# --- what it says -------------------------------------------------------------------------------------


def test_steps_and_seconds_are_those_of_the_files(tmp_path):
    made = Made(tmp_path, work=lambda rank, step: {"samples": 9, "epoch": 2})
    made.write()
    lines = drawn(made)
    assert line_of(lines, "step 20").split("   ") == [
        " step 20",
        "18.0 ms a step",  # 1 + 4 + 8 of its own, 3 of the transfer, 2 of the optimizer
        "55.6 steps/s",
        "1,000 samples/s",  # of two ranks
        "epoch 2",
    ]
    assert row_of(lines, 1).split()[:4] == ["1", "20", "18.0", "ms"]
    title = drawn(made, width=200)[0]
    assert title.split("  ")[:3] == [f" {tmp_path}", "2 ranks on node0", "train.py --lr 0.1"]
    assert title.rstrip().endswith(" finished  2 s")
    assert drawn(made, width=len(tmp_path.name) + 50)[0].startswith(f" {tmp_path.name}  2 ranks on node0")


def test_a_bar_divides_the_last_steps_among_their_phases(tmp_path):
    made = Made(tmp_path)
    made.write()
    bar = row_of(drawn(made, width=101), 0)[28:]
    width = 101 - 29 - 28
    shares = {"D": 1, "F": 4, "B": 8, "W": 3, "O": 2}
    for letter, milliseconds in shares.items():
        assert abs(bar[:width].upper().count(letter) - width * milliseconds / 18) < 1
    assert bar[:width] == bar[:width].rstrip()


def test_only_the_last_steps_count(tmp_path):
    later = {"data": 1000, "forward": 1000}
    made = Made(tmp_path, steps=60, own=lambda rank, step: OWN if step <= 60 - LOOK else later)
    made.write()
    run = open_latest(made.path)
    found = recent_steps(run.ranks[0, 0])
    assert found.steps == LOOK
    assert found.seconds == pytest.approx(0.005)  # 1 + 1 + 3 of the transfer
    assert set(found.spent) == {"data", "forward", "wait"}


def test_an_evaluation_is_no_training_and_is_shown_while_a_rank_is_in_it(tmp_path):
    made = Made(tmp_path, apart=lambda rank, step: {"evaluate": 1.0} if step == 20 else {}, ended=lambda rank: False)
    made.about = RUNNING
    made.write()
    lines = drawn(made, now=T0 + 2)
    assert "18.0 ms a step" in line_of(lines, "step 20")
    assert "Eeee" in row_of(lines, 0)
    assert "evaluate" in line_of(lines, " F forward")
    further = {"steps": 1, "seconds": 0.018, "spent": {"forward": 0.018}, "spans": [], "more": 0, "buckets": []}
    made.append(0, "step", 21, T0 + 2, **further, work={})
    assert "E" not in row_of(drawn(made, now=T0 + 2), 0)


def test_values_have_their_last_number_and_a_curve(tmp_path):
    made = Made(tmp_path, values=lambda rank, step: {} if rank else {"loss": 20.0 - step, "lr": 0.1 + 1e-17 * step})
    made.write()
    line = line_of(drawn(made), "loss")
    assert re.fullmatch(r" loss 0 █▇?[▂-▇]+▁  lr 0\.1 ▄▄▄▄▄▄▄▄ ", line)


def test_a_value_that_is_no_number_is_shown_and_not_drawn(tmp_path):
    made = Made(tmp_path, steps=4, values=lambda rank, step: {"loss": "nan" if step == 4 else 1.0 * step})
    made.write()
    assert " loss nan ▁▅█  " in line_of(drawn(made), "loss")


def test_a_rank_that_has_said_nothing_has_a_row(tmp_path):
    made = Made(tmp_path, ranks=2)
    made.about = {**RUNNING, "ranks": 3}
    made.write()
    assert "has not begun" in row_of(drawn(made), 2)


def test_a_rank_without_steps_is_counted_by_its_seconds(tmp_path):
    made = Made(tmp_path, ended=lambda rank: False)
    made.about = RUNNING
    made.write()
    assert "no step for 2 min" in row_of(drawn(made, now=T0 + 0.36 + 150), 0)
    assert "running? silent for 2 min" in drawn(made, now=T0 + 0.36 + 150)[0]
    assert "running  2 s" in drawn(made, now=T0 + 0.5)[0]


def test_the_samples_of_a_pipeline_count_once_and_not_for_each_stage(tmp_path):
    """Two pipelines of two stages; the last stage tells of the same samples as the first."""
    made = Made(tmp_path, ranks=4, work=lambda rank, step: {"samples": 9, "epoch": 2})
    made.write()
    for rank in range(4):
        made.append(rank, "pipeline", 3, schedule="1f1b", stages=2, actions=[["F", rank % 2, 0, 0.0, 0.001]])
    assert "1,000 samples/s" in line_of(drawn(made), "samples/s")  # 2 x 9 in 18 ms


def test_a_long_run_whose_lines_stand_for_many_steps_is_not_called_silent(tmp_path):
    """64 steps of 1 s a line: the next is due 64 s after the last."""
    own = lambda rank, step: {"forward": 1_000_000}  # noqa: E731
    made = Made(tmp_path, ranks=1, steps=256, stride=64, transfer=0, own=own, ended=lambda rank: False)
    made.about = RUNNING
    made.write()
    lines = drawn(made, now=T0 + 256 + 63)
    assert "no step" not in row_of(lines, 0)
    assert "silent" not in lines[0]
    late = drawn(made, now=T0 + 256 + 6 * 64)
    assert "no step for 6 min" in row_of(late, 0)
    assert "running? silent for 6 min" in late[0]


def test_a_rank_of_whose_lines_none_could_be_written_is_not_silent_since_1970(tmp_path):
    made = Made(tmp_path, ranks=1)
    made.about = RUNNING
    made.write()
    made.file(0).write_text("")
    lines = drawn(made)
    assert lines[0].rstrip().endswith("running  3 s")
    assert row_of(lines, 0).rstrip().endswith("no step yet")


def test_a_rank_that_was_gone_before_it_could_write_has_failed_and_not_never_begun(tmp_path):
    failure = {"rank": 1, "host": "node0", "pid": 1, "signal": 9, "exception": None, "message": None, "where": None}
    made = Made(tmp_path, ranks=2, about={"exit": 137, "failure": failure})
    made.write()
    made.file(1).unlink()
    assert row_of(drawn(made), 1).rstrip().endswith(" failed")
    assert "failed" not in row_of(drawn(made), 0)
    made.file(0).unlink()
    assert row_of(drawn(made), 1).rstrip().endswith(" failed")
    assert row_of(drawn(made), 0).rstrip().endswith(" did not begin")


def test_a_run_that_goes_with_the_directory_one_stands_in_is_still_shown(tmp_path, monkeypatch):
    made = Made(tmp_path / "run")
    made.write()
    monkeypatch.chdir(made.path)
    made.path = Path()
    scene = WatchModel(open_latest(made.path), ViewState(), T0)
    shutil.rmtree(tmp_path / "run")
    lines = [line.plain for line in Renderer(scene, Marks(colours=False), 80).screen([], 24)]
    assert " step 20 " in line_of(lines, "step 20 ")
    assert line_of(lines, "standard output").rstrip("─ ").endswith("0/node0/rank0.out")


def test_a_run_that_was_preempted_has_not_failed(tmp_path):
    made = Made(tmp_path, about={"exit": 75})
    made.write()
    assert "preempted, and saved" in drawn(made)[0]
    assert "failed" not in drawn(made)[0]


def test_a_clock_that_is_ahead_makes_no_rank_silent(tmp_path):
    made = Made(tmp_path, ahead=lambda rank: -500.0 * rank, host=lambda rank: f"node{rank}", ended=lambda rank: False)
    made.about = RUNNING
    made.write()
    assert "no step" not in row_of(drawn(made), 1)
    assert "on 2 hosts" in drawn(made)[0]
    assert "node1" in row_of(drawn(made, width=120), 1)


def test_a_slow_rank_is_marked_until_it_keeps_up(tmp_path):
    made = Made(tmp_path, ranks=4, ended=lambda rank: False)
    made.about = RUNNING
    made.write()
    made.say("straggler", "rank 3 is slow: its own work takes 40 ms a step", 3)
    lines = drawn(made)
    assert "slow" in row_of(lines, 3)
    assert "slow" not in row_of(lines, 2)
    assert "straggler  rank 3 is slow: its own work" in line_of(lines, "straggler")
    made.say("keeps-up", "rank 3 is no longer slow", 3, t=T0 + 1)
    assert "slow" not in row_of(drawn(made), 3)


@pytest.mark.parametrize(
    ("at", "shown"),
    [
        ({"phase": "wait", "operation": None, "site": None}, "waiting for others for 5 s"),
        ({"phase": "collective", "operation": "barrier", "site": "a.py:9"}, "barrier for 5 s at a.py:9"),
        ({"phase": "\x1b[31m", "operation": None, "site": None}, "for 5 s"),
    ],
)
def test_what_a_rank_is_at_for_long_is_shown_while_it_lasts(tmp_path, at, shown):
    made = Made(tmp_path, ranks=2, ended=lambda rank: False)
    made.about = RUNNING
    made.write()
    made.append(1, "at", made.steps, T0 + 60.0, **at)
    assert shown in row_of(drawn(made, now=T0 + 65.5, width=120), 1)


def test_a_hang_names_who_is_missing_and_shows_what_it_prints(tmp_path):
    made = Made(tmp_path, ranks=3, ended=lambda rank: False)
    made.about = RUNNING
    made.write()
    made.say("hang", "it hangs: rank 1 is not in all_reduce\n    rank 1 at train.py:9", 1)
    lines = drawn(made, now=T0 + 60.36)
    assert "hangs" in lines[0]
    assert "stuck for 1 min" in row_of(lines, 1)
    assert "rank 1, standard output" in line_of(lines, "standard output")
    assert not any("train.py:9" in line for line in lines)
    assert any("train.py:9" in line for line in drawn(made, choice=ViewState(panel="events")))
    made.say("moves", "progress again after 60 s", t=T0 + 61)
    assert "hangs" not in drawn(made, now=T0 + 1)[0]


def test_a_failed_run_says_why_and_shows_the_standard_error_of_whom_it_blames(tmp_path):
    made = Made(tmp_path, ranks=4, ended=lambda rank: False)
    failure = {"rank": 2, "host": "node0", "pid": 1, "signal": None, "exception": "ValueError", "message": "boom"}
    made.about = {"exit": 7, "failure": failure | {"where": "train.py:12", "waiting": [0, 1]}}
    made.write()
    made.append(2, "end", 20, error="ValueError: boom")
    made.append(0, "end", 20, error="PeerError: rank 2 failed")
    made.append(3, "end", 20, error="lost its peers: Connection closed by peer [127.0.0.1]:10115")
    lines = drawn(made)
    assert "failed, exit code 7" in lines[0]
    assert " rank 2 on node0: ValueError: boom, at train.py:12" in lines
    assert "rank 2, standard error" in line_of(lines, "standard error")
    assert "ValueError: boom" in row_of(lines, 2)
    assert "was ended" in row_of(lines, 1)
    scene = WatchModel(open_latest(tmp_path), ViewState(), T0)
    assert [scene.row(rank).at.level for rank in range(4)] == ["warn", "warn", "bad", "warn"]
    assert scene.row(3).at.text == "lost its peers"


def test_findings_of_check_are_told_with_their_fix(tmp_path):
    made = Made(tmp_path)
    made.write()
    made.find(rank=1, step=3, where="train.py:4", cause="rank 1 stepped alone", fix="wait for the others")
    text = "\n".join(drawn(made, choice=ViewState(panel="events")))
    assert "finding    parameters-diverged, rank 1, step 3 at train.py:4: rank 1" in text
    assert "wait for the others" in text


def test_an_earlier_attempt_can_be_seen(tmp_path):
    Made(tmp_path, ended=lambda rank: False).write()
    made = Made(tmp_path, attempt=1, steps=30, about={"restarts": 1})
    made.write()
    made.say("restart", "rank 0 failed", 0)
    assert ", attempt 1" in drawn(made)[0]
    assert "finished" in row_of(drawn(made), 0)
    before = drawn(made, choice=ViewState(attempt=0))
    assert ", attempt 0" in before[0]
    assert "was ended" in row_of(before, 0)


def test_ranks_that_a_script_starts_by_itself_are_the_ones_that_are_shown(tmp_path):
    Made(tmp_path, ranks=1, steps=0).write()
    (spawned,) = (tmp_path / "0").iterdir()
    inner = Made(tmp_path / "made", ranks=2)
    inner.write()
    folder = spawned / "rank0.spawned"
    (tmp_path / "made" / "0" / "node0").rename(folder)
    (spawned / "rank0.out").write_text("all of them\n")
    run = open_latest(tmp_path)
    run.refresh()
    assert [log.step for log in run.attempt(0)] == [20, 20]
    assert WatchModel(run, ViewState(rank=1), T0).output() == spawned / "rank0.out"


# --- how it looks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 64])
@pytest.mark.parametrize("size", [(80, 24), (140, 40), (60, 15), (40, 10), (20, 5), (10, 2), (300, 100)])
def test_it_fits_every_terminal(tmp_path, ranks, size):
    made = Made(tmp_path, ranks=ranks, steps=3, values=lambda rank, step: {f"value {n}": n for n in range(9)})
    made.write()
    made.say("hang", "it hangs\n" + "x" * 500, 0)
    for panel in ("out", "err", "events"):
        for choice in (ViewState(panel=panel), ViewState(panel=panel, is_help=True, is_paused=True)):
            lines = drawn(made, *size, choice, output=["y" * 500, "日本語" * 100] * 20)
            assert len(lines) == size[1]
            console = Console(width=400)
            assert all(console.measure(line).maximum <= max(20, size[0]) for line in lines)


def test_eight_ranks_fit_into_the_smallest_usual_terminal(tmp_path):
    made = Made(tmp_path, ranks=8, values=lambda rank, step: {"loss": 1.0})
    made.write()
    made.say("straggler", "rank 3 is slow", 3)
    lines = drawn(made, output=[f"line {number}" for number in range(99)])
    assert all(row_of(lines, rank) for rank in range(8))
    assert " line 98" in lines
    assert " line 94" in lines


def test_of_many_ranks_those_round_the_chosen_one_are_shown(tmp_path):
    made = Made(tmp_path, ranks=64, steps=3)
    made.write()
    lines = drawn(made, choice=ViewState(rank=40))
    assert row_of(lines, 40).startswith(" ▸   40")
    assert row_of(lines, 36)
    assert row_of(lines, 44)
    assert re.search(r"\d+-\d+ of 64$", line_of(lines, " rank "))
    assert row_of(drawn(made, choice=ViewState(rank=63)), 63).startswith(" ▸")


def test_phases_are_told_apart_without_colour_and_with_it(tmp_path):
    made = Made(tmp_path)
    made.write()
    for what in ("symbol", "ground"):
        assert len({getattr(mark, what) for mark in PHASES.values()}) == len(PHASES)
    assert re.search(r" Dd*Ff+Bb+Ww+Oo* ", row_of(drawn(made), 0))
    bar = Marks().bar({"forward": 1.0, "backward": 2.0}, 9)
    assert bar.plain == "F  B     "
    assert Marks(few=True).bar({"forward": 1.0, "backward": 2.0}, 9).plain == "FffBbbbbb"  # some grounds are the same
    grounds = [(span.start, span.end, span.style.bgcolor.name) for span in bar.spans]
    assert grounds == [(0, 3, "#56b4e9"), (3, 9, "#0072b2")]


def test_letters_beyond_ascii_are_avoided_where_a_terminal_has_none(tmp_path):
    made = Made(tmp_path, values=lambda rank, step: {"loss": 1.0 * step})
    made.write()
    assert "\n".join(drawn(made, ascii_only=True)).isascii()


@pytest.mark.parametrize("width", [0, 1, 7, 100])
def test_a_bar_has_as_many_cells_as_it_may(width):
    assert sum(largest_remainder({"a": 1.0, "b": 1e-9, "c": 3.3}, width).values()) == width
    assert largest_remainder({}, width) == {}


def test_a_snapshot_has_all_ranks_and_the_last_ten_lines(tmp_path):
    made = Made(tmp_path, ranks=64, steps=3)
    made.write()
    scene = WatchModel(open_latest(tmp_path), ViewState(), T0)
    lines = [
        line.plain
        for line in Renderer(scene, Marks(colours=False), 100, is_live=False).whole([f"line {n}" for n in range(50)])
    ]
    assert all(row_of(lines, rank) for rank in range(64))
    assert lines[-10:] == [f" line {n}" for n in range(40, 50)]
    assert not any("quit" in line for line in lines)


# --- who wants it to break -------------------------------------------------------------------------------


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31m[red]x[/red]\u202e\u0085\x9b31m\r\n\t\x00\ud800"


def test_nothing_from_the_files_is_obeyed(tmp_path):
    failure = {"rank": HOSTILE, "host": [HOSTILE], "exception": {"a": HOSTILE}, "message": HOSTILE, "where": HOSTILE}
    about = {"command": [HOSTILE, 3, None], "exit": HOSTILE, "failure": failure, "ranks": "many", "began": HOSTILE}
    made = Made(tmp_path, values=lambda rank, step: {HOSTILE: 1.0}, about=about, begin={"host": HOSTILE})
    made.write()
    made.say("hang", HOSTILE, 1)
    made.find(code=HOSTILE, cause=HOSTILE, fix=HOSTILE, rank=HOSTILE, step=[HOSTILE], where={HOSTILE: 1})
    made.append(1, "end", 20, error=HOSTILE)
    made.append(1, "checkpoint", 20, seconds=1.0, path=HOSTILE, bytes=10**300, reason=HOSTILE)
    for panel in ("out", "events"):
        scene = WatchModel(open_latest(tmp_path), ViewState(panel=panel), T0)
        lines = [*Renderer(scene, Marks(), 200).screen([], 60), *Renderer(scene, Marks(), 200, is_live=False).whole([])]
        console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="truecolor", markup=False)
        for line in lines:
            assert line.plain.isprintable(), line.plain
            console.print(line)
        written = console.file.getvalue()
        assert set(re.findall(r"\x1b.[\d;]*(.)", written)) <= {"m"}
        assert "[red]" in written  # as it stands there, not as markup


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "-5", "1e308", "1" + "0" * 400])
def test_numbers_that_nobody_can_count_with_do_no_harm(tmp_path, number):
    made = Made(tmp_path, ended=lambda rank: False)
    made.about = RUNNING
    made.write()
    (step,) = [line for line in made.file(0).read_text().splitlines() if '"step": 20, "steps"' in line]
    whole = number if number.isdecimal() else "7"
    fields = {"t": number, "seconds": number, "spent": f'{{"forward": {number}}}', "step": whole, "steps": whole}
    fields["work"] = f'{{"samples": {number}, "epoch": {number}}}'
    for name, text in fields.items():
        event = json.loads(step) | {name: "HERE"}
        with made.file(0).open("a") as file:
            file.write(json.dumps(event).replace('"HERE"', text) + "\n")
        head = '{"v": 1, "t": 1, "rank": 0, "attempt": 0, "kind": "values", "step": 1, '
        values = f'{head}"values": {{"x": {number}}}}}'
        with made.file(1).open("a") as file:
            file.write(values + "\n")
        assert len(drawn(made)) == 24


def test_lines_of_a_newer_version_are_left_out_and_told(tmp_path):
    made = Made(tmp_path)
    made.write()
    for rank in range(2):
        made.file(rank).write_text(made.file(rank).read_text().replace('"v": 1', '"v": 2'))
    lines = drawn(made)
    assert "rank0.events.jsonl has lines of version 2: a later sames" in "\n".join(lines)
    assert row_of(lines, 0)


def test_half_written_files_are_shown_as_far_as_they_go(tmp_path):
    made = Made(tmp_path)
    made.write()
    text = made.file(0).read_text()
    made.file(0).write_text(text[: len(text) // 2])
    (tmp_path / "run.json").write_text('{"ranks": ')
    (tmp_path / "findings.jsonl").write_text('{"code": ')
    lines = drawn(made)
    assert re.match(r".. +0 +\d+ ", row_of(lines, 0))
