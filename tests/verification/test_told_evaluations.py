"""What is told of the buffers with which ranks evaluate."""

from __future__ import annotations

import math

import pytest
import torch
from journals import Event, ended, passed, record

from samestep.runtime.digest import digest
from samestep.verification import journal
from samestep.verification.judging import evaluation
from samestep.verification.judging.printed import Difference, metrics_alike
from samestep.verification.recording.evaluations import Evaluations
from samestep.verification.recording.inputs import Inputs
from samestep.verification.report import Report


def test_buffers_are_told_again_when_a_pass_is_evaluated_whole(tmp_path) -> None:
    """The first forward may still bring those of rank 0, and whoever loads ahead has two batches before it."""
    mean = torch.zeros(2)
    book = journal.TraceWriter(tmp_path, 0)
    model = Inputs(book, lambda: None)
    evaluations = Evaluations(book, lambda: {"mean": mean}, model)
    for index in (0, 1):
        evaluations.batch("train.py:9#1", 0, index, gradients=False)
        model.used = True
    mean += 1  # the first forward
    evaluations.passed("train.py:9#1", 0)
    evaluations.leave()
    told = [event["digests"]["mean"] for event in journal.read(tmp_path, 0) if event["kind"] == "buffers"]
    assert told == [digest(torch.zeros(2)), digest(torch.ones(2))]
    evaluations.end()
    assert len([event for event in journal.read(tmp_path, 0) if event["kind"] == "buffers"]) == 2


def test_buffers_of_a_model_that_is_not_called_are_not_told(tmp_path) -> None:
    """Another model is evaluated, or its statistics are made: a pass without gradients alone says nothing."""
    book = journal.TraceWriter(tmp_path, 0)
    evaluations = Evaluations(book, lambda: {"mean": torch.zeros(2)}, Inputs(book, lambda: None))
    for index in (0, 1):
        evaluations.batch("train.py:9#1", 0, index, gradients=False)
    evaluations.passed("train.py:9#1", 0)
    evaluations.end()
    assert not [event for event in journal.read(tmp_path, 0) if event["kind"] == "buffers"]


def evaluated(value: float, **more: object) -> dict[str, object]:
    """What samestep.evaluate has returned."""
    return {"kind": "metrics", "window": 200, "where": "train.py:22", "metrics": {"accuracy": value}, **more}


def test_an_evaluation_of_other_weights_is_not_held_against_the_ranks() -> None:
    """One process that has gone on by itself has weights of its own, by rounding: here a sample of 1,009 more."""
    for placed, codes in ((True, ["evaluation-inexact"]), (False, [])):
        told = Report(ranks=2, steps=400)
        evaluation.judge(
            record([evaluated(0.915758), ended()], [ended()]),
            record([evaluated(0.914767, placed=placed), ended()]),
            told,
        )
        assert [finding.code for finding in told.findings] == codes


@pytest.mark.parametrize(
    ("mine", "theirs", "codes"),
    [
        (math.nan, math.nan, []),
        (math.inf, math.inf, []),
        (math.nan, 0.5, ["evaluation-inexact"]),
        (math.inf, 0.5, ["evaluation-inexact"]),
        (0.5, -math.inf, ["evaluation-inexact"]),
    ],
)
def test_metrics_that_are_not_finite_are_compared(mine: float, theirs: float, codes: list[str]) -> None:
    """A score of a class that is nowhere is 0/0, on the ranks as in one process."""
    told = Report(ranks=2, steps=400)
    evaluation.judge(record([evaluated(mine), ended()], [ended()]), record([evaluated(theirs), ended()]), told)
    assert [finding.code for finding in told.findings] == codes
    assert told.coverage["evaluation"] == ("differs" if codes else "agrees")


def evaluates(
    *batches: list[int], samples: int, gathers: bool = False, sums: bool = False, **more: object
) -> list[Event]:
    """A rank that evaluates these samples, and may gather what it predicts for each batch."""
    about, batch, _, _, _, over = passed([], samples=samples, sampler="SequentialSampler", **more)
    events: list[Event] = [about]
    for index, indices in enumerate(batches):
        told = {"phase": 1, "key": about["key"], "number": 0}
        events.append({"kind": "evaluated", "index": index, **told})
        events.append({**batch, "index": index, "indices": indices, "size": len(indices), "training": False})
        if gathers:
            rows = {"rows": 2 * len(indices), "op": "all_gather_into_tensor", "reduce": None}
            events.append({"kind": "collected", "phase": 1, "where": "train.py:40", **rows})
    summed = {"kind": "collected", "phase": 1, "where": "train.py:41", "op": "all_reduce", "reduce": "SUM"}
    return [*events, over, *([summed] if sums else []), ended()]


