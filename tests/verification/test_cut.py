"""Models of which each rank holds a part that the script cuts, held against one process at its own pace."""

from __future__ import annotations

import pytest
from journals import Event, record, step

from samestep.verification.findings import AGREES
from samestep.verification.judging.cut import Parts
from samestep.verification.judging.record import Record
from samestep.verification.report import Report

NAMES = "abcdef"


def run(
    names: str, steps: int = 8, *, begun: str = "v", times: dict[str, float] | None = None, rate: float = 0.1
) -> list[Event]:
    """A process that holds these parameters; `times` makes the norms of some gradients larger."""
    norms = [{name: (times or {}).get(name, 1.0) * (number + 1) for name in names} for number in range(steps)]
    start: Event = {"kind": "start", "parameters": {name: f"{begun}{name}" for name in names}}
    return [start, *(step(number, "g", norms=one, rates=[rate], parameters={}) for number, one in enumerate(norms))]


def parts(*ranks: list[Event], alone: list[Event]) -> tuple[Record, Record]:
    return record(*ranks), record(alone)


@pytest.mark.parametrize(
    ("ranks", "alone"),
    [
        ([run("abc"), run("def", times={"e": 1.1})], run(NAMES)),
        ([run("abc"), run("def")], run("abcdefg")),  # a part is on no rank
        ([run("abc"), run("def")], run(NAMES, begun="w")),
        ([run("abc", 4), run("def", 4)], run(NAMES, 4)),  # few steps
        ([run("abc"), run("def", rate=0.2)], run(NAMES)),
        ([run("abc"), run("def")], run(NAMES, 16)),  # one process goes on
    ],
    ids=["another norm", "missing", "another start", "few steps", "another rate", "more steps"],
)
def test_parts_are_not_compared_where_one_process_has_others(ranks: list[list[Event]], alone: list[Event]) -> None:
    report = Report(ranks=2)
    assert not Parts(*parts(*ranks, alone=alone)).cover(report)
    assert report.coverage == {}


def test_parts_that_begin_and_go_on_as_in_one_process_are_the_same() -> None:
    report = Report(ranks=2)
    assert Parts(*parts(run("abc"), run("def"), alone=run(NAMES))).cover(report)
    assert {*report.coverage.values()} == {AGREES}


@pytest.mark.parametrize(
    ("times", "rate", "found"),
    [
        ({"f": 0.6}, 0.1, [("gradient-differs", 1, "f", 0.6)]),
        ({"f": 0.6}, 0.05, []),  # its rate may make up for that
        ({"f": 0.6, "a": 2.0, "b": 2.0, "c": 2.0}, 0.1, []),  # other samples
        ({}, 0.1, []),
    ],
)
def test_a_gradient_of_a_shared_parameter_that_is_not_added_up_is_found(
    times: dict[str, float], rate: float, found: list[tuple[str, int, str, float]]
) -> None:
    report = Report(ranks=2)
    ranks = [run("abc", times=times), run("def", times=times, rate=rate)]
    Parts(*parts(*ranks, alone=run(NAMES))).find_apart(report)
    assert [(one.code, one.rank, one.tensor, one.factor) for one in report.errors] == found


def test_gradients_of_zero_do_not_show_that_the_samples_are_the_same() -> None:
    """Beside matrices that begin with zeros, as in LoRA."""
    zeros, report = dict.fromkeys("abcde", 0.0), Report(ranks=2)
    ranks = [run("abc", 1, times=zeros), run("def", 1, times=zeros | {"f": 0.6})]
    Parts(*parts(*ranks, alone=run(NAMES, 1, times=zeros))).find_apart(report)
    assert report.errors == []


@pytest.mark.parametrize(("size", "is_same"), [(1e-9, True), (1e-3, False)])
def test_a_gradient_that_is_rounding_beside_the_whole_one_may_have_any_norm(size: float, *, is_same: bool) -> None:
    """A bias before a softmax over the same dim has no gradient but rounding."""
    report = Report(ranks=2)
    both = parts(run("abc", times={"a": 2 * size}), run("def"), alone=run(NAMES, times={"a": size}))
    assert Parts(*both).cover(report) is is_same
    Parts(*both).find_apart(report)
    assert [one.tensor for one in report.errors] == ([] if is_same else ["a"])


def test_what_no_optimizer_of_torch_steps_is_not_called_the_same() -> None:
    """A table that the script's own code steps has no norm in the record of a step, as a sparse gradient has none."""
    ranks = [run("abc"), run("def")]
    for one in (*ranks, whole := run(NAMES)):
        one[1]["parameters"] = {"table": "vtable"}
    assert not Parts(*parts(*ranks, alone=whole)).cover(Report(ranks=2))


def test_a_second_optimizer_s_parameters_are_compared() -> None:
    def second(events: list[Event]) -> list[Event]:
        start = {**events[0]["parameters"], **{f"optimizer 1: {name}": f"w{name}" for name in "abc"}}
        norms = {"a": 1.0, "b": 1.0, "c": 1.0}
        more = [{**one, "optimizer": 1, "norms": norms} for one in events[1:]]
        return [
            {"kind": "start", "parameters": start},
            *(step for pair in zip(events[1:], more, strict=True) for step in pair),
        ]

    ranks, whole = [second(run("abc")), second(run("def"))], second(run(NAMES))
    assert Parts(*parts(*ranks, alone=whole)).cover(Report(ranks=2))
    ranks[1][2]["norms"] = {"a": 1.0, "b": 1.0, "c": 2.0}
    assert not Parts(*parts(*ranks, alone=whole)).cover(Report(ranks=2))


def test_parameters_that_begin_alike_are_not_told_apart() -> None:
    """The weights of all norms begin with ones: the other parameters decide."""
    alike: Event = {"kind": "start", "parameters": dict.fromkeys("xy", "ones")}
    alone = [{"kind": "start", "parameters": {**run(NAMES)[0]["parameters"], **alike["parameters"]}}, *run(NAMES)[1:]]
    first = [{"kind": "start", "parameters": {**run("abc")[0]["parameters"], "x": "ones"}}, *run("abc")[1:]]
    assert Parts(*parts(first, run("def"), alone=alone)).cover(Report(ranks=2))
