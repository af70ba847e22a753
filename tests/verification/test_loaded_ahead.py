"""Batches are counted to the step in which they are used, also where somebody loads ahead of it."""

from __future__ import annotations

from journals import Event, passed, record

from samestep.verification.judging.passes import passes
from samestep.verification.judging.record import settled

BACKWARD = "backward"
BEGIN, END = (
    {"kind": "pass", "key": "train.py:10#1", "number": 0},
    {"kind": "passed", "key": "train.py:10#1", "number": 0},
)


def batch(window: int, *, key: str = "train.py:10#1") -> Event:
    return {"kind": "batch", "key": key, "number": 0, "training": True, "window": window}


def backward(window: int) -> Event:
    return {"kind": BACKWARD, "window": window}


def windows(*events: Event) -> list[int]:
    return [event["window"] for event in settled(list(events)) if event["kind"] == "batch"]


def test_a_loader_that_looks_one_batch_ahead() -> None:
    told = (BEGIN, batch(0), batch(0), backward(0), batch(1), backward(1), END, backward(2))
    assert windows(*told) == [0, 1, 2]
    assert [event["loaded"] for event in settled(list(told)) if event["kind"] == "batch"] == [0, 0, 1]


def test_a_loader_that_looks_a_whole_step_and_one_batch_ahead() -> None:
    step = [batch(0), batch(0), batch(0), backward(0), backward(0)]
    assert windows(BEGIN, *step, batch(1), backward(1), backward(1), END) == [0, 0, 1, 1]


def test_batches_that_are_loaded_when_they_are_used_stay() -> None:
    assert windows(BEGIN, batch(0), backward(0), batch(1), backward(1), END) == [0, 1]


def test_a_batch_that_no_backward_pass_follows_leaves_all_as_they_are() -> None:
    skipped = (BEGIN, batch(0), backward(0), batch(1), batch(1), backward(1))
    assert windows(*skipped, END) == [0, 1, 1]
    assert windows(*skipped) == [0, 1, 1]  # nor does a pass that was cut short


def test_a_pass_that_was_cut_short_may_have_loaded_for_nothing() -> None:
    assert windows(BEGIN, batch(0), batch(0), backward(0), batch(1), backward(1)) == [0, 1, 1]


def test_two_loaders_at_once_stay_as_they_are() -> None:
    both = (batch(0), batch(0, key="train.py:11#1"), backward(0), backward(0), batch(1), batch(1, key="train.py:11#1"))
    assert windows(*both, backward(1), backward(1)) == [0, 0, 1, 1]


def test_an_evaluation_between_two_batches_is_no_other_loader() -> None:
    test = batch(1, key="train.py:11#1")
    told = {"kind": "evaluated", "key": test["key"], "number": 0}
    assert windows(BEGIN, batch(0), batch(0), backward(0), told, test, batch(1), backward(1), END, backward(2)) == [
        *(0, 1),
        1,  # the evaluation's
        2,
    ]


def test_a_pass_whose_only_batch_is_used_when_it_is_over_is_one_of_training() -> None:
    begun, only, used, *rest, over = passed([0, 1], samples=2)
    (one,) = passes(record([begun, only, over, used, *rest]).ranks[0])
    assert one.is_training
    (one,) = passes(record([begun, only, over, {**only, "key": "other"}, used, *rest]).ranks[0])
    assert not one.is_training
