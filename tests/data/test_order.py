import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.data.order import BLOCK, SampleOrder, StepPartitioner

# Golden: a resume must find the same order for ever, under any version of anything. A change is a new ORDER_VERSION.
GOLDEN = {  # samples, seed, epoch: the first four, four from the middle on, the last four
    (1, 0, 0): [[0], [0], [0]],
    (2, 0, 0): [[1, 0], [0], [1, 0]],
    (10, 0, 0): [[6, 4, 3, 9], [0, 1, 5, 7], [1, 5, 7, 8]],
    (10, 0, 1): [[6, 3, 0, 9], [4, 5, 1, 7], [5, 1, 7, 2]],
    (10, 1, 0): [[1, 7, 4, 3], [2, 9, 0, 5], [9, 0, 5, 6]],
    (16, 5, 2): [[3, 0, 7, 6], [1, 8, 10, 9], [15, 14, 5, 12]],
    (255, 1, 0): [[252, 56, 180, 61], [249, 185, 167, 5], [201, 93, 31, 16]],
    (256, 1, 0): [[78, 214, 94, 47], [196, 46, 57, 179], [9, 129, 249, 176]],
    (257, 1, 0): [[177, 84, 13, 75], [65, 117, 96, 133], [229, 100, 159, 189]],
    (1797, 0, 0): [[192, 1409, 1552, 546], [269, 1370, 1610, 971], [1626, 1256, 365, 713]],
    (1281167, 42, 89): [
        [577585, 1020121, 998912, 849961],
        [1227100, 997508, 957439, 816858],
        [13671, 1094834, 855120, 200985],
    ],
    (10**9, 1, 0): [
        [770650726, 365617792, 293863451, 297709037],
        [791084220, 697848138, 138598312, 123052144],
        [295857779, 575760604, 228357489, 611208711],
    ],
    (10**9, 2**40, 1000): [
        [510863776, 174913563, 586549865, 197764764],
        [257499420, 486363740, 575278600, 527790862],
        [889679582, 265335399, 56432824, 898519997],
    ],
    (2**40, 3, 0): [
        [990220323597, 671789031343, 4517814427, 303943113951],
        [760149196460, 1043562063653, 714120402271, 534322163040],
        [754566437922, 447620331121, 47988933471, 478975954240],
    ],
}
WHOLE = {  # BLAKE2b of all indices as little-endian int64
    (10, 0, 0): "23bc77d954dffbba",
    (257, 1, 0): "765b61654e26c0d4",
    (1797, 0, 9): "40af320fc03dc035",
    (50000, 7, 3): "c52683e2d9b88392",
}


@pytest.mark.parametrize("what", GOLDEN)
def test_the_order_never_changes(what):
    size, order = what[0], SampleOrder(*what)
    starts = (0, size // 2, max(0, size - 4))
    assert [order.take(start, min(size, start + 4)).tolist() for start in starts] == GOLDEN[what]


@pytest.mark.parametrize("what", WHOLE)
def test_not_one_sample_of_it_ever_changes(what):
    indices = SampleOrder(*what).take(0, what[0]).astype("<i8").tobytes()
    assert hashlib.blake2b(indices, digest_size=8).hexdigest() == WHOLE[what]


def steps_from(partitioner, cursor):
    return [partitioner.step(start) for start in range(cursor, partitioner.end, partitioner.batch_size)]


def test_a_billion_samples_take_no_more_memory_than_a_thousand():
    tracemalloc.start()
    try:
        order = SampleOrder(10**9, seed=1)
        for start in (0, 10**9 // 2, 10**9 - 256, 123_456_789, 10**9 - 256):
            assert len(order.take(start, start + 256)) == 256
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_ranks_ask_a_billion_samples_for_the_same_steps(ranks):
    start, order = 10**9 - 1000, SampleOrder(10**9, seed=1)
    spans = [StepPartitioner(10**9, 600, 50, rank, ranks).step(start).micro for rank in range(ranks)]
    taken = [order.take(*span) for together in zip(*spans, strict=True) for span in together]
    assert np.concatenate(taken).tolist() == SampleOrder(10**9, seed=1).take(start, start + 600).tolist()


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 100))
def test_every_sample_comes_once(size, seed, epoch):
    assert sorted(SampleOrder(size, seed, epoch).take(0, size).tolist()) == list(range(size))


@given(st.data())
def test_any_part_can_be_asked_for(data):
    order = SampleOrder(3 * BLOCK + 7, seed=1)
    start = data.draw(st.integers(0, order.size))
    stop = data.draw(st.integers(start, order.size))
    assert order.take(start, stop).tolist() == order.take(0, order.size)[start:stop].tolist()


def test_epochs_and_seeds_give_other_orders():
    orders = [SampleOrder(50, seed, epoch).take(0, 50).tolist() for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_every_position_is_equally_likely_for_a_sample():
    counts = np.zeros((20, 20))
    for seed in range(1000):
        counts[np.arange(20), SampleOrder(20, seed).take(0, 20)] += 1
    chi_squared = ((counts - 50) ** 2 / 50).sum()
    assert chi_squared < 361 + 5 * (2 * 361) ** 0.5  # 19 x 19 degrees of freedom, five standard deviations


def test_without_shuffle_the_samples_come_as_they_lie():
    assert SampleOrder(5, shuffle=False).take(1, 4).tolist() == [1, 2, 3]


#                          step 0        step 1        step 2, short
# rank 0 of 3              0 1           4 5           8
# rank 1 of 3              2             6             9
# rank 2 of 3              3             7             none, and takes the step all the same
def test_the_cut_looks_like_the_picture():
    micro = [[step.micro for step in steps_from(StepPartitioner(10, 4, None, rank, 3), 0)] for rank in range(3)]
    assert micro == [
        [((0, 2),), ((4, 6),), ((8, 9),)],
        [((2, 3),), ((6, 7),), ((9, 10),)],
        [((3, 4),), ((7, 8),), ((10, 10),)],
    ]


def test_micro_batches_are_as_many_on_every_rank_and_cut_evenly():
    micro = [StepPartitioner(10, 10, 2, rank, 3).step(0).micro for rank in range(3)]
    assert micro == [((0, 2), (5, 7)), ((2, 4), (7, 9)), ((4, 5), (9, 10))]


@given(
    total=st.integers(1, 200),
    batch=st.integers(1, 60),
    micro=st.one_of(st.none(), st.integers(1, 20)),
    ranks=st.integers(1, 9),
    cursor=st.integers(0, 200),
)
def test_all_ranks_together_take_every_position_once_in_equally_many_micro_batches(total, batch, micro, ranks, cursor):
    cursor = min(cursor, total)
    plans = [list(steps_from(StepPartitioner(total, batch, micro, rank, ranks), cursor)) for rank in range(ranks)]
    taken: list[int] = []
    for steps in zip(*plans, strict=True):
        for together in zip(*(step.micro for step in steps), strict=True):  # one micro-batch of all ranks
            taken += [position for start, stop in together for position in range(start, stop)]
            assert all(micro is None or stop - start <= micro for start, stop in together)
    assert taken == list(range(cursor, total))
    assert len(plans[0]) == StepPartitioner(total, batch, micro, 0, ranks).steps_from(cursor)


def test_a_short_last_step_can_be_left_out():
    steps = list(steps_from(StepPartitioner(10, 4, drop_last=True), 0))
    assert [(step.start, step.stop) for step in steps] == [(0, 4), (4, 8)]
