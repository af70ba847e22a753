from __future__ import annotations

import io
import itertools
from types import SimpleNamespace

import pytest
from rich.console import Console

from samestep.recipes.progress import ProgressDisplay, percent, plural


class Batches:
    """What the display asks of the shards; counts how often the loss is read."""

    def __init__(self):
        self.steps_per_epoch = 10
        self.step = 0
        self.reads = 0

    @property
    def loss(self):
        self.reads += 1
        return 0.25


class Clock:
    """Seconds that pass only when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def made():
    """Makes a display on a page of text."""

    def make(*, rank=0, terminal=False, pace="", **options):
        page, clock, batches = io.StringIO(), Clock(), Batches()
        console = Console(file=page, force_terminal=terminal, width=120, highlight=False, soft_wrap=True)
        world = SimpleNamespace(is_first=rank == 0, size=4, pace=pace)
        show = ProgressDisplay("demo", world, batches, epochs=3, items=1000, console=console, clock=clock, **options)
        return show, page, clock, batches

    return make


def advance(show, clock, steps, seconds=1.0):
    for _ in range(steps):
        clock.now += seconds
        show.step()


def test_a_log_gets_a_line_every_five_seconds_and_one_for_each_epoch(made):
    show, page, clock, _ = made()
    with show:
        show.begin(0)
        advance(show, clock, 10)
        show.result(held_out="97.5 %")
    assert page.getvalue().splitlines() == [
        "demo: epoch 1/3  step 5/10  loss 0.2500  100 samples/s  eta 0:00:25",
        "demo: epoch 1/3  step 10/10  loss 0.2500  100 samples/s  eta 0:00:20",
        "demo: epoch 1/3  loss 0.2500  held out 97.5 %  100 samples/s",
    ]


def test_how_the_ranks_stand_is_shown_where_it_is_known(made):
    show, page, clock, _ = made(pace="waiting 31%  slowest rank 2 (1.4x)")
    show.begin(0)
    advance(show, clock, 5)
    assert "100 samples/s  waiting 31%  slowest rank 2 (1.4x)  eta" in page.getvalue()


def test_the_loss_is_read_only_when_a_line_is_written(made):
    show, page, clock, batches = made()
    show.begin(0)
    advance(show, clock, 1000, seconds=0.1)
    assert page.getvalue().count("\n") == batches.reads == 19  # 100 s; a clock in tenths drifts a little


def test_evaluation_does_not_count_as_training_time(made):
    show, page, clock, _ = made(print_freq=10)
    show.begin(0)
    advance(show, clock, 10)
    clock.now += 1000
    show.result()
    show.begin(1)
    advance(show, clock, 10)
    assert page.getvalue().splitlines()[-1].endswith("100 samples/s  eta 0:00:10")


def test_print_freq_counts_steps(made):
    show, page, clock, _ = made(print_freq=4)
    show.begin(0)
    advance(show, clock, 10, seconds=60)
    assert [line.split("step ")[1].split()[0] for line in page.getvalue().splitlines()] == ["4/10", "8/10"]


def test_columns_of_a_recipe_are_shown_and_empty_ones_are_not(made):
    counter = itertools.count(1)
    show, page, clock, _ = made(print_freq=1, columns={"skew": lambda: f"{next(counter)} ms", "nothing": lambda: ""})
    show.begin(0)
    advance(show, clock, 2)
    first, second = page.getvalue().splitlines()
    assert "loss 0.2500  skew 1 ms  100 samples/s" in first
    assert "loss 0.2500  skew 2 ms  100 samples/s" in second
    assert "nothing" not in page.getvalue()


def test_other_ranks_are_silent_and_never_read_the_loss(made):
    show, page, clock, batches = made(rank=1, terminal=True)
    with show:
        show.begin(0)
        advance(show, clock, 10)
        show.result(held_out="1 %")
        show.note("hello")
        show.summary("done")
    assert not page.getvalue()
    assert batches.reads == 0


def test_a_resumed_epoch_says_where_it_goes_on(made):
    show, page, _, batches = made()
    batches.step = 7
    show.begin(1)
    assert page.getvalue() == "demo: goes on in epoch 2/3 after step 7/10\n"


def test_a_fresh_epoch_says_nothing(made):
    show, page, _, _ = made()
    show.begin(0)
    assert not page.getvalue()


def test_the_summary_tells_result_effort_and_place(made, tmp_path):
    show, page, clock, _ = made()
    clock.now += 11.23
    show.summary("98.6 % of 360 held-out samples right", tmp_path)
    expected = f"demo: 98.6 % of 360 held-out samples right, 3 epochs, 4 ranks, 11.2 s, checkpoints in {tmp_path}\n"
    assert page.getvalue() == expected


def test_a_terminal_shows_a_bar_and_keeps_a_line_for_each_epoch(made):
    show, page, clock, batches = made(terminal=True)
    with show:
        show.begin(0)
        advance(show, clock, 10, seconds=0.125)
        show.result(held_out="97.5 %")
    drawn = page.getvalue()
    assert "demo: epoch 1/3  loss 0.2500  held out 97.5 %" in drawn
    assert "4/30" in drawn  # half a second later
    assert "10/30" in drawn
    assert batches.reads <= 4


def test_the_bar_is_gone_before_the_summary(made):
    show, page, clock, _ = made(terminal=True)
    with show:
        show.begin(2)
        advance(show, clock, 10)
        show.result()
        show.summary("done")
    assert page.getvalue().rstrip().endswith("demo: done, 3 epochs, 4 ranks, 10.0 s")


def test_100_percent_is_said_of_all_only():
    assert percent(1.0) == "100.0 %"
    assert percent(0.9999) == "99.990 %"
    assert percent(0.98611) == "98.6 %"


def test_one_is_singular():
    assert plural(1, "rank") == "1 rank"
    assert plural(2, "rank") == "2 ranks"
