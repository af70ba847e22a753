"""A recording ends by counts of steps and batches, never by the clock, and says what it has not reached."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from journals import Event, ended, passed, record, step, stepped

from samestep.verification.failures import ended_alone
from samestep.verification.findings import NOT_REACHED
from samestep.verification.journal import value_path
from samestep.verification.judging import evaluation, reached, samples, storage
from samestep.verification.judging.passes import passes
from samestep.verification.judging.record import Rank, Record, Run
from samestep.verification.judging.samples import _read_alone
from samestep.verification.recording.limit import Limit
from samestep.verification.report import Report
from samestep.verification.runs import Ended
from samestep.verification.verify import _both, _goes_on

KEY = "train.py:10#1"


class Loop:
    """What a loop over a loader does to a limit: yields, steps, begins the next pass."""

    def __init__(self, limit: Limit, *, length: int, ahead: int = 0, micro: int = 1) -> None:
        self.passes: list[int] = []
        number, taken, is_over, waiting = 0, 0, False, 0
        while not is_over and number < 100:
            name, batches = (KEY, number), 0
            while not is_over and batches < length and not limit.ends(name):
                limit.yielded(name)
                batches, waiting = batches + 1, waiting + 1
                if waiting == micro + ahead:
                    taken, waiting = taken + 1, waiting - micro
                    is_over = limit.stepped(taken)
            while not is_over and waiting >= micro:
                taken, waiting = taken + 1, waiting - micro
                is_over = limit.stepped(taken)
            number, waiting = number + 1, 0
            self.passes.append(batches)
        self.taken = taken


def test_behind_the_last_step_three_passes_end_and_then_the_rank() -> None:
    loop = Loop(Limit(64, 3), length=1000)
    assert (loop.passes, loop.taken) == ([64, 1, 1, 1], 67)


def test_short_passes_end_by_themselves_until_then() -> None:
    loop = Loop(Limit(64, 3), length=30)
    assert (loop.passes, loop.taken) == ([30, 30, 4, 1, 1, 1], 67)


def test_no_pass_ends_early_where_none_may() -> None:
    loop = Loop(Limit(20, 0), length=1000)
    assert (loop.passes, loop.taken) == ([20], 20)


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_a_pass_ends_where_a_step_has_all_its_batches(ahead: int) -> None:
    """Also where a library loads the next batch, or the next step's, ahead of the training."""
    loop = Loop(Limit(8, 3), length=1000, ahead=ahead, micro=4)
    assert loop.taken == 11
    assert all(batches % 4 == 0 for batches in loop.passes[:-1])


def test_a_loop_that_reads_no_pass_ends_at_the_same_step() -> None:
    """A rank that is sent its batches by another one has no DataLoader, and must end with it."""
    limit = Limit(64, 3)
    assert next(taken for taken in range(1, 1000) if limit.stepped(taken)) == 67


def test_an_optimizer_that_begins_behind_the_last_step_goes_on_counting_there() -> None:
    limit = Limit(64, 3)
    assert (limit.reached, limit.stepped(64), limit.reached) == (0, False, 64)


# --- what is judged of passes that were ended ---


def cut(indices: list[int], rest: list[int] | None, *, samples: int, number: int = 0) -> list[Event]:
    """A pass that was ended after its first batch, and what its sampler would have ordered behind it."""
    *events, over = passed(indices, samples=samples, number=number, window=number, length=2, epoch=0)
    told = [] if rest is None else [{"kind": "rest", "key": KEY, "number": number, "indices": [rest]}]
    return [*events, *told, {**over, "cut": 1}]


def judged(*ranks: list[Event]) -> Report:
    report = Report(ranks=len(ranks))
    for judge in (samples, storage):
        judge.judge(record(*ranks), report)
    evaluation.judge(record(*ranks), None, report)
    return report


@pytest.mark.parametrize(
    ("numbers", "events", "goes_on"),
    [(1000, [], True), (2_000_000, [], False), (1000, passed([0], samples=1), False)],
    ids=["small", "large", "with a DataLoader"],
)
def test_a_small_model_without_a_loader_is_recorded_for_longer(
    numbers: int, events: list[Event], *, goes_on: bool
) -> None:
    start: Event = {"kind": "start", "numbers": numbers, "parameters": {}, "buffers": {}}
    over: Event = {**ended(), "enough": True}
    assert _goes_on(record([start, *events, over], [start, *events, over])) is goes_on
    assert not _goes_on(record([start, *events, ended()], [start, *events, ended()]))  # the script is over


