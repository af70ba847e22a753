"""What ranks do at a step: scale, clip, accumulate, skip, draw."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from journals import Event, chance_findings, ended, findings, passed, record, step, stepped, wrap
from torch import nn

from samestep.verification.findings import Finding
from samestep.verification.judging import control
from samestep.verification.recording.datasets import held_by
from samestep.verification.recording.recorder import Recorder
from samestep.verification.report import Report


def scaler(*, scale: float = 65536.0, skipped: bool = False) -> Event:
    return {"kind": "scaler", "window": 0, "scale": scale, "skipped": skipped, "where": "train.py:29"}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (scaler(skipped=True), "rank 1 skips and has the scale 65536, rank 0 does not skip"),
        (scaler(scale=32768.0), "rank 1 does not skip and has the scale 32768, rank 0 does not skip and has 65536"),
        (scaler(), None),
    ],
)
def test_a_scaler_that_skips_or_scales_otherwise_on_a_rank_is_found(other: Event, said: str | None) -> None:
    found = findings(control, record([scaler(), step(0, "g")], [other, step(0, "g")]))
    assert [(one.code, one.rank, one.where) for one in found] == (
        [] if said is None else [("steps-differ", 1, "train.py:29")]
    )
    assert said is None or said in found[0].cause


def test_a_schedule_that_steps_on_one_rank_only_is_no_difference_where_all_have_its_rates() -> None:
    moved = {"kind": "scheduler", "window": 1, "event": 1, "where": "train.py:31"}
    first, other = [step(0, "g"), moved, ended()], [step(0, "g"), ended()]
    assert findings(control, record(first, other)) == []


def test_a_rate_that_differs_is_told_with_what_a_schedule_has_seen() -> None:
    moved = {"kind": "scheduler", "window": 1, "event": 1, "where": "train.py:31"}
    reduced = {"kind": "collective", "op": "reduce", "where": "train.py:28", "window": 1}
    first, other = ([step(0, "g"), moved, step(1, "g", rates=[rate])] for rate in (0.1, 0.05))
    (finding,) = findings(control, record(first, other))
    assert (finding.step, finding.factor, finding.where) == (1, 0.5, "train.py:31")
    (finding,) = findings(control, record(first, [reduced, *other]))
    assert finding.where == "train.py:28"
    assert "reduce() brings its result to one rank only" in finding.cause


def test_a_rank_without_an_optimizer_has_no_rate_that_could_differ() -> None:
    assert findings(control, record([step(0, "g"), ended()], [step(0, "g", rates=[]), ended()])) == []


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_gradients_that_are_clipped_while_they_are_scaled_are_found(scale: float) -> None:
    clipped = {"kind": "clipped_scaled", "window": 0, "scale": scale, "most": 1.0, "where": "train.py:27"}
    found = findings(control, record([clipped, step(0, "g")], [step(0, "g")]))
    assert [(one.code, one.factor, one.where) for one in found] == (
        [("gradient-scale", 1024.0, "train.py:27")] if scale > 1 else []
    )


def test_a_threshold_that_is_multiplied_by_the_scale_is_right() -> None:
    clipped = {"kind": "clipped_scaled", "window": 0, "scale": 1024.0, "most": 0.5 * 1024, "where": "train.py:27"}
    assert findings(control, record([clipped, step(0, "g")], [step(0, "g")])) == []


@pytest.mark.parametrize(
    ("norm", "most", "window", "is_found"),
    [(3.0, 1.0, 0, True), (3.0, 5.0, 0, False), (2.0, 1.0, 0, False), (2.00001, 1.0, 0, False), (3.0, 1.0, 1, False)],
)
def test_ranks_that_clip_norms_of_their_own_are_found(norm: float, most: float, window: int, *, is_found: bool) -> None:
    clip = {"kind": "clip", "norm": 2.0, "most": most, "window": window, "where": "train.py:27"}
    report = Report(ranks=2)
    control.judge(record([clip, step(0, "g")], [{**clip, "norm": norm}, step(0, "g")]), report)
    found = [(one.code, one.rank, one.factor) for one in report.evidence]
    assert found == ([("gradient-differs", 1, 1.5)] if is_found else [])


@pytest.mark.parametrize("differs", [True, False])
def test_clipping_of_each_rank_explains_gradients_that_differ(*, differs: bool) -> None:
    clip = {"kind": "clip", "norm": 2.0, "most": 1.0, "window": 0, "where": "train.py:27"}
    report = Report(ranks=2)
    control.judge(record([clip, step(0, "g")], [{**clip, "norm": 3.0}, step(0, "g")]), report)
    report.add([Finding(code="update-differs", cause="an error")] if differs else [])
    report.conclude()
    assert [one.severity for one in report.findings if one.code == "gradient-differs"] == [
        "error" if differs else "note"
    ]


def micro_batches(count: int, factor: float, *, probe: float = 1.0, window: int = 0, **more: Any) -> list[Event]:
    """A step of so many micro-batches, each of whose losses, a mean, has this factor."""
    loss = {"loss": "MeanBackward0", "mean": True, "factor": factor, "window": window, "where": "train.py:25"}
    batch = {"kind": "batch", "training": True, "window": window, "key": "train.py:10#1"}
    norm = {"kind": "accumulated", "norm": 1.0, "window": window}
    pairs = [batch, {"kind": "backward", **loss, **more}] * count
    return [*pairs, norm, step(window, "g", probe=probe), stepped(window)]


OPTIMIZER: Event = {"kind": "optimizer", "number": 0, "where": "train.py:15"}


@pytest.mark.parametrize(
    ("steps", "factor"),
    [
        (micro_batches(4, 1.0), 4.0),
        (micro_batches(4, 1 / 16), 0.25),
        (micro_batches(4, 1 / 4), None),
        (micro_batches(4, 1.0, probe=0.25), None),  # what is divided is the sum
        ([{"kind": "clip", "window": 0, "norm": 4.0, "most": 1.0}, *micro_batches(4, 1.0, probe=0.25)], 4.0),
        (micro_batches(4, 1.0, mean=False), None),
        (micro_batches(4, 1.0, loss="AddBackward0"), None),
        ([{"kind": "scaled", "window": 0}, *micro_batches(4, 1.0)], None),
        (micro_batches(1, 1.0), None),
        ([*micro_batches(4, 1 / 4), *micro_batches(1, 1 / 4, window=1)], 0.25),  # the last ones of an epoch
        ([*micro_batches(4, 1 / 4), *micro_batches(1, 1.0, window=1)], None),
    ],
)
def test_micro_batches_whose_sum_is_no_mean_are_found(steps: list[Event], factor: float | None) -> None:
    found = findings(control, record([OPTIMIZER, *steps], [OPTIMIZER, *steps]))
    assert [(one.code, one.where) for one in found] == ([] if factor is None else [("gradient-scale", "train.py:25")])
    assert factor is None or found[0].factor == pytest.approx(factor, rel=1e-4)


def test_one_loss_over_two_sources_is_a_sum_of_means() -> None:
    """What a script labels and what it does not, each by its own loader and in its own backward pass."""
    rank: list[Event] = [OPTIMIZER, *micro_batches(2, 1.0)]
    first = next(event for event in rank if event["kind"] == "batch")
    rank[rank.index(first)] = {**first, "key": "train.py:11#1"}
    assert findings(control, record(rank, rank)) == []


def test_a_model_in_data_parallel_is_found() -> None:
    (finding,) = findings(control, record([wrap("w", wrapper="DataParallel"), step(0, "g")], [step(0, "g")]))
    assert (finding.code, finding.rank, finding.where) == ("data-parallel-module", 0, "train.py:12")


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_model_in_data_parallel_is_judged_by_what_is_trained(*, is_frozen: bool) -> None:
    """A teacher's file may have the names of such a wrapper, and it is frozen behind it."""
    recorder, told = Recorder.__new__(Recorder), []
    recorder.sources, recorder._split = None, []
    recorder.journal = SimpleNamespace(write=lambda kind, **about: told.append((kind, about["where"])))  # type: ignore[assignment]
    model = nn.DataParallel(nn.Linear(2, 2))
    recorder.on_wrap("DataParallel", model, "train.py:12")
    model.requires_grad_(not is_frozen)
    recorder.tell_trained_splits()
    recorder.tell_trained_splits()
    assert told == ([] if is_frozen else [("wrap", "train.py:12")])


