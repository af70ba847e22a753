"""`samestep run --check`: what follows from the ranks' summaries, that they wait for nobody, and a few real scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lazily import Lazily
from torch.distributed import HashStore
from torch.utils.data import DataLoader

from samestep.instrument.callbacks import LoaderPass
from samestep.verification.findings import Finding
from samestep.verification.journal import Event
from samestep.verification.online import samples
from samestep.verification.online.exchange import (
    EVERY,
    SLOTS,
    FinalSummary,
    PassSummary,
    StepSummary,
    SummaryDetail,
    SummaryExchange,
    decode,
    encode,
)
from samestep.verification.online.policy import LOCAL_STEPS, OnlineRules
from samestep.verification.online.tracking import KEPT, EventStream

ZOO = Path(__file__).parents[2] / "zoo"


def reported(
    step: int, values: str = "a", gradients: str = "g", events: tuple[Event, ...] = (), **more: object
) -> tuple[StepSummary, SummaryDetail]:
    """One rank's summary; `values` and `gradients` have a character for each tensor."""
    names = [f"{i}.weight" for i in range(len(values))]
    streams = {kind: stream(event for event in events if event["kind"] == kind) for kind in STREAMS}
    summary = StepSummary(optimizer=0, step=step, steps=[step], rates=[0.1], streams=streams, layout="whole")
    summary = replace(summary, parameters=values, gradients=gradients, is_data_parallel=True)
    summary = replace(summary, **more)
    window = {"window": step, "event": step, "where": "train.py:9", "optimizer": 0, "micro": 1}
    detail = SummaryDetail(
        parameters=dict(zip(names, values, strict=True)),
        gradients=dict(zip(names, gradients, strict=False)),
        events=[
            {"kind": "begin", "size": 2},
            {"kind": "optimizer", "number": 0, "where": "train.py:5"},
            *events,
            {"kind": "step", "rates": summary.rates, **window},
        ],
    )
    return summary, detail


STREAMS = ("collective", "scaler", "scheduler", "wrap")


def stream(events: Iterable[Event]) -> list[int]:
    listed = list(events)
    return [len(listed), hash(str(listed))]


def found_by(rules: OnlineRules, *ranks: tuple[StepSummary, SummaryDetail]) -> list[Finding]:
    return rules.step([summary for summary, _ in ranks], lambda i: ranks[i][1])


def judged(rules: OnlineRules, *ranks: tuple[StepSummary, SummaryDetail]) -> list[str]:
    return [f"{one.code} {one.rank}" for one in found_by(rules, *ranks)]


def call(index: int, name: str, where: str) -> Event:
    same = {"kind": "collective", "shapes": [], "dtypes": [""], "root": None, "reduce": None, "group": "world"}
    return same | {"index": index, "op": name, "where": where, "window": 0, "between_two": False}


def scaler(index: int, scale: float, *, skipped: bool = False) -> Event:
    return {"kind": "scaler", "index": index, "scale": scale, "skipped": skipped, "where": "train.py:8"}


def schedule(index: int) -> Event:
    return {"kind": "scheduler", "index": index, "event": index, "where": "train.py:11"}


def wrap(*names: str) -> Event:
    about = {"wrapper": "DistributedDataParallel", "where": "train.py:4"}
    return {"kind": "wrap", "index": 0, "names": list(names), "trained": list(names), **about}


def test_ranks_that_agree_are_not_mentioned() -> None:
    rules = OnlineRules(2)
    assert [judged(rules, reported(step), reported(step)) for step in (0, 16, 32)] == [[], [], []]
    ends = [FinalSummary(well=True, steps=[40], where="", spots={})] * 2
    assert rules.final(ends) == []


TWO_CALLS = (call(0, "barrier", "a.py:1"), call(1, "barrier", "a.py:2"))


