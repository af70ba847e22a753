"""What gradients are that are not those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from journals import Event, ended, passed, record, step, stepped, trained, wrap
from torch import nn

from samestep.verification import numerics
from samestep.verification.findings import Finding
from samestep.verification.journal import value_path
from samestep.verification.judging import average, explanations, moved, windows
from samestep.verification.judging.explanations import CARRIED
from samestep.verification.judging.in_step import InStep
from samestep.verification.judging.others import Others
from samestep.verification.judging.record import Rank, Record, Run
from samestep.verification.judging.reference import Comparison
from samestep.verification.recording.recorder import local_norms_in, unsynchronised_in
from samestep.verification.report import Report
from samestep.verification.runs import Ended

ONE, OTHER = torch.tensor([1.0, 2.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 3.0, -1.0])  # of each rank's samples
MEAN = (ONE + OTHER) / 2
APART = torch.tensor([5.0, -1.0, 1.0, 7.0])  # no combination of these


def two_ranks(folder: Path, gradients: Sequence[torch.Tensor], more: Sequence[Event] = (), **of_steps: Any) -> Record:
    first = trained(folder, gradients, more, **of_steps).record.ranks[0]
    return Record(folder, [first, Rank(1, [{**event, "kept": None} for event in first.events])])


def judged(
    folder: Path,
    ranks: Sequence[torch.Tensor],
    alone: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor] = (ONE, OTHER),
    at_step: Sequence[torch.Tensor] = (),
    more: Sequence[Event] = (),
    twice: Sequence[torch.Tensor] = (),
    of_alone: Sequence[Event] = (),
    **of_steps: Any,
) -> Report:
    def of_ranks(kind: str, gradients: Sequence[torch.Tensor]) -> list[Run]:
        return [trained(folder / f"{kind} {i}", [one] * len(ranks)) for i, one in enumerate(gradients)]

    record = two_ranks(folder / "ranks", ranks, more, **of_steps)
    others = Others(
        lambda: trained(folder / "again", alone),
        lambda: of_ranks("part", parts),
        at_step=lambda _: of_ranks("at step", at_step),
        twice=lambda: of_ranks("twice", twice),
    )
    report = Report(ranks=2)
    Comparison(record, trained(folder / "alone", alone, of_alone), others).judge(report)
    return report


@pytest.mark.parametrize(
    ("factor", "micro", "said"),
    [
        (0.5, 1, "1/2, the number of ranks: a sum is averaged"),
        (2.0, 1, "2, the number of ranks: the loss, or the gradient, is multiplied by it"),
        (0.25, 4, "1/4, the number of micro-batches: it is divided by it twice"),
        (4.0, 4, "4, the number of micro-batches: it is not divided by it"),
        (4.0, 1, "a constant factor"),
    ],
)
def test_a_factor_is_told_with_what_it_means(tmp_path: Path, factor: float, micro: int, said: str) -> None:
    (error,) = judged(tmp_path, [factor * MEAN], [MEAN], micro=micro).errors
    assert (error.code, error.step, error.where) == ("gradient-scale", 0, "train.py:25")
    assert error.factor == pytest.approx(factor, rel=1e-4)
    assert said in error.cause


def test_a_gradient_that_is_right_is_excepted_from_a_factor_of_the_others() -> None:
    alone = {"w": MEAN, "scale": torch.tensor([0.1]), "unused": None, "zero": torch.zeros(2)}
    recorded = {"w": MEAN / 2, "scale": torch.tensor([0.1]), "unused": None, "zero": torch.zeros(2)}
    assert explanations._right(recorded, alone, 0.5) == ["scale"]


@pytest.mark.parametrize(
    ("ranks", "alone", "severity", "said"),
    [
        (MEAN, 0.75 * ONE + 0.25 * OTHER, "error", "one process weighs them 0.750, 0.250, the ranks 0.500 each"),
        (ONE + OTHER, APART, "error", "the ranks' gradients are added up, not averaged"),
        (0.25 * ONE + 0.75 * OTHER, MEAN, "error", "count 0.25, 0.75 times, where a mean counts each 0.5 times"),
        (MEAN, APART, "error", "the loss of the whole batch is no mean over its parts"),
        (APART, MEAN, "error", "the gradients are not those of one process, most of all that of w"),
    ],
    ids=["mean of means", "added up", "weighed", "composed", "unexplained"],
)
def test_what_the_ranks_make_of_their_parts_is_told(
    tmp_path: Path, ranks: torch.Tensor, alone: torch.Tensor, severity: str, said: str
) -> None:
    report = judged(tmp_path, [ranks], [alone])
    (found,) = report.findings
    assert (found.code, found.severity, found.step) == ("gradient-differs", severity, 0)
    assert said in found.cause
    assert report.coverage["gradients"] == ("differs" if severity == "error" else "agrees as declared")


@pytest.mark.parametrize("is_cut", [True, False])
def test_batchnorm_of_each_rank_s_samples_may_declare_a_loss_that_is_no_mean_over_parts(
    tmp_path: Path, *, is_cut: bool
) -> None:
    """Not where one process normalises each rank's samples by themselves, too."""
    norms: list[Event] = [{"kind": "start", "local_norms": 2, "parameters": {}}]
    others: list[Event] = [] if is_cut else [{"kind": "other_norms", "window": 0}]
    report = judged(tmp_path, [MEAN], [APART], more=norms, of_alone=others)
    assert [one.severity for one in report.findings] == ["error" if is_cut else "note"]
    assert report.coverage["gradients"] == ("differs" if is_cut else "agrees as declared")


