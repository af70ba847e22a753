"""What an evaluation comes to: the metric at its end, not its progress lines, nor what only some ranks have summed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from journals import Event, ended, record
from torch import nn

from samestep.verification import journal
from samestep.verification.judging import evaluation
from samestep.verification.judging.evaluation_outcomes import outcomes
from samestep.verification.judging.record import Rank, Record, Run
from samestep.verification.recording.evaluations import Evaluations
from samestep.verification.recording.inputs import Inputs, mixes_samples
from samestep.verification.recording.naming import buffers_of
from samestep.verification.recording.script_observer import ScriptObserver
from samestep.verification.report import Report
from samestep.verification.runs import Ended

VALIDATION, REST = "train.py:10#1", "train.py:11#1"


def loads(*indices: list[int], key: str = VALIDATION, samples: int | None = None) -> list[Event]:
    """The events of a pass of an evaluation, a list for each batch, and its end."""
    place = {"key": key, "number": 0}
    about = {"dataset": "Data", "sampler": "DistributedSampler", "replacement": False, "drop_last": True}
    more = {"rows": [], "kept": None, "training": False, "window": 4}
    batches = [
        event
        for i, batch in enumerate(indices)
        for event in (
            {"kind": "evaluated", "phase": 1, "index": i, **place},
            {"kind": "batch", "index": i, "indices": batch, "size": len(batch), **place, **more},
        )
    ]
    return [{"kind": "pass", "samples": samples, **place, **about}, *batches, {"kind": "passed", **place}]


def sums(*values: float, where: str = "train.py:30", group: str = "world", **more: Any) -> Event:
    about = {"kind": "collected", "op": "all_reduce", "reduce": "SUM", "phase": 1, "placed": True, "drew": None}
    return {**about, "values": [float(value) for value in values], "where": where, "group": group, **more}


def prints(text: str, where: str = "train.py:40", **more: Any) -> Event:
    return {"kind": "printed", "text": text, "where": where, "phase": 1, "placed": True, "drew": None, **more}


def ran(*, by_batch: bool = False) -> Event:
    return {"kind": "ran", "phase": 1, "by_batch": by_batch}


def judged(ranks: list[list[Event]], alone: list[Event]) -> Report:
    report = Report(ranks=len(ranks), steps=4)
    evaluation.judge(record(*[[*rank, ended()] for rank in ranks]), record([*alone, ended()]), report)
    return report


def found(ranks: list[list[Event]], alone: list[Event]) -> list[str | None]:
    return [finding.where for finding in judged(ranks, alone).errors]


def test_of_sums_over_some_ranks_and_then_over_others_the_last_is_compared() -> None:
    def rank(pair: float, whole: float) -> list[Event]:
        return [ran(), sums(pair, 2, where="train.py:29", group="2:0,1"), sums(whole, 4, group="5:0,2")]

    alone = [ran(), sums(7, 4, where="train.py:29", group="2:0"), sums(7, 4, group="5:0")]
    assert found([rank(3, 7), rank(3, 7)], alone) == []
    assert found([rank(3, 6), rank(3, 6)], alone) == ["train.py:30"]
    only = [ran(), sums(3, 2, where="train.py:29", group="2:0,1")]
    assert found([only, only], [ran(), sums(7, 4, where="train.py:29", group="2:0")]) == ["train.py:29"]


def test_a_mean_over_the_ranks_of_a_group_is_a_sum_divided_by_their_number() -> None:
    def evaluates(group: str) -> list[Event]:
        return [ran(), sums(1.5, group=group)]

    assert found([evaluates("5:0,1")] * 4, [ran(), sums(0.75)]) == []
    assert found([evaluates("world")] * 4, [ran(), sums(0.75)]) == ["train.py:30"]


def test_progress_lines_are_no_metric() -> None:
    """As PyTorch's ImageNet example prints them: on every rank, for its part, and the result at the end by all."""

    def shows(acc: str, result: str, *rest: list[int]) -> list[Event]:
        about, *batches, over = loads([0, 1], [2, 3], *rest)
        begun, later = batches[:2], batches[2:]
        return [
            about,
            *begun,
            prints(f"Test: [1/2] Acc@1 {acc}"),
            *later,
            over,
            prints(f" * Acc@1 {result}", "train.py:50"),
        ]

    whole = shows("12.50", "40.25", [4, 5], [6, 7])
    assert found([shows("16.67", "40.25"), shows("33.33", "40.25")], whole) == []
    assert judged([shows("16.67", "40.25"), shows("33.33", "40.25")], whole).coverage["evaluation"] == "agrees"
    assert found([shows("12.50", "42.50"), shows("12.50", "42.50")], whole) == ["train.py:50"]


