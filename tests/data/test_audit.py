import random
import tracemalloc

import pytest

from samestep.data.audit import audit
from samestep.data.ledger import Ledger, Skip
from samestep.data.order import SampleOrder

N, SEED = 50, 3


def run(steps, *, n=N, now=None, batch_size=8, drop_last=False, begins=(0, 0), skipped=()):
    """The data state of a run that committed `steps`: (epoch, start, stop)."""
    ledger = Ledger(begins)
    for epoch, start, stop in steps:
        mine = tuple(skip for place, skip in skipped if place == (epoch, start))
        ledger.enter(epoch, start, SampleOrder(n, SEED, epoch).take(start, stop), batch_size=batch_size, skipped=mine)
    epoch, cursor = now or (steps[-1][0], steps[-1][2])
    return {
        "order": 1,
        "samples": n,
        "seed": SEED,
        "shuffle": True,
        "drop_last": drop_last,
        "epoch": epoch,
        "cursor": cursor,
        "ledger": ledger.state(),
    }


def steps_of(epoch, stop=N, *, start=0, batch_size=8):
    return [(epoch, at, min(at + batch_size, stop)) for at in range(start, stop, batch_size)]


WHOLE = steps_of(0) + steps_of(1) + steps_of(2)


@pytest.mark.parametrize(
    ("state", "summary"),
    [
        (run(WHOLE, now=(3, 0)), "every sample of 3 epochs exactly once"),
        (run(WHOLE), "every sample of 3 epochs exactly once"),  # the last step is committed, its loop not over
        (run(WHOLE + steps_of(3, 16)), "every sample of 3 epochs exactly once; epoch 3: 16 of 50 so far"),
        (run(steps_of(0, 16)), "epoch 0: 16 of 50 so far, each exactly once"),
        (run([], now=(0, 0)), "no step so far"),
        (
            run(steps_of(0, 48) + steps_of(1, 48), now=(2, 0), drop_last=True),
            "every sample of 2 epochs exactly once but for 4 left out by drop_last",
        ),
        (
            run(steps_of(1, start=10) + steps_of(2), now=(3, 0), begins=(1, 10)),
            "every sample of 1 epoch exactly once; the ledger begins at epoch 1, position 10",
        ),
    ],
)
@pytest.mark.parametrize("digests", [True, False])
def test_a_whole_run_is_a_sentence(state, summary, digests):
    found = audit(state, digests=digests)
    assert (found.ok, found.problems) == (True, ())
    assert found.summary == summary + ("" if digests else "; digests not computed again")


def test_what_was_skipped_is_named():
    index = int(SampleOrder(N, SEED, 1).take(9, 10)[0])
    found = audit(run(WHOLE, now=(3, 0), skipped=[((1, 8), Skip(9, index, "ValueError: no picture"))]))
    assert found.ok
    assert found.summary == (
        f"every sample of 3 epochs exactly once except 1 skipped: index {index} (epoch 1: ValueError: no picture)"
    )


def indices(epoch, start, stop):
    order = SampleOrder(N, SEED, epoch).take(0, N)
    return ", ".join(f"index {order[at]} (position {at})" for at in range(start, stop))


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (
            run(steps_of(0) + steps_of(1, 16) + steps_of(1, start=18), now=(2, 0)),
            f"epoch 1: 2 samples missing: {indices(1, 16, 18)}",
        ),
        (
            run(steps_of(0) + steps_of(1, 16) + steps_of(1, start=15), now=(2, 0)),
            f"epoch 1: 1 sample consumed twice, or before the ledger: {indices(1, 15, 16)}",
        ),
        (
            run(steps_of(0, 40) + steps_of(1), now=(2, 0)),
            f"epoch 0: 10 samples missing: {indices(0, 40, 43)} and 7 more",
        ),
        (
            run(steps_of(0, 40), now=(0, 16)),
            f"epoch 0: 24 samples consumed, though the run stands at position 16: {indices(0, 16, 19)} and 21 more",
        ),
        (run(steps_of(0, 16), now=(0, 17)), f"epoch 0: 1 sample missing: {indices(0, 16, 17)}"),
        (run(steps_of(0) + steps_of(4), now=(5, 0)), "3 whole epochs missing, the first is epoch 1"),
        (
            run(steps_of(0) + steps_of(4, 8), now=(1, 0)),
            "epoch 4: 8 samples consumed, though the ledger begins at epoch 0 and the run stands at epoch 1",
        ),
        (
            run(steps_of(0), now=(1, 0), skipped=[((0, 8), Skip(9, 51, "bad"))]),
            "epoch 0: index 51 was not skipped at position 9",
        ),
        (
            run(steps_of(0, 40) + steps_of(1), now=(2, 0), drop_last=True),
            f"epoch 0: 10 samples missing: {indices(0, 40, 43)} and 7 more",
        ),
    ],
)
def test_what_is_missing_or_twice_is_named(state, problem):
    found = audit(state, digests=False)
    assert not found.ok
    assert found.problems == (problem,)
    assert found.summary == f"1 problem: {problem}"


