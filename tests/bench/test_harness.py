"""Alternating pairs, and what is said of them."""

from __future__ import annotations

import json
import math

import pytest

from samestep.bench import BENCHMARKS, benchmark, load
from samestep.bench.harness import Comparison, Options, Report, alternate
from samestep.errors import UsageError


class Clock:
    """Advances only when told to."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def block(self, name, seconds):
        def run():
            self.log.append(name)
            self.now += seconds

        return run

    def __call__(self):
        return self.now


def test_who_goes_first_changes_with_every_pair():
    clock = Clock()
    alternate(clock.block("ours", 1), clock.block("theirs", 2), pairs=3, warmup=0, clock=clock)
    assert clock.log == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]


def test_every_block_is_timed_under_its_own_name_and_the_warm_up_is_not():
    clock = Clock()
    times = alternate(clock.block("ours", 1), clock.block("theirs", 2), pairs=4, warmup=3, clock=clock)
    assert times == ([1.0] * 4, [2.0] * 4)
    assert len(clock.log) == 2 * (3 + 4)


def test_all_are_aligned_before_each_block_and_again_inside_its_time():
    clock = Clock()
    times = alternate(
        clock.block("ours", 1),
        clock.block("theirs", 2),
        pairs=1,
        warmup=0,
        align=clock.block("align", 0.25),
        clock=clock,
    )
    assert clock.log == ["align", "ours", "align", "align", "theirs", "align"]
    assert times == ([1.25], [2.25])


COMPARISON = Comparison("a / b", "step", (1.0, 2.0, 3.0, 30.0), (1.0, 1.0, 2.0, 30.0), most=1.25)


def test_the_ratio_is_the_median_over_pairs_and_not_the_ratio_of_medians():
    assert COMPARISON.ratios == [1.0, 2.0, 1.5, 1.0]
    assert COMPARISON.ratio == 1.25
    assert COMPARISON.quartiles == (1.0, 1.625)


def compare(ratios, most=1.25):
    return Comparison("a / b", "step", tuple(ratios), (1.0,) * len(ratios), most)


def test_the_interval_of_the_median_narrows_with_the_number_of_pairs():
    ratios = [float(ratio) for ratio in range(1, 101)]
    assert compare(ratios[:4]).interval == (1.0, 4.0)  # too few to leave any out
    assert compare(ratios[::-1]).interval == (40.0, 61.0)  # as tables of the binomial distribution have it


@pytest.mark.parametrize("count", [6, 8, 11, 14, 20, 60, 100, 150])
def test_the_true_median_is_outside_of_the_interval_in_one_of_20_cases_at_most(count):
    lower = int(compare([float(place) for place in range(count)]).interval[0])
    outside = 2 * sum(math.comb(count, below) for below in range(lower + 1)) / 2**count
    next_outside = outside + 2 * math.comb(count, lower + 1) / 2**count
    assert outside <= 0.05 < next_outside


def test_a_target_is_met_or_missed_only_when_the_interval_says_so():
    assert compare([1.0, 1.25] * 3).kept is True
    assert compare([1.26, 1.3] * 3).kept is False
    assert compare([1.0, 1.3] * 3).kept is None
    assert compare([1.0, 1.0] * 3, most=None).kept is None
    assert compare([1.0] * 5).kept is None  # all on one side of the median: once in 16 times by chance


def test_the_json_carries_setting_medians_ratio_and_every_time():
    told = json.loads(json.dumps(Report("step", [COMPARISON], {"ranks": 2}).as_json()))
    assert told["bench"] == "step"
    assert told["setting"] == {"ranks": 2}
    (comparison,) = told["comparisons"]
    assert comparison == {
        "name": "a / b",
        "unit": "seconds per step",
        "ours": {"median": 2.5, "times": [1.0, 2.0, 3.0, 30.0]},
        "theirs": {"median": 1.5, "times": [1.0, 1.0, 2.0, 30.0]},
        "ratio": {"median": 1.25, "interval": [1.0, 2.0], "quartiles": [1.0, 1.625]},
        "overhead_percent": 25.0,
        "target_percent": 25.0,
        "kept": None,
    }


@pytest.mark.parametrize("options", [{"ranks": 0}, {"repeats": 1}])
def test_options_that_measure_nothing_are_refused(options):
    with pytest.raises(UsageError, match="a benchmark needs"):
        Options(**options)


def test_every_benchmark_in_the_table_exists():
    assert all(callable(load(name)) for name in BENCHMARKS)


def test_an_unknown_benchmark_is_refused_with_the_list():
    known = "allreduce, buckets, checkpoint, compress, guard, launch, links, mpi, observe, pipeline, step, virtual"
    with pytest.raises(UsageError, match=f"there is no benchmark 'stpe': choose one of {known}"):
        benchmark("stpe")
