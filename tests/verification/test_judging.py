"""Judges on records of two ranks: what differs is found, at the first place; what does not is no finding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from journals import Event, call, chance_findings, ended, findings, passed, record, step, stepped

from samestep.verification.judging import communication, control, own_data, samples, states
from samestep.verification.judging.record import Record
from samestep.verification.report import Report


def codes(judge: object, ranks: Record) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in findings(judge, ranks)]


def test_replicas_that_stay_alike_are_no_finding() -> None:
    rank = [step(0, "g"), stepped(0), step(1, "h"), stepped(1), ended()]
    assert codes(states, record(rank, rank)) == []


def test_other_gradients_are_found_where_they_begin() -> None:
    first = [step(0, "g"), stepped(0), step(1, "h"), stepped(1)]
    other = [step(0, "g"), stepped(0), step(1, "x"), stepped(1, "q")]
    (finding,) = findings(states, record(first, other))
    assert (finding.code, finding.rank, finding.step, finding.tensor) == ("gradients-not-synchronised", 1, 1, "w")


def test_other_parameters_after_equal_gradients_are_another_finding() -> None:
    first = [step(0, "g"), stepped(0), step(1, "h"), stepped(1)]
    other = [step(0, "g"), stepped(0, "q"), step(1, "h", "q"), stepped(1, "q")]
    assert codes(states, record(first, other)) == [("parameters-diverged", "error")]


def test_local_steps_whose_parameters_are_averaged_are_no_finding() -> None:
    first = [step(0, "g"), stepped(0), step(1, "h"), stepped(1), step(2, "i"), stepped(2)]
    other = [step(0, "x"), stepped(0), step(1, "y"), stepped(1), step(2, "i"), stepped(2)]
    assert codes(states, record(first, other)) == []


def test_the_last_of_such_steps_is_none_either() -> None:
    """Nothing was recorded of what comes behind it."""
    first = [step(0, "g"), stepped(0), step(1, "h"), stepped(1)]
    other = [step(0, "x"), stepped(0, "q"), step(1, "y"), stepped(1, "q")]
    assert codes(states, record(first, other)) == []
    assert states.averaged_behind(record(first, other)) == 0
    assert codes(states, record(first[:2], other[:2])) == [("gradients-not-synchronised", "error")]


DECLARED: Event = {"kind": "local_steps", "every": 2, "how": "period=2", "where": "train.py:9"}
AVERAGE: Event = {"kind": "average"}


def apart(rank: int, count: int, *, averaged: Sequence[int]) -> list[Event]:
    """Steps of a rank by itself, averaged behind some of them; all ranks are `p` where they are alike."""
    events, own, alike = [DECLARED], "p" if rank == 0 else "q", True
    for number in range(count):
        events.append(step(number, f"g{rank}", "p" if alike else own))
        alike = number in averaged
        events += [stepped(number, own), *[AVERAGE] * alike]
    return events


def test_ranks_that_declare_local_steps_are_apart_between_two_averages() -> None:
    first, other = (apart(rank, 5, averaged=[1, 3]) for rank in range(2))
    assert codes(states, record(first, other)) == []
    assert not states.evaluates_apart(record([*first[:6], {"kind": "evaluated"}], other))
    assert states.evaluates_apart(record([*first[:3], {"kind": "evaluated"}], other))


def test_an_average_that_is_declared_and_does_not_come_is_found() -> None:
    (finding,) = findings(states, record(*(apart(rank, 5, averaged=[]) for rank in range(2))))
    assert (finding.code, finding.rank, finding.step, finding.where) == ("parameters-diverged", 1, 2, "train.py:9")
    assert "period=2 declares an average of all ranks, and in 3 steps there was none" in finding.cause


def test_parameters_that_an_average_leaves_out_are_found() -> None:
    first, other = apart(0, 3, averaged=[1]), apart(1, 3, averaged=[])
    (finding,) = findings(states, record(first, other))
    assert (finding.code, finding.step, "the average leaves them out" in finding.cause) == (
        "parameters-diverged",
        1,
        True,
    )


def test_ranks_with_the_same_gradients_stay_alike_until_they_step_by_themselves() -> None:
    first = [DECLARED, step(0, "g"), stepped(0), step(1, "g"), stepped(1)]
    other = [DECLARED, step(0, "g"), stepped(0), step(1, "g", "q"), stepped(1, "q")]
    assert codes(states, record(first, other)) == [("parameters-diverged", "error")]


def test_clipping_is_each_rank_s_own_where_steps_are() -> None:
    clips = [{"kind": "clip", "window": 0, "norm": norm, "most": 1.0, "where": "train.py:28"} for norm in (3.0, 4.0)]
    for declared, found in (([], ["gradient-differs"]), ([DECLARED], [])):
        report = Report(ranks=2)
        control.judge(record([*declared, step(0, "g"), clips[0]], [*declared, step(0, "h"), clips[1]]), report)
        assert [one.code for one in report.evidence] == found


def test_another_rate_is_found_with_its_ratio() -> None:
    (finding,) = findings(control, record([step(0, "g")], [step(0, "g", rates=[0.2])]))
    assert (finding.code, finding.rank, finding.factor) == ("learning-rate-differs", 1, 2.0)


@pytest.mark.parametrize(("line", "where"), [("train.py:40", "train.py:40"), ("train.py:31", "train.py:31")])
def test_a_schedule_that_one_rank_alone_steps_at_some_line_is_named_there(line: str, where: str) -> None:
    """Rank 0 alone evaluates, and steps its schedule by what comes out; a line of both tells nothing."""
    steps = [{"kind": "scheduler", "window": 0, "event": 0, "where": one} for one in ("train.py:31", line)]
    (finding,) = findings(
        control, record([step(0, "g"), *steps, step(1, "g", rates=[0.2])], [step(0, "g"), steps[0], step(1, "g")])
    )
    assert (finding.code, finding.where) == ("learning-rate-differs", where)
    assert ("only one of them comes by it" in finding.cause) == (line == "train.py:40")


def test_another_number_of_steps_counts_where_both_came_to_their_end() -> None:
    two, one = [step(0, "g"), step(1, "g"), ended()], [step(0, "g"), ended()]
    assert codes(control, record(two, one)) == [("steps-differ", "error")]
    assert codes(control, record(two, one[:1])) == []


def test_every_sample_once_is_no_finding() -> None:
    assert codes(samples, record(passed([0, 2], samples=4), passed([1, 3], samples=4))) == []


def accumulated(length: int, *steps: int) -> list[Event]:
    """Steps of so many batches each, of a loader with `length` batches that is begun anew as often as it takes."""
    about, batch, backward, *_, done = passed([0], samples=9)
    events: list[Event] = []
    windows = [window for window, count in enumerate(steps) for _ in range(count)]
    for count, window in enumerate(windows):
        number, index = divmod(count, length)
        told = {"number": number, "index": index, "indices": None, "rows": [], "window": window}
        events += [*[{**about, "number": number}] * (not index), {**batch, **told}, {**backward, "window": window}]
        events += [{**done, "number": number}] * (index + 1 == length)
        events += [step(window, "g"), stepped(window)] * (window not in windows[count + 1 :])
    return events


@pytest.mark.parametrize(("length", "steps"), [(3, (2, 2, 2)), (6, (4, 4, 4)), (3, (4, 4, 4))])
def test_a_loader_that_is_begun_anew_within_a_step_leaves_nothing_over(length: int, steps: tuple[int, ...]) -> None:
    """`while True: yield from loader`: every step takes as many batches."""
    rank = accumulated(length, *steps)
    assert codes(samples, record(rank, rank)) == []


def test_batches_that_are_left_to_a_step_of_the_next_epoch_are_found() -> None:
    rank = accumulated(5, 4, 5, 1)  # four of five, and the fifth with four of the next
    (finding,) = findings(samples, record(rank, rank))
    assert (finding.code, finding.step, "5 backward passes" in finding.cause) == ("gradient-differs", 1, True)


def shown(*digests: str) -> Event:
    """What a rank shows of its dataset: fewer samples where they load slowly."""
    return {"kind": "fingerprint", "key": "train.py:10#1", "samples": {str(9 * i): d for i, d in enumerate(digests)}}


@pytest.mark.parametrize(("adds", "codes_found"), [(None, ["gradient-differs"]), (False, [])])
def test_gradients_that_are_thrown_away_are_left_to_no_step(adds: bool | None, codes_found: list[str]) -> None:
    """A batch is left out, on all ranks, behind its backward pass: optimizer.zero_grad(); continue."""
    rank = accumulated(5, 4, 5, 1)
    backwards = [event for event in rank if event["kind"] == "backward"]
    if adds is not None:
        backwards[5]["adds"] = adds  # the second of its window
    assert [one.code for one in findings(samples, record(rank, rank))] == codes_found


def test_a_rank_that_had_time_for_fewer_samples_has_no_other_dataset() -> None:
    first, other = passed([0, 2], samples=4), passed([1, 3], samples=4)
    assert codes(samples, record([*first, shown("a", "b", "c")], [*other, shown("a")])) == []
    assert codes(samples, record([*first, shown("a", "b", "c")], [*other, shown()])) == []
    (finding,) = findings(samples, record([*first, shown("a", "b")], [*other, shown("a", "x", "c")]))
    assert (finding.code, finding.rank) == ("datasets-differ", 1)
    assert "another sample 9 than" in finding.cause


def test_padding_in_training_is_a_note() -> None:
    assert codes(samples, record(passed([0, 2], samples=3), passed([1, 0], samples=3))) == [
        ("samples-repeated", "note")
    ]


def test_padding_by_another_sampler_is_a_note_where_only_the_last_batches_repeat_samples() -> None:
    def cut(*batches: list[int]) -> list[Event]:
        about, first, backward, *rest = passed(list(batches[0]), samples=6, sampler="RandomSampler", cut_by="Filling")
        later = [{**first, "index": i, "indices": batch} for i, batch in enumerate(batches[1:], 1)]
        return [about, first, backward, *later, *rest]

    (note,) = findings(samples, record(cut([0, 1], [4, 0]), cut([2, 3], [5, 2])))
    assert (note.code, note.severity, "Filling pads" in note.cause) == ("samples-repeated", "note", True)
    assert codes(samples, record(cut([0, 1], [4, 0]), cut([0, 3], [5, 2]))) == [("samples-repeated", "error")]


def test_all_data_on_all_ranks_is_an_error() -> None:
    shuffled = {"sampler": "RandomSampler"}
    ranks = record(passed([0, 2, 1, 3], samples=4, **shuffled), passed([3, 1, 0, 2], samples=4, **shuffled))
    assert codes(samples, ranks) == [("samples-repeated", "error")]


def in_batches(*batches: list[int], size: int) -> list[Event]:
    """The pass of an endless sampler."""
    about, batch, backward, *_ = passed(list(batches[0]), samples=size, sampler="Endless")
    return [about, *({**batch, "index": i, "indices": one, "rows": []} for i, one in enumerate(batches)), backward]


def test_an_endless_sampler_comes_to_its_next_epoch_at_another_place_on_each_rank() -> None:
    """[rank::world] of one order after the other: five samples, of which two ranks have used six."""
    first, other = in_batches([4, 0], [1], size=5), in_batches([2, 3], [4], size=5)
    assert codes(samples, record(first, other)) == []
    early = in_batches([2, 4], [3], size=5)  # before 1 has come
    assert codes(samples, record(first, early)) == [("samples-repeated", "error")]


@pytest.mark.parametrize(("held", "alone", "is_found"), [(3, 6, False), (3, 3, True), (6, 6, True)])
def test_a_dataset_that_shows_nothing_may_be_a_part_by_its_length(held: int, alone: int, *, is_found: bool) -> None:
    """Its samples are other ones whenever they are loaded."""
    about: dict[str, Any] = {"sampler": "RandomSampler", "samples": held}
    batches = [[one for one in passed([1, 0], **about) if one["kind"] != "fingerprint"] for _ in range(2)]
    report = Report(ranks=2)
    samples.judge(record(*batches), report, lambda: record(passed([*range(alone)], samples=alone, batch_size=1)))
    assert [one.code for one in report.errors] == ["samples-repeated"] * is_found


@pytest.mark.parametrize(("held", "is_found"), [([1, 0], False), ([0], True)])
def test_a_set_that_one_process_takes_as_a_whole_may_be_taken_by_each_rank(held: list[int], *, is_found: bool) -> None:
    """Prototypes are means of all samples that are labelled."""
    report, every = Report(ranks=2), passed(held, samples=2, sampler="SequentialSampler")
    samples.judge(record(every, every), report, lambda: record(passed([0, 1], samples=2)))
    assert [one.code for one in report.errors] == ["samples-repeated"] * is_found


def test_views_of_rows_that_each_rank_takes_of_one_batch_are_as_many_as_in_one_process() -> None:
    def views(*rows: str) -> list[Event]:
        return [*passed([1, 0, 2], samples=4, sampler="RandomSampler"), {"kind": "used", "window": 0, "rows": rows}]

    for alone, is_found in ((["a", "b", "c", "d"], False), (["a", "b"], True)):
        report = Report(ranks=2)
        samples.judge(record(views("k", "l"), views("m", "n")), report, lambda rows=alone: record(views(*rows)))
        assert [one.code for one in report.errors] == ["samples-repeated"] * is_found


def test_left_out_samples_are_an_error_unless_that_was_asked_for() -> None:
    assert codes(samples, record(passed([0, 2], samples=6), passed([1, 3], samples=6))) == [
        ("samples-missing", "error")
    ]
    for left_out, found in ((2, []), (6, []), (7, [("samples-missing", "error")])):  # a batch and one more of each rank
        dropped: dict[str, Any] = {"drop_last": True, "samples": 4 + left_out}
        assert codes(samples, record(passed([0, 2], **dropped), passed([1, 3], **dropped))) == found


@pytest.mark.parametrize(("samples_held", "severity"), [(7, "note"), (8, "error")])
def test_a_sampler_may_leave_out_what_fills_no_batch_of_all_ranks(samples_held: int, severity: str) -> None:
    about: dict[str, Any] = {"samples": samples_held, "batch_size": 2, "sampler": "Own"}
    assert codes(samples, record(passed([0, 2], **about), passed([1, 3], **about))) == [("samples-missing", severity)]


@pytest.mark.parametrize(
    ("held", "alone", "severity"),
    [(8, [*range(8)], "error"), (8, [0, 1, 2, 3], "note"), (6, [*range(6)], "note")],
    ids=["a batch of each rank", "as alone", "fewer batches than ranks"],
)
def test_what_one_process_leaves_out_as_well_is_no_mistake(held: int, alone: list[int], severity: str) -> None:
    """A sampler of the script's own may cut batches of similar length, and leave their rests out."""
    about: dict[str, Any] = {"samples": held, "batch_size": None, "sampler": "Buckets"}
    ranks, report = record(passed([0, 2], **about), passed([1, 3], **about)), Report(ranks=2)
    samples.judge(ranks, report, lambda: record(passed(alone, **about)))
    assert [(one.code, one.severity) for one in report.findings] == [("samples-missing", severity)]