def test_batchnorm_beside_some_that_is_synchronised_is_named(tmp_path: Path) -> None:
    wraps: list[Event] = [{**wrap("w"), "unsynchronised": ["head.1"]}]
    (found,) = judged(tmp_path, [APART], [MEAN], more=wraps).findings
    assert (found.severity, found.tensor) == ("error", "head.1")
    assert "the model synchronises its other BatchNorm layers, but not head.1" in found.cause


@pytest.mark.parametrize(("wraps", "tensor"), [([], "critic.0._u"), ([wrap("w", broadcasts=True)], "w")])
def test_a_buffer_that_begins_apart_is_named_where_no_wrapper_sends_it(
    tmp_path: Path, wraps: list[Event], tensor: str
) -> None:
    start: Event = {"kind": "start", "parameters": {}, "buffers": {"bn.running_mean": "m", "critic.0._u": "u"}}
    ranks = two_ranks(tmp_path, [APART], [start, *wraps])
    ranks.ranks[1].events[:] = [
        {**one, "buffers": {"bn.running_mean": "n", "critic.0._u": "v"}} if one["kind"] == "start" else one
        for one in ranks.ranks[1].events
    ]
    whole = trained(tmp_path / "alone", [MEAN])
    event, apart = ranks.ranks[0].steps[0], numerics.distance({"w": APART}, {"w": MEAN})
    assert (
        explanations.Explanations(ranks, whole, Others(lambda: whole, list))._unexplained(event, apart).tensor == tensor
    )


@pytest.mark.parametrize("is_partly", [True, False])
def test_batchnorm_declares_its_own_samples_only_where_none_is_synchronised(*, is_partly: bool) -> None:
    body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    if is_partly:
        body = nn.SyncBatchNorm.convert_sync_batchnorm(body)
    model = nn.Sequential(body, nn.BatchNorm1d(4))
    assert local_norms_in(model.modules()) == (0 if is_partly else 2)
    assert unsynchronised_in(model) == (["1"] if is_partly else [])


@pytest.mark.parametrize(
    ("at_step", "said"),
    [((APART, OTHER), "carried from step to step"), ((ONE, OTHER), "is no mean over its parts")],
)
def test_what_each_rank_carries_from_step_to_step_is_an_error(
    tmp_path: Path, at_step: tuple[torch.Tensor, torch.Tensor], said: str
) -> None:
    (found,) = judged(tmp_path, [MEAN, MEAN], [MEAN, APART], at_step=at_step).findings
    assert (found.code, found.severity, found.step) == ("gradient-differs", "error", 1)
    assert said in found.cause


@pytest.mark.parametrize(
    ("rate", "name", "decay", "severity"),
    [(0.2, "SGD", 0.0, "note"), (0.1, "SGD", 0.0, "error"), (0.2, "Adam", 0.0, "error"), (0.2, "SGD", 0.01, "error")],
    ids=["made up for", "the same rate", "not linear", "with weight decay"],
)
def test_a_rate_makes_up_for_gradients_that_are_smaller_by_as_much(
    tmp_path: Path, rate: float, name: str, decay: float, severity: str
) -> None:
    more: list[Event] = [{"kind": "optimizer", "number": 0, "name": name, "where": "train.py:9"}]
    settings = [{"weight_decay": decay, "momentum": 0.9}]
    report = judged(tmp_path, [MEAN / 2], [MEAN], more=more, rates=[rate], settings=settings)
    assert [one.severity for one in report.findings if one.code == "gradient-scale"] == [severity]