@pytest.mark.parametrize(
    ("first", "other", "code", "where"),
    [
        (reported(16), reported(16, rates=[0.2]), "learning-rate-differs 1", "train.py:5"),
        (
            reported(16, events=(schedule(3),)),
            reported(16, rates=[0.2], events=(schedule(3),)),
            "learning-rate-differs 1",
            "train.py:11",
        ),
        (reported(16), reported(16, events=(schedule(0),)), "steps-differ 1", "train.py:11"),
        (
            reported(16, events=(scaler(70, 65536.0), scaler(71, 65536.0))),
            reported(16, events=(scaler(71, 32768.0, skipped=True),)),
            "steps-differ 1",
            "train.py:8",
        ),
        (reported(16), reported(16, steps=[14]), "steps-differ 1", "train.py:9"),
        (
            reported(16, events=(wrap("b", "a"),)),
            reported(16, events=(wrap("a", "b"),)),
            "parameter-order-differs 1",
            "train.py:4",
        ),
        (
            reported(16, events=TWO_CALLS),
            reported(16, events=(call(0, "broadcast", "a.py:1"), call(1, "barrier", "a.py:3"))),
            "collective-mismatch 1",
            "a.py:1",
        ),
        (
            reported(16, events=TWO_CALLS),
            reported(16, events=(call(0, "barrier", "a.py:2"), call(1, "barrier", "a.py:1"))),
            "collective-order 1",
            "a.py:2",
        ),
        (
            reported(16, events=TWO_CALLS),
            reported(16, events=(call(0, "barrier", "a.py:1"),)),
            "collective-order 1",
            "a.py:1",
        ),
        (reported(16), reported(16, "b"), "initial-state-differs 1", "train.py:5"),
    ],
    ids=["rates", "schedule", "schedules", "scaler", "steps", "order", "call", "calls", "missing", "start"],
)
def test_each_kind_is_found_in_one_summary_and_reported_once(
    first: tuple[StepSummary, SummaryDetail], other: tuple[StepSummary, SummaryDetail], code: str, where: str
) -> None:
    rules = OnlineRules(2)
    (finding,) = found_by(rules, first, other)
    assert (f"{finding.code} {finding.rank}", finding.where) == (code, where)
    assert judged(rules, first, other) == []


def test_findings_name_the_step_and_the_ranks_in_verifys_words() -> None:
    (rates,) = found_by(OnlineRules(2), reported(4096), reported(4096, rates=[0.2]))
    assert (rates.step, rates.factor) == (4096, 2.0)
    assert rates.cause == "at step 4096 rank 1 steps with the rate 0.2, rank 0 with 0.1"
    scalers = reported(80, events=(scaler(70, 2.0),)), reported(80, events=(scaler(70, 1.0, skipped=True),))
    (skipped,) = found_by(OnlineRules(2), *scalers)
    assert skipped.cause.startswith("at call 70 of scaler.step rank 1 skips and has the scale 1, rank 0 does not skip")
    (start,) = found_by(OnlineRules(3), reported(0), reported(0), reported(0, "b"))
    assert start.cause == (
        "before the first step rank 2 has other values than rank 0 in 0.weight, and their gradients are equal"
    )
    ranks = [reported(0, values, layout=layout) for values, layout in ("ax", "by", "ax", "cy")]
    (start,) = found_by(OnlineRules(4), *ranks)  # two replicas of two parts
    assert start.cause.startswith("before the first step rank 3 has other values than rank 1 in 0.weight")


def test_models_of_other_names_are_not_held_against_each_other() -> None:
    assert judged(OnlineRules(2), reported(0, events=(wrap("a"),)), reported(0, events=(wrap("b"),))) == []


