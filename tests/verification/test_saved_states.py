"""Whether a training that was saved and loaded goes on as it was."""

from __future__ import annotations

from typing import Any

import pytest
from journals import Event, ended, findings, passed, record, step, stepped

from samestep.verification.findings import NOT_REACHED
from samestep.verification.judging import storage
from samestep.verification.judging.resumed import Resumed, _elsewhere
from samestep.verification.judging.resumed import judge as judge_resumed
from samestep.verification.report import Report

STATE: dict[str, Any] = {
    "parameters": {"w": "p1"},
    "buffers": {"mean": "m1"},
    "optimizers": [{"number": 0, "state": "momentum 1", "rates": [0.1]}],
    "averaged": {"model 1: w": "average"},
}


def save(digests: dict[str, str], **more: Any) -> Event:
    about = {"path": "best.pt", "digests": digests, "event": 1, "where": "train.py:40", "state": STATE}
    return {"kind": "save", **about, **more}


def load(digests: dict[str, str]) -> Event:
    return {"kind": "load", "path": "best.pt", "digests": digests, "event": 1, "where": "train.py:45"}


def resumed(**more: Any) -> Event:
    optimizers = [{"number": 1, "state": "momentum 1", "rates": [0.1]}]
    return {
        "kind": "resumed",
        "path": "best.pt",
        "event": 1,
        "buffers": {"mean": "m1"},
        "optimizers": optimizers,
        "averaged": {"model 1: w": "average", "model 2: w": "average"},
    } | more


def judged(*events: Event) -> Report:
    report = Report(ranks=1)
    begun: Event = {"kind": "start", "parameters": {"w": "p0"}, "buffers": {"mean": "m0", "mask": "constant"}}
    storage.judge(record([begun, step(0, "g", rates=[0.2]), stepped(0), *events, step(1, "h"), stepped(1)]), report)
    return report


WHOLE = {"w": "p1", "mean": "m1"}


def test_a_state_that_comes_back_whole_is_proved() -> None:
    report = judged(save(WHOLE), load(WHOLE), resumed())
    assert (report.findings, report.coverage["checkpoint"]) == ([], "identical")


@pytest.mark.parametrize(
    ("state", "after", "lost"),
    [
        ({}, {"buffers": {"mean": "m0"}}, "and mean did not come back"),
        (
            {},
            {"optimizers": [{"number": 1, "state": None, "rates": [0.1]}]},
            "and the optimizer's state did not come back",
        ),
        (
            {},
            {"optimizers": [{"number": 1, "state": "momentum 1", "rates": [0.2]}]},
            "and the learning rate ([0.1] is now [0.2]) did not come back",
        ),
    ],
)
def test_what_does_not_come_back_is_named(state: dict[str, Any], after: dict[str, Any], lost: str) -> None:
    (error,) = judged(save(WHOLE, state=STATE | state), load(WHOLE), resumed(**after)).errors
    assert (error.code, error.rank, error.step, error.where) == ("checkpoint-inexact", 0, 1, "train.py:45")
    assert lost in error.cause


@pytest.mark.parametrize(
    "events",
    [
        [save(WHOLE), load({"w": "of another run"}), resumed(buffers={"mean": "other"})],
        [save(WHOLE, state=STATE | {"parameters": {}, "buffers": {}}), load(WHOLE), resumed(buffers={"mean": "x"})],
        [save(WHOLE, event=2), load(WHOLE), resumed(buffers={"mean": "other"})],
    ],
    ids=["another file", "saved before there was an optimizer", "saved later"],
)
def test_what_was_not_loaded_from_there_is_not_held_against_it(events: list[Event]) -> None:
    assert judged(*events).findings == []


def test_optimizers_of_several_tasks_that_begin_with_one_file_are_new() -> None:
    new = resumed(optimizers=[{"number": 1, "state": None, "rates": [0.1]}])
    assert len(judged(save(WHOLE), load(WHOLE), new).errors) == 1
    assert judged(save(WHOLE), load(WHOLE), new, {**load(WHOLE), "event": 2}).errors == []
    other = {**load(WHOLE | {"w": "p2"}), "event": 2}  # what has been saved since then
    assert len(judged(save(WHOLE), load(WHOLE), new, other).errors) == 1