@pytest.mark.parametrize(
    ("ranks", "severity", "code"),
    [
        (MEAN + 0.01 * APART, "note", "gradient-differs"),
        (MEAN + 0.05 * APART, "error", "gradient-differs"),
        (2 * MEAN, "error", "gradient-scale"),
    ],
)
def test_a_hook_may_round_and_no_more(tmp_path: Path, ranks: torch.Tensor, severity: str, code: str) -> None:
    hook = {"kind": "hook", "name": "fp16_compress_hook", "where": "train.py:12"}
    (found,) = judged(tmp_path, [ranks], [MEAN], more=[hook]).findings
    assert (found.code, found.severity, found.where) == (code, severity, "train.py:12")
    assert "fp16_compress_hook" in found.cause


def test_a_buffer_that_nobody_keeps_alike_is_named(tmp_path: Path) -> None:
    record = two_ranks(tmp_path / "ranks", [APART])
    for rank, value in zip(record.ranks, "ab", strict=True):
        next(event for event in rank.events if event["kind"] == "window")["others"] = {"centre": value}
    parts = [trained(tmp_path / name, [part]) for name, part in (("one", ONE), ("other", OTHER))]
    alone, report = trained(tmp_path / "alone", [MEAN]), Report(ranks=2)
    Comparison(record, alone, Others(lambda: alone, lambda: parts)).judge(report)
    (error,) = report.errors
    assert error.tensor == "centre"
    assert "the buffer centre differs between the ranks" in error.cause


def test_a_step_that_one_process_does_not_take_is_found_with_the_rank_that_skips(tmp_path: Path) -> None:
    about, batch, backward, *_ = passed([0, 1], samples=8)
    first, other = [backward, batch], [batch, backward]
    ranks = [Rank(i, [about, batch, *middle, step(0, "g")]) for i, middle in enumerate((first, other))]
    record = Record(tmp_path, ranks)
    for window, own, does in (
        (0, 1, "one process takes a step that the ranks do not take"),
        (1, 0, "one process skips a step of the ranks"),
    ):
        gone = Run(
            Ended(code=0, hung=False, failure=None, folder=tmp_path),
            Record(tmp_path, [Rank(0, [{"kind": "out_of_step", "window": window, "own": own, "placed": True}])]),
        )
        report = Report(ranks=2)
        Comparison(record, gone, Others(lambda gone=gone: gone, list)).judge(report)
        (error,) = report.errors
        assert (error.code, error.rank, error.where) == ("steps-differ", 1, "train.py:30")
        assert does in error.cause
        assert "rank 1 leaves out a batch that the others train on" in error.cause


def test_a_step_that_one_process_leaves_out_with_weights_of_its_own_is_no_difference(tmp_path: Path) -> None:
    """A discriminator that steps only while it is not too good: between the kept steps one process goes its own way."""
    ranks = [Rank(i, [*passed([i], samples=8)[:3], step(0, "g")]) for i in range(2)]
    astray: Event = {"kind": "out_of_step", "window": 1, "own": 0, "placed": False}
    gone = Run(Ended(code=0, hung=False, failure=None, folder=tmp_path), Record(tmp_path, [Rank(0, [astray])]))
    report = Report(ranks=2)
    Comparison(Record(tmp_path, ranks), gone, Others(lambda: gone, list)).judge(report)
    assert report.errors == []
    assert report.coverage["gradients"].startswith("not checked")
    assert (
        report.coverage["control"] == "not checked: from step 0 on one process steps at other batches, from "
        "weights of its own"
    )