def test_a_cause_of_gradients_that_differ_is_what_verify_says() -> None:
    rules = OnlineRules(2)
    forward = {"kind": "forward", "window": 0, "synchronises": False, "bare": False, "where": "train.py:7"}
    events = wrap("0.weight"), {"kind": "no_sync", "window": 0, "where": "train.py:6"}, forward
    about = {"is_wrapped": True, "is_synchronised": True, "events": events}
    assert judged(rules, reported(0, "a", "g", **about), reported(0, "a", "h", **about)) == []
    (found,) = found_by(rules, reported(16, "b", "g", **about), reported(16, "c", "h", **about))
    assert (found.step, found.where) == (0, "train.py:6")
    assert found.cause == (
        "at step 0 rank 1 has different gradients than rank 0 in 0.weight: every micro-batch of the step ran under "
        "no_sync(), so none was reduced"
    )


def test_events_of_one_kind_are_numbered_and_only_the_last_are_kept() -> None:
    one, other = EventStream("scaler", "scale"), EventStream("scaler", "scale")
    for number in range(2 * KEPT):
        one.add("same", 1.0)
        other.add("same" if number else "another", 1.0)
    assert (one.count, len(one.events)) == (2 * KEPT, KEPT)
    assert one.events[0] == {"kind": "scaler", "index": KEPT, "scale": 1.0}
    assert one.state[0] == other.state[0]
    assert one.state[1] != other.state[1]


def test_parameters_that_part_are_told_at_once_if_their_gradients_agree() -> None:
    rules = OnlineRules(3)
    assert judged(rules, *[reported(0, "ab", "gg")] * 3) == []
    assert judged(rules, reported(16, "ab", "hh"), reported(16, "ab", "hh"), reported(16, "ac", "hh")) == [
        "parameters-diverged 2"
    ]


def test_torn_gradients_are_told_at_the_next_summary_where_a_wrapper_should_have_averaged_them() -> None:
    rules = OnlineRules(2)
    wrapped = {"is_wrapped": True, "is_synchronised": True}
    assert judged(rules, reported(0, "a", "g", **wrapped), reported(0, "a", "h", **wrapped)) == []
    assert judged(rules, reported(16, "b", "g", **wrapped), reported(16, "c", "h", **wrapped)) == [
        "gradients-not-synchronised 1"
    ]


def local(rules: OnlineRules, steps: range, spots: list[list[str]], **more: object) -> list[str]:
    """Steps with gradients of each rank's own, whose parameters differ from the second summary on."""
    found = []
    for step in steps:
        ranks = [
            reported(step, "a" if step == 0 else name, name, spots=ours, **more)
            for name, ours in zip("bc", spots, strict=True)
        ]
        found += judged(rules, *ranks)
    return found


def test_local_steps_whose_parameters_are_averaged_later_are_meant() -> None:
    rules = OnlineRules(2)
    assert local(rules, range(0, 64, EVERY), [["p"], ["q"]], is_wrapped=True) == []
    assert (
        local(rules, range(64, 80, EVERY), [["p", "r", "s"], ["q", "r", "t"]], is_wrapped=True) == []
    )  # agreed in between
    assert local(rules, range(80, 4 * LOCAL_STEPS, EVERY), [["p"], ["q"]], is_wrapped=True) == []


def test_local_steps_that_nobody_averages_are_told_when_patience_ends() -> None:
    assert local(OnlineRules(2), range(0, LOCAL_STEPS, EVERY), [["p"], ["q"]], is_wrapped=True) == []
    found = local(OnlineRules(2), range(0, LOCAL_STEPS + EVERY, EVERY), [["p"], ["q"]], is_wrapped=True)
    assert found == ["gradients-not-synchronised 1"]


@pytest.mark.parametrize(("spots", "codes"), [("pq", ["gradients-not-synchronised"]), ("pp", [])])
def test_or_at_the_end_unless_they_are_averaged_there(spots: str, codes: list[str]) -> None:
    rules = OnlineRules(2)
    local(rules, range(0, 64, EVERY), [["p"], ["q"]], is_wrapped=True)
    ends = [FinalSummary(well=True, steps=[60], where="", spots={"0": spot}) for spot in spots]
    assert [one.code for one in rules.final(ends)] == codes