def changed(state, row, place, value):
    rows = [list(segment) for segment in state["ledger"]["segments"]]
    rows[row][place] = value
    return state | {"ledger": state["ledger"] | {"segments": rows}}


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (
            run(WHOLE) | {"seed": 4},
            "epoch 0: the samples of positions [0, 50) were not those of the order in steps of 8",
        ),
        (run(WHOLE) | {"shuffle": False}, "epoch 0: the samples of positions [0, 50) were not those of the order"),
        (changed(run(WHOLE), 1, 3, 7), "epoch 1: the samples of positions [0, 50) were not those of the order"),
        (changed(run(WHOLE), 1, 4, "00" * 16), "epoch 1: the samples of positions [0, 50) were not those"),
    ],
)
def test_digests_show_what_positions_do_not(state, problem):
    assert audit(state, digests=False).ok
    assert audit(state).problems[0].startswith(problem)


def test_the_skipped_are_not_in_the_digest():
    index = int(SampleOrder(N, SEED, 0).take(9, 10)[0])
    state = run(steps_of(0), skipped=[((0, 8), Skip(9, index, "bad"))])
    assert audit(state).ok
    assert not audit(changed(state, 0, 5, ())).ok


@pytest.mark.parametrize(
    "change",
    [
        {"order": 2},
        {"samples": 0},
        {"cursor": 51},
        {"epoch": -1},
        {"samples": "many"},
        {"ledger": {}},
        {"ledger": run(WHOLE)["ledger"] | {"version": 9}},
        {"ledger": run(WHOLE)["ledger"] | {"begins": (9, 0)}},
    ],
    ids=str,
)
def test_what_cannot_be_audited_is_said_so(change):
    found = audit(run(WHOLE) | change)
    assert not found.ok
    assert found.summary.startswith("cannot be audited: ")


@pytest.mark.parametrize("span", [(-1, 8), (8, 8), (0, 51), (0, 1 << 62)])
def test_a_segment_that_is_none_is_a_problem_and_nothing_is_computed_for_it(span):
    state = changed(changed(run(WHOLE), 0, 1, span[0]), 0, 2, span[1])
    assert "is none of 50 samples" in audit(state).summary


def test_a_state_without_a_ledger_is_not_taken_for_a_good_one():
    state = run(WHOLE)
    del state["ledger"]
    found = audit(state)
    assert not found.ok
    assert "no ledger was kept" in found.summary


def test_a_billion_samples_are_audited_in_constant_memory():
    n = 10**9
    ledger = Ledger(begins=(0, n - 300_000))
    order = SampleOrder(n, SEED, 0)
    for start in range(n - 300_000, n, 4096):
        ledger.enter(0, start, order.take(start, min(n, start + 4096)), batch_size=4096)
    state = run([], n=n, now=(1, 0)) | {"ledger": ledger.state()}
    tracemalloc.start()
    try:
        assert audit(state).ok
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.prove
def test_random_runs_that_lose_or_repeat_are_found_out():
    """200 runs of random steps, in half of which a resume went on at a wrong position: simulated against a count."""
    draw = random.Random(1)
    for trial in range(200):
        n, batch_size, epochs = draw.randint(20, 90), draw.randint(3, 17), draw.randint(1, 3)
        wrong = draw.randrange(epochs) if trial % 2 else None
        ledger, seen = Ledger(), {}
        for epoch in range(epochs):
            order, cursor = SampleOrder(n, SEED, epoch), 0
            jump = draw.randint(-batch_size, batch_size) or 1
            while cursor < n:
                stop = min(cursor + batch_size, n)
                ledger.enter(epoch, cursor, order.take(cursor, stop), batch_size=batch_size)
                for index in order.take(cursor, stop).tolist():
                    seen[epoch, index] = seen.get((epoch, index), 0) + 1
                cursor = stop
                if draw.random() < 0.3:
                    ledger = Ledger.of(ledger.state())
                if epoch == wrong and -jump <= cursor < n:
                    cursor, wrong = cursor + jump, None
        exact = all(seen.get((epoch, index)) == 1 for epoch in range(epochs) for index in range(n))
        state = run([], n=n, now=(epochs, 0)) | {"ledger": ledger.state()}
        assert audit(state).ok == exact, (trial, audit(state))
