"""Which way is fastest, what cannot be, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trainings import flat, training

from samestep.errors import UsageError
from samestep.network.cluster import parse
from samestep.network.links import Link
from samestep.planning import plan
from samestep.planning.plan import make_plan
from samestep.planning.planner import Planner
from samestep.planning.step import ParallelLayout, PredictedStep

SLOW = flat(Link(50e-6, 1e8), 64)
QUICK = flat(Link(1e-6, 1e11), 64)


def test_the_curve_goes_from_one_rank_to_all_of_them() -> None:
    points = Planner(training(), flat(Link(1e-6, 1e11), 12)).curve()
    assert [one.ranks for one in points] == [1, 2, 4, 8, 12]
    assert [one.best is not None for one in points] == [True] * 5


def test_the_fastest_of_a_kind_is_the_best_of_all_its_ways() -> None:
    planner = Planner(training(layers=8), QUICK)
    every = [planner.step(way) for way in planner.layouts("hybrid", 8)]
    assert len({(one.layout.stages, one.layout.micro_batches) for one in every}) > 4
    assert planner.predict(8).steps["hybrid"].seconds == min(one.seconds for one in every)


def test_a_slow_network_makes_data_parallel_the_wrong_answer_and_says_so() -> None:
    planner = Planner(training(nbytes=20_000_000), SLOW)
    points = planner.curve()
    data = points[-1].steps["data"]
    assert isinstance(data, PredictedStep)
    assert data.rate < planner.single_process.rate
    said = " ".join(plan.verdict(planner, points))
    assert "Data parallel training is the wrong answer here" in said
    assert "bandwidth of the all-reduce" in said


def test_ranks_that_make_it_slower_are_named() -> None:
    planner = Planner(training(nbytes=1_000_000, start_s=0.0005, cut=False), flat(Link(1e-3, 1e10), 64))
    points = planner.curve()
    peak = max((one.best for one in points if one.best), key=lambda one: one.rate)
    assert 1 < peak.layout.ranks < 64
    assert f"More than {peak.layout.ranks} ranks make it slower" in " ".join(plan.verdict(planner, points))


def test_fewer_ranks_that_are_as_quick_are_what_is_told_in_detail() -> None:
    cluster = parse("""
        nodes = { count = 4, devices = 4 }
        [links]
        inside = { latency = "2 us", bandwidth = "300 GB/s" }
        between = { latency = "150 us", bandwidth = "100 Gbit/s" }
    """)
    plan = make_plan(replace(training(cut=False), other_s=0.4), cluster, 16)
    assert plan.best is not None
    assert plan.best.layout.ranks == 8
    said = list(plan.lines())
    assert any(line.startswith("Fastest: 16 replicas, ") for line in said)
    near = next(line for line in said if line.startswith("Within 1 % of that with fewer ranks: 8 replicas, "))
    assert said.index(near) < next(number for number, line in enumerate(said) if line.startswith("8 replicas: "))


def test_a_quick_network_is_not_spoken_against() -> None:
    planner = Planner(training(data_s=0.0), flat(Link(1e-6, 1e11), 4))
    said = plan.verdict(planner, planner.curve())
    assert len(said) == 1
    assert said[0].startswith("Fastest: ")


def test_a_model_that_fits_nowhere_is_short_of_so_many_bytes() -> None:
    planner = Planner(training(cut=False), QUICK, memory=10_000_000)
    point = planner.predict(2)
    assert point.best is None
    assert isinstance(point.steps["data"], str)
    assert point.steps["data"] == "a device needs 24 MB, and has 10 MB: 14 MB too little"
    assert "its forward cannot be followed" in plan.verdict(planner, [point])[0]


def test_a_model_too_large_for_a_device_is_cut() -> None:
    planner = Planner(training(layers=8), QUICK, memory=20_000_000)
    best = planner.predict(8).best
    assert best is not None
    assert best.layout.stages > 1
    assert best.memory <= 20_000_000


@pytest.mark.parametrize("ranks", [0, 65])
def test_ranks_that_are_not_there_cannot_be_planned_with(ranks: int) -> None:
    with pytest.raises(UsageError, match=f"{ranks} ranks are asked for, and the cluster has 64"):
        Planner(training(), QUICK).predict(ranks)


def test_more_ranks_than_samples_leave_some_without_any() -> None:
    reason = Planner(training(batch=16), QUICK).predict(32).steps["data"]
    assert isinstance(reason, str)
    assert reason == "a batch of 16 samples is smaller than 32 ranks"


def test_a_batch_that_grows_keeps_every_rank_as_busy() -> None:
    planner = Planner(training(start_s=0.001, cut=False), QUICK, scale_batch=True)
    best = planner.predict(64).best
    assert best is not None
    assert best.samples == 64 * 64
    assert best.parts.smaller == pytest.approx(0, abs=1e-12)
    assert plan.efficiency(planner, best) > 0.95


def test_the_gain_of_a_change_is_that_of_the_plan_with_it() -> None:
    planner = Planner(training(cut=False, data_s=1.0), SLOW)
    found = plan.of_setup(planner, 8)
    best = found[0]
    assert best.what == "load samples beside the step (workers=)"
    now, then = planner.predict(8).best, Planner(training(cut=False, data_s=0.0), SLOW).predict(8).best
    assert now is not None
    assert then is not None
    assert best.gain == pytest.approx(then.rate / now.rate - 1)
    assert [one.same for one in found] == sorted((one.same for one in found), reverse=True)


def test_changes_that_give_nothing_are_not_told() -> None:
    told_of = [one.what for one in plan.of_setup(Planner(training(cut=False, data_s=0.0), QUICK), 2)]
    assert "a network of half the latency" not in told_of
    assert "a network of twice the bandwidth" not in told_of


def test_compression_pays_on_a_slow_network_and_not_where_coding_takes_longer() -> None:
    planner = Planner(training(nbytes=8_000_000, cut=False), SLOW)
    now = planner.predict(8).best
    assert now is not None
    cheap, dear = (plan.compressed(planner, rate).predict(8).best for rate in (1e10, 1e8))
    assert cheap is not None
    assert dear is not None
    assert cheap.rate > 2 * now.rate
    assert dear.rate < now.rate


def test_the_table_has_a_line_for_each_point_and_the_details_add_up() -> None:
    planner = Planner(training(), SLOW)
    points = planner.curve(4)
    lines = plan.table(planner, points)
    assert [line.split()[0] for line in lines] == ["ranks", "1", "2", "4"]
    step = planner.step(ParallelLayout(4))
    shown = [line.split("%")[0].split()[-1] for line in plan.detail(step, planner)[1:] if "%  " in line]
    assert sum(map(int, shown)) == pytest.approx(100, abs=len(shown))


def test_small_buckets_and_small_shares_are_told_in_their_own_units() -> None:
    planner = Planner(training(), SLOW)
    step = planner.step(ParallelLayout(4))
    parts = replace(step.parts, imbalance=-0.003 * step.seconds)
    lines = plan.detail(replace(step, parts=parts, buckets=(24_000, 2_500_000)), planner)
    assert [line for line in lines if "buckets of 24 kB, 2.5 MB" in line]
    assert "-0 %" not in "\n".join(lines)
