"""The benchmark of compression: real ranks, few steps; and what it concludes."""

from __future__ import annotations

import pytest
from small import in_place_of_spawn, wide

from samestep.bench import compress
from samestep.bench.harness import Comparison, Options
from samestep.errors import UsageError


def test_real_ranks_time_every_codec_beside_the_step_without(two_ranks, monkeypatch):
    monkeypatch.setattr(compress, "spawn", in_place_of_spawn(two_ranks))
    report = compress.run(Options(2, 2))
    assert [one.name for one in report.comparisons] == [*compress.CODECS, "as it comes"]
    plain = sum(each.nbytes for each in wide().parameters()) / 1e6  # each of two ranks sends as much as there is
    for one in report.comparisons[:-1]:
        assert len(one.ours) == len(one.theirs) == 2
        assert 0 < one.figures["sent_mb"] < 0.51 * plain
        assert one.figures["coding_ms"] > 0
    int8 = next(one for one in report.comparisons if one.name == "int8")
    assert int8.figures["sent_mb"] == pytest.approx(plain / 4, rel=0.02)
    assert report.conclusion.startswith("Too few steps")
    assert all(word in report.legend for word in ("ours", "theirs", "speedup", "coding", "pays below"))


def compared(name, ratio):
    return Comparison(name, "step", (ratio,) * 9, (1.0,) * 9)


@pytest.mark.parametrize(
    ("int8", "as_it_comes", "said"),
    [
        (0.25, 1.0, "Compression pays on this network: a step is int8 4.0 times as quick"),
        (0.25, 0.5, "int8 2.0 times as quick as without"),
        (0.25, 0.1, "Nothing is gained by compression on this network"),
        (1.1, 1.0, "Nothing is gained"),
    ],
)
def test_it_pays_only_where_it_is_faster_than_the_best_way_without(int8, as_it_comes, said):
    found = compress.conclusion([compared("int8", int8), compared("as it comes", as_it_comes)], hosts=2)
    assert said in found


def test_nothing_is_concluded_from_few_steps_nor_of_a_network_from_one_host():
    few = [Comparison("int8", "step", (0.1,) * 5, (1.0,) * 5)]
    assert compress.conclusion(few, hosts=2).startswith("Too few steps to tell")
    found = compress.conclusion([compared("int8", 1.5)], hosts=1)
    assert "Nothing is gained by compression among processes of one host" in found
    assert "--hosts" in found


def test_one_rank_has_nothing_to_compress():
    with pytest.raises(UsageError, match="needs 2 ranks or more"):
        compress.run(Options(1, 2))