@pytest.mark.parametrize(("number", "rates"), [(1, [0.01]), (0, [0.1])], ids=["other rate", "there at the save"])
def test_an_optimizer_that_goes_on_from_no_save_is_not_held_against_one(number: int, rates: list[float]) -> None:
    """The best weights are fine-tuned, with a new optimizer or the one that has gone on."""
    optimizers = [{"number": number, "state": "other", "rates": rates}]
    assert judged(save(WHOLE), load(WHOLE), resumed(optimizers=optimizers)).findings == []


@pytest.mark.parametrize(
    ("before", "after", "is_lost"),
    [
        ("average", "average", False),
        ("average", "p1", True),  # a copy of the trained parameters
        ("average", "another", False),  # of some other model
        ("p1", "p1", False),  # it was no average yet
        ("p0", "p1", False),  # nor was the model of an earlier part of the training
    ],
)
def test_an_average_of_the_weights_must_not_begin_again(before: str, after: str, *, is_lost: bool) -> None:
    known = {"model 1: w": before}
    now = {"averaged": known | {"model 2: w": after}}
    report = Report(ranks=1)
    events = [save(WHOLE, state=STATE | {"averaged": known}), load(WHOLE), resumed(**now)]
    going_on = [step(1, "h", parameters={"w": "p1"}), stepped(1)]
    begun = [step(0, "g"), {**stepped(0), "parameters": {"w": "p0"}}]
    storage.judge(record([*begun, *events, *going_on]), report)
    assert ["the average of the parameters (w)" in one.cause for one in report.errors] == ([True] if is_lost else [])


@pytest.mark.parametrize(("names", "is_lost"), [(["v"], False), (["w"], True), ([], True)])
def test_a_rank_whose_optimizer_holds_another_part_is_not_held_against_the_saver_s(
    names: list[str], *, is_lost: bool
) -> None:
    """ZeroRedundancyOptimizer consolidates on rank 0, and every rank loads its own part."""
    before = {"optimizers": [{"number": 0, "state": "momentum 1", "rates": [0.1], "names": ["w"]}]}
    after = [{"number": 1, "state": "another" if names else None, "rates": [0.1], "names": names}]
    report = judged(save(WHOLE, state=STATE | before), load(WHOLE), resumed(optimizers=after))
    assert ["and the optimizer's state did not" in one.cause for one in report.errors] == ([True] if is_lost else [])


@pytest.mark.parametrize(("placed", "is_lost"), [(["(Replicate(),)"], True), (["(Partial(sum),)"], False)])
def test_a_state_that_comes_back_placed_otherwise_is_no_other_state(placed: list[str], *, is_lost: bool) -> None:
    """What a rank has of partial sums is not what it has of the whole."""
    before = {"optimizers": [{"number": 0, "state": ["a"], "placed": placed, "rates": [0.1], "names": ["w"]}]}
    after = [{"number": 1, "state": ["b"], "placed": ["(Replicate(),)"], "rates": [0.1], "names": ["w"]}]
    report = judged(save(WHOLE, state=STATE | before), load(WHOLE), resumed(optimizers=after))
    assert ["and the optimizer's state did not" in one.cause for one in report.errors] == [True] * is_lost


def test_where_nothing_is_saved_or_loaded_nothing_is_said() -> None:
    assert judged(ended()).coverage["checkpoint"] == "not checked: nothing was saved"
    assert judged({**ended(), "enough": True}).coverage["checkpoint"] == NOT_REACHED
    assert judged(save(WHOLE)).coverage["checkpoint"] == "not checked: nothing that was saved was loaded again"


def test_parameters_that_are_saved_without_their_buffers_are_found() -> None:
    (error,) = judged(save({"w": "p1"})).errors
    assert (error.code, error.where) == ("checkpoint-inexact", "train.py:40")
    assert "all parameters are saved, and no buffer (mean)" in error.cause
    whole = save(WHOLE, event=2, path="last.pt")
    assert judged(save({"w": "p1"}), whole).errors == []  # a snapshot, beside a whole state
    assert len(judged(save({"w": "p1"}), whole, load({"w": "p1"})).errors) == 1  # which is loaded
    assert judged(save({"v": "another model's"})).findings == []
    assert judged(save({"w": "p1"}), save({"mean": "m1"}, path="statistics.pt")).findings == []
    assert judged(save({"w": "p1"}, state=STATE | {"buffers": {"mask": "constant"}})).findings == []