def test_the_last_line_of_a_loop_that_is_left_is_one_of_progress_too() -> None:
    """As with a limit of batches: nothing says that the pass is over."""

    def shows(*batches: str, result: str) -> list[Event]:
        about, *yielded, _ = loads(*([2 * i, 2 * i + 1] for i, _ in enumerate(batches)))
        lines = [event for i, one in enumerate(batches) for event in (*yielded[2 * i : 2 * i + 2], prints(one))]
        return [about, *lines, prints(f"accuracy {result}", "train.py:50")]

    alone = shows("Acc@1 10.00", "Acc@1 30.00", result="0.300")
    assert found([shows("Acc@1 10.00", "Acc@1 20.00", result="0.300")] * 2, alone) == []
    assert found([shows("Acc@1 10.00", "Acc@1 20.00", result="0.150")] * 2, alone) == ["train.py:50"]


def test_the_last_line_of_a_loop_over_tensors_is_one_of_progress_too() -> None:
    def shows(*batches: str, result: str) -> list[Event]:
        lines = [event for one in batches for event in (ran(), prints(f"batch accuracy {one}"))]
        return [*lines, prints(f"accuracy {result}", "train.py:50")]

    alone = shows("0.100", "0.300", "0.500", result="0.300")
    assert found([shows("0.100", "0.200", result="0.300"), [ran()]], alone) == []
    assert found([shows("0.100", "0.200", result="0.150"), [ran()]], alone) == ["train.py:50"]


def test_results_that_one_helper_prints_are_told_apart_by_their_words() -> None:
    def logs(validation: str, test: str) -> list[Event]:
        return [
            *[*loads([0, 1]), prints(f"validation: accuracy {validation}")],
            *[*loads([0, 1], key=REST), prints(f"test: accuracy {test}")],
        ]

    assert found([logs("0.750", "0.500"), loads([2, 3])], logs("0.750", "0.500")) == []
    assert found([logs("0.750", "0.600"), loads([2, 3])], logs("0.750", "0.500")) == ["train.py:40"]


def test_numbers_that_are_padded_to_one_width_are_of_one_line() -> None:
    ours, theirs = [*loads([0, 1]), prints("Acc@1 100.00 ( 66.67)")], [*loads([0, 1]), prints("Acc@1  50.00 ( 66.67)")]
    assert judged([ours, loads([2, 3])], theirs).coverage["evaluation"] == "agrees"


@pytest.mark.parametrize("what", ["", "fold ", "class "])
def test_lines_of_parts_that_ranks_deal_out_are_compared_by_the_part_s_number(what: str) -> None:
    def process(**errors: str) -> list[Event]:
        return [*loads([0, 1]), *(prints(f"{what}{part[1:]}: mae {error}") for part, error in errors.items())]

    alone = process(_4="0.250", _5="0.500", _6="0.750", _7="0.375")
    report = judged([process(_4="0.250", _6="0.750"), process(_5="0.500", _7="0.375")], alone)
    assert report.findings == []
    assert report.coverage["evaluation"] == "agrees"
    assert found([process(_4="0.250", _6="0.700"), process(_5="0.500", _7="0.375")], alone) == ["train.py:40"]


@pytest.mark.parametrize("name", ["[GPU0]", "rank 0:", "shard {}/2:"])
def test_what_every_rank_prints_of_its_own_part_is_no_metric(name: str) -> None:
    def rank(number: int, loss: str) -> list[Event]:
        begin = name.format(number + 1).replace("0", str(number))
        return [*loads([0, 1]), prints(f"{begin} eval loss {loss}")]

    report = judged([rank(0, "1.234"), rank(1, "1.345")], rank(0, "1.300"))
    assert report.findings == []
    assert report.coverage["evaluation"].startswith("not checked: each rank tells of its own part at train.py:40")
    assert found([rank(0, "1.234"), loads([2, 3])], rank(0, "1.300")) == ["train.py:40"]  # rank 0's, as the result

    def anybody(loss: str, *more: Event) -> list[Event]:
        return [*loads([0, 1]), prints(f"eval loss {loss}"), *more]

    assert found([anybody("1.234"), anybody("1.345")], anybody("1.300")) == ["train.py:40"]  # each, as the result
    whole = prints("over all ranks: eval loss 1.300", "train.py:41")
    assert found([anybody("1.234", whole), anybody("1.345")], anybody("1.300", whole)) == []
    assert found([anybody("1.234", sums(2.6, 2)), anybody("1.345")], anybody("1.300", sums(2.6, 2))) == []


