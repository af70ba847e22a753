"""The numbers of a report, on runs whose right answers follow from how they are made."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from made_runs import OWN, T0, Made

from samestep.errors import UsageError
from samestep.reporting import page
from samestep.reporting.analysis import analyse
from samestep.reporting.run_log import PackingReader, open_run
from samestep.reporting.summary import as_json, lines, summary
from samestep.reporting.timeline import course, curves, idle, moments, ranges

CALM = {"data": 100, "forward": 4_000, "backward": 8_000, "optimizer": 2_000}


def analysis_of(made, number=None):
    return analyse(open_run(made.write(), PackingReader), number)


def told(made):
    found = analysis_of(made)
    return summary(found, T0 + 100)


def advised(made):
    return {piece.code: piece for piece in told(made).advice}


def test_the_phases_of_a_step_add_up(tmp_path):
    account = analysis_of(Made(tmp_path, ranks=2, steps=10)).account
    assert account.step == pytest.approx(0.018)  # 1 + 4 + 8 of its own, 3 of waiting, 2 behind
    assert account.phases == pytest.approx(
        {"data": 0.001, "forward": 0.004, "backward": 0.008, "wait": 0.003, "optimizer": 0.002}
    )
    assert account.wall == pytest.approx(0.18, abs=1e-5)
    assert account.training == pytest.approx(0.18)


def test_what_nobody_is_spared_is_exchange_and_the_rest_is_waiting_for_others(tmp_path):
    made = Made(tmp_path, ranks=2, own=lambda rank, step: OWN | {"backward": 8_000 + 4_000 * rank})
    account = analysis_of(made).account
    assert account.transfer == pytest.approx(0.003)
    assert account.delay == pytest.approx(0.002)  # rank 0 waits 4 ms longer, rank 1 not at all


def test_a_slow_rank_is_named_with_what_it_costs(tmp_path):
    made = Made(tmp_path, ranks=4, own=lambda rank, step: OWN | {"backward": 12_000 if rank == 2 else 8_000})
    piece = advised(made)["straggler"]
    assert piece.gain == pytest.approx(4 / 22)  # of a step of 1 + 4 + 12 + 3 + 2 ms
    assert "Rank 2" in piece.text
    assert "backward" in piece.text
    assert "19.0 ms a step, 1.27 times the others' 15.0 ms, and it loses most in backward" in piece.text


def test_what_slow_ranks_cost_is_told_by_one_rule(tmp_path):
    made = Made(tmp_path, ranks=2, own=lambda rank, step: OWN | {"backward": 20_000 if rank == 1 else 8_000})
    found = advised(made)
    assert "The largest is waiting for slower ranks" in found["communication"].text
    gains = [found[code].gain for code in ("communication", "straggler")]
    assert gains == pytest.approx([12 / 30] * 2)  # of a step; `samestep run` says the same of it


def test_ranks_that_are_slow_in_turn_are_not_named(tmp_path):
    made = Made(tmp_path, steps=21, own=lambda rank, step: OWN | {"backward": 8_000 + 4_000 * ((rank + step) % 2)})
    found = advised(made)
    assert "straggler" not in found
    assert found["changing stragglers"].gain == pytest.approx(2 / 22)


def test_one_long_step_makes_no_slow_rank_and_is_told_as_that(tmp_path):
    """Frozen for 9 s once: in all other steps the rank keeps up."""
    own = lambda rank, step: OWN | {"backward": 9_000_000 if (rank, step) == (1, 20) else 8_000}  # noqa: E731
    made = Made(tmp_path, steps=40, own=own)
    assert "straggler" not in advised(made)
    (step,) = [line for line in told(made).time if line.startswith("A step takes")]
    assert "the slowest, step 20, 9.01 s, 93 % of all training)" in step


def test_a_dozen_steps_make_no_slow_rank(tmp_path):
    own = lambda rank, step: OWN | {"backward": 12_000 if rank == 1 else 8_000}  # noqa: E731
    assert "straggler" not in advised(Made(tmp_path, steps=13, own=own))


@pytest.mark.parametrize(("moves", "end"), [(False, "."), (True, "; progress again after 27 s.")])
def test_a_hang_is_told_and_counts_in_the_time(tmp_path, moves, end):
    made = Made(tmp_path, ended=lambda rank: False, about={"exit": 130, "ended": T0 + 30.0})
    made.say("hang", "no progress for 12 s: rank 1 is frozen\n    more", 1)
    if moves:
        made.say("moves", "progress again after 27 s")
    found = told(made)
    assert f"It hung: no progress for 12 s: rank 1 is frozen{end}" in found.state.sentences
    assert "It ended with exit code 130: Ctrl-C." in found.state.sentences
    assert found.time[0].startswith("Of 30.0 s from begin to end ")


def test_int8_is_advised_between_hosts_only(tmp_path):
    for hosts in (1, 2):
        made = Made(tmp_path / str(hosts), buckets=1, host=lambda rank, hosts=hosts: f"node{rank % hosts}")
        text = advised(made)["overlap"].text
        assert 'samestep.replicate(…, buckets="auto")' in text
        assert ("int8" in text) == (hosts == 2)


def test_waiting_for_data_is_told_with_what_it_would_bring(tmp_path):
    piece = advised(Made(tmp_path, own=lambda rank, step: OWN | {"data": 5_000}))["data"]
    assert piece.gain == pytest.approx(5 / 22)


def test_data_that_one_rank_waits_for_is_that_ranks_own_matter(tmp_path):
    found = advised(Made(tmp_path, ranks=3, own=lambda rank, step: OWN | {"data": 6_000 if rank == 1 else 1_000}))
    assert "data" not in found
    assert found["straggler"].gain == pytest.approx(5 / 23)
    assert "what it reads its data from" in found["straggler"].text


def test_data_that_only_a_rank_waits_for_which_is_not_last_brings_nothing(tmp_path):
    own = {0: OWN | {"data": 3_000}, 1: OWN | {"data": 0, "backward": 12_000}}
    assert "data" not in advised(Made(tmp_path, own=lambda rank, step: own[rank]))


def test_nothing_stands_out_where_nothing_does(tmp_path):
    found = told(Made(tmp_path, transfer=200, own=lambda rank, step: CALM))
    assert found.advice == ()
    assert found.changes == ["Nothing stands out."]


def test_uneven_work_is_told_apart_from_a_slow_rank(tmp_path):
    def weight(rank, step):
        return 30 if (rank + step) % 2 else 10

    made = Made(
        tmp_path,
        transfer=200,
        own=lambda rank, step: CALM | {"backward": 8_000 + 100 * weight(rank, step)},
        work=lambda rank, step: {"samples": 4, "weight": weight(rank, step), "epoch": 0},
    )
    found = advised(made)
    ledger = analyse(open_run(tmp_path)).ledger
    assert ledger.imbalance == pytest.approx(0.5)  # 30 of a mean of 20
    assert ledger.cost == pytest.approx(0.001)  # 100 us a unit, 10 units beyond the mean
    assert list(found) == ["imbalance"]
    assert found["imbalance"].gain == pytest.approx(1_000 / 17_300, rel=1e-3)


def test_batches_of_a_loader_of_its_own_are_compared_by_the_numbers_in_them(tmp_path):
    made = Made(
        tmp_path,
        transfer=200,
        own=lambda rank, step: CALM | {"backward": 8_000 + 100 * (30 if (rank + step) % 2 else 10)},
        work=lambda rank, step: {"elements": 30 if (rank + step) % 2 else 10},
    )
    found, ledger = advised(made), analyse(open_run(tmp_path)).ledger
    assert (ledger.unit, ledger.imbalance) == ("elements", pytest.approx(0.5))
    assert "50 % more numbers in batches than the mean" in found["imbalance"].text
    assert page._shares(analyse(open_run(tmp_path)))[0][1::3] == ["not told", "not told"]
    assert "numbers in batches (samples are told by samestep.shards alone)" in page._ledger_words(
        analyse(open_run(tmp_path))
    )


def test_work_that_not_all_ranks_tell_of_is_not_called_even(tmp_path):
    made = Made(tmp_path, ranks=3, work=lambda rank, step: {} if rank == 2 else {"samples": 8, "weight": 8, "epoch": 0})
    found = analysis_of(made)
    assert page._ledger_words(found).startswith("Not all ranks say what they had")
    assert as_json(found, summary(found, T0))["imbalance"] is None
    assert page._ledger_words(analysis_of(Made(tmp_path / "one", ranks=1, work=made.work))).startswith("One rank had")


def test_work_that_the_times_do_not_follow_costs_nothing(tmp_path):
    made = Made(tmp_path, work=lambda rank, step: {"samples": 4 + rank, "weight": 4 + rank, "epoch": 0})
    assert analysis_of(made).ledger.cost == 0
    assert "imbalance" not in advised(made)


def test_the_exchange_is_hidden_as_far_as_it_passes_beside_the_backward(tmp_path):
    overlap = analysis_of(Made(tmp_path, buckets=2, transfer=5_000)).overlap
    # Two buckets, each 4 ms on its way from 10 us behind its last gradient; the backward ends when the second is full.
    assert overlap.in_flight == pytest.approx(8_000)
    assert overlap.hidden == pytest.approx(3_990)


def test_buckets_of_which_the_end_is_unknown_are_said_to_be(tmp_path):
    made = Made(tmp_path, buckets=2)
    made.write()
    for rank in range(2):
        text = made.file(rank).read_text()
        lines = [
            line.replace('"buckets": [[0', '"buckets": [[7, 100, 5, null, null], [0') for line in text.splitlines()
        ]
        lines = [
            line.split(", [0, 1048576")[0] + "], " + line[line.index('"work"') :] if "[7, 100" in line else line
            for line in lines
        ]
        made.file(rank).write_text("\n".join(lines) + "\n")
    found = analyse(open_run(tmp_path))
    assert found.overlap.part is None
    assert "when they were back is not" in " ".join(summary(found, T0).time)


def test_saves_and_evaluations_are_no_training(tmp_path):
    made = Made(tmp_path, steps=20, apart=lambda rank, step: {"save": 0.09} if step % 10 == 0 else {})
    found = analysis_of(made)
    assert found.account.training == pytest.approx(20 * 0.018)
    assert found.account.outside_training == {"save": pytest.approx(0.18)}
    assert advised(made)["save"].gain == pytest.approx(0.18 / 0.54 / 2, rel=1e-3)


@pytest.mark.parametrize("saves", [1, 2])
def test_of_a_single_save_none_can_be_left_out(tmp_path, saves):
    made = Made(tmp_path, steps=20, apart=lambda rank, step: {"save": 0.09} if step == 20 else {})
    made.write()
    with made.file(0).open("a") as file:
        for step in range(saves):
            line = {"v": 1, "t": T0, "rank": 0, "attempt": 0, "kind": "checkpoint", "step": step, "seconds": 0.1}
            file.write(json.dumps(line | {"path": "kept", "bytes": 9, "reason": None}) + "\n")
    found = {piece.code for piece in summary(analyse(open_run(tmp_path)), T0).advice}
    assert ("save" in found) == (saves == 2)


def test_the_first_step_is_told_apart(tmp_path):
    made = Made(tmp_path, own=lambda rank, step: OWN | ({"forward": 504_000} if step == 1 else {}))
    found = analysis_of(made)
    assert found.account.first == pytest.approx(0.518)
    assert found.account.step == pytest.approx(0.018)
    assert "The first step took 518 ms, 500 ms more than a usual one" in " ".join(told(made).time)


def test_lines_of_many_steps_tell_the_same_as_one_for_each(tmp_path):
    def own(rank, step):
        return OWN | {"backward": 8_000 + 1_000 * rank}

    single = analysis_of(Made(tmp_path / "single", steps=64, own=own)).account
    several = analysis_of(Made(tmp_path / "several", steps=64, own=own, stride=4)).account
    assert several.step == pytest.approx(single.step)
    assert several.delay == pytest.approx(single.delay)
    assert several.wall == pytest.approx(single.wall, abs=1e-5)


def test_one_rank_alone_has_nobody_to_wait_for(tmp_path):
    found = told(Made(tmp_path, ranks=1))
    assert all("Communication" not in sentence for sentence in found.time)
    assert {piece.code for piece in found.advice} <= {"data"}


# --- is it the same training? -------------------------------------------------------------------------


def test_what_nobody_checked_is_called_so_with_the_command_that_would(tmp_path):
    same = told(Made(tmp_path)).same
    assert same.verdict == "unchecked"
    assert same.command == "samestep verify -n 2 train.py --lr 0.1"


def test_an_error_of_the_check_makes_it_another_training(tmp_path):
    made = Made(tmp_path)
    made.write()
    made.find(code="gradient-scale")
    made.find(code="parameters-diverged")
    made.find(code="parameters-diverged")
    same = summary(analyse(open_run(tmp_path)), T0).same
    assert same.verdict == "different"
    assert "3 errors (gradient-scale and parameters-diverged)" in same.sentence


def test_a_check_without_findings_says_that_the_ranks_agree(tmp_path):
    made = Made(tmp_path)
    made.write()
    made.check(20)
    same = summary(analyse(open_run(tmp_path)), T0).same
    assert same.verdict == "agrees"
    assert "over 20 steps" in same.sentence


def test_a_check_of_no_step_proves_nothing(tmp_path):
    made = Made(tmp_path, steps=0)
    made.write()
    made.check(0)
    same = summary(analyse(open_run(tmp_path)), T0).same
    assert same.verdict == "unchecked"
    assert same.sentence.startswith("Nothing was checked: ")


def test_while_a_run_goes_on_nobody_says_that_nothing_was_checked(tmp_path):
    made = Made(tmp_path, about={"ended": None, "exit": None}, ended=lambda rank: False)
    assert told(made).same.sentence.startswith("Not known yet (--check tells at the end): ")


# --- what became of it ----------------------------------------------------------------------------------


def test_a_run_that_goes_on_says_so(tmp_path):
    found = told(Made(tmp_path, about={"ended": None, "exit": None}, ended=lambda rank: False))
    assert found.state.word == "running"


def test_a_run_whose_lines_stand_for_minutes_is_not_called_dead(tmp_path):
    """64 steps of 1 s a line: the next is due 64 s after the last."""
    own = lambda rank, step: {"forward": 1_000_000}  # noqa: E731
    running = {"ended": None, "exit": None}
    made = Made(tmp_path, ranks=1, steps=256, stride=64, own=own, about=running, ended=lambda rank: False)
    found = analysis_of(made)
    end = T0 + 256 * 1.003
    assert "It is still running: this is what it has written by now." in summary(found, end + 63).state.sentences
    assert any("was killed with its launcher" in one for one in summary(found, end + 6 * 65).state.sentences)


def test_a_rank_without_an_end_was_killed(tmp_path):
    made = Made(tmp_path, ranks=4, ended=lambda rank: rank not in (1, 2), about={"exit": 137})
    found = told(made)
    assert found.state.word == "failed"
    assert any("Ranks 1-2 did not come to an end" in sentence for sentence in found.state.sentences)


def test_of_a_rank_that_is_to_blame_something_is_known_though_it_left_no_event(tmp_path):
    failure = {"rank": 1, "host": "node0", "pid": 1, "signal": None, "exception": "Exit", "message": "exit code 3"}
    made = Made(tmp_path, ranks=2, about={"exit": 3, "failure": failure | {"where": None, "waiting": [0]}})
    made.write()
    made.file(1).unlink()
    sentences = summary(analyse(open_run(tmp_path)), T0).state.sentences
    assert "Rank 1 is to blame: Exit: exit code 3." in sentences
    assert "Rank 1 has left no event." in sentences


def test_a_name_too_long_for_any_file_is_no_run_directory(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: File name too long"):
        open_run(tmp_path / ("a" * 300))


def test_buckets_without_a_size_do_no_harm(tmp_path):
    made = Made(tmp_path, ranks=1, steps=1, buckets=1)
    made.write()
    made.file(0).write_text(made.file(0).read_text().replace("1048576", "null"))
    assert analyse(open_run(tmp_path)).overlap.size == 0


def test_a_rank_that_was_killed_is_told_where_it_stood(tmp_path):
    made = Made(tmp_path, ended=lambda rank: rank != 1, about={"exit": 124})
    made.write()
    made.append(1, "at", 20, phase="collective", operation="all_reduce", site="train.py:7")
    sentences = " ".join(summary(analyse(open_run(tmp_path)), T0).state.sentences)
    assert "Rank 1 was last seen in its phase 'collective' (all_reduce at train.py:7)" in sentences
    assert "it hung, and was stopped" in sentences


def test_a_run_without_its_launchers_record_is_shown(tmp_path):
    found = told(Made(tmp_path, about=None))
    assert found.state.word == "ended"
    assert found.same.command == "samestep verify -n 2 train.py"


def test_the_last_of_several_attempts_is_chosen_and_the_others_named(tmp_path):
    Made(tmp_path, attempt=0, steps=5).write()
    made = Made(tmp_path, attempt=1, steps=8)
    found = analysis_of(made)
    assert found.steps == 8
    assert "attempt 0" in " ".join(summary(found, T0).state.sentences)
    assert analysis_of(made, 0).steps == 5
    with pytest.raises(UsageError, match="no attempt 7 of this run; its attempts are 0, 1"):
        analyse(open_run(tmp_path), 7)


def test_a_rank_that_has_hardly_begun_is_not_compared(tmp_path):
    made = Made(tmp_path, ranks=3, steps=20)
    made.write()
    kept = [
        line for line in made.file(2).read_text().splitlines() if '"kind": "step"' not in line or '"step": 1,' in line
    ]
    made.file(2).write_text("\n".join(kept) + "\n")
    found = analyse(open_run(tmp_path))
    assert found.table.ranks == (0, 1)
    assert len(found.table) == 20
    assert "Rank 2 has taken 1 step and is not compared" in " ".join(summary(found, T0).state.sentences)


def test_ranks_are_compared_by_their_steps_and_not_by_their_lines(tmp_path):
    """A line stands for four steps: of 40 a rank has 16, and then 20."""
    for lines_kept, compared in ((4, False), (5, True)):
        made = Made(tmp_path / str(lines_kept), steps=40, stride=4)
        made.write()
        kept = made.file(1).read_text().splitlines()[: 2 + lines_kept]
        made.file(1).write_text("\n".join(kept) + "\n")
        found = analyse(open_run(made.path))
        said = "Rank 1 has taken 16 steps and is not compared" in " ".join(summary(found, T0).state.sentences)
        assert (found.table.ranks == (0, 1), said) == (compared, not compared)


def test_a_rank_that_began_with_lines_of_single_steps_is_left_out_by_its_steps(tmp_path):
    """The first has 10 lines for 10 steps, the other 10 for 40: a quarter of them."""
    Made(tmp_path, steps=40, stride=4).write()
    single = Made(tmp_path / "single", steps=10)
    single.write()
    Made(tmp_path).file(1).write_bytes(single.file(1).read_bytes())
    found = analyse(open_run(tmp_path))
    assert found.table.ranks == (0,)
    assert found.table.left_out == {1: 10}


def test_no_step_at_all_is_no_reason_to_fail(tmp_path):
    found = analysis_of(Made(tmp_path, ranks=3, steps=0))
    assert summary(found, T0).time == ("No step was finished.",)
    text = lines(summary(found, T0))
    assert not [line for line in text if "compared" in line or "change" in line or "stands out" in line]
    assert as_json(found, summary(found, T0))["step"]["mean"] == 0


def test_numbers_that_no_clock_gives_do_no_harm(tmp_path):
    made = Made(tmp_path, ranks=2, steps=5)
    made.write()
    strange = {"steps": 1, "spans": [["forward", -5, 1e200]], "more": 0, "work": {"samples": -1}, "t": 1e200}
    made.append(0, "step", 6, **strange, seconds=1e200, spent={"forward": 1e200}, buckets=[[0, 10**200, 1, 2, 3]])
    made.append(1, "step", 6, **strange, seconds=-1.0, spent={"forward": -(10**200)}, buckets=[])
    made.append(1, "step", 10**40, **strange, seconds=1, spent={}, buckets=[])
    found = analyse(open_run(tmp_path))
    assert np.isfinite(found.table.spent).all()
    assert lines(summary(found, T0))
    assert len(moments(found.table, found.logs)) == 6


# --- what is drawn --------------------------------------------------------------------------------------


def test_a_long_curve_keeps_its_extremes(tmp_path):
    made = Made(
        tmp_path, steps=3_000, values=lambda rank, step: {"loss": 99.0 if step == 1234 else 1.0} if rank == 0 else {}
    )
    (loss,) = curves(analysis_of(made).logs)
    assert len(loss.steps) == 500
    assert max(loss.highest) == 99.0
    assert loss.steps[-1] == 3_000
    assert loss.lowest == [1.0] * 500


def test_values_that_are_no_numbers_are_counted(tmp_path):
    made = Made(tmp_path, values=lambda rank, step: {"loss": "nan" if step > 15 else 2.0})
    (loss,) = curves(analysis_of(made).logs)
    assert loss.odd == [16, 17, 18, 19, 20]
    assert loss.ranks == 2
    assert set(loss.means) == {2.0}


def test_the_heat_of_a_rank_is_its_own_time_against_the_others(tmp_path):
    slow = range(11, 21)
    made = Made(
        tmp_path,
        ranks=3,
        steps=41,
        own=lambda rank, step: OWN | ({"backward": 14_000} if rank == 1 and step in slow else {}),
    )
    pace = analysis_of(made).pace
    heat = pace.over([0, 9, 19, 40])  # steps 2 to 10, 11 to 20, 21 to 41
    assert heat[1] == pytest.approx([0, 6 / 15, 0])
    assert np.abs(heat[[0, 2]]).max() == 0


def test_the_course_of_a_run_has_its_phases_and_its_slowest_steps(tmp_path):
    found = course(analysis_of(Made(tmp_path, steps=1_001, own=lambda rank, step: OWN)).table)
    assert len(found.steps) == 200
    assert found.phases["backward"] == pytest.approx([0.008] * 200)
    assert found.slowest == pytest.approx([0.018] * 200)


def test_ranges_cover_everything_once():
    edges = ranges(10_007, 200)
    assert edges[0] == 0
    assert edges[-1] == 10_007
    assert {b - a for a, b in pairwise(edges)} == {50, 51}


def test_the_steps_worth_a_look_are_among_those_drawn(tmp_path):
    made = Made(tmp_path, steps=300, own=lambda rank, step: OWN | {"forward": 90_000 if step == 123 else 4_000})
    found = analysis_of(made)
    chosen = {moment.why: moment.step for moment in moments(found.table, found.logs)}
    assert chosen["the slowest step"] == 123
    assert chosen["the first step"] == 1
    assert chosen["the last step"] == 300
    assert len(chosen) <= 21


def test_the_clocks_of_hosts_are_brought_together_by_the_ends_of_steps(tmp_path):
    """One step, and behind it a line of none; and a host whose first rank has no step."""
    made = Made(tmp_path, ranks=3, steps=1, ahead=lambda rank: 100.0 * (rank > 0), host=lambda rank: f"node{rank > 0}")
    made.write()
    for rank in (0, 1, 2):
        late = T0 + 0.018 + made.ahead(rank)
        rest = {"steps": 0, "seconds": 1.0, "spent": {"other": 1.0}, "spans": [], "more": 0, "buckets": [], "work": {}}
        made.append(rank, "step", 1, late, **rest)
    assert [round(log.clock_offset, 6) for log in open_run(tmp_path).attempt(0)] == [0, 100, 100]
    made.file(1).write_text("")
    assert [round(log.clock_offset, 6) for log in open_run(tmp_path).attempt(0)] == [0, 100, 100]


def test_hosts_whose_clocks_differ_are_drawn_on_one(tmp_path):
    made = Made(tmp_path, ahead=lambda rank: 100.0 * rank, host=lambda rank: f"node{rank}")
    found = analysis_of(made)
    begins = [lane.spans[0][1] for moment in moments(found.table, found.logs) for lane in moment.lanes]
    assert max(begins) < 10  # microseconds
    assert found.account.wall == pytest.approx(0.36, abs=1e-4)


def test_a_pipelines_idle_time_is_what_is_left_between_its_actions(tmp_path):
    made = Made(tmp_path, ranks=2, steps=2)
    made.write()
    # rank 0: F0 F1 ·· B0 B1 ··      rank 1: ·· F0 B0 F1 B1 ··      one second each, of six
    made.append(0, "pipeline", 1, schedule="1F1B", stages=2, actions=_actions(0, {"F": (0, 1), "B": (3, 4)}))
    made.append(1, "pipeline", 1, schedule="1F1B", stages=2, actions=_actions(1, {"F": (1, 3), "B": (2, 5)}))
    found = analyse(open_run(tmp_path))
    assert idle(found.gantts) == pytest.approx(1 - 8 / 12)
    assert {piece.code for piece in summary(found, T0).advice} <= {"idle stages", "save"}


def _actions(stage, begins):
    return [
        [kind, stage, micro, begin, begin + 1] for kind, times in begins.items() for micro, begin in enumerate(times)
    ]


def as_collectives(made, operation, where):
    """Makes the waits of all ranks calls of one operation."""
    for rank in range(made.ranks):
        lines = [json.loads(line) for line in made.file(rank).read_text().splitlines()]
        for line in lines:
            if line["kind"] == "step" and "wait" in line["spent"]:
                line["spent"]["collective"] = line["spent"].pop("wait")
                line["spans"] = [
                    ["collective", *span[1:3], operation, where] if span[0] == "wait" else span
                    for span in line["spans"]
                ]
        made.file(rank).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("operation", "whose", "change"),
    [
        ("SyncBatchNorm", "SyncBatchNorm", 'batchnorm="local"'),
        ("all_reduce", "the script's own calls", "async_op=True"),
        (None, "the exchange of gradients", "Steps of more samples"),
    ],
)
def test_whose_the_collectives_are_is_said_first_where_they_take_more_than_a_quarter(
    tmp_path, operation, whose, change
):
    made = Made(tmp_path, transfer=8_000, apart=lambda rank, step: {"save": 0.05})
    made.write()
    if operation:
        as_collectives(made, operation, "train.py:7")
    first, *others = summary(analyse(open_run(tmp_path)), T0 + 100).advice
    assert first.code == "communication"
    assert first.text.startswith(f"Collectives take 35 % of a step: {whose} 35 %. The largest is {whose}")
    assert change in first.text
    assert ("called at train.py:7" in first.text) == (operation is not None)
    assert first.gain == pytest.approx(8 / 23)
    assert others[0].gain > first.gain or others[0].code != "communication"


def test_collectives_that_take_less_are_no_cause(tmp_path):
    Made(tmp_path, transfer=3_000).write()
    assert all(one.code != "communication" for one in summary(analyse(open_run(tmp_path)), T0 + 100).advice)


def test_the_head_says_what_was_run_when_and_on_what(tmp_path):
    Made(tmp_path).write()
    found = summary(analyse(open_run(tmp_path)), T0 + 100)
    assert found.header.startswith("train.py --lr 0.1, 20")
    assert found.header.endswith(", torch 2.13.0+cpu, cpu")
    assert lines(found)[0] == found.header