@pytest.mark.parametrize(("shape", "is_found"), [([4], True), ([5], False)], ids=["lost", "another model's"])
def test_parameters_that_do_not_come_back_are_named(shape: list[int], *, is_found: bool) -> None:
    report, going_on = Report(ranks=1), [step(1, "h", optimizer=1, parameters={"w": "drawn anew"}), stepped(1)]
    names = [
        {"kind": "names", "optimizer": number, "names": ["w"], "shapes": [one]}
        for number, one in ((0, [4]), (1, shape))
    ]
    events = [save(WHOLE), load(WHOLE), resumed()]
    storage.judge(record([*names, step(0, "g"), stepped(0), *events, *going_on]), report)
    assert ["and the parameters did not come back" in one.cause for one in report.errors] == [True] * is_found


@pytest.mark.parametrize(("now", "is_found"), [("p", False), ("q", True)])
def test_parameters_that_are_saved_when_their_optimizer_is_gone_are_compared(now: str, *, is_found: bool) -> None:
    events = [step(0, "g"), stepped(0), save(WHOLE, state=STATE | {"parameters": {}}), load(WHOLE), resumed()]
    report = Report(ranks=1)
    storage.judge(record([*events, step(1, "h", now, optimizer=1)]), report)
    assert [error.code for error in report.errors] == ["checkpoint-inexact"] * is_found
    assert report.coverage["checkpoint"] == ("differs" if is_found else "identical")


def test_parts_of_one_rank_that_all_ranks_load_are_named_where_they_are_saved() -> None:
    held = {"w": "first", "mean": "m1"}

    def rank(place: str, mine: str, *saves: Event, now: str) -> list[Event]:
        after = {**stepped(0), "parameters": {"w": f"{place} {mine}"}}
        going_on = step(1, "h", optimizer=1, parameters={"w": f"{place} {now}"})
        return [step(0, "g"), after, *saves, load(held), resumed(), going_on]

    saved = save(held, state=STATE | {"parameters": {}})
    ranks = record(rank("[0]+[4]", "first", saved, now="first"), rank("[4]+[4]", "second", now="first"))
    report = Report(ranks=2)
    storage.judge(ranks, report)
    (error,) = report.errors
    assert (error.code, error.rank, error.where) == ("checkpoint-inexact", 1, "train.py:40")
    assert error.cause.startswith("the file has the parts of rank 0 alone, and rank 1 goes on with them")


def test_a_file_that_another_model_is_evaluated_with_is_no_resume() -> None:
    """The best weights are loaded for a test while the training goes on."""
    digests = {"w": "p0", "mean": "m0"}
    state = STATE | {"parameters": {"w": "p0"}, "buffers": {"mean": "m0"}}
    events = [save(digests, state=state), load(digests), resumed(buffers={"mean": "m1"})]
    assert judged(*events).findings == []


def test_a_buffer_that_the_script_sets_behind_the_load_is_not_lost() -> None:
    """The temperature of an epoch, say: it has neither the value of the save nor that of the start."""
    assert judged(save(WHOLE), load(WHOLE), resumed(buffers={"mean": "set anew"})).findings == []


def test_of_several_files_that_are_loaded_the_training_goes_on_with_one() -> None:
    best = {"w": "p0", "mean": "m0"}
    of_best = {"path": "best.pt", "state": STATE | {"parameters": {"w": "p0"}, "buffers": {"mean": "m0"}}, "event": 0}
    loads = [load(WHOLE) | {"path": "last.pt"}, load(best)]
    saves = [save(best, **of_best), save(WHOLE, path="last.pt")]
    assert judged(*saves, *loads, resumed()).findings == []
    assert judged(*saves, *loads, resumed(buffers={"mean": "m0"})).errors


def test_a_file_without_anything_of_the_training_is_no_checkpoint() -> None:
    """Indices of the samples that were labelled, say."""
    report = judged(save({"": "indices"}), load({"": "indices"}), resumed(buffers={"mean": "m0"}))
    assert report.findings == []
    assert report.coverage["checkpoint"] != "identical"