def stream(window: int, state: str) -> Event:
    return {"kind": "stream", "window": window, "state": state, "where": "train.py:24"}


@pytest.mark.parametrize(
    ("other", "severity", "window"),
    [("ab", "note", 0), ("xb", "error", 1), ("xy", None, None), ("ay", "note", 0)],
)
def test_dropout_that_is_the_same_on_two_ranks_is_found(other: str, severity: str | None, window: int | None) -> None:
    """From the beginning it is a habit; alike after they differed, it is a mistake. One rank may draw on the way."""
    ranks = [[stream(0, states[0]), stream(1, states[1])] for states in ("ab", other)]
    found = chance_findings(record(*ranks))
    assert [(one.code, one.severity, one.step) for one in found] == (
        [] if severity is None else [("random-streams", severity, window)]
    )


@pytest.mark.parametrize(
    ("states", "values", "has_replicas", "found"),
    [
        ("ab", "vv", False, [1]),
        ("aa", "vv", False, []),
        ("ab", "vw", False, []),
        ("abab", "vvww", True, [1]),
        ("aabb", "vvvv", True, []),
    ],
    ids=["apart", "alike", "of other values", "in each replica", "positions, apart in each replica"],
)
def test_ranks_that_share_a_layer_drop_the_same_units_of_the_same_values(
    states: str, values: str, found: list[int], *, has_replicas: bool
) -> None:
    cut = {"kind": "start", "parameters": {"w": "[0]+[2] w"}}
    wraps = [wrap("w", wrapper="fully_shard", ranks=[0, 2])] if has_replicas else []
    ranks = [
        [cut, *wraps, {"kind": "mask", "window": 0, "number": 1, "of": of, "state": state, "where": "train.py:24"}]
        for state, of in zip(states, values, strict=True)
    ]
    told = [one for one in chance_findings(record(*ranks)) if one.severity == "error"]
    assert [(one.code, one.rank, one.where) for one in told] == [
        ("random-streams", rank, "train.py:24") for rank in found
    ]