def judged(*ranks: list[Event], alone: list[Event] | None = None) -> Report:
    report = Report(ranks=len(ranks), steps=4)
    evaluation.judge(record(*ranks), None if alone is None else record(alone), report)
    return report


def test_what_a_library_fills_up_and_gathers_it_may_take_out_again() -> None:
    """As accelerate does: the last batch of a rank without one begins with the first samples again."""
    cut = {"samples": 5, "cut_by": "BatchSamplerShard"}
    report = judged(evaluates([0, 1], [4, 0], gathers=True, **cut), evaluates([2, 3], [1, 2], gathers=True, **cut))
    assert report.findings == []
    assert report.coverage["evaluation"].startswith("not checked: 3 samples come twice, since BatchSamplerShard fills")
    one = {"samples": 2, "cut_by": "BatchSamplerShard"}
    assert judged(evaluates([0, 1], gathers=True, **one), evaluates([0], gathers=True, **one)).findings == []


@pytest.mark.parametrize(
    "more",
    [
        {"samples": 6, "sums": True, "cut_by": "BatchSamplerShard"},  # what is summed up keeps them
        {"samples": 7, "gathers": True, "cut_by": "BatchSamplerShard"},  # one is never evaluated
    ],
)
def test_samples_that_nobody_takes_out_again_are_an_error(more: dict[str, object]) -> None:
    (error,) = judged(evaluates([0, 1], [4, 0], **more), evaluates([2, 3], [5, 0], **more)).errors
    assert (error.code, "twice" in error.cause) == ("evaluation-inexact", True)
    assert error.where == "train.py:10"
    more |= {"sampler_made": "train.py:9"}
    (error,) = judged(evaluates([0, 1], [4, 0], **more), evaluates([2, 3], [5, 0], **more)).errors
    assert error.where == "train.py:9"


def test_samples_that_the_script_gathers_it_may_take_out_again() -> None:
    report = judged(
        evaluates([0, 1], [4, 0], samples=6, gathers=True), evaluates([2, 3], [5, 0], samples=6, gathers=True)
    )
    assert report.findings == []
    assert report.coverage["evaluation"].endswith("what is gathered may leave them out")


def test_samples_that_come_twice_are_in_no_outcome_where_nothing_is_brought_together() -> None:
    report = judged(evaluates([0, 1], [4, 0], samples=6), evaluates([2, 3], [5, 0], samples=6))
    assert report.findings == []
    assert report.coverage["evaluation"] == (
        "not checked: each rank tells of its own part, and nothing of the whole was seen"
    )


@pytest.mark.parametrize(("of_one", "missing"), [([4, 5, 6, 7], 0), ([*range(8)], 4), ([], 4)])
def test_samples_that_one_process_does_not_evaluate_either_are_not_missing(of_one: list[int], missing: int) -> None:
    """Training and validation read one dataset, each by a list of indices."""
    ranks = [evaluates(mine, samples=8, sums=True) for mine in ([4, 6], [5, 7])]
    report = judged(*ranks, alone=evaluates(of_one, samples=8, sums=True))
    assert [error.cause for error in report.errors] == (
        [f"the ranks together evaluate {missing} samples never, of 8"] if missing else []
    )


def shows(*digests: str) -> Event:
    """What a rank shows of its dataset."""
    return {"kind": "fingerprint", "key": "train.py:10#1", "samples": {str(i): d for i, d in enumerate(digests)}}


def test_parts_of_unlike_length_are_no_samples_that_come_twice() -> None:
    """Each rank has a Subset of its own, in which samples are counted anew."""
    first, other = evaluates([0, 1], [2], samples=3), evaluates([0, 1], samples=2)
    assert judged([*first, shows("a", "c", "e")], [*other, shows("b", "d")]).findings == []


def test_a_tail_is_what_no_rank_has_in_a_batch() -> None:
    """Of 7 samples each of two ranks gets 4, one of them twice, and two whole batches of 2: none is left out."""
    drop = {"samples": 7, "drop_last": True, "batch_size": 2}
    first = evaluates([0, 2], [4, 6], **drop)
    told = judged(first, evaluates([1, 3], [5, 0], **drop))
    assert not [finding for finding in told.findings if "drop_last" in finding.cause]
    (error,) = judged(evaluates([0, 1], [2, 3], [4, 5], **drop), evaluates([0, 1], [2, 3], [4, 5], **drop)).errors
    assert "1 of 7 samples are in no batch: drop_last" in error.cause