@pytest.mark.parametrize(("asked", "recorded"), [(64, [64, 256]), (8, [8])], ids=["the default", "asked for"])
def test_as_many_steps_as_are_asked_for_are_recorded(asked: int, recorded: list[int]) -> None:
    start: Event = {"kind": "start", "numbers": 1000, "parameters": {}, "buffers": {}}
    run = Run(Ended(code=0, hung=False, failure=None, folder=Path()), record([start, {**ended(), "enough": True}]))
    told: list[int] = []

    def first(steps: int, *_: int, **__: bool) -> Run:
        told.append(steps)
        return run

    _both(SimpleNamespace(first=first, alone=lambda *_: run), asked, 3, "all samples")  # type: ignore[arg-type]
    assert told == recorded


@pytest.mark.parametrize(
    ("theirs", "is_found"),
    [("WeightedRandomSampler", True), (None, False)],
    ids=["with replacement", "as on the ranks"],
)
def test_a_sampler_with_replacement_that_only_one_process_has_is_found(theirs: str | None, *, is_found: bool) -> None:
    parts = [[*range(rank, 128, 2)] for rank in range(2)]
    ours = record(*(passed(part, samples=128) for part in parts))
    drawn: list[Event] = [] if theirs is None else [{"kind": "draws_again", "key": KEY, "number": 0, "sampler": theirs}]
    report = Report(ranks=2)
    samples.judge_sampler(ours, record(drawn), report)
    assert [one.code for one in report.errors] == (["samples-missing"] if is_found else [])
    again = record(*(passed([*part[:-1], 0], samples=128) for part in parts))  # they draw with replacement, too
    samples.judge_sampler(again, record(drawn), report := Report(ranks=2))
    assert report.errors == []


@pytest.mark.parametrize(("key", "is_found"), [("train.py:10#2", True), ("train.py:10#1", False)])
def test_a_loader_that_is_made_anew_is_compared_with_that_of_the_same_number(key: str, *, is_found: bool) -> None:
    """A stream of 40 samples that one process reads whole, the second loader's ranks only its first half of each."""
    ours = [
        [{**event, "key": "train.py:10#2", "indices": None} for event in passed([*range(rank, 20, 4)], samples=40)]
        for rank in range(2)
    ]
    alone = [{**event, "key": key, "indices": None} for event in passed([*range(20)], samples=40)]
    one = passes(record(*ours).ranks[0])[0]
    assert (_read_alone([one], record(alone)) is not None) is is_found


def test_samples_that_are_left_out_are_found_behind_the_last_step() -> None:
    report = judged(cut([0, 2], [4], samples=8), cut([1, 3], [5], samples=8))
    assert [one.code for one in report.errors] == ["samples-missing"]
    report = judged(cut([0, 2], [4], samples=6), cut([1, 3], [5], samples=6))
    assert (report.errors, report.coverage["data"], report.margins["data"]) == ([], "identical", "1 epoch of 2 ranks")


def test_samples_that_come_twice_are_found_behind_the_last_step() -> None:
    report = judged(cut([0, 2], [4, 6, 8], samples=10), cut([1, 3], [5, 4, 6], samples=10))
    assert [one.code for one in report.errors] == ["samples-repeated"]


def test_an_order_that_is_read_may_be_the_last_pass_s() -> None:
    first, second = [[2, 0, 8], [4, 6, 12, 10]], [[3, 1, 9], [7, 5, 13, 11]]
    again = [[*cut(*one, samples=14), *cut(*one, samples=14, number=1)] for one in (first, second)]
    assert [one.code for one in judged(*again).errors] == ["same-order-every-epoch"]


def test_a_pass_whose_rest_nobody_can_read_is_no_whole_one() -> None:
    report = judged(cut([0, 2], None, samples=7), cut([1, 3], None, samples=7))
    assert (report.errors, report.coverage["data"]) == ([], "agrees")


def test_what_was_not_reached_is_named_and_not_called_the_same() -> None:
    report = judged(cut([0, 2], [4], samples=6), cut([1, 3], [5], samples=6))
    assert report.coverage["evaluation"] == report.coverage["checkpoint"] == NOT_REACHED
    whole = [[*passed(own, samples=4), ended()] for own in ([0, 2], [1, 3])]
    told = judged(*whole).coverage
    assert (told["evaluation"], told["checkpoint"]) == (
        "not checked: none was seen",
        "not checked: nothing was saved",
    )