def test_rates_are_compared_with_those_of_the_save_unless_others_are_known() -> None:
    events = [save(WHOLE), load(WHOLE), resumed(optimizers=[{"number": 1, "state": "momentum 1", "rates": [0.2]}])]
    ranks = record([step(0, "g", rates=[0.2]), stepped(0), *events, step(1, "h"), stepped(1)])
    for compares, codes in ((True, ["checkpoint-inexact"]), (False, [])):
        report = Report(ranks=1)
        storage.judge(ranks, report, compares_rates=compares)
        assert [one.code for one in report.errors] == codes


@pytest.mark.parametrize("into", ["into_others", "into_trained"])
def test_what_was_loaded_into_another_or_a_trained_model_need_not_come_back(into: str) -> None:
    """A student begins anew, with the teacher's names and shapes; a trained model goes back to its best weights."""
    for is_so, codes in ((True, []), (False, ["checkpoint-inexact"])):
        report = judged(save(WHOLE), load(WHOLE), resumed(buffers={"mean": "m0"}, **{into: is_so}))
        assert [one.code for one in report.errors] == codes


@pytest.mark.parametrize(
    ("digests", "is_found"),
    [({"conv": "p1"}, False), ({"encoder.conv": "p1"}, True)],
    ids=["the encoder", "the model"],
)
def test_buffers_beside_the_part_that_is_saved_are_none_of_it(digests: dict[str, str], *, is_found: bool) -> None:
    """The keys of a memory queue, around the encoder."""
    state = STATE | {"parameters": {"encoder.conv": "p1"}, "buffers": {"queue": "m1"}}
    assert bool(judged(save(digests, state=state)).errors) is is_found


@pytest.mark.parametrize(
    ("missing", "unexpected", "is_found"), [(2, 2, True), (1, 2, False), (2, 0, False), (0, 0, False)]
)
def test_weights_none_of_whose_names_the_model_knows_are_found(
    missing: int, unexpected: int, *, is_found: bool
) -> None:
    event = {"kind": "weights", "event": 1, "missing": missing, "held": 2, "unexpected": unexpected, "where": "a.py:3"}
    errors = judged(event).errors
    assert [(one.code, one.where) for one in errors] == ([("checkpoint-inexact", "a.py:3")] if is_found else [])
    assert judged(event, {**event, "missing": 0, "unexpected": 0}).errors == []  # then with the right names


@pytest.mark.parametrize(
    ("then", "code"),
    [
        ([0, 1], "samples-repeated"),
        ([2, 3], None),
        ([0, None, 2, None, 4], "samples-missing"),
        ([0, None, 1, None, 2], None),
        ([0, None, 1], "samples-repeated"),
    ],
    ids=["begins again", "goes on", "skips three of two", "skips what was used", "skips one of two"],
)
def test_a_pass_that_was_under_way_goes_on_behind_a_load_with_what_was_not_used(
    then: list[int | None], code: str | None
) -> None:
    """Batches 0 and 1 were used before the save; None stands behind a batch that no backward pass uses."""
    about, batch, backward, *_ = passed([0, 1], samples=16)

    def trains(order: list[int | None], number: int) -> list[Event]:
        events: list[Event] = [{**about, "number": number, "key": f"train.py:10#{number}"}]
        for place, index in enumerate(order):
            if index is not None:
                name = {"number": number, "key": f"train.py:10#{number}"}
                events.append({**batch, **name, "index": place, "indices": [2 * index, 2 * index + 1]})
                events += [backward] if order[place + 1 : place + 2] != [None] else []
        return events

    under_way = [*trains([0, 1], 1), save(WHOLE, state=None), load(WHOLE)]
    found = [*judge_resumed(record([*under_way, *trains(then, 2)]))]
    assert [(one.code, one.where) for one in found] == ([(code, "train.py:20")] if code else [])


@pytest.mark.parametrize(("behind", "code"), [("ef", None), ("gh", "samples-missing"), ("ab", "samples-repeated")])
def test_a_stream_goes_on_behind_a_load_as_in_one_process(behind: str, code: str | None) -> None:
    def batches(*rows: str) -> list[Event]:
        about = {"kind": "batch", "training": True, "indices": None, "key": "train.py:52#1", "number": 0}
        return [{**about, "window": i, "rows": [*one]} for i, one in enumerate(rows)]

    steps = [one for i in range(3) for one in (step(i, "g"), stepped(i))]
    going_on = resumed(event=2)
    ranks = [[*batches("a", "c", behind[0]), going_on, *steps], [*batches("b", "d", behind[1]), going_on, *steps]]
    found = list(judge_resumed(record(*ranks), lambda: record([*batches("ab", "cd", "ef"), *steps])))
    assert [one.code for one in found] == ([] if code is None else [code])


