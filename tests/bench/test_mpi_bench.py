"""The benchmark of MPI: a real job, few and small."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch.distributed as dist
from small import small

import samestep
from samestep.bench import mpi
from samestep.bench.allreduce import KIB
from samestep.bench.harness import Options
from samestep.errors import UsageError

NAMES = {"polling", "blocking", "gloo", "samestep"}


def in_a_world(function):
    with samestep.world(device="cpu"):
        return small(function)


def timed():
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "samestep")}
    return mpi._all_reduces(groups, 64 * KIB, 3), mpi._steps(groups, 2)


def test_every_group_takes_its_turn_with_the_same_work(two_ranks):
    for sums, steps in two_ranks(in_a_world, timed):
        assert {name: len(times) for name, times in sums.items()} == {"gloo": 3, "samestep": 3}
        assert {name: len(times) for name, times in steps.items()} == {"gloo": 2, "samestep": 2}
        assert min(map(min, [*sums.values(), *steps.values()])) > 0


@pytest.mark.prove
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="needs mpi4py: pip install 'samestep[mpi]'")
def test_a_job_of_mpiexec_times_every_way():
    rows, conditions = mpi._job(Options(2, 2))
    assert [name for name, _, _ in rows][-1] == "step"
    assert len(rows) == len(mpi.SIZES) + 1
    for _, _, times in rows:
        assert set(times) == NAMES
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())
    assert "MPI" in conditions["mpi"]


def test_only_the_way_that_ranks_get_by_default_has_a_target():
    found = mpi._comparisons("a", "call", {name: [1.0, 2.0] for name in NAMES}, "busy, ")
    assert [(one.name, one.most) for one in found] == [
        ("busy, a, polling / gloo", 1.2),
        ("busy, a, blocking / gloo", None),
        ("busy, a, polling / samestep", None),
        ("busy, a, samestep / gloo", None),
    ]


def test_one_rank_has_nothing_to_add():
    with pytest.raises(UsageError, match="needs 2 ranks or more"):
        mpi.run(Options(1, 2))