@pytest.mark.parametrize(
    ("first", "other", "step_found"),
    [("abcde", "xyzde", 3), ("abcde", "abcde", None), ("abcde", "vwxyz", None), ("abcde", "abcyz", None)],
    ids=["from a step on", "always", "never", "at first"],
)
def test_noise_that_is_the_same_on_two_ranks_from_a_step_on_is_found(
    first: str, other: str, step_found: int | None
) -> None:
    """A restart gives every rank the random state of one."""

    def rank(digests: str) -> list[Event]:
        about = {"kind": "draw", "name": "torch.randn", "shape": [8, 4], "kept": None, "within": False, "trains": True}
        return [{**about, "place": f"{i}|train.py:51|1", "digest": one} for i, one in enumerate(digests)]

    found = chance_findings(record(rank(first), rank(other)))
    assert [(one.step, one.where, one.severity) for one in found] == (
        [] if step_found is None else [(step_found, "train.py:51", "error")]
    )


def test_workers_that_begin_with_the_same_random_state_are_found() -> None:
    def worker(number: int, state: str, *used: str) -> Event:
        return {"kind": "worker", "key": "a.py:9#1", "worker": number, "used": used, "states": {"numpy": state}}

    (finding,) = chance_findings(record([worker(0, "s", "numpy"), worker(1, "s", "numpy")]))
    assert (finding.code, finding.rank, finding.where) == ("random-streams", 0, "a.py:9")
    assert "workers 0 and 1 of rank 0 begin with the same state of numpy's generator" in finding.cause
    assert chance_findings(record([worker(0, "s", "numpy"), worker(1, "t", "numpy")])) == []
    assert chance_findings(record([worker(0, "s"), worker(1, "s")])) == []  # neither draws from it
    stream = {"kind": "batch", "key": "a.py:9#1", "indices": None, "training": True, "window": 0, "size": 4}
    drawn = record([stream, worker(0, "s", "numpy"), worker(1, "s", "numpy")])
    assert chance_findings(drawn) == []  # each takes its share of an order that all of them draw