@pytest.mark.parametrize(("behind", "code"), [("ef", None), ("bc", "samples-repeated")])
def test_a_sampler_that_begins_behind_what_was_used_goes_on_as_in_one_process(behind: str, code: str | None) -> None:
    """It skips by itself, and its indices do not tell whether in the unit in which they were counted."""

    def batches(*rows: str) -> list[Event]:
        events: list[Event] = []
        for window, one in enumerate(rows):
            number = int(window == 2)
            name = {"key": f"train.py:10#{number}", "number": number}
            about, batch, backward, *_ = passed([ord(row) for row in one], samples=8, window=window, **name)
            events += [about] if window != 1 else []
            events += [save(WHOLE, state=None), load(WHOLE)] if window == 2 else []
            events += [{**batch, **name, "rows": [*one], "window": window}, {**backward, "window": window}]
            events += [resumed(event=2)] if window == 2 else []
        return events

    steps = [one for i in range(3) for one in (step(i, "g"), stepped(i))]
    ranks = [[*batches(*rows), *steps] for rows in (("a", "c", behind[0]), ("b", "d", behind[1]))]
    found = list(judge_resumed(record(*ranks), lambda: record([*batches("ab", "cd", "ef"), *steps])))
    assert [one.code for one in found] == ([] if code is None else [code])


@pytest.mark.parametrize(("length", "is_found"), [(2, False), (4, True)])
def test_a_pass_is_over_with_its_last_batch(length: int, *, is_found: bool) -> None:
    """A state is saved in the body of the loop; without a shuffle, the next epoch begins with the same samples."""

    def trains(number: int) -> list[Event]:
        about, batch, backward, *_ = passed([0], samples=4, number=number, length=length)
        batches = ({**batch, "index": place, "indices": [place]} for place in range(2))
        return [about, *(event for one in batches for event in (one, backward))]

    found = [*judge_resumed(record([*trains(0), save(WHOLE, state=None), load(WHOLE), *trains(1)]))]
    assert [one.code for one in found] == ["samples-repeated"] * is_found


def test_behind_a_save_between_two_epochs_the_whole_next_one_is_used() -> None:
    first = passed([0, 1], samples=2)
    again = passed([1, 0], samples=2, number=1, window=1)
    assert [*judge_resumed(record([*first, save(WHOLE, state=None), load(WHOLE), *again]))] == []


@pytest.mark.parametrize(
    ("places", "digests", "is_found"),
    [
        (["[0, 0]+[2, 3] a", "[2, 0]+[2, 3] b"], "xy", True),
        (["[0, 0]+[2, 3] a", "[2, 0]+[2, 3] b"], "xx", False),  # alike on all ranks
        (["[0, 0]+[4, 3] a", "[4, 0]+[4, 3] b"], "xy", False),  # no part: statistics of each rank's samples, say
        (["a", "a"], "xy", False),  # nothing is cut
    ],
)
def test_parts_that_are_saved_together_as_plain_tensors_are_found(
    places: list[str], digests: str, *, is_found: bool
) -> None:
    ranks: list[list[Event]] = [
        [
            {"kind": "start", "parameters": {"w": place}, "buffers": {}},
            {"kind": "save_together", "where": "train.py:9", "plain": {"average.w": [digest, [2, 3]]}},
        ]
        for place, digest in zip(places, digests, strict=True)
    ]
    found = findings(storage, record(*ranks))
    assert [(one.code, one.tensor, one.where) for one in found] == [
        ("checkpoint-inexact", "average.w", "train.py:9")
    ] * is_found