def test_what_one_process_leaves_out_in_a_later_pass_is_no_mistake_either() -> None:
    """All samples first, and then the best of them."""
    about: dict[str, Any] = {"samples": 8, "batch_size": None, "sampler": "Best"}
    ranks, report = record(passed([0, 2], **about), passed([1, 3], **about)), Report(ranks=2)
    passes_alone = [*passed(range(8), **about), *passed([0, 1, 2, 3], number=1, window=1, **about)]
    samples.judge(ranks, report, lambda: record(passes_alone))
    assert [(one.code, one.severity) for one in report.findings] == [("samples-missing", "note")]


@pytest.mark.parametrize(("alone", "codes"), [(1, []), (2, ["samples-missing"])])
def test_a_last_batch_that_one_process_skips_too_is_none_that_ranks_lose(alone: int, codes: list[str]) -> None:
    """A smaller one, say, for which a state has another shape."""

    def process(first: list[int], last: list[int], steps: int) -> list[Event]:
        events = passed([*first, *last], samples=6)
        place = next(i for i, event in enumerate(events) if event["kind"] == "batch")
        batches = [
            {
                **events[place],
                "index": n,
                "window": n,
                "indices": part,
                "size": len(part),
                "rows": [str(i) for i in part],
            }
            for n, part in enumerate((first, last))
        ]
        taken = [[batch, *([step(n, "g"), stepped(n)] if n < steps else [])] for n, batch in enumerate(batches)]
        return [*events[:place], *(event for one in taken for event in one), *events[place + 1 :]]

    ranks = record(process([0, 2], [4], 1), process([1, 3], [5], 1))
    report = Report(ranks=2)
    samples.judge(ranks, report, lambda: record(process([0, 1, 2, 3], [4, 5], alone)))
    assert [one.code for one in report.errors] == codes