def test_models_that_are_not_meant_to_be_one_are_not_compared() -> None:
    assert (
        local(OnlineRules(2), range(0, 4 * LOCAL_STEPS, EVERY), [["p"], ["q"]]) == []
    )  # by hand, no gradient ever agreed
    rules = OnlineRules(2)
    assert judged(rules, reported(0, "a", "g"), reported(0, "b", "h")) == []  # stages of a pipeline
    assert judged(rules, reported(0, "a", names="x"), reported(0, "b", names="y")) == []
    assert judged(rules, reported(0, "a", is_not_comparable=True), reported(0, "b", is_not_comparable=True)) == []
    assert (
        judged(rules, reported(0, "a", layout="rows 0 to 2"), reported(0, "b", layout="rows 2 to 4")) == []
    )  # fully_shard


def test_ranks_that_end_after_different_numbers_of_steps_are_told() -> None:
    ends = [FinalSummary(well=True, steps=[steps], where="a.py:3", spots={}) for steps in (40, 40, 39)]
    (found,) = OnlineRules(3).final(ends)
    assert (found.code, found.rank, found.step, found.where) == ("steps-differ", 2, 39, "a.py:3")
    assert OnlineRules(3).final([*ends[:2], replace(ends[2], well=False)]) == []  # stopped, and that is told elsewhere


def passed(indices: range | list[int], rows: str = "", sampler: str = "RandomSampler", **more: object) -> PassSummary:
    shown = {str(i): f"row {i} {rows}" for i in list(indices)[:3]}
    one = PassSummary(key="a.py:7#1", number=0, size=64, sampler=sampler, indices="", repeated=0, steps=2, rows=shown)
    return replace(one, indices=samples.pack(list(indices)), **more)


@pytest.mark.parametrize(
    ("first", "other", "is_found"),
    [
        (passed(range(32)), passed(range(32)), True),
        (passed(range(32)), passed(range(32, 64)), False),
        (passed(range(32)), passed(range(32), "of another dataset"), False),
        (passed(range(32)), passed(range(32), steps=1), False),  # an evaluation before a step
        (passed(range(32), repeated=4), passed(range(32)), False),  # drawn with repeats by a sampler's nature
        (passed(range(32)), passed(range(32), size=63), False),
        (passed(range(32), "", "DistributedSampler"), passed([*range(32, 63), 0], "", "DistributedSampler"), False),
        (passed(range(32), "", "DistributedSampler"), passed(range(32), "randomly cut", "DistributedSampler"), True),
    ],
)
def test_samples_may_come_to_one_rank_only_but_for_padding(
    first: PassSummary, other: PassSummary, is_found: bool
) -> None:
    found = samples.SampleCoverage(2).add([[first], [other]])
    assert (found is not None) is is_found
    if found is not None:
        assert (found.code, found.where) == ("samples-repeated", "a.py:7")


def test_summaries_survive_their_journey() -> None:
    summary, detail = reported(16, passes=[passed([5, 3])], events=(wrap("a"), scaler(3, 2.0)))
    again = decode(encode(summary), StepSummary)
    assert again == summary
    assert samples.unpack(again.passes[0].indices).tolist() == [5, 3]
    assert decode(encode(detail), SummaryDetail) == detail
    final = FinalSummary(well=True, steps=[3], where="train.py:5", spots={"0": "a"})
    assert decode(encode(final), FinalSummary) == final


@pytest.fixture
def exchanges() -> list[SummaryExchange]:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    return [SummaryExchange(store, rank, 2) for rank in range(2)]


def test_rank_0_compares_when_all_summaries_of_a_step_are_there_and_leaves_none_behind(
    exchanges: list[SummaryExchange],
) -> None:
    zero, one = exchanges
    zero.send(*reported(0))
    assert zero.received() is None
    one.send(*reported(0, "b"))
    zero.poll_now()
    received = zero.received()
    assert received is not None
    summaries, details = received
    assert [summary.parameters for summary in summaries] == ["a", "b"]
    assert [detail.parameters for rank in (0, 1) if (detail := details(rank))] == [{"0.weight": "a"}, {"0.weight": "b"}]
    zero.free(summaries)
    assert zero._store.num_keys() == 0


