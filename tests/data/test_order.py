import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from samestep.data.order import BLOCK, Cut, Order

# Golden: a resume must find the same order for ever. A change here is a new ORDER_VERSION.
TEN = [6, 4, 3, 9, 2, 0, 1, 5, 7, 8]
THOUSAND_AT_500 = [278, 452, 133, 894, 980]
BILLION_AT_HUNDRED_MILLION = [600417306, 374155101, 507478636, 246164131, 448239541]


def test_the_order_never_changes():
    assert Order(10, seed=0, epoch=0).take(0, 10).tolist() == TEN
    assert Order(1000, seed=7, epoch=3).take(500, 505).tolist() == THOUSAND_AT_500
    assert Order(10**9, seed=1, epoch=0).take(10**8, 10**8 + 5).tolist() == BILLION_AT_HUNDRED_MILLION


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 100))
def test_every_sample_comes_once(size, seed, epoch):
    assert sorted(Order(size, seed, epoch).take(0, size).tolist()) == list(range(size))


@given(st.data())
def test_any_part_can_be_asked_for(data):
    order = Order(3 * BLOCK + 7, seed=1)
    start = data.draw(st.integers(0, order.size))
    stop = data.draw(st.integers(start, order.size))
    assert order.take(start, stop).tolist() == order.take(0, order.size)[start:stop].tolist()


def test_epochs_and_seeds_give_other_orders():
    orders = [Order(50, seed, epoch).take(0, 50).tolist() for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_every_position_is_equally_likely_for_a_sample():
    counts = np.zeros((20, 20))
    for seed in range(2000):
        counts[np.arange(20), Order(20, seed).take(0, 20)] += 1
    chi_squared = ((counts - 100) ** 2 / 100).sum()
    assert chi_squared < 361 + 5 * (2 * 361) ** 0.5  # 19 x 19 degrees of freedom, five standard deviations


def test_without_shuffle_the_samples_come_as_they_lie():
    assert Order(5, shuffle=False).take(1, 4).tolist() == [1, 2, 3]


#                          step 0        step 1        step 2, short
# rank 0 of 3              0 1           4 5           8
# rank 1 of 3              2             6             9
# rank 2 of 3              3             7             none, and takes the step all the same
def test_the_cut_looks_like_the_picture():
    micro = [[step.micro for step in Cut(10, 4, None, rank, 3).steps(0)] for rank in range(3)]
    assert micro == [
        [((0, 2),), ((4, 6),), ((8, 9),)],
        [((2, 3),), ((6, 7),), ((9, 10),)],
        [((3, 4),), ((7, 8),), ((10, 10),)],
    ]


def test_micro_batches_are_as_many_on_every_rank_and_cut_evenly():
    micro = [Cut(10, 10, 2, rank, 3).step(0).micro for rank in range(3)]
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
    plans = [list(Cut(total, batch, micro, rank, ranks).steps(cursor)) for rank in range(ranks)]
    taken: list[int] = []
    for steps in zip(*plans, strict=True):
        for together in zip(*(step.micro for step in steps), strict=True):  # one micro-batch of all ranks
            taken += [position for start, stop in together for position in range(start, stop)]
            assert all(micro is None or stop - start <= micro for start, stop in together)
    assert taken == list(range(cursor, total))
    assert len(plans[0]) == Cut(total, batch, micro, 0, ranks).steps_from(cursor)


def test_a_short_last_step_can_be_left_out():
    steps = list(Cut(10, 4, drop_last=True).steps(0))
    assert [(step.start, step.stop) for step in steps] == [(0, 4), (4, 8)]