ORDER = [6, 0, 4, 2, 10, 8, 12]


def test_the_same_shuffle_in_two_epochs_is_an_error() -> None:
    assert codes(samples, in_epochs([ORDER, ORDER])) == [("same-order-every-epoch", "error")]


@pytest.mark.parametrize(
    ("orders", "is_found"),
    [
        ([[4, 0]] * 3, False),  # by chance once in four times
        ([[4, 0]] * 13, True),
        ([[4, 0], [4, 0], [0, 4], *[[0, 4], [4, 0]] * 6], False),
        ([ORDER, [*ORDER, 14, 12]], False),  # a curriculum goes further in every epoch
    ],
)
def test_an_order_that_comes_again_by_chance_or_goes_on_is_none_of_every_epoch(
    orders: list[list[int]], *, is_found: bool
) -> None:
    assert codes(samples, in_epochs(orders)) == ([("same-order-every-epoch", "error")] if is_found else [])


def in_epochs(orders: list[list[int]], *begin: Event, **about: Any) -> Record:
    """Two ranks that take samples of even and of odd numbers, in the same order."""
    size = 2 * max(map(len, orders))
    taken = [
        [(i, order) for i, order in enumerate(orders)],
        [(i, [j + 1 for j in one]) for i, one in enumerate(orders)],
    ]
    about |= {"samples": size} if all(len(one) == len(orders[0]) for one in orders) else {"samples": None}
    return record(
        *([*begin, *(one for i, o in rank for one in passed(o, number=i, window=i, **about))] for rank in taken)
    )


