import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import UsageError
from samestep.topology import Grid, cut_evenly


def test_the_grid_looks_like_the_picture():
    grid = Grid(size=8, pipeline=2)
    assert grid.rows() == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert grid.columns() == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert grid.coordinates(5) == (2, 1)


@given(st.integers(1, 12), st.integers(1, 6))
def test_every_rank_is_on_one_row_and_one_column(replicas, stages):
    grid = Grid(replicas * stages, stages)
    for rank in range(grid.size):
        data, stage = grid.coordinates(rank)
        assert grid.data_ranks(rank)[data] == rank
        assert grid.pipeline_ranks(rank)[stage] == rank


def test_a_world_that_cannot_be_cut_into_pipelines_is_refused():
    with pytest.raises(UsageError, match="world of 6 cannot be cut into pipelines of 4"):
        Grid(6, 4)


@given(st.integers(0, 1000), st.integers(1, 40))
def test_an_even_cut_covers_all_and_differs_by_one_at_most(total, parts):
    cut = cut_evenly(total, parts)
    assert [position for start, stop in cut for position in range(start, stop)] == list(range(total))
    lengths = [stop - start for start, stop in cut]
    assert max(lengths) - min(lengths) <= 1
