"""What differs between the states of ranks, and what is said to be the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from journals import Event, call, findings, record, step, stepped, wrap

from samestep.verification.judging import evaluation, states
from samestep.verification.judging.record import Run
from samestep.verification.report import Report
from samestep.verification.runs import Ended

OPTIMIZER: Event = {"kind": "optimizer", "number": 0, "where": "train.py:15"}


def start(**parameters: str) -> Event:
    return {"kind": "start", "parameters": parameters}


def names(*of_parameters: str, **more: Any) -> Event:
    return {"kind": "names", "optimizer": 0, "names": list(of_parameters), **more}


def alike(*more: Event) -> list[Event]:
    return [*more, step(0, "g"), stepped(0)]


def begun_with(value: str, *more: Event, **others: str) -> list[Event]:
    """A rank that begins with a value of w, and steps from there."""
    return [*more, start(**others, w=value), step(0, "g", parameters={"w": value}), stepped(0)]


@pytest.mark.parametrize(
    ("made", "where", "fix"),
    [
        ([wrap("w")], "train.py:12", "before DistributedDataParallel(model)"),
        ([], "train.py:15", "dist.broadcast"),
        ([names("w", made=[("model.py:3", "train.py:9")])], "train.py:9", "dist.broadcast"),
    ],
)
def test_other_parameters_before_the_first_step_are_found(made: list[Event], where: str, fix: str) -> None:
    first, other = (begun_with(value, *made, OPTIMIZER, v="a") for value in "bc")
    (finding,) = findings(states, record(first, first, other))
    assert (finding.code, finding.rank, finding.step, finding.tensor) == ("initial-state-differs", 2, 0, "w")
    assert finding.where == where
    assert fix in (finding.fix or "")


def test_parts_that_lie_at_other_places_are_not_compared() -> None:
    first, other, third = map(begun_with, ("0:2 a", "2:4 b", "2:4 c"))
    report = Report(ranks=2)
    states.judge(record(first, other), report)
    assert (report.findings, report.coverage["initial_state"]) == ([], "agrees")
    (finding,) = findings(states, record(first, other, third))
    assert (finding.code, finding.rank) == ("initial-state-differs", 2)


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        (wrap("a", "b"), wrap("b", "a"), "rank 1 registers b where rank 0 has a (parameter 0)"),
        (wrap("a", "b"), wrap("a", "c"), "rank 1 registers c where rank 0 has b (parameter 1)"),
        (names("a"), names("b"), None),  # an optimizer for each rank's own part
        (names("a", "b"), names("a", "b"), None),
    ],
)
def test_another_order_of_the_parameters_is_found(first: Event, other: Event, said: str | None) -> None:
    found = findings(states, record(alike(first), alike(other)))
    assert [finding.code for finding in found] == ([] if said is None else ["parameter-order-differs"])
    assert said is None or said in found[0].cause


def test_another_order_is_found_where_a_rank_makes_the_module_that_is_in_another_place() -> None:
    def rank(*order: str) -> list[Event]:
        return alike(wrap(*order, made=[(f"model.py:{one}", "train.py:9") for one in order]))

    (finding,) = findings(states, record(rank("1", "2"), rank("2", "1")))
    assert finding.where == "model.py:2"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"gradients": {"w": None}, "orphans": ["model.w"]}, "parameters that the model no longer has"),
        ({"left_out": ["head.w"], "empty_groups": 1}, "head.w get gradients and are in no optimizer"),
        ({"left_out": ["w"]}, None),  # it changes from step to step: the script's own code steps it
        ({"orphans": ["model.w"]}, None),
        ({"gradients": {"w": None}}, None),
        ({"gradients": {"w": None, "v": "g"}, "orphans": ["other.w"]}, None),  # of another model; w is not used yet
        ({"gradients": {"parameter 0": None, "v": "g"}, "orphans": ["new.w"], "left_out": ["new.w"]}, "no longer has"),
        (
            {"gradients": {"w": None, "v": "g"}, "orphans": ["h.w"], "left_out": ["h.w"]},
            "h.w get gradients and are in no",
        ),
    ],
)
def test_parameters_that_train_and_are_in_no_optimizer_are_found(more: dict[str, Any], said: str | None) -> None:
    rank = [OPTIMIZER, step(0, "g", **more), stepped(0), step(1, "g", window=2), stepped(1)]
    found = findings(states, record(rank, rank))
    assert [(one.code, one.where) for one in found] == (
        [] if said is None else [("optimizer-misses-parameters", "train.py:15")]
    )
    assert said is None or said in found[0].cause


@pytest.mark.parametrize(("alone", "severity"), [(1, "note"), (0, "error")])
def test_groups_that_one_process_leaves_empty_too_are_meant(alone: int, severity: str) -> None:
    def process(empty: int) -> list[Event]:
        return [OPTIMIZER, step(0, "g", left_out=["head.w"], empty_groups=empty), stepped(0)]

    report = Report(ranks=2)
    states.judge(record(process(1), process(1)), report, lambda: record(process(alone)))
    assert [one.severity for one in report.findings if one.code == "optimizer-misses-parameters"] == [severity]


@pytest.mark.parametrize(("held", "severity"), [(["w"], "note"), (["w", "head.w"], "error")])
def test_parameters_that_no_optimizer_of_one_process_holds_either_are_meant_to_stay(
    held: list[str], severity: str
) -> None:
    rank = [OPTIMIZER, step(0, "g", left_out=["head.w"]), stepped(0), step(1, "g", window=2), stepped(1)]
    report = Report(ranks=2)
    states.judge(record(rank, rank), report, lambda: record([names(*held)]))
    assert [one.severity for one in report.findings] == [severity]


@pytest.mark.parametrize(("gradient", "severity"), [("g", "note"), ("h", "error")])
def test_another_order_in_an_optimizer_is_wrong_where_values_differ_by_name(gradient: str, severity: str) -> None:
    ranks = [[names("w", "b"), step(0, "g"), stepped(0)], [names("b", "w"), step(0, gradient), stepped(0)]]
    found = findings(states, record(*ranks))
    assert ("parameter-order-differs", severity) in [(one.code, one.severity) for one in found]


@pytest.mark.parametrize(("value", "is_found"), [("a", False), ("b", True)])
def test_copies_are_compared_where_no_step_is_seen(value: str, *, is_found: bool) -> None:
    """An update within a backward pass, before anything is averaged."""

    def rank(*values: str) -> list[Event]:
        return [{"kind": "replicas", "where": "train.py:30", "parameters": {"w": one}} for one in values]

    found = findings(states, record(rank("p", "a"), rank("p", value)))
    assert [(one.code, one.tensor, one.where) for one in found] == (
        [("parameters-diverged", "w", "train.py:30")] if is_found else []
    )


def test_parameters_may_be_made_equal_while_the_first_batch_is_there() -> None:
    ranks = [[start(w=value), step(0, "g"), stepped(0)] for value in ("a", "b")]
    assert findings(states, record(*ranks)) == []


def test_values_that_are_written_over_what_a_rank_alone_has_stepped_are_found() -> None:
    """Each rank's optimizer holds other parameters, and somebody sends the wrong rank's."""

    def rank(own: str, before: dict[str, str], after: dict[str, str], then: dict[str, str]) -> list[Event]:
        steps = [step(0, "g", parameters=before), step(1, "g", parameters=then)]
        return [names(own), steps[0], {"kind": "stepped", "event": 0, "parameters": after}, steps[1], stepped(1)]

    before = {"v": "v0", "w": "w0"}
    first = rank("v", before, {"v": "v1", "w": "w0"}, {"v": "v1", "w": "w0"})
    ranks = record(first, rank("w", before, {"v": "v0", "w": "w1"}, {"v": "v1", "w": "w0"}))
    for then, codes in (("w1", ["parameters-diverged"]), ("w0", [])):  # one process clamps it, say
        report, alone = Report(ranks=2), rank("w", before, {"v": "v1", "w": "w1"}, {"v": "v1", "w": then})
        states.judge(ranks, report, lambda alone=alone: record(alone))
        assert [one.code for one in report.errors] == codes
    (finding,) = findings(states, ranks)
    assert (finding.code, finding.rank, finding.tensor) == ("parameters-diverged", 1, "w")
    assert "another rank's values were written over them" in finding.cause
    right = {"v": "v1", "w": "w1"}
    first = rank("v", before, {"v": "v1", "w": "w0"}, right)
    assert findings(states, record(first, rank("w", before, {"v": "v0", "w": "w1"}, right))) == []


def forward(*, bare: bool = False, synchronises: bool = True) -> Event:
    return {"kind": "forward", "window": 0, "bare": bare, "synchronises": synchronises, "where": "train.py:24"}


BACKWARD: Event = {"kind": "backward", "window": 0, "where": "train.py:25"}
NO_SYNC: Event = {"kind": "no_sync", "window": 0, "where": "train.py:23"}
PART = "world:0,1"


@pytest.mark.parametrize(
    ("events", "said", "where"),
    [
        ([wrap("w", trained=[])], "they were frozen when the model was wrapped", "train.py:12"),
        ([wrap("other")], "they belong to no DistributedDataParallel model", "train.py:30"),
        ([wrap("w"), forward(bare=True)], "the model inside the wrapper was called", "train.py:24"),
        (
            [wrap("w"), NO_SYNC, forward(synchronises=False), BACKWARD],
            "every micro-batch of the step ran under no_sync()",
            "train.py:23",
        ),
        (
            [wrap("w"), forward(), forward(synchronises=False), BACKWARD],
            "the last micro-batch of the step ran under no_sync()",
            "train.py:25",
        ),
        ([wrap("w"), BACKWARD], "no forward went through the wrapper", "train.py:25"),
        ([wrap("w"), forward(), BACKWARD], "the reducer did not reach them", "train.py:30"),
        ([call("train.py:26", "broadcast")], "nothing averages them before the step", "train.py:30"),
        ([call("train.py:26", between_two=True)], "nothing averages them before the step", "train.py:30"),
        ([wrap("w", wrapper="fully_shard", ranks=[0])], "fully_shard is given a mesh of 1 rank", "train.py:12"),
        (
            [wrap("w", wrapper="fully_shard", ranks=[0]), call("train.py:26")],
            "what the script communicates before the step does not make them equal",
            "train.py:26",
        ),
        ([call("train.py:26", group=PART)], "all_reduce runs in a group of 2 ranks, and never between", "train.py:26"),
        ([call("train.py:26")], "what the script communicates before the step does not make them equal", "train.py:26"),
    ],
)
def test_why_gradients_differ_is_told_by_what_came_before_the_step(events: list[Event], said: str, where: str) -> None:
    begun = {"kind": "begin", "size": 3}
    first, other = ([begun, *events, step(0, gradient), stepped(0, gradient)] for gradient in "gh")
    (finding,) = findings(states, record(first, first, other))
    assert (finding.code, finding.rank, finding.step) == ("gradients-not-synchronised", 2, 0)
    assert said in finding.cause
    assert finding.where == where


@pytest.mark.parametrize(("gradients", "is_found"), [(("g", "h"), False), (("g", "g"), True)])
def test_what_is_sent_behind_the_last_steps_is_not_known(gradients: tuple[str, str], *, is_found: bool) -> None:
    """A server alone steps with the sum, and sends its parameters; what it does behind the last step is not seen."""
    ranks = [
        [step(0, gradient), stepped(0), step(1, last), stepped(1, last)]
        for gradient, last in zip(gradients, "gh", strict=True)
    ]
    assert bool(findings(states, record(*ranks))) is is_found


def test_parameters_that_an_average_leaves_out_are_told() -> None:
    first, other = (
        [call("train.py:26"), step(0, "g", gradients={"v": "same", "w": value}), stepped(0, value)] for value in "gh"
    )
    (finding,) = findings(states, record(first, other))
    assert (finding.tensor, finding.where) == ("w", "train.py:26")
    assert "what averages the others leaves these out" in finding.cause


@pytest.mark.parametrize(
    ("more", "loads", "said"),
    [
        (
            {"settings": [{"weight_decay": 0.1}]},
            [],
            "rank 1 steps with weight_decay=0.1, rank 0 with weight_decay=0.0",
        ),
        ({}, [{"kind": "weights", "event": 1, "where": "train.py:40"}], "they were loaded, and the ranks have loaded"),
        ({}, [], "something changes them outside the optimizer, on some ranks only"),
    ],
)
def test_why_parameters_part_is_told(more: dict[str, Any], loads: list[Event], said: str) -> None:
    loads = [{**event, "missing": 0, "held": 1, "unexpected": 0} for event in loads]
    first = [step(0, "g"), stepped(0), step(1, "g")]
    other = [step(0, "g", **more), stepped(0), *loads, step(1, "g", "q")]
    (finding,) = findings(states, record(first, other))
    assert (finding.code, finding.rank, finding.step, finding.tensor) == ("parameters-diverged", 1, 0, "w")
    assert said in finding.cause
    assert finding.where == (loads[0]["where"] if loads else "train.py:30")


def test_ranks_that_evaluate_with_other_buffers_are_found() -> None:
    def rank(mean: str, **more: str) -> list[Event]:
        digests = {"mean": mean, **more}
        return alike({"kind": "buffers", "key": "train.py:50#1", "number": 0, "digests": digests})

    def judged(*ranks: list[Event]) -> Report:
        report = Report(ranks=2)
        evaluation.judge(record(*ranks), None, report)
        return report

    (finding,) = judged(rank("a"), rank("b")).findings
    assert (finding.code, finding.rank, finding.tensor) == ("buffers-diverged", 1, "mean")
    assert finding.where == "train.py:50"
    same = judged(rank("a"), rank("a", other="b"))
    assert (same.findings, same.coverage["buffers"]) == ([], "identical")


def test_ranks_that_use_other_values_of_an_average_are_found() -> None:
    def rank(*values: str) -> list[Event]:
        about = {"kind": "averaged", "window": 1, "where": "train.py:50"}
        return alike(*({**about, "digests": {"w": value}} for value in values))

    def judged(*ranks: list[Event]) -> Report:
        report = Report(ranks=2)
        evaluation.judge(record(*ranks), None, report)
        return report

    (finding,) = judged(rank("teacher", "a"), rank("teacher", "b")).errors
    told = (finding.code, finding.property, finding.rank, finding.step, finding.tensor, finding.where)
    assert told == ("parameters-diverged", "evaluation", 1, 0, "w", "train.py:50")
    assert judged(rank("a"), rank("a")).findings == judged(rank("a"), rank()).findings == []
    dealt = [[*rank(one), *({**event, "window": 2} for event in rank(one))] for one in ("a", "b")]
    assert judged(*dealt).findings == []  # teachers that never change, and of which each rank has others


@pytest.mark.parametrize(
    ("values", "loaded", "is_found"),
    [(("p1", "p0"), "train.py:60", True), (("p1", "p1"), "train.py:60", False), (("p1", "p0"), None, False)],
    ids=["other ones", "the same", "not loaded"],
)
def test_ranks_that_load_different_weights_before_they_evaluate_are_found(
    values: tuple[str, str], loaded: str | None, *, is_found: bool
) -> None:
    """Each keeps the best by its own part of the validation data."""
    told = [{"kind": "evaluates", "phase": "1.1", "parameters": {"w": one}, "loaded": loaded} for one in values]
    report = Report(ranks=2)
    evaluation.judge(record(*(alike(one) for one in told)), None, report)
    assert [(one.code, one.property, one.where) for one in report.errors] == (
        [("parameters-diverged", "evaluation", "train.py:60")] if is_found else []
    )


@pytest.mark.parametrize(("theirs", "is_found"), [("trained", True), ("average", False)])
def test_the_weights_that_ranks_evaluate_explain_an_inexact_evaluation(theirs: str, *, is_found: bool) -> None:
    about: Event = {"kind": "evaluates", "phase": "1.1", "loaded": None, "where": "train.py:61"}
    ranks = [alike({**about, "parameters": {"w": weights}}) for weights in ("average", theirs)]
    found = list(evaluation._weights_apart(record(*ranks)))
    assert [(one.code, one.property, one.where) for one in found] == (
        [("parameters-diverged", "evaluation", "train.py:61")] if is_found else []
    )


def test_weights_that_a_rank_makes_for_an_evaluation_are_its_own() -> None:
    """An evolution strategy perturbs them."""
    about = {"kind": "evaluates", "phase": "1.1", "loaded": "train.py:60"}
    report = Report(ranks=2)
    evaluation.judge(
        record(*(alike({**about, "parameters": {"w": one}}) for one in ("noisy", "noisier"))), None, report
    )
    assert report.errors == []


@pytest.mark.parametrize(
    ("more", "is_local"),
    [([], True), ([wrap("w")], False), ([{"kind": "weights", "event": 2, "where": "train.py:40"}], False)],
    ids=["averaged by hand", "declared copies", "loaded"],
)
def test_steps_of_each_rank_s_own_may_be_averaged_later_where_nothing_declares_copies(
    more: list[Event], *, is_local: bool
) -> None:
    def rank(name: str) -> list[Event]:
        own = [step(0, name), stepped(0, name), step(1, name, name), stepped(1, name)]
        return [*more, *own, step(2, "g"), stepped(2)]

    codes = [one.code for one in findings(states, record(rank("a"), rank("b")))]
    assert codes == ([] if is_local else ["gradients-not-synchronised"])


def held_by(*names: str, digests: str = "p", gradient: str = "g", **wrap: Any) -> list[Event]:
    """A rank, or one process, that has these parameters."""
    about = {"kind": "wrap", "wrapper": "DistributedDataParallel", "where": "train.py:12", "names": list(names), **wrap}
    values = {name: f"{digests} {name}".replace(" ", "-") for name in names}
    return [
        *([about] if wrap else []),
        {"kind": "names", "optimizer": 0, "names": list(names), "shapes": [[2, 2] for _ in names]},
        {"kind": "start", "parameters": values, "buffers": {}},
        step(0, gradient, parameters=values, gradients={name: f"{gradient}-{name}" for name in names}),
    ]


DDP: dict[str, Any] = {"ignored": []}


@pytest.mark.parametrize(
    ("ranks", "alone", "said"),
    [
        ([held_by("head", "0.w", **DDP)] * 2, held_by("head", "0.w", "1.w"), "each rank holds a part of the model"),
        ([held_by("head", "0.w"), held_by("head", "1.w")], held_by("head", "0.w", "1.w"), "each rank holds a part"),
        ([held_by("w", **DDP), held_by("w", digests="q", **DDP)], held_by("w"), None),
        (
            [held_by("w", ignored=["w"]), held_by("w", digests="q", gradient="h", ignored=["w"])],
            held_by("w"),
            None,  # nothing agrees: whether the ranks train anything together is not known
        ),
    ],
    ids=["experts beside DDP", "stages", "replicas that differ", "nothing in common"],
)
def test_what_is_no_replica_by_the_script_s_own_hand(
    ranks: list[list[Event]], alone: list[Event], said: str | None
) -> None:
    whole = Run(Ended(code=0, hung=False, failure=None, folder=Path("/nowhere")), record(alone))
    told = states.by_hand(record(*ranks), whole)
    assert (told or "").startswith(said or "")
    assert (told is None) == (said is None)


def test_stages_of_both_directions_are_no_replicas_though_each_rank_has_every_name() -> None:
    def process(down: list[str], up: list[str]) -> list[Event]:
        _, start, first = held_by(*down)
        shapes = [[[2, 2] for _ in part] for part in (down, up)]
        names = [
            {"kind": "names", "optimizer": number, "names": part, "shapes": shapes[number]}
            for number, part in enumerate((down, up))
        ]
        return [*names, start, first]

    ranks = record(process(["0.w"], ["1.w"]), process(["1.w"], ["0.w"]))
    alone = record(process(["0.w", "1.w"], ["0.w", "1.w"]))
    whole = Run(Ended(code=0, hung=False, failure=None, folder=Path("/nowhere")), alone)
    assert (states.by_hand(ranks, whole) or "").startswith("each rank holds a part")
    owners = [held_by("0.w"), held_by("1.w")]  # each of which has the other parameter, too
    for rank in owners:
        rank[-1]["parameters"] = {"0.w": "p", "1.w": "p"}
    whole = Run(Ended(code=0, hung=False, failure=None, folder=Path("/nowhere")), record(held_by("0.w", "1.w")))
    assert states.by_hand(record(*owners), whole) is None


def test_what_ddp_is_told_to_ignore_may_differ() -> None:
    def rank(own: str) -> list[Event]:
        wrap, names, start, first = held_by("head", "expert", ignored=["expert"])
        return [
            wrap,
            names,
            {**start, "parameters": {"head": "p", "expert": own}},
            {**first, "gradients": {"head": "g", "expert": own}},
        ]

    whole = Run(Ended(code=0, hung=False, failure=None, folder=Path("/nowhere")), record(held_by("head", "expert")))
    told = states.by_hand(record(rank("a"), rank("b")), whole)
    assert told is not None
    assert told.startswith("each rank has expert for itself, and")


@pytest.mark.parametrize(
    ("wrapped", "own_shape", "said"),
    [
        (["head"], [1, 2], "each rank holds a part of the model"),
        (["head", "centres"], [1, 2], None),  # DDP says that it is a copy
        (["head"], [2, 2], None),
    ],
)
def test_what_has_another_shape_in_one_process_is_a_part(
    wrapped: list[str], own_shape: list[int], said: str | None
) -> None:
    wrap, names, *events = held_by("head", "centres", **DDP)
    rank = [{**wrap, "names": wrapped}, {**names, "shapes": [[2, 2], own_shape]}, *events]
    whole = Run(Ended(code=0, hung=False, failure=None, folder=Path("/nowhere")), record(held_by("head", "centres")))
    told = states.by_hand(record(rank, rank), whole)
    assert (told or "").startswith(said or "")
    assert (told is None) == (said is None)


def test_what_ddp_is_told_to_ignore_may_come_apart_later() -> None:
    """A table of which each rank steps its own rows."""

    def rank(own: str) -> list[Event]:
        wrap, names, start, first = held_by("head", "table", ignored=["table"])
        second = {**first, "event": 1, "window": 1, "parameters": {"head": "p", "table": own}}
        return [wrap, names, start, {**first, "gradients": {"head": "g"}}, {**second, "gradients": {"head": "g"}}]

    whole = Run(Ended(code=0, hung=False, failure=None, folder=Path("/nowhere")), record(held_by("head", "table")))
    told = states.by_hand(record(rank("a"), rank("b")), whole)
    assert told is not None
    assert told.startswith("each rank has table for itself, and")


@pytest.mark.parametrize("differs", ["start", "gradients"])
def test_ranks_that_have_joined_no_process_group_are_told_so(differs: str) -> None:
    """A script for one process, run on two."""

    def rank(value: str) -> list[Event]:
        begun = value if differs == "start" else "p0"
        gradient = value if differs == "gradients" else "g"
        return [start(w=begun), step(0, gradient, in_group=False, parameters={"w": begun}), stepped(0, value)]

    (finding,) = findings(states, record(rank("a"), rank("b")))
    assert "joined no process group, so each trains a model of its own" in finding.cause
    assert 'init_process_group("gloo"); model = torch.nn.parallel.Distributed' in str(finding.fix)


def test_gradients_that_one_rank_alone_clips_are_found_at_the_line_that_clips() -> None:
    clips: Event = {"kind": "clipping", "window": 0, "where": "train.py:28"}
    mine, theirs = [wrap("w"), clips, step(0, "a"), stepped(0)], [wrap("w"), step(0, "b"), stepped(0, "q")]
    (finding,) = findings(states, record(mine, theirs))
    assert (finding.where, finding.fix) == ("train.py:28", "clip on every rank")
    assert finding.cause.endswith("rank 0 clips them and the other does not")


@pytest.mark.parametrize(("rows", "said"), [(4, "each rank holds a part of the model"), (8, None)])
def test_what_a_script_cuts_beside_a_dtensor_is_a_part(rows: int, said: str | None) -> None:
    """A head over a rank's own classes, beside layers that torch's tensor parallelism cuts."""

    def process(shape: list[int], place: str) -> list[Event]:
        shapes = names("up", "head", shapes=[[8, 4], shape])
        return [shapes, start(up=f"{place}u", head="h"), step(0, "g", parameters={"up": f"{place}u", "head": "h"})]

    ranks = record(process([rows, 2], "[0, 0]+[4, 4] "), process([rows, 2], "[4, 0]+[4, 4] "))
    whole = Run(Ended(code=0, hung=False, failure=None, folder=Path("/nowhere")), record(process([8, 2], "")))
    told = states.by_hand(ranks, whole)
    assert (told or "").startswith(said or "")
    assert (told is None) == (said is None)


@pytest.mark.parametrize(("second", "is_told"), [(2, True), (1, False)])
def test_ranks_that_train_models_by_themselves_in_turn_are_not_compared(second: int, *, is_told: bool) -> None:
    """Each rank trains its own clients, of which one has more steps than the other, before all step together."""

    def rank(*optimizers: int) -> list[Event]:
        steps = [step(number, "g", optimizer=one) for number, one in enumerate(optimizers)]
        return [*steps, {**call("train.py:40"), "window": len(steps) - 1}]

    told = states.foreign_to(record(rank(1, 1, 0), rank(1, second, 0)))
    assert (told is not None) is is_told