def test_a_rank_that_is_far_ahead_keeps_a_bounded_number_of_summaries(exchanges: list[SummaryExchange]) -> None:
    zero, one = exchanges
    for number in range(3 * SLOTS):
        one.send(*reported(number * EVERY))
    assert one._store.num_keys() == 2 * SLOTS
    zero.send(*reported(0))
    assert zero.received() is None  # its place holds a later one
    assert zero._pending.maxlen == SLOTS


def test_a_rank_that_never_comes_is_looked_for_ever_more_seldom(exchanges: list[SummaryExchange]) -> None:
    zero, _ = exchanges
    zero.send(*reported(0))
    looks = 0
    for _ in range(1000):
        looks += zero._skips == 0
        assert zero.received() is None
    assert looks < 30


def test_rank_0_waits_for_no_end_after_one_of_its_own_that_was_not_well(exchanges: list[SummaryExchange]) -> None:
    assert exchanges[0].exchange_final(FinalSummary(well=False, steps=[], where="", spots={})) is None


@pytest.mark.parametrize(("rows", "is_cut"), [(4, True), (8, False), (6, False), (0, False)])
def test_a_model_that_gets_one_rank_s_part_of_a_batch_tells_that_ranks_cut_it(rows: int, *, is_cut: bool) -> None:
    loader = DataLoader(torch.arange(16.0), batch_size=8)  # type: ignore[arg-type]
    epoch = samples.TrainedSamples(LoaderPass(loader, "a.py:7#1", 0, "a.py:9"), "RandomSampler")
    epoch.add(list(range(8)), torch.arange(8.0))
    assert epoch.is_cut_to(rows, 2) == is_cut
    assert not epoch.is_cut_to(rows, 1)


RUNS = {  # script -> code, and a text of the culprit's line
    "weights-loaded-on-rank-0/buggy.py": ("initial-state-differs", "DDP("),
    "sampler-forgotten/buggy.py": ("samples-repeated", "shuffle=True"),
    "healthy/gan.py": (None, ""),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Lazily[tuple[subprocess.CompletedProcess[str], Path]]:
    """Every script under `samestep run --check`, with its run directory."""
    folder = tmp_path_factory.mktemp("checked")

    def run(name: str) -> tuple[subprocess.CompletedProcess[str], Path]:
        place = folder / name.partition("/")[0]
        command = [sys.executable, "-m", "samestep", "run", "-n", "2", "--check", "--run-dir", place]
        command += ["--json", f"{place}.json", ZOO / name]
        return subprocess.run(command, capture_output=True, text=True, check=False), place

    return Lazily(run)


@pytest.mark.parametrize("name", RUNS)
def test_a_training_goes_on_and_what_differs_is_told_with_its_line(
    runs: Lazily[tuple[subprocess.CompletedProcess[str], Path]], name: str
) -> None:
    done, place = runs[name]
    code, text = RUNS[name]
    path = place / "findings.jsonl"
    findings = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert done.returncode == (0 if code is None else 1), done.stderr
    told = json.loads(Path(f"{place}.json").read_text(encoding="utf-8"))
    assert (told["exit"], told["failure"], told["ranks"]) == (done.returncode, None, 2)
    assert (told["verdict"], told["findings"]) == ("inconclusive" if code is None else "different", findings)
    assert told["steps"] > 0
    assert [one["code"] for one in findings] == ([] if code is None else [code])
    assert ("--check: nothing found in " if code is None else "--check: 1 finding in ") in done.stderr
    assert "--check: not checked: buffers, evaluations, checkpoints, and whether one process " in done.stderr
    if code is not None:
        file, _, line = findings[0]["where"].rpartition(":")
        assert text in Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        assert f"ERROR {code}" in done.stderr