@pytest.mark.parametrize(
    ("rows", "is_chosen", "is_found"), [("cd", True, False), ("ab", True, True), ("cd", False, True)]
)
def test_a_subset_of_the_samples_that_are_left_begins_at_0_again(rows: str, *, is_chosen: bool, is_found: bool) -> None:
    def batch(number: int, rows: str) -> Event:
        return {"key": "train.py:10#1", "number": number, "indices": [0, 1], "rows": [*rows]}

    chosen: Event = {"kind": "chosen", "key": "train.py:10#1", "number": 1}
    one = Resumed(used=[batch(0, "ab")], skipped=[], trained=batch(1, rows), where="train.py:20")
    found = _elsewhere(record([chosen] * is_chosen).ranks[0], one)
    assert (found is not None) == is_found


def test_parts_that_ranks_hold_for_themselves_come_back_to_each() -> None:
    """An optimizer divided by hand: rank 0 saves the whole, and each rank cuts its own part out of it."""
    saver, other = record([step(0, "g"), stepped(0, "a")], [step(0, "g"), stepped(0, "b")]).ranks
    save: Event = {"event": 1, "digests": {}, "state": {"parameters": {"w": "a1"}, "optimizers": [], "buffers": {}}}
    states = [storage._state_of(rank, saver, save) for rank in (saver, other)]
    assert [None if one is None else one["parameters"] for one in states] == [{"w": "a1"}, {"w": "b1"}]
    assert storage._state_of(other, saver, save, is_handed_over=True) == save["state"]  # a member of a population


@pytest.mark.parametrize(("numbers", "is_found"), [(3, False), (1, True)])
def test_parts_of_one_state_may_be_saved_at_several_lines(numbers: int, *, is_found: bool) -> None:
    """Rank 0 has the model, too, in its file."""

    def saved(where: str, count: int) -> Event:
        own = {"w": count} if count else {}
        return save({}, where=where, window=1, numbers=count + 4 * (where == "train.py:40"), own_state=own)

    ranks = record([saved("train.py:40", 3)], [saved("train.py:42", numbers)])
    report = Report(ranks=2)
    storage.judge_saved(ranks, record([saved("train.py:40", 6)]), report)
    assert bool(report.errors) is is_found


@pytest.mark.parametrize(
    ("loaded", "digests", "found"),
    [
        (("adam-0.pt", "adam-0.pt"), ("a", "b"), [1]),
        (("adam-0.pt", "adam-1.pt"), ("a", "b"), []),
        (("adam-0.pt", "adam-0.pt"), ("a", "a"), []),  # what all ranks have alike
        (("other.pt", "adam-0.pt"), ("a", "b"), []),  # handed over: rank 0 does not go on from it
    ],
)
def test_a_rank_that_loads_the_file_of_another_is_found(
    loaded: tuple[str, str], digests: tuple[str, str], found: list[int]
) -> None:
    ranks = [
        [save({"m": digests[rank]}, path=f"adam-{rank}.pt"), {**load({"m": "any"}), "path": loaded[rank]}]
        for rank in range(2)
    ]
    report = Report(ranks=2)
    storage.judge(record(*ranks), report)
    wanted = [one for one in report.findings if "saved of its own part" in one.cause]
    assert [(one.rank, one.where) for one in wanted] == [(rank, "train.py:45") for rank in found]


@pytest.mark.parametrize(
    ("parameters", "states", "found"),
    [
        (("p0", "p1"), ("m0", "m0"), [1]),
        (("p0", "p1"), ("m0", "m1"), []),
        (("p", "p"), ("m0", "m0"), []),  # replicas
        (("p0", "p1"), ("", ""), []),  # SGD has none
    ],
)
def test_one_state_for_the_parts_of_all_ranks_is_found(
    parameters: tuple[str, str], states: tuple[str, str], found: list[int]
) -> None:
    def rank(number: int) -> list[Event]:
        optimizers = [{"number": 0, "state": [states[number]] if states[number] else [], "rates": [0.1]}]
        about = {"path": "best.pt", "event": 1, "buffers": {}, "averaged": {}, "optimizers": optimizers}
        took = [step(0, "g"), stepped(0), load({"m": states[number]}), {"kind": "resumed", **about}]
        return [*took, {**step(1, "g"), "parameters": {"w": parameters[number]}}, stepped(1)]

    report = Report(ranks=2)
    storage.judge(record(rank(0), rank(1)), report)
    wanted = [one for one in report.findings if "holds other parameters" in one.cause]
    assert [(one.rank, one.step, one.where) for one in wanted] == [(each, 1, "train.py:45") for each in found]
