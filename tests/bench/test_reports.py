"""The report of a benchmark has what it is asked for: so many pairs of each comparison, and its target."""

from __future__ import annotations

from functools import partial

import pytest
from small import in_place_of_spawn

from samestep.bench import allreduce, checkpoint, guard, virtual
from samestep.bench.allreduce import MIB
from samestep.bench.harness import Options


@pytest.mark.parametrize(
    ("benchmark", "most", "constants"),
    [
        (guard, [1.005], {"EVERY": 3, "CHECKS": 2}),
        (virtual, [None] * 3, {}),
        (checkpoint, [1.02, None], {}),
        (allreduce, [1 / 3.5, 1.0], {"WARM": MIB, "COPIED": 4 * MIB}),
    ],
    ids=["guard", "virtual", "checkpoint", "allreduce"],
)
def test_a_report_has_as_many_pairs_as_were_asked_for(two_ranks, monkeypatch, tmp_path, benchmark, most, constants):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(allreduce, "SIZES", (MIB,))
    spawn = in_place_of_spawn(two_ranks, **constants)
    if benchmark is checkpoint:
        few = partial(checkpoint.compare, steps=9)
        monkeypatch.setattr(benchmark, "spawn", lambda _, *given, **more: spawn(few, *given, **more))
    else:
        monkeypatch.setattr(benchmark, "spawn", spawn)
    report = benchmark.run(Options(2, 3))
    assert report.bench == benchmark.__name__.rpartition(".")[2]
    assert [one.most for one in report.comparisons] == pytest.approx(most)
    assert [(len(one.ours), len(one.theirs)) for one in report.comparisons] == [(3, 3)] * len(most)
    assert all(min(*one.ours, *one.theirs) > 0 for one in report.comparisons)
    assert report.setting["ranks"] == 2
