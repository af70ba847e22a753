"""The all-reduce benchmark adds on both sides, and derives its figures as nccl-tests does."""

from __future__ import annotations

import pytest
from small import small

from samestep.bench import allreduce
from samestep.bench.allreduce import KIB, MIB, Timed
from samestep.bench.harness import Options, check_plot, draw
from samestep.errors import UsageError

SMALL = (4, 64 * KIB)


def test_every_size_is_timed_in_both_kinds_against_gloo(two_ranks):
    found = two_ranks(lambda: small(allreduce.compare, (3, SMALL), WARM=MIB, COPIED=4 * MIB))
    for timed, bytes_per_s, conditions in found:
        assert [(one.kind, one.nbytes) for one in timed] == [(kind, n) for n in SMALL for kind in allreduce.KINDS]
        assert all(len(side) == 3 and min(side) > 0 for one in timed for side in (one.ours, one.theirs))
        assert bytes_per_s > 1e8
        assert conditions["ranks"] == 2


def test_bandwidths_and_the_limit_follow_from_time_and_size():
    one = Timed("registered", 25 * MIB, [0.002] * 6, [0.020] * 6)
    comparison = allreduce._comparison(one, 4, 80e9)
    assert comparison.name == "25 MiB, registered"
    assert comparison.ratio == pytest.approx(0.1)
    assert comparison.kept is True
    nbytes = 25 * 2**20
    assert comparison.figures == pytest.approx(
        {
            "algbw_GB_per_s": nbytes / 0.002 / 1e9,
            "busbw_GB_per_s": 1.5 * nbytes / 0.002 / 1e9,
            "limit_ms": 8e3 * nbytes / 80e9,
            "limits": 0.002 / (8 * nbytes / 80e9),
        }
    )


@pytest.mark.parametrize(
    ("kind", "nbytes", "times"),
    [("registered", MIB, 3.5), ("registered", 25 * MIB, 3.5), ("registered", 100 * MIB, 2.5), ("copied", MIB, 1.0)],
)
def test_the_target_depends_on_size_and_kind(kind, nbytes, times):
    assert 1 / allreduce.target(kind, nbytes) == pytest.approx(times)


def test_one_rank_has_nothing_to_add():
    with pytest.raises(UsageError, match="2 ranks or more"):
        allreduce.run(Options(1, 2))


def test_the_plot_is_a_page_with_every_way_and_its_own_script(tmp_path):
    timed = [Timed(kind, n, [0.001], [0.002]) for n in (KIB, MIB) for kind in allreduce.KINDS]
    curves = allreduce._curves(timed, Options(2, 2))
    assert {name: len(points) for name, points in curves.items()} == {"registered": 2, "copied": 2, "gloo": 2}
    page = tmp_path / "page.html"
    draw(allreduce.Report("allreduce", [], {"ranks": 2}, (), curves), page)
    text = page.read_text(encoding="utf-8")
    assert all(f'"name":"{name}"' in text for name in curves)
    assert 'src="http' not in text


def test_a_plot_of_something_else_is_refused_before_anything_is_measured():
    with pytest.raises(UsageError, match="--plot draws allreduce, not step"):
        check_plot("step")