@pytest.mark.parametrize(("draws", "shuffles"), [(False, True), (True, False), (False, False)])
def test_an_order_that_no_sampler_is_asked_to_shuffle_may_repeat(*, draws: bool, shuffles: bool) -> None:
    """By length, say."""
    drawn: list[Event] = [{"kind": "order", "where": "train.py:9", "digest": "o"}]
    about: dict[str, Any] = {"sampler": "ByLength", "shuffles": shuffles}
    found = codes(samples, in_epochs([ORDER, ORDER], *(drawn if draws else []), **about))
    assert found == ([("same-order-every-epoch", "error")] if draws or shuffles else [])
    others = [{**one, "key": "train.py:12#1"} for one in drawn]  # while another loader loads
    assert codes(samples, in_epochs([ORDER, ORDER], *others, **about)) == (found if shuffles else [])
    masks = [{**one, "where": "collate.py:3"} for one in drawn * 9]  # in each sample, not once a pass
    assert codes(samples, in_epochs([ORDER, ORDER], *masks, **about)) == (found if shuffles else [])


@pytest.mark.parametrize(
    ("sampler", "again", "severity"),
    [("ByLength", ORDER, "note"), ("ByLength", ORDER[::-1], "error"), ("DistributedSampler", ORDER, "error")],
)
def test_an_order_that_one_process_repeats_too_is_meant(sampler: str, again: list[int], severity: str) -> None:
    """A sampler may have `set_epoch` and sort by length; one of torch's is asked to shuffle."""
    ranks = in_epochs([ORDER, ORDER], sampler=sampler)
    alone = record(
        [one for i, order in enumerate((ORDER, again)) for one in passed(order, number=i, window=i, samples=14)]
    )
    report = Report(ranks=2)
    samples.judge(ranks, report, lambda: alone)
    found = [one.severity for one in report.findings if one.code == "same-order-every-epoch"]
    assert found == [severity]