@pytest.mark.parametrize(
    ("taken", "kept", "draws", "says"),
    [
        (2, 0, False, None),
        (3, 0, False, "one process, from the same weights, goes on"),
        (1, 0, False, "one process, from the same weights, has ended before"),
        (3, None, False, "with weights of its own, ends after another number of steps"),
        (3, 0, True, "one process cannot draw the same"),
    ],
    ids=["as many", "more", "fewer", "from other weights", "with other draws"],
)
def test_one_process_ends_after_the_ranks_steps_from_their_weights(
    taken: int, kept: int | None, says: str | None, *, draws: bool
) -> None:
    """An early stop by each rank's own validation loss, of which one process has the whole."""
    windows: list[Event] = [{"kind": "window", "number": number, "kept": kept} for number in range(2)]
    ranks = record(
        *([*windows, *passed([i], samples=2), *passed([i], samples=2, number=1, window=1), ended()] for i in "01")
    )
    rates: list[Event] = [{"kind": "rates", "event": number, "optimizer": 0, "rates": [0.1]} for number in range(taken)]
    drawn: list[Event] = [{"kind": "chance", "place": "0|train.py:9|1", "name": "torch.rand"}] if draws else []
    alone = Run(Ended(code=0, hung=False, failure=None, folder=Path()), record([*rates, *drawn, ended()]))
    in_step = InStep(ranks, alone)
    told = [one.cause for one in in_step.findings()] + [one for one in [in_step.unknown] if one is not None]
    assert (says is None and told == []) or (len(told) == 1 and str(says) in told[0])
    assert in_step.may_become_known == (kept is None)


@pytest.mark.parametrize(
    ("rows", "more", "is_found"),
    [("ab", [], True), ("cd", [], False), ("ab", [{"kind": "unjoinable", "why": "lists of different lengths"}], False)],
    ids=["the same samples", "others", "ended for its batches"],
)
def test_steps_are_counted_without_a_loader_where_one_process_takes_the_samples(
    rows: str, more: list[Event], *, is_found: bool
) -> None:
    """Patience that goes by rank 0's part of the held-out rows; one process has all of them."""
    windows: list[Event] = [{"kind": "window", "number": number, "kept": 0} for number in range(2)]
    steps = [step(number, "g") for number in range(2)]

    def inputs(*names: str) -> list[Event]:
        return [{"kind": "input", "window": number, "rows": [*names]} for number in range(2)]

    ranks = record(*([*windows, *inputs(name), *steps, ended()] for name in "ab"))
    rates: list[Event] = [{"kind": "rates", "event": number, "optimizer": 0, "rates": [0.1]} for number in range(3)]
    alone = record([*rates, *inputs(*rows), *more, ended()])
    in_step = InStep(ranks, Run(Ended(code=0, hung=False, failure=None, folder=Path()), alone))
    assert [one.code for one in in_step.findings()] == (["steps-differ"] if is_found else [])


def test_a_part_of_the_loss_that_is_a_sum_is_found(tmp_path: Path) -> None:
    """An L1 term is a mean, the rest is a sum that is divided by the batch of all ranks: no factor explains both."""
    sums = [torch.tensor([1.0, 0.0, 2.0, 1.0]), torch.tensor([0.0, 3.0, -1.0, 1.0])]
    parts = [ONE + sums[0], OTHER + sums[1]]
    doubled = [ONE + 2 * sums[0], OTHER + 2 * sums[1]]
    whole = MEAN + sums[0] + sums[1]
    (error,) = judged(tmp_path / "1", [(parts[0] + parts[1]) / 2], [whole], parts=parts, twice=doubled).errors
    assert "a part of the loss is a sum over a rank's samples" in error.cause
    report = judged(tmp_path / "2", [(parts[0] + parts[1]) / 2], [APART], parts=parts, twice=doubled)
    assert "is no mean over its parts" in report.errors[0].cause  # a loss that compares samples


def test_a_part_of_the_loss_that_is_a_mean_over_unlike_parts_is_found(tmp_path: Path) -> None:
    def losses(count: float) -> list[Event]:
        terms = [{"factor": 1.0, "mean": True, "count": each, "shape": [8, 3]} for each in (count, 24.0)]
        return [{"kind": "backward", "window": 0, "where": "train.py:25", "terms": terms}]

    record = two_ranks(tmp_path, [MEAN])
    ranks = [Rank(rank.number, [*losses(7.0 + rank.number), *rank.events]) for rank in record.ranks]
    for rank in ranks:
        rank.events[:] = [one for one in rank.events if one["kind"] != "backward" or "terms" in one]
    assert average.uneven_counts(Record(tmp_path, ranks), ranks[0].steps[0]) == [7.0, 8.0]
    assert average.uneven_counts(Record(tmp_path, [ranks[0], Rank(1, ranks[0].events)]), ranks[0].steps[0]) is None