def test_what_each_rank_logs_of_its_part_while_rows_of_all_are_gathered_leaves_an_evaluation_open() -> None:
    """A log's format may name the rank, which its message does not."""
    rows = {name: value for name, value in sums().items() if name != "values"} | {"op": "gather_object", "rows": None}

    def rank(loss: str, *more: Event) -> list[Event]:
        return [*loads([0, 1]), prints(f"eval loss {loss}"), *more]

    report = judged([rank("1.234", rows), rank("1.345", rows)], rank("1.300", rows))
    assert report.findings == []
    assert report.coverage["evaluation"].startswith("not checked: a number that is printed at train.py:40")
    assert found([rank("1.234", rows), rank("1.234", rows)], rank("1.300", rows)) == ["train.py:30"]


def test_sums_of_a_loader_are_compared_though_another_follows() -> None:
    def evaluates(first: float, second: float) -> list[Event]:
        return [*loads([0, 1]), sums(first, 5), *loads([0, 1], key=REST), sums(second, 5)]

    assert found([evaluates(3, 4)] * 2, evaluates(3, 4)) == []
    assert found([evaluates(2, 4)] * 2, evaluates(3, 4)) == ["train.py:30"]
    assert found([evaluates(3, 3)] * 2, evaluates(3, 4)) == ["train.py:30"]


@pytest.mark.parametrize(("batches", "is_found"), [(4, False), (5, True)])
def test_ranks_may_count_more_batches_than_one_process(batches: int, *, is_found: bool) -> None:
    """Each has a last one of its own: two with six samples have four batches, and one process three."""
    ranks = [[*loads(one, [one[0] + 2], samples=6), sums(12.5, batches)] for one in ([0, 1], [3, 4])]
    alone = [*loads([0, 1], [2, 3], [4, 5], samples=6), sums(12.5, 3)]
    assert found(ranks, alone) == (["train.py:30"] if is_found else [])


@pytest.mark.parametrize(("said", "is_found"), [("val accuracy 0.8125", False), ("loss 0.7", True)])
def test_a_rank_s_number_on_a_line_of_its_own_is_not_the_evaluation_s(said: str, *, is_found: bool) -> None:
    """Where another line tells that of the evaluation, and it is one process's."""
    one, other = ([*loads([0, 1]), prints(said), prints(f"accuracy {own}", "train.py:41")] for own in (0.9375, 0.5125))
    assert found([one, loads([2, 3])], other) == (["train.py:41"] if is_found else [])


def test_samples_that_one_loader_leaves_out_and_another_brings_are_evaluated() -> None:
    """A sampler that drops the last 1 of 9 on two ranks, then a loader for it; one process has no such loader."""

    def rank(mine: list[int], rest: int, *more: Event) -> list[Event]:
        beside = loads([0], key=REST, samples=rest) if rest else []
        return [*loads(mine, samples=9), sums(6, 8), *beside, *more]

    alone = [*loads([*range(9)], samples=9), sums(7, 9)]
    first, other = [0, 2, 4, 6], [1, 3, 5, 7]
    assert found([rank(first, 1), rank(other, 1)], alone) == []
    line, whole = prints("accuracy 0.7778"), [*alone, prints("accuracy 0.7778")]
    assert judged([rank(first, 1, line), rank(other, 1)], whole).coverage["evaluation"] == "agrees"
    assert found([rank(first, 0), rank(other, 0)], alone) == ["train.py:10"]
    assert found([rank(first, 3), rank(other, 3)], alone) == ["train.py:10"]  # no loader for as many


def test_sums_with_a_row_for_each_rank_are_not_held_against_one_row() -> None:
    rows = [*loads([0, 1]), sums(3.5, 2.0, 4.5, 2.0)]
    assert found([rows, rows], [*loads([0, 1]), sums(8.0, 4.0)]) == []