@pytest.mark.parametrize(
    ("mine", "theirs", "differ"),
    [
        ("1.23e-05", "4.56e-05", True),  # a digit is worth 1e-07
        ("1.234e+02", "1.235e+02", False),  # and here 0.1: rounding, perhaps
        ("1.234E+02", "1.284E+02", True),
        ("0.913", "0.914", False),
        ("0.913", "0.951", True),
    ],
)
def test_a_printed_metric_is_as_exact_as_its_last_digit(mine: str, theirs: str, *, differ: bool) -> None:
    place = ("1.1", "train.py:50", "epoch#:testloss#", 1)
    line = {"kind": "printed", "phase": 1, "where": "train.py:50", "drew": None}
    ranks, alone = ({place: {**line, "text": f"epoch 3: test loss {number}"}} for number in (mine, theirs))
    assert (metrics_alike([ranks], alone).different is not None) == differ


@pytest.mark.parametrize(
    ("text", "mine", "theirs", "differ"),
    [
        ("accuracy, loads so far: {}", "0.320000 0.302543 0.295848", "0.320000 0.294020 0.280191", True),
        ("error after each month {}", "0.0569, 0.0649", "0.0569, 0.0690", True),
        ("accuracy {}", "0.3200 0.2940", "0.3200 0.2940", False),
        ("test accuracy 0.9100 loss {}", "0.4127", "0.4098", False),  # of a rank's own samples
        ("accuracy 0.9100 {}", "0.51s", "0.73s", False),
        ("loss 0.71/0.69 acc {}", "0.5312/0.6094", "0.5156/0.6094", False),  # of the training, and of the validation
        ("loss 0.71/0.69 acc {}", "0.5312/0.6094", "0.5156/0.6823", True),
        ("acc {}", "0.5312 -> 0.6094", "0.5156 -> 0.6094", False),
        ("val acc {}", "0.5312 | 0.6094", "0.5156 | 0.6094", True),
        ("train/val acc {}", "0.5312/0.6094", "0.5156/0.6094", False),
        ("train/val acc {}", "0.5312/0.6094", "0.5312/0.6823", True),
    ],
)
def test_several_numbers_behind_one_name_are_compared(text: str, mine: str, theirs: str, *, differ: bool) -> None:
    place = ("1.1", "train.py:50", "accuracy##", 1)
    line = {"kind": "printed", "phase": 1, "where": "train.py:50", "drew": None}
    ranks, alone = ({place: {**line, "text": text.format(numbers)}} for numbers in (mine, theirs))
    assert (metrics_alike([ranks], alone).different is not None) == differ


@pytest.mark.parametrize(
    ("mine", "theirs", "unknown"),
    [
        ("loss 0.4127 same species first 0.7100", "loss 0.4127 same species first 0.8200", ("0.7100", "0.8200")),
        ("loss 0.4127 same species first 0.7100", "loss 0.4127 same species first 0.7100", None),
        ("loss 0.4127 same species first 0.7100", "loss 0.5000 same species first 0.8200", None),  # of a rank
        ("epoch 3 took 0.51 s", "epoch 3 took 0.73 s", None),
    ],
)
def test_a_number_that_the_script_calls_by_its_own_words(
    mine: str, theirs: str, unknown: tuple[str, str] | None
) -> None:
    place = ("1.1", "train.py:50", "epoch##", 1)
    line = {"kind": "printed", "phase": 1, "where": "train.py:50", "drew": None}
    found = metrics_alike([{place: {**line, "text": mine}}], {place: {**line, "text": theirs}}).unknown
    assert (None if found is None else (found.name, found.mine, found.theirs)) == (
        None if unknown is None else ("same species first", *unknown)
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "counts"), [("0.40", "0.80", True), ("1.6", "0.8", True), ("0.7", "0.8", False)]
)
def test_a_number_of_each_rank_s_own_is_an_nth(mine: str, theirs: str, *, counts: bool) -> None:
    found = Difference("seen", mine, theirs, "train.py:50", is_of_evaluation=True, start=0)
    assert evaluation._are_counts(found, 2) is counts


def test_a_mean_of_the_ranks_is_not_divided_again() -> None:
    assert "the mean of the ranks' values is 1.3, and one process has 1.2" in (
        evaluation._inexact("train.py:9", 1.3, 1.2, 2, "AVG").cause
    )