@pytest.mark.parametrize(
    ("merged", "sizes", "factors", "severity"),
    [
        (0.5 * ONE + 1.5 * OTHER, (4, 4), (1.0, 1.0), "error"),
        (0.5 * ONE + 1.5 * OTHER, (4, 4), (0.7, 0.3), None),  # each source of data has a weight
        (0.5 * ONE + 1.5 * OTHER, (2, 6), (1.0, 1.0), "note"),
        (ONE + OTHER, (4, 4), (1.0, 1.0), None),
        (APART, (4, 4), (1.0, 1.0), None),  # a loss that compares samples
    ],
)
def test_micro_batches_that_count_alike_and_are_not_are_found(
    tmp_path: Path,
    merged: torch.Tensor,
    sizes: tuple[int, int],
    factors: tuple[float, float],
    severity: str | None,
) -> None:
    about: Event = {"training": True, "key": "a.py:1#1", "window": 0}
    batches: list[Event] = [{"kind": "batch", **about, "size": size} for size in sizes]
    terms = ([{"factor": factor, "mean": True}] for factor in factors)
    batches += [{"kind": "backward", "window": 0, "where": "train.py:25", "terms": one} for one in terms]
    record = two_ranks(tmp_path / "ranks", [ONE + OTHER], batches)
    alone, whole = (trained(tmp_path / name, [one]) for name, one in (("alone", ONE + OTHER), ("merged", merged)))

    def apart(_: list[Event]) -> Run:
        run = trained(tmp_path / "apart", [ONE, ONE + OTHER])  # what has added up after each micro-batch
        run.record.ranks[0].events.extend({"kind": "micro", "kept": kept} for kept in (0, 1))
        return run

    report = Report(ranks=2)
    windows.judge(record, record.ranks[0].steps, alone, lambda _: whole, apart, report)
    assert [(one.code, one.severity, one.where) for one in report.findings] == (
        [] if severity is None else [("gradient-differs", severity, "train.py:25")]
    )
    assert severity is None or "they would count 0.500, 1.500 times" in report.findings[0].cause


@pytest.mark.parametrize(
    ("theirs", "found"),
    [
        ([3.0, 5.0], [False, True]),
        ([1.5, 2.5], [False, True]),
        ([3.0, 6.0], [True, True]),
    ],
    ids=["sum", "mean", "other"],
)
@pytest.mark.parametrize("carries", [False, True])
def test_buffers_that_each_rank_keeps_a_part_of_are_no_difference(
    tmp_path: Path, theirs: list[float], found: list[bool], *, carries: bool
) -> None:
    """They are added up, or averaged, where they are used; not if gradients show that they are not."""

    def kept(rank: int, number: int, value: Any) -> None:
        path = value_path(tmp_path, rank, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path)

    kept(0, 0, {"buffers": {"total": torch.zeros(2)}, "untrained": {}})
    kept(1, 0, {"total": torch.zeros(2)})
    kept(0, 1, {"buffers": {"total": torch.tensor([1.0, 2.0])}, "untrained": {}})
    kept(1, 1, {"total": torch.tensor([2.0, 3.0])})
    kept(0, 2, {"buffers": {"total": torch.tensor(theirs)}, "before": {}, "teachers": {}})
    windows = [{"kind": "window", "number": number, "kept": number} for number in (0, 1)]
    others = [{**window, "kept": None, "buffers": window["number"]} for window in windows]
    record = Record(tmp_path, [Rank(0, [*windows, step(0, "g")]), Rank(1, [*others, step(0, "g")])])
    ended = Ended(code=0, hung=False, failure=None, folder=tmp_path)
    whole = Run(ended, Record(tmp_path, [Rank(0, [{"kind": "moved", "window": 1, "kept": 2}])]))
    report = Report(ranks=2, coverage={"gradients": "agrees"})
    if carries:
        report = Report(ranks=2)
        record.ranks[0].events.extend([step(1, "g", window=2), step(2, "g", window=2)])
        report.add([Finding(code="gradient-differs", step=1, cause=f"{CARRIED}, and each rank carries its own")])
    moved.judge(record, whole, lambda: whole.record, report)
    assert bool([one for one in report.errors if one.code == "buffers-diverged"]) == found[carries]