@pytest.mark.parametrize(
    ("reduce", "ours", "alone", "gathers", "is_found"),
    [
        ("MAX", [29.0], [57.0], False, False),  # samples of the longest part
        ("MIN", [3.0], [6.0], False, False),  # batches
        ("MAX", [40.0], [70.0], True, False),  # words of a text, say
        ("MAX", [40.0], [70.0], False, True),
        ("MAX", [29.0, 21.0], [57.0, 42.0], False, True),  # hits, in the place of their sum
        ("SUM", [29.0], [57.0], False, True),
    ],
)
def test_a_length_to_which_ranks_fill_up_their_parts_is_no_sum(
    reduce: str, ours: list[float], alone: list[float], *, gathers: bool, is_found: bool
) -> None:
    rows = {name: value for name, value in sums().items() if name != "values"} | {"op": "all_gather", "rows": 58}

    def evaluates(mine: range, values: list[float]) -> list[Event]:
        batches = [[*mine[i : i + 10]] for i in range(0, len(mine), 10)]
        brought = sums(*values, where="train.py:29", reduce=reduce)
        return [*loads(*batches, samples=57), brought, *([rows] if gathers else [])]

    ranks = [evaluates(range(first, 57, 2), ours) for first in (0, 1)]
    assert found(ranks, evaluates(range(57), alone)) == (["train.py:29"] if is_found else [])


def test_sums_that_no_metric_shows_are_none() -> None:
    """Times, say; but not where samples come twice, and the digits that are printed do not show it."""

    def rank(mine: list[int], seconds: float) -> list[Event]:
        return [*loads(mine, samples=4), sums(seconds), prints("accuracy 0.750")]

    assert found([rank([0, 1], 3.5), rank([2, 3], 3.5)], rank([0, 1, 2, 3], 1.0)) == []
    assert found([rank([0, 1, 2], 3.5), rank([3, 0, 1], 3.5)], rank([0, 1, 2, 3], 1.0)) == ["train.py:10"]


@pytest.mark.parametrize(
    ("mine", "theirs", "is_found"),
    [
        ("* Acc@1 60.000 Acc@5 100.000", "* Acc@1 55.556 Acc@5 100.000", True),  # of two classes: 100 whatever happens
        ("acc 0.881 | val auc 0.9912 f1 0.61", "acc 0.902 | val auc 0.9912 f1 0.69", True),
        ("acc 0.881 | val auc 0.9912 f1 0.69", "acc 0.902 | val auc 0.9912 f1 0.69", False),  # rank 0's training
        ("acc 0.881, auc 0.9912", "acc 0.902, auc 0.9912", False),  # perhaps so too
        ("Best metric: 50.0 (epoch 0)", "Best metric: 55.55555 (epoch 0)", True),
        ("test accuracy 1.000", "test accuracy 1.000", False),
        ("epoch 0 | dev | loss 0.713 | acc 0.881", "epoch 0 | dev | loss 0.704 | acc 0.902", True),
    ],
)
def test_a_number_that_differs_counts_unless_it_may_be_of_the_training(
    mine: str, theirs: str, *, is_found: bool
) -> None:
    report = judged([[ran(), prints(mine)], [ran()]], [ran(), prints(theirs)])
    assert [one.where for one in report.errors] == (["train.py:40"] if is_found else [])
    assert report.coverage["evaluation"] == ("differs" if is_found else "agrees")


def test_a_metric_of_a_line_that_says_train_is_of_the_training() -> None:
    mine, theirs = ([ran(), prints(f"epoch 0 | train | loss 0.7 | acc {acc}")] for acc in ("0.881", "0.902"))
    assert found([mine, [ran()]], theirs) == []


@pytest.mark.parametrize(("in_float64", "is_rounding"), [(2e-16, True), (0.8e-6, False)])
def test_a_number_that_is_next_to_nothing_in_float64_is_rounding(in_float64: float, *, is_rounding: bool) -> None:
    def process(error: float) -> Record:
        return record([*loads([0, 1]), sums(12.5, error)])

    numbers = process(1.1e-6), process(0.9e-6)
    assert evaluation.is_rounding("train.py:30", numbers, (process(in_float64), process(1e-16))) is is_rounding
    assert not evaluation.is_rounding("train.py:31", numbers, (process(in_float64), process(1e-16)))