@pytest.mark.parametrize(("name", "shape"), [("torch.randn", [15]), ("torch.randperm", [64])])
def test_draws_that_may_be_equal_are_no_noise(name: str, shape: list[int]) -> None:
    drawn = {
        "kind": "draw",
        "within": True,
        "trains": True,
        "place": "3|train.py:4|0",
        "digest": "d",
        "name": name,
        "shape": shape,
    }
    assert chance_findings(record([drawn], [drawn])) == []


@pytest.mark.parametrize(
    ("states", "streams", "indices", "severity"),
    [
        (("s", "s"), ("a", "b"), ([0, 1], [2, 3]), "error"),
        (("s", "s"), ("a", "a"), ([0, 1], [2, 3]), "note"),
        (("s", "t"), ("a", "b"), ([0, 1], [2, 3]), None),
        (("s>u", "s>v"), ("a", "b"), ([0, 1], [2, 3]), None),
        (("s", "s"), ("a", "b"), ([0, 1], [1, 0]), None),
    ],
    ids=["where others differ", "where all are alike", "apart", "seeded for each sample", "of the same samples"],
)
def test_a_dataset_s_own_generator_draws_one_noise_for_the_samples_of_two_ranks(
    states: tuple[str, str], streams: tuple[str, str], indices: tuple[list[int], list[int]], severity: str | None
) -> None:
    def rank(number: int) -> list[Event]:
        about, batch, *_ = passed(indices[number], samples=4)
        noise = {key: batch[key] for key in ("key", "number", "index")} | {"kind": "noise", "where": "data.py:8"}
        noise["state"], _, noise["after"] = states[number].partition(">")
        stream = {"kind": "stream", "window": 0, "state": streams[number], "where": "model.py:3"}
        return [about, batch, noise, stream]

    found = [one for one in chance_findings(record(rank(0), rank(1))) if "the dataset of rank 1" in one.cause]
    assert [(one.severity, one.where) for one in found] == ([] if severity is None else [(severity, "data.py:8")])


class Jittered:
    def __init__(self, seed: int) -> None:
        self.size = 4
        self.rng: Any = np.random.default_rng(seed)


def test_a_generator_s_line_is_where_the_dataset_s_class_takes_it() -> None:
    text = Path(__file__).read_text().splitlines()
    line = next(number for number, one in enumerate(text, 1) if "self.rng" in one)
    held = held_by([Jittered(1)])
    assert held is not None
    assert held.where is not None
    assert held.where.endswith(f"test_control_of_ranks.py:{line}")


def test_a_step_that_one_rank_leaves_out_is_named_where_it_is_taken() -> None:
    backward: Event = {"kind": "backward", "where": "train.py:25"}
    first = [{**backward, "window": 0}, step(0, "g"), {**backward, "window": 1}, step(1, "g", where="train.py:31")]
    other = [{**backward, "window": 0}, step(0, "g"), *[{**backward, "window": 1}] * 2, step(1, "g"), ended()]
    more = [{**backward, "window": 2}, step(2, "g"), ended()]
    (finding,) = findings(control, record([*first, *more], other))
    assert (finding.code, finding.where) == ("steps-differ", "train.py:31")