@pytest.mark.parametrize(
    ("times", "rows", "is_found"),
    [(0.0, 4, False), (0.0, 8, True), (0.5, 4, True)],
    ids=["renewed after as many samples", "whose steps have as many", "moved elsewhere"],
)
def test_a_copy_of_the_weights_may_be_renewed_after_so_many_samples(
    tmp_path: Path, times: float, rows: int, *, is_found: bool
) -> None:
    """64 of all ranks are fewer steps than 64 of one process."""
    made, other = torch.arange(1.0, 9.0), torch.tensor([1.0, -1.0] * 4)

    def kept(number: int, value: Any) -> None:
        value_path(tmp_path, 0, number).parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, value_path(tmp_path, 0, number))

    def given(count: int) -> Event:
        return {"kind": "input", "window": 0, "rows": [str(row) for row in range(count)]}

    kept(1, {"buffers": {}, "untrained": {"target": made}, "parameters": {}})
    kept(2, {"buffers": {}, "before": {"target": 0 * made}, "teachers": {"target": times * other}})
    events = [given(4), step(0, "g"), {"kind": "window", "number": 1, "kept": 1}]
    ended = Ended(code=0, hung=False, failure=None, folder=tmp_path)
    whole = Run(ended, Record(tmp_path, [Rank(0, [{"kind": "moved", "window": 1, "kept": 2}])]))
    own = Record(tmp_path, [Rank(0, [given(rows), step(0, "g")])])
    report = Report(ranks=2, coverage={"gradients": "agrees"})
    others = [*events[:2], {**events[2], "kept": None}]
    moved.judge(Record(tmp_path, [Rank(0, events), Rank(1, others)]), whole, lambda: own, report)
    assert bool(report.errors) is is_found


@pytest.mark.parametrize(
    ("mine", "theirs", "is_found"),
    [([4, 8], [8, 16], True), ([40, 81], [41, 80], False), ([3], [6], False), ([4.0, 8.0], [8.0, 16.0], True)],
    ids=["counts of a rank", "a few", "a counter of calls", "no integers"],
)
def test_integers_of_a_buffer_are_compared_where_there_are_several(
    mine: list[float], theirs: list[float], *, is_found: bool
) -> None:
    assert moved._differ(torch.tensor(mine), torch.tensor(theirs)) is is_found


@pytest.mark.parametrize(
    ("theirs", "own", "draws", "is_found"),
    [
        ([5.0, 2.0], None, False, True),
        ([9.0, 2.0], None, False, False),
        ([5.0, 2.0], [9.0, 2.0], False, False),  # one process at its own pace writes the same
        ([5.0, 2.0], None, True, False),  # other numbers may be drawn
    ],
)
def test_what_a_script_writes_into_parameters_behind_a_step_is_compared(
    tmp_path: Path, theirs: list[float], own: list[float] | None, *, draws: bool, is_found: bool
) -> None:
    def kept(folder: str, number: int, value: Any) -> None:
        path = value_path(tmp_path / folder, 0, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path)

    def begins(code: list[float]) -> Any:
        return {"buffers": {}, "untrained": {}, "parameters": {0: {"w": torch.tensor(code)}}}

    kept("ranks", 1, begins([9.0, 2.0]))
    kept("ranks", 2, {"parameters": {"w": torch.tensor([1.0, 2.0])}, "states": {}})
    kept("alone", 1, {"buffers": {}, "before": {}, "teachers": {}, "written": {0: {"w": torch.tensor(theirs)}}})
    kept("own", 1, begins(own or theirs))
    window: Event = {"kind": "window", "number": 1, "kept": 1}
    updated: Event = {"kind": "updated", "event": 0, "optimizer": 0, "kept": 2, "evaluations": 1}
    draw: Event = {"kind": "draw", "place": "1|train.py:5|1", "digest": "d", "within": False}
    events = [step(0, "g"), stepped(0), updated, window, *[draw] * draws, step(1, "h", "written"), stepped(1)]
    ranks = Record(tmp_path / "ranks", [Rank(0, events)])
    alone = Record(tmp_path / "alone", [Rank(0, [{"kind": "moved", "window": 1, "kept": 1}])])
    whole = Run(Ended(code=0, hung=False, failure=None, folder=tmp_path), alone)
    report = Report(ranks=2, coverage={"gradients": "agrees"})
    moved.judge(ranks, whole, lambda: Record(tmp_path / "own", [Rank(0, [window])]), report)
    assert [(one.code, one.tensor, one.step) for one in report.errors] == [("parameters-diverged", "w", 0)] * is_found
    assert ranks.ranks[0].written_before(1) == {0: {"w"}}