@pytest.mark.parametrize(
    ("apart", "of_one", "is_rounding"),
    [
        (146.640, 146.5618293, True),
        (146.640, 146.5631, False),
        (190.720, 146.5618293, False),  # by an order that is drawn anew in each run, say
    ],
)
def test_a_number_that_is_one_process_s_in_float64_is_rounding(
    apart: float, of_one: float, *, is_rounding: bool
) -> None:
    """A mean over each batch that is rounded to bfloat16 is another one in other batches."""

    def process(loss: float) -> Record:
        return record([*loads([0, 1]), sums(loss, 120)])

    numbers = process(293.125 / 2), process(apart)
    in_float64 = process(146.5618293), process(of_one)
    assert evaluation.is_rounding("train.py:30", numbers, in_float64) is is_rounding


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_copy_of_low_precision_computes_in_float64_where_the_run_does(*, is_trained: bool) -> None:
    observer, model = ScriptObserver(), nn.Linear(2, 2).to(torch.bfloat16)
    trained = [torch.optim.SGD(model.parameters(), lr=0.1)] if is_trained else []
    observer.optimizers = SimpleNamespace(all=trained)
    with torch.no_grad():
        given = observer._double(model, (torch.zeros(1, 2, dtype=torch.bfloat16),))
    assert model.weight.dtype == (torch.bfloat16 if is_trained else torch.float64)
    assert given is None if is_trained else given[0].dtype == torch.float64


@pytest.mark.parametrize(
    ("line", "brings", "state"),
    [
        ("accuracy 1.000", "sum", "differs"),
        ("accuracy 0.913", "sum", "not checked: the ranks together evaluate 2 samples twice"),
        ("accuracy 0.91304", "sum", "agrees"),
        ("accuracy 0.913", "rows", "agrees"),
    ],
)
def test_that_samples_come_twice_is_shown_by_digits_alone(line: str, brings: str, state: str) -> None:
    """Who gathers rows may take them out again; a large sum is compared with nothing."""
    about = {name: value for name, value in sums().items() if name != "values"}
    about |= {"op": "all_gather", "rows": 4} if brings == "rows" else {}

    def rank(*mine: int) -> list[Event]:
        return [*loads([*mine], samples=4), about, prints(line)]

    report = judged([rank(0, 1, 2), rank(3, 0, 1)], [*loads([0, 1, 2, 3], samples=4), prints(line)])
    assert report.coverage["evaluation"].startswith(state)
    assert bool(report.errors) == (state == "differs")


@pytest.mark.parametrize(("drew", "by_batch", "said"), [("x", False, "random numbers"), (None, True, "BatchNorm")])
def test_what_may_differ_is_not_accused(*, drew: str | None, by_batch: bool, said: str) -> None:
    """Other random numbers, or a model in training mode whose BatchNorm sees other batches: agreement counts alone."""

    def evaluates(accuracy: str, drew: str | None) -> list[Event]:
        return [ran(by_batch=by_batch), sums(float(accuracy), drew=drew), prints(f"accuracy {accuracy}", drew=drew)]

    report = judged([evaluates("0.500", drew), [ran()]], evaluates("0.600", None))
    assert report.findings == []
    assert said in report.coverage["evaluation"]
    assert judged([evaluates("0.500", drew), [ran()]], evaluates("0.500", None)).coverage["evaluation"] == "agrees"
    if drew:  # the same numbers alone
        assert found([evaluates("0.500", drew), [ran()]], evaluates("0.600", drew)) == ["train.py:30"]


def test_numbers_that_one_process_comes_to_otherwise_when_it_runs_again_tell_nothing() -> None:
    """Samples a second, say; the accuracy in another line is one process's."""

    def evaluates(speed: str, accuracy: str) -> list[Event]:
        return [ran(), sums(float(speed)), prints(f"test {speed} items", "train.py:39"), prints(f"accuracy {accuracy}")]

    def judged_again(accuracy: str) -> Report:
        report, alone = Report(ranks=2, steps=4), evaluates("300.25", "0.812")
        ended_well = Ended(code=0, hung=False, failure=None, folder=Path())
        again = Run(ended_well, record([*evaluates("296.75", "0.812"), ended()]))
        ranks = record([*evaluates("512.5", accuracy), ended()], [ran(), sums(512.5), ended()])
        evaluation.judge(ranks, record([*alone, ended()]), report, lambda: again)
        return report

    assert (judged_again("0.812").findings, judged_again("0.812").coverage["evaluation"]) == ([], "agrees")
    assert [one.where for one in judged_again("0.625").errors] == ["train.py:40"]