@pytest.mark.parametrize(
    ("used", "is_found"),
    [((["x0"], ["x1"]), False), ((["x0", "x1"], ["x0", "x1"]), True), ((["y0", "y1"], ["z0", "z1"]), True)],
    ids=["cut", "whole", "whole, with noise of their own"],
)
def test_ranks_that_load_one_batch_and_cut_it_use_no_sample_twice(
    used: tuple[list[str], list[str]], *, is_found: bool
) -> None:
    about: dict[str, Any] = {"samples": 2, "sampler": "RandomSampler"}
    ranks = [[*passed([1, 0], **about), {"kind": "used", "window": 0, "rows": rows}] for rows in used]
    found = codes(samples, record(*ranks))
    assert found == ([("samples-repeated", "error")] if is_found else [])


@pytest.mark.parametrize(("lines", "are_drawn"), [(1, False), (3, True)])
def test_orders_that_are_drawn_for_each_sample_make_rows(lines: int, *, are_drawn: bool) -> None:
    """Some points of each sample, say."""
    order: Event = {"kind": "order", "where": "data.py:9", "digest": "o", "name": "torch.randperm"}
    rank = record([*[order] * lines, *passed([0, 1], samples=2)]).ranks[0]
    assert own_data._draws_for_samples(rank) is are_drawn