@pytest.mark.parametrize(
    ("factors", "own", "samples", "is_so"),
    [
        ((0.5 / 16, -0.25 / 16), (0.5 / 16, -0.25 / 16), 16, True),
        ((0.5 / 16, -0.25 / 16), (0.5 / 32, -0.25 / 32), 16, False),  # the batch of all, divided by their number
        ((0.5 / 16, -0.25 / 16), (0.5 / 16, -0.25 / 16), 32, False),
        ((1.0, 0.5), (1.0, 0.5), 16, False),  # a sum that is not divided
    ],
)
def test_a_constant_that_divides_sums_may_be_that_of_a_process(
    factors: tuple[float, float], own: tuple[float, float], samples: int, *, is_so: bool
) -> None:
    def process(factors: tuple[float, float], samples: int) -> list[Event]:
        terms = [{"factor": one, "mean": False, "count": None, "shape": [16]} for one in factors]
        batch: Event = {"kind": "batch", "window": 0, "size": samples, "training": True}
        return [batch, {"kind": "backward", "window": 0, "where": "train.py:25", "terms": terms}, step(0, "g")]

    rank = process(factors, 16)
    alone = record(process(own, samples))
    assert average.are_divided_alike_alone(record(rank, rank), alone, rank[-1]) is is_so


def test_the_weight_of_a_part_of_the_loss_may_follow_samples() -> None:
    """An annealed term: two ranks come to a weight in half as many steps as one process."""

    def process(weights: list[float], samples: int) -> list[Event]:
        events: list[Event] = []
        for window, weight in enumerate(weights):
            terms = [{"factor": one, "mean": True, "count": 8.0, "shape": [8]} for one in (1.0, weight)]
            events += [
                {"kind": "batch", "window": window, "size": samples, "training": True},
                {"kind": "backward", "window": window, "where": "train.py:25", "terms": terms},
                step(window, "g"),
            ]
        return events

    ended = Ended(code=0, hung=False, failure=None, folder=Path("/nowhere"))
    rank, whole = process([0.0, 0.2], 8), Run(ended, record(process([0.0, 0.1], 16)))
    for weights, samples, is_found in (
        ([0.0, 0.1, 0.2, 0.3, 0.4], 8, True),
        ([0.0, 0.1, 0.2, 0.3, 0.4], 16, False),  # it has the batch of all ranks
        ([0.0, 0.1, 0.15, 0.15, 0.15], 8, False),  # it never comes to that weight
    ):
        alone = record(process(weights, samples))
        others = Others(lambda: whole, list, own_pace=lambda alone=alone: alone)
        found = explanations.Explanations(record(rank, rank), whole, others)._weighed_by_samples(rank[-1])
        assert (found is not None and found.severity == "note") is is_found


@pytest.mark.parametrize(("samples", "factor", "severity"), [(16, 0.5, "note"), (8, 0.5, "error"), (16, 2.0, "error")])
def test_a_sum_over_the_number_of_a_rank_s_own_samples_is_their_mean(
    samples: int, factor: float, severity: str
) -> None:
    term = {"factor": 1 / 16, "mean": False, "count": None, "shape": [16]}
    backward: Event = {"kind": "backward", "window": 0, "where": "train.py:25", "terms": [term]}
    batch: Event = {"kind": "batch", "window": 0, "size": samples, "training": True}
    rank = [batch, backward, step(0, "g")]
    ended = Ended(code=0, hung=False, failure=None, folder=Path("/nowhere"))
    ranks, whole = record(rank, rank), Run(ended, record(rank))
    found = explanations.Explanations(ranks, whole, Others(lambda: whole, list))._scaled(rank[-1], factor, [])
    assert (found.code, found.severity) == ("gradient-scale", severity)
    assert ("by a constant, such as their number" in found.cause) == (severity == "note")