def test_a_number_of_no_known_meaning_that_differs_leaves_an_evaluation_open() -> None:
    def evaluates(kappa: str) -> list[Event]:
        gathers = {name: value for name, value in sums().items() if name != "values"} | {"op": "all_gather"}
        return [ran(), gathers, prints(f"kappa {kappa}")]

    report = judged([evaluates("0.7712"), [ran()]], evaluates("0.8035"))
    assert report.coverage["evaluation"] == (
        "not checked: a number that is printed at train.py:40 is not one process's, and what it means is not known"
    )


@pytest.mark.parametrize(
    ("row", "total", "is_found"),
    [
        ("     1      {}      0.6871      0.7444", 5.0, False),
        ("     1      {}      0.6871      0.7444", None, True),
        ("     1 mine {}      0.6871      0.7444", 5.0, True),
    ],
)
def test_a_row_of_bare_numbers_may_have_those_of_a_rank_s_training(
    row: str, total: float | None, *, is_found: bool
) -> None:
    """Sums that agree confirm the evaluation; a header that names the columns is no part of the row."""

    def evaluates(training: str) -> list[Event]:
        return [ran(), *([] if total is None else [sums(total)]), prints(row.format(training))]

    report = Report(ranks=2, steps=4)
    ranks, alone = record([*evaluates("0.8412"), ended()], [ran(), ended()]), record([*evaluates("0.8127"), ended()])
    evaluation.judge(ranks, alone, report, unnamed=True)
    assert [one.where for one in report.errors] == (["train.py:40"] if is_found else [])


@pytest.mark.parametrize(
    ("dropped", "alone", "severity"),
    [([3], 2.0, "note"), ([3], 3.0, "error")],
    ids=["one process leaves as much out", "one process comes to more"],
)
def test_a_tail_that_an_evaluation_leaves_out_is_wrong_where_its_outcome_differs(
    dropped: list[int], alone: float, severity: str
) -> None:
    def evaluates(total: float) -> list[Event]:
        return [*loads([0, 1, 2], samples=3 + len(dropped)), sums(total)]

    report = judged([evaluates(2.0)] * 2, evaluates(alone))
    assert [(one.severity, one.where) for one in report.findings] == [(severity, "train.py:10")]


@pytest.mark.parametrize(
    ("buffer", "brings", "severity"),
    [("seen", True, "note"), ("running_mean", True, "error"), ("running_mean", False, "note")],
    ids=["a counter", "statistics", "of a rank that nobody asks"],
)
def test_buffers_that_differ_are_wrong_where_they_make_an_outcome(buffer: str, *, brings: bool, severity: str) -> None:
    def evaluates(value: str, *more: Event) -> list[Event]:
        told = {"kind": "buffers", "phase": 1, "key": VALIDATION, "number": 0, "digests": {buffer: value}}
        return [*loads([0, 1], samples=2), told, *more]

    line = prints("accuracy 0.7778")
    first, other = evaluates("a", sums(4), line), evaluates("b", *([sums(4)] if brings else []))
    report = judged([first, other], evaluates("a", sums(4), line))
    assert [(one.code, one.severity) for one in report.findings] == [("buffers-diverged", severity)]


@pytest.mark.parametrize(
    ("mine", "theirs", "is_found"),
    [
        ([12.5, 768.0], [12.6, 384.0], False),  # N times as much, to be divided by N
        ([12.5, 1152.0], [12.6, 768.0], True),  # a sum that was added up before
        ([12.5, 385.0], [12.6, 384.0], False),  # padding
        ([12.5, 0.25], [12.6, 0.75], False),  # no counts
    ],
)
def test_what_ranks_count_while_they_train_is_what_one_process_counts(
    mine: list[float], theirs: list[float], *, is_found: bool
) -> None:
    def counts(values: list[float]) -> Event:
        return {"kind": "counted", "where": "train.py:27", "number": 1, "window": 3, "group": "world", "values": values}

    assert found([[counts(mine)]] * 2, [counts(theirs)]) == (["train.py:27"] if is_found else [])
    filled_up = [{"kind": "collated"}, counts(theirs)]  # to the length of the longest text of all ranks
    assert found([[counts(mine)]] * 2, filled_up) == []
    got: list[list[Event]] = [[{"kind": "input", "window": 2, "rows": [row]}] for row in ("a", "b")]
    assert found([[*got[0], counts(mine)]] * 2, [*got[1], counts(theirs)]) == []  # of other samples: environments, say