EVALUATED = {"kind": "evaluated", "phase": "1.1", "key": "train.py:11#1", "number": 0, "index": 0}
SAVED = {"kind": "save", "path": "/x", "digests": {}, "where": "train.py:40", "event": 1, "window": 1}


def test_the_report_says_which_pass_was_ended_and_for_what() -> None:
    first, second = cut([0], None, samples=6), cut([0], None, samples=6, number=1)
    assert reached.remarks(record([*first, EVALUATED], first)) == [
        "the pass was ended after 1 of 2 batches to reach the evaluation"
    ]
    (told,) = reached.remarks(record([*first, EVALUATED, SAVED, *second], [*first, *second]))
    assert told == (
        "the pass was ended after 1 of 2 batches to reach the evaluation and the save; so was 1 later pass, "
        "after a step"
    )
    assert reached.remarks(record(first, first)) == [
        "the pass was ended after 1 of 2 batches and no evaluation, save or resume came behind it"
    ]
    assert reached.remarks(record(passed([0], samples=1))) == []


def test_ranks_that_do_not_end_the_same_pass_are_told_apart() -> None:
    """Rank 0 alone may have the batches: it takes the pass for over, and the others wait for the next one."""
    one, other = cut([0], None, samples=6), passed([1], samples=6)
    assert reached.is_cut(record(one, other))
    assert not reached.are_alike(record(one, other))
    assert reached.are_alike(record(one, one))
    assert reached.are_alike(record(one, [*one, *cut([1], None, samples=6, number=1)]))  # the first fails behind it


def test_only_the_steps_that_were_asked_for_count() -> None:
    told: list[Event] = [one for number in range(5) for one in (step(number, "g"), stepped(number))]
    ranks: Record = record([*told, {"kind": "enough", "event": 3}], [*told, {"kind": "enough", "event": 3}])
    assert (ranks.steps, ranks.asked) == (5, 3)


@pytest.mark.parametrize(
    ("enough", "code", "rank"), [((True, False), 1, 0), ((True, True), 1, None), ((True, False), 0, None)]
)
def test_a_rank_that_takes_all_steps_by_itself_is_ended_while_others_wait(
    enough: tuple[bool, bool], code: int, rank: int | None
) -> None:
    """It trains a teacher, say, which the others wait for."""
    ranks = record(*([{**ended(), "enough": one}] for one in enough))
    run = Run(Ended(code=code, hung=False, failure=None, folder=ranks.folder), ranks)
    assert ended_alone(run) == rank


@pytest.mark.parametrize("is_found", [True, False])
def test_a_sampler_that_draws_from_a_part_of_the_data_on_each_rank_is_found(*, is_found: bool) -> None:
    """Of two ranks that draw from all data, some draws are of one sample."""
    parts = [[2 * ((1 + 2 * rank) * i % 7) + (rank if is_found else i % 2) for i in range(64)] for rank in (0, 1)]
    report = Report(ranks=2)
    samples.judge(record(*(passed(part, samples=128, replacement=True) for part in parts)), report)
    assert [one.code for one in report.errors] == ["batches-differ"] * is_found


@pytest.mark.parametrize(
    ("alone", "draws", "is_found"), [(range(8), False, True), (range(4, 12), False, False), (range(8), True, False)]
)
def test_samples_that_every_rank_chooses_must_be_those_of_one_process(
    tmp_path: Path, alone: range, *, draws: bool, is_found: bool
) -> None:
    def chosen(folder: str, rank: int, places: range) -> Event:
        path = value_path(tmp_path / folder, rank, 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(torch.tensor(places), path)
        return {"kind": "chosen", "key": "train.py:10#1", "number": 0, "kept": 0}

    drawn: list[Event] = [{"kind": "draw", "place": "0|train.py:5|1"}] * draws
    ranks = [
        Rank(rank, [*drawn, chosen("ranks", rank, range(4, 12)), *passed(list(range(rank, 8, 2)), samples=8)])
        for rank in (0, 1)
    ]
    one = Record(tmp_path / "alone", [Rank(0, [chosen("alone", 0, alone)])])
    report = Report(ranks=2)
    samples.judge_chosen(Record(tmp_path / "ranks", ranks), one, report)
    assert [one.code for one in report.errors] == ["datasets-differ"] * is_found