@pytest.mark.parametrize("broadcasts", [True, False])
@pytest.mark.parametrize("local_norms", [0, 1])
def test_running_statistics_of_a_normalisation_of_its_own_are_compared_where_rank_0_s_are_handed_out(
    tmp_path: Path, local_norms: int, *, broadcasts: bool
) -> None:
    def kept(rank: int, number: int, value: Any) -> None:
        path = value_path(tmp_path, rank, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path)

    for rank, ends in enumerate(([1.0, 2.0], [2.0, 3.0])):
        for number, value in enumerate(([0.0, 0.0], ends)):
            buffers = {"norm.running_var": torch.tensor(value)}
            kept(rank, number, buffers if rank else {"buffers": buffers, "untrained": {}})
    kept(0, 2, {"buffers": {"norm.running_var": torch.tensor([3.0, 6.0])}, "before": {}, "teachers": {}})
    windows = [{"kind": "window", "number": number, "kept": number} for number in (0, 1)]
    others = [{**window, "kept": None, "buffers": window["number"]} for window in windows]
    begins: list[Event] = [{"kind": "start", "local_norms": local_norms}, wrap("w", broadcasts=broadcasts)]
    record = Record(tmp_path, [Rank(0, [*begins, *windows, step(0, "g")]), Rank(1, [*begins, *others, step(0, "g")])])
    ended = Ended(code=0, hung=False, failure=None, folder=tmp_path)
    whole = Run(ended, Record(tmp_path, [Rank(0, [{"kind": "moved", "window": 1, "kept": 2}])]))
    report = Report(ranks=2, coverage={"gradients": "agrees"})
    moved.judge(record, whole, lambda: whole.record, report)
    assert bool(report.errors) == (broadcasts and not local_norms)


@pytest.mark.parametrize(
    ("name", "theirs", "gradients", "is_found"),
    [
        ("queue", [1.0, 2.5], "agrees", True),
        ("queue", [1.0, 2.5], "agrees as declared", True),
        ("queue", [1.0, 2.5], "differs", False),
        ("queue", [1.0, 2.001], "agrees", False),
        ("bn.running_mean", [1.0, 2.5], "agrees", False),
        ("queue", [1.0, 2.5, 3.0], "agrees", False),
    ],
)
def test_a_buffer_that_a_step_leaves_otherwise_than_in_one_process_is_found(
    tmp_path: Path, name: str, theirs: list[float], gradients: str, *, is_found: bool
) -> None:
    def kept(folder: str, number: int, value: Any) -> Path:
        path = value_path(tmp_path / folder, 0, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path)
        return tmp_path / folder

    mine = kept("ranks", 1, {"buffers": {name: torch.tensor([1.0, 2.0])}, "untrained": {}})
    alone = kept("alone", 1, {"buffers": {name: torch.tensor(theirs)}, "before": {}, "teachers": {}})
    kept("ranks", 0, {"buffers": {name: torch.zeros(2)}, "untrained": {}})
    window = {"kind": "window", "number": 1, "kept": 1}
    first = {"kind": "window", "number": 0, "kept": 0}
    events = [first, {"kind": "backward", "window": 0, "where": "train.py:25"}, step(0, "g"), window]
    for number in (0, 1):
        path = value_path(mine, 1, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: torch.tensor([1.0, 2.0]) * number}, path)
    other = [{**one, "kept": None, "buffers": one.get("number")} for one in events]
    record = Record(mine, [Rank(0, events), Rank(1, other)])
    ended = Ended(code=0, hung=False, failure=None, folder=alone)
    whole = Run(ended, Record(alone, [Rank(0, [{"kind": "moved", "window": 1, "kept": 1}])]))
    report = Report(ranks=2, coverage={"gradients": gradients})
    moved.judge(record, whole, lambda: whole.record, report)
    at_own_pace = Report(ranks=2, coverage={"gradients": gradients})
    moved.judge(record, whole, lambda: record, at_own_pace)  # which has been given no other draws
    assert at_own_pace.errors == []
    assert [(one.code, one.step, one.tensor, one.where) for one in report.errors] == (
        [("buffers-diverged", 0, name, "train.py:25")] if is_found else []
    )


@pytest.mark.parametrize(("exception", "may"), [("StopIteration", True), ("ValueError", False)])
def test_one_process_that_has_used_all_batches_too_soon_may_take_them_in_turn(exception: str, *, may: bool) -> None:
    """It accumulates as many as all ranks together, from a stream that it reads with next()."""
    ranks = record(*([*passed([i], samples=2), step(0, "g", micro=2), ended()] for i in "01"))
    failure = {"exception": exception, "message": ""}
    apart: Event = {"kind": "out_of_step", "window": 1, "own": 0, "placed": True}
    alone = Run(Ended(code=1, hung=False, failure=failure, folder=Path()), record([apart]))
    assert InStep(ranks, alone).may_accumulate_in_turn == may