@pytest.mark.parametrize(("workers", "is_found"), [(0, False), (1, True)])
def test_a_dataset_s_own_epoch_needs_no_other_order(*, workers: int, is_found: bool) -> None:
    """Samples may depend on it alone; workers may live on with a copy that never knows it."""
    about: dict[str, Any] = {"samples": 4, "shuffles": False, "workers": workers}
    about["samples"] = 14
    ranks = [
        [one for i in range(2) for one in passed(order, number=i, window=i, dataset_epoch=i, **about)]
        for order in ([*range(0, 14, 2)], [*range(1, 14, 2)])
    ]
    found = codes(samples, record(*ranks))
    assert found == ([("same-order-every-epoch", "error")] if is_found else [])


@pytest.mark.parametrize(
    ("alone", "code"), [([0, 0, 1, 1, 2, 3, 4, 5], None), ([0, 1, 2, 3, 4, 5], "samples-repeated")]
)
def test_samples_that_one_process_uses_as_often_may_come_twice(alone: list[int], code: str | None) -> None:
    """A sampler that repeats rare samples deals them to different ranks."""
    about = {"samples": 6, "sampler": "Balanced"}
    report, ranks = Report(ranks=2, steps=1), record(passed([0, 1, 2, 3], **about), passed([0, 1, 4, 5], **about))
    samples.judge(ranks, report, lambda: record(passed(alone, **about)))
    assert [one.code for one in report.errors] == ([] if code is None else [code])


def test_an_order_that_nobody_drew_may_repeat() -> None:
    first = passed([0, 2], samples=4) + passed([0, 2], samples=4, number=1, window=1)
    other = passed([1, 3], samples=4) + passed([1, 3], samples=4, number=1, window=1)
    assert codes(samples, record(first, other)) == []


def test_exchanged_collectives_are_found_by_their_lines() -> None:
    ranks = record([call("a.py:1"), call("a.py:2")], [call("a.py:2"), call("a.py:1")])
    assert codes(communication, ranks) == [("collective-order", "error")]


@pytest.mark.parametrize("kind", ["batch", "backward"])
def test_ranks_may_come_by_one_of_two_lines_in_each_micro_batch(kind: str) -> None:
    """A rank whose batch has no object takes part with zeros."""
    between: Event = {"kind": kind, "window": 0}
    ranks = record([call("a.py:1"), between, call("a.py:2")], [call("a.py:2"), between, call("a.py:1")])
    assert codes(communication, ranks) == []


