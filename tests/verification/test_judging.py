"""Judges on records of two ranks: what differs is found, at the first place; what does not is no finding."""

from __future__ import annotations

import pytest
from journals import Event, call, ended, findings, passed, record, step, stepped

from samestep.verification.judging import chance, communication, control, samples, states
from samestep.verification.judging.record import Record


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


def test_another_rate_is_found_with_its_ratio() -> None:
    (finding,) = findings(control, record([step(0, "g")], [step(0, "g", rates=[0.2])]))
    assert (finding.code, finding.rank, finding.factor) == ("learning-rate-differs", 1, 2.0)


def test_another_number_of_steps_counts_where_both_came_to_their_end() -> None:
    two, one = [step(0, "g"), step(1, "g"), ended()], [step(0, "g"), ended()]
    assert codes(control, record(two, one)) == [("steps-differ", "error")]
    assert codes(control, record(two, one[:1])) == []


def test_every_sample_once_is_no_finding() -> None:
    assert codes(samples, record(passed([0, 2], samples=4), passed([1, 3], samples=4))) == []


def shown(*digests: str) -> Event:
    """What a rank shows of its dataset: fewer samples where they load slowly."""
    return {"kind": "fingerprint", "key": "train.py:10#1", "samples": {str(9 * i): d for i, d in enumerate(digests)}}


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


def test_left_out_samples_are_an_error_unless_that_was_asked_for() -> None:
    assert codes(samples, record(passed([0, 2], samples=6), passed([1, 3], samples=6))) == [
        ("samples-missing", "error")
    ]
    dropped = {"drop_last": True}
    assert codes(samples, record(passed([0, 2], samples=6, **dropped), passed([1, 3], samples=6, **dropped))) == []


def test_the_same_shuffle_in_two_epochs_is_an_error() -> None:
    first = passed([2, 0], samples=4) + passed([2, 0], samples=4, number=1, window=1)
    other = passed([3, 1], samples=4) + passed([3, 1], samples=4, number=1, window=1)
    assert codes(samples, record(first, other)) == [("same-order-every-epoch", "error")]


def test_an_order_that_nobody_drew_may_repeat() -> None:
    first = passed([0, 2], samples=4) + passed([0, 2], samples=4, number=1, window=1)
    other = passed([1, 3], samples=4) + passed([1, 3], samples=4, number=1, window=1)
    assert codes(samples, record(first, other)) == []


def test_exchanged_collectives_are_found_by_their_lines() -> None:
    ranks = record([call("a.py:1"), call("a.py:2")], [call("a.py:2"), call("a.py:1")])
    assert codes(communication, ranks) == [("collective-order", "error")]


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


def scheduled() -> Event:
    return {"kind": "scheduler", "window": 0, "event": 0, "where": "train.py:31"}


def skips() -> Event:
    return {"kind": "scaler", "window": 0, "scale": 65536.0, "skipped": True, "where": "train.py:29"}


def test_a_schedule_that_steps_between_the_micro_batches_of_a_step_is_an_error() -> None:
    rank = [backward(), scheduled(), backward(), step(0, "g"), stepped(0)]
    (finding,) = findings(control, record(rank, rank))
    assert (finding.code, finding.where) == ("learning-rate-differs", "train.py:31")
    assert "after every micro-batch, 2 times for one step" in finding.cause
    again = [backward(), skips(), scheduled(), *rank]
    assert codes(control, record(again, again)) == [("learning-rate-differs", "error")]


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
    }
    (finding,) = findings(chance, record([drawn], [drawn]))
    assert (finding.code, finding.step, finding.where) == ("random-streams", 3, "/data/a|b/train.py:4")


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