def test_rollouts_of_which_one_process_has_one_rank_s_may_differ() -> None:
    def evaluates(reward: float, drew: str) -> list[Event]:
        return [ran(), sums(reward, drew=drew)]

    assert found([evaluates(5.0, "a"), evaluates(5.0, "b")], evaluates(3.0, "a")) == []
    assert found([evaluates(5.0, "a"), evaluates(5.0, "a")], evaluates(3.0, "a")) == ["train.py:30"]


def test_sums_of_samestep_are_its_own_and_its_metrics_are_compared() -> None:
    def evaluates(accuracy: float) -> list[Event]:
        returned = {"kind": "metrics", "window": 4, "where": "train.py:30", "metrics": {"accuracy": accuracy}}
        return [ran(), sums(accuracy), returned]

    report = judged([evaluates(0.5), [ran(), sums(3)]], [ran(), sums(9), *evaluates(0.5)[2:]])
    assert (report.findings, report.coverage["evaluation"]) == ([], "agrees")
    assert found([evaluates(0.5)] * 2, evaluates(0.75)) == ["train.py:30"]


# --- recording ------------------------------------------------------------------------------------------


class Told:
    """An evaluation's events, as a script would cause them."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder
        self.journal = journal.TraceWriter(folder, 0)
        self.evaluations = Evaluations(self.journal, dict, Inputs(self.journal, lambda: None))

    def goes_through(self, *, trains: bool, key: str = VALIDATION, batches: int = 3) -> None:
        """A loop that switches gradients off around its model only, if it does."""
        self.evaluations.begin_pass(key, 0)
        for index in range(batches):
            self.evaluations.batch(key, 0, index, gradients=True)
            self.evaluations.ran(begins=True, by_batch=lambda: False)  # pseudo-labels, where it trains
            self.evaluations.printed(lambda: "progress", "train.py:40")
            if trains:
                self.evaluations.trained()
                self.evaluations.end()
        self.evaluations.passed(key, 0)

    def prints(self) -> None:
        self.evaluations.printed(lambda: "accuracy 0.750", "train.py:50")

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in journal.read(self.folder, 0) if event["kind"] in kinds]


def test_an_evaluation_is_seen_though_neither_eval_nor_the_loop_says_so(tmp_path) -> None:
    told = Told(tmp_path)
    told.goes_through(trains=False)
    told.prints()
    told.goes_through(trains=False, key=REST, batches=1)
    told.prints()
    assert [event["index"] for event in told.of("evaluated")] == [0, 1, 2, 0]
    assert {event["phase"] for event in told.of("evaluated", "printed", "ran")} == {"0.1"}
    (outcome,) = outcomes(Rank(0, told.of("evaluated", "printed", "ran", "passed"))).values()
    assert outcome.loaders == [VALIDATION, REST]
    assert {place[1] for place in outcome.lines} == {"train.py:50"}
    told.goes_through(trains=True, key="train.py:9#1")
    told.prints()
    assert len(told.of("evaluated")) == 4
    assert len([event for event in told.of("printed") if event["where"] == "train.py:50"]) == 2


def test_a_loop_that_trains_on_what_it_has_labelled_without_gradients_is_no_evaluation(tmp_path) -> None:
    told = Told(tmp_path)
    told.goes_through(trains=True)
    told.prints()
    assert not told.of("evaluated", "printed", "ran")
    assert not told.evaluations.lasts


def test_a_loop_without_gradients_is_over_with_its_pass(tmp_path) -> None:
    """Its next loader may be that of the training, also where the loop was left before the end."""
    told = Told(tmp_path)
    told.evaluations.begin_pass(VALIDATION, 0)
    told.evaluations.batch(VALIDATION, 0, 0, gradients=False)
    assert told.evaluations.lasts
    told.evaluations.begin_pass("train.py:9#1", 1)
    told.evaluations.batch("train.py:9#1", 1, 0, gradients=True)
    assert not told.evaluations.lasts
    assert [event["key"] for event in told.of("evaluated")] == [VALIDATION]


def test_data_without_a_loader_are_evaluated_between_two_steps_only(tmp_path) -> None:
    told = Told(tmp_path)
    told.evaluations.ran(begins=False, by_batch=lambda: False)  # a window in which something is trained on
    told.prints()
    told.evaluations.begin_pass(VALIDATION, 0)
    told.evaluations.ran(begins=True, by_batch=lambda: False)  # a batch of it
    told.prints()
    told.evaluations.passed(VALIDATION, 0)
    assert not told.of("printed", "ran")
    told.evaluations.drew(torch.ones(2))
    told.evaluations.ran(begins=True, by_batch=lambda: False)
    told.prints()
    (line,) = told.of("printed")
    assert line["drew"] is not None
    assert [event["phase"] for event in told.of("ran")] == ["0.1"]


def test_phases_are_named_by_their_window_and_begin_with_data(tmp_path) -> None:
    """Alone, a script may leave out what ranks bring together between two steps: no phase is counted for it."""
    windows = iter([3, 3, 5])
    book = journal.TraceWriter(tmp_path, 0)
    evaluations = Evaluations(book, dict, Inputs(book, lambda: None), window=lambda: next(windows))
    evaluations.notice()  # parameters are averaged, say
    evaluations.begin()
    evaluations.ran(begins=True, by_batch=lambda: False)
    evaluations.leave()
    evaluations.begin()
    evaluations.ran(begins=True, by_batch=lambda: False)
    evaluations.end()
    evaluations.begin()
    evaluations.ran(begins=True, by_batch=lambda: False)
    assert [event["phase"] for event in journal.read(tmp_path, 0)] == ["3.1", "3.2", "5.1"]


def test_statistics_of_a_batchnorm_that_does_not_run_are_not_of_an_evaluation(tmp_path) -> None:
    """A projector, say, which only the training needs."""
    model = nn.ModuleDict({"body": nn.BatchNorm1d(2), "projector": nn.BatchNorm1d(2)}).eval()
    buffers = dict(model.named_buffers())
    book = journal.TraceWriter(tmp_path, 0)
    inputs = Inputs(book, lambda: None)
    evaluations = Evaluations(book, lambda: buffers, inputs)
    evaluations.begin()
    evaluations.batch("v", 0, 0, gradients=False)
    inputs.used = True
    evaluations.normalised(model["body"].running_mean)
    evaluations.passed("v", 0)
    evaluations.settle()
    (held,) = [event["digests"] for event in journal.read(tmp_path, 0) if event["kind"] == "buffers"]
    assert sorted(held) == ["body.num_batches_tracked", "body.running_mean", "body.running_var"]


def test_a_module_in_training_mode_uses_no_statistics_and_mixes_samples() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert mixes_samples(model)
    assert buffers_of(model.parameters(), evaluating=True) == {}
    model.eval()
    assert not mixes_samples(model)
    assert sorted(buffers_of(model.parameters(), evaluating=True)) == [
        "1.num_batches_tracked",
        "1.running_mean",
        "1.running_var",
    ]


def test_a_number_without_a_known_name_confirms_only_what_no_sum_refutes() -> None:
    def evaluates(total: float, area: str) -> list[Event]:
        return [*loads([0, 1]), sums(total), prints(f"epoch 3 area {area}")]

    assert judged([evaluates(4.0, "0.99123")] * 2, evaluates(4.0, "0.99123")).coverage["evaluation"] == "agrees"
    assert found([evaluates(4.0, "0.99123")] * 2, evaluates(7.0, "0.99123")) == ["train.py:30"]


def test_rollouts_in_which_models_see_other_data_are_no_evaluation_of_the_ranks_data() -> None:
    def evaluates(total: float, *rows: str) -> list[Event]:
        return [ran(), {"kind": "seen", "phase": 1, "rows": [*rows]}, sums(total)]

    for other, codes in ((["a", "x"], []), (["a", "b"], ["train.py:30"])):
        assert found([evaluates(5.0, "a"), evaluates(5.0, "b")], evaluates(9.0, *other)) == codes


def test_a_line_that_agrees_does_not_confirm_an_evaluation_of_which_a_number_differs() -> None:
    """The order of predictions decides a correlation; the norm of the weights agrees whatever it is."""
    mine, theirs = ([ran(), prints(f"correlation {one:.4f}"), prints("weight norm 15.9676")] for one in (0.05, 0.99))
    assert judged([mine, mine], mine).coverage["evaluation"] == "agrees"
    assert judged([mine, mine], theirs).coverage["evaluation"] != "agrees"