def test_a_line_of_two_that_each_rank_chooses_in_every_step_is_no_exchange() -> None:
    """Where a rank has no positives, it adds zeros at another line."""
    first, other = (
        [call(f"a.py:{line}", window=window) for window, line in enumerate(lines)] for lines in ("1122", "2121")
    )
    assert codes(communication, record(first, other)) == []


def test_ranks_that_send_at_one_line_and_receive_at_another_exchange_nothing() -> None:
    ranks = [[call(f"a.py:{line}", "broadcast", root=i) for i, line in enumerate(lines)] for lines in ("12", "21")]
    assert codes(communication, record(*ranks)) == []


def test_a_group_that_its_members_make_alone_is_no_call_of_all() -> None:
    made = call("a.py:1", "new_group", of_members=True)
    assert codes(communication, record([made, call("a.py:2")], [call("a.py:2")])) == []


def test_one_number_has_two_shapes() -> None:
    assert codes(communication, record([call("a.py:1", shape=())], [call("a.py:1", shape=(1,))])) == []


def test_one_collective_from_two_branches_is_none() -> None:
    ranks = record([call("a.py:1", "broadcast", root=0)], [call("a.py:5", "broadcast", root=0)])
    assert codes(communication, ranks) == []


def test_another_shape_is_a_mismatch() -> None:
    ranks = record([call("a.py:1", shape=(4,))], [call("a.py:1", shape=(2, 2))])
    assert codes(communication, ranks) == [("collective-mismatch", "error")]


@pytest.mark.parametrize("op", ["all_gather", "all_to_all_single", "all_to_all"])
def test_gathers_and_exchanges_may_differ_in_shape(op: str) -> None:
    """Experts on ranks get as many tokens as are meant for them."""
    ranks = record([call("a.py:1", op, (4,))], [call("a.py:1", op, (3,))])
    assert codes(communication, ranks) == []


def test_what_is_left_out_is_what_torch_takes() -> None:
    """On the root with its list of parts, on the others in a call of their own, without src= and op=."""
    ranks = record(
        [call("a.py:1", "reduce", root=0), call("a.py:2", "scatter", root=0, reduce=None)],
        [call("a.py:4", "reduce", root=0, reduce=None), call("a.py:5", "scatter", reduce=None)],
    )
    assert codes(communication, ranks) == []
    ranks = record([call("a.py:1", "reduce", root=0)], [call("a.py:1", "reduce", root=1)])
    assert codes(communication, ranks) == [("collective-mismatch", "error")]


def test_a_hang_names_who_is_missing() -> None:
    ranks = record([call("a.py:1"), call("a.py:9", "barrier")], [call("a.py:1")])
    finding = communication.stuck(ranks)
    assert (finding.code, finding.rank, finding.where) == ("hang", 1, "a.py:9")


def backward(window: int = 0) -> Event:
    return {"kind": "backward", "window": window, "where": "train.py:25"}


def scheduled(moved: int = 9, length: int | None = 8) -> Event:
    return {"kind": "scheduler", "window": 0, "event": 0, "where": "train.py:31", "moved": moved, "length": length}


def skips() -> Event:
    return {"kind": "scaler", "window": 0, "scale": 65536.0, "skipped": True, "where": "train.py:29"}


def test_a_schedule_that_steps_between_the_micro_batches_of_a_step_is_an_error() -> None:
    rank = [backward(), scheduled(), backward(), step(0, "g"), stepped(0)]
    (finding,) = findings(control, record(rank, rank))
    assert (finding.code, finding.where) == ("learning-rate-differs", "train.py:31")
    assert "after every micro-batch, 2 times for one step" in finding.cause
    again = [backward(), skips(), scheduled(), *rank]
    assert codes(control, record(again, again)) == [("learning-rate-differs", "error")]


@pytest.mark.parametrize("length", [None, 9])
def test_a_schedule_whose_length_counts_micro_batches_may_step_between_them(length: int | None) -> None:
    rank = [backward(), scheduled(9, length), backward(), step(0, "g"), stepped(0)]
    assert codes(control, record(rank, rank)) == [("learning-rate-differs", "note")]


def test_a_schedule_that_steps_where_a_scaler_left_the_step_out_is_none_of_micro_batches() -> None:
    """A scaler begins with a scale that is too large, and the first steps are left out."""
    rank = [backward(), skips(), scheduled(), backward(), skips(), scheduled(), backward(), step(0, "g"), stepped(0)]
    assert codes(control, record(rank, rank)) == []


def test_the_same_noise_on_two_ranks_is_an_error_wherever_the_script_lies() -> None:
    drawn = {
        "kind": "draw",
        "within": True,
        "place": "3|/data/a|b/train.py:4|0",
        "digest": "d",
        "name": "torch.randn",
        "shape": [64],
        "trains": True,
    }
    own = {"kind": "own_draw", "place": drawn["place"]}
    ranks = record([drawn], [drawn])
    (finding,) = chance_findings(ranks, {**own, "shape": [128]})
    assert (finding.code, finding.step, finding.where) == ("random-streams", 3, "/data/a|b/train.py:4")
    assert finding.severity == "error"
    assert [one.severity for one in chance_findings(ranks)] == ["note"]
    assert chance_findings(ranks, {**own, "shape": [64]}) == []  # of all samples' noise every rank takes its part
    ones = {**drawn, "is_one_number": True}
    assert chance_findings(record([ones], [ones]), {**own, "shape": [128]}) == []  # with the probability 1, say


def test_ranks_that_shuffle_data_of_their_own_need_not_hold_the_same() -> None:
    """They have drawn so few yet that no index came twice, which is no cut."""

    def drawn(indices: list[int], digest: str, *, complete: bool = False, samples: int = 1000) -> list[Event]:
        events = passed(indices, samples=samples, sampler="RandomSampler")
        return [*(events if complete else events[:-1]), shown(digest)]

    assert codes(samples, record(drawn([7, 3, 500], "a"), drawn([8, 2, 501], "b"))) == []
    assert codes(samples, record(drawn([7, 3, 500], "a"), drawn([8, 2, 501], "b", samples=999))) == []
    many = [*range(1, 1000, 2)][::-1], [*range(0, 1000, 2)][::-1]
    assert codes(samples, record(drawn(many[0], "a"), drawn(many[1], "b"))) == [("datasets-differ", "error")]
    cut = record(drawn([3, 1], "a", complete=True, samples=4), drawn([2, 0], "b", complete=True, samples=4))
    assert codes(samples, cut) == [("datasets-differ", "error")]


@pytest.mark.parametrize(("alone", "code"), [("ab", "samples-repeated"), ("aab", None)])
def test_a_stream_that_one_process_draws_from_with_replacement_may_repeat_samples(alone: str, code: str | None) -> None:
    def rank(rows: str) -> list[Event]:
        events = passed([*range(len(rows))], samples=9, sampler="_InfiniteConstantSampler")
        return [{**one, "indices": None, "rows": [*rows]} if one["kind"] == "batch" else one for one in events]

    report = Report(ranks=2)
    samples.judge(record(rank("ab"), rank("ac")), report, lambda: record(rank(alone)))
    assert [one.code for one in report.errors] == ([] if code is None else [code])


def test_models_that_each_rank_trains_by_itself_may_have_rates_of_their_own() -> None:
    """A search for the rate, before the training of all ranks."""

    def rank(rate: float, gradient: str) -> list[Event]:
        search = [step(0, gradient, rates=[rate], optimizer=0), stepped(0)]
        return [*search, call("train.py:40", window=1), step(1, "g", optimizer=1), {**stepped(1), "optimizer": 1}]

    searching = record(rank(0.1, "a"), rank(0.2, "b"))
    assert codes(control, searching) == codes(states, searching) == []
    alone = record(*[[event for event in rank(rate, "a") if event["kind"] != "collective"] for rate in (0.1, 0.2)])
    assert codes(control, alone) == [("learning-rate-differs", "error")]
