import itertools
import os
import random
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import samestep
from samestep.checkpoints import inspection
from samestep.data.audit import audit
from samestep.data.iterable import PROMISES
from samestep.errors import DataError, PeerError, StepError


class Repeats(IterableDataset):
    """A stream that does not say how long it is."""

    def __init__(self, size, epoch_matters=False):
        self.size = size
        self.first = 0
        self.epoch_matters = epoch_matters

    def set_epoch(self, epoch):
        self.first = 1000 * epoch if self.epoch_matters else 0

    def __iter__(self):
        for number in range(self.size):
            yield torch.tensor(self.first + number)


class Says(Repeats):
    """One that does."""

    said = None

    def __len__(self):
        return self.said or self.size


class Seeks(Says):
    """One that can go to any position."""

    def iter_from(self, position):
        return (torch.tensor(number) for number in range(position, self.size))


KINDS = {"seeks": Seeks, "repeats": Says, "unknown": Repeats}


def batches_of(world, dataset, options):
    return samestep.shards(dataset, world, **{"batch_size": 8, "seed": 4, **options})


def seen(dataset, options, epochs=2):
    """Every micro-batch of this rank, whether it ended its step, and the state at the end."""
    with samestep.world() as world:
        batches, taken = batches_of(world, dataset, options), []
        for _ in range(epochs):
            for x in batches:
                x = x[0] if isinstance(x, list) else x
                taken.append((x.tolist(), batches.step_ends))
                if batches.step_ends:
                    batches.commit()
        return taken, batches.state_dict()


def as_indexed(size, options, ranks):
    return ranks(seen, TensorDataset(torch.arange(size)), {"shuffle": False, **options})


CASES = [(24, {}), (22, {"weight": len, "drop_last": True}), (22, {"micro_batch_size": 2})]
WITH_WORKERS = (22, {"micro_batch_size": 2, "workers": 2})


@pytest.mark.parametrize(
    ("kind", "size", "options"),
    [
        *((kind, *case) for kind in KINDS for case in CASES),
        ("seeks", *WITH_WORKERS),
        *(pytest.param(kind, *WITH_WORKERS, marks=pytest.mark.prove) for kind in ("unknown", "repeats")),
    ],
    ids=str,
)
def test_a_stream_is_cut_as_if_it_had_random_access(three_ranks, kind, options, size):
    indexed = as_indexed(size, options, three_ranks)
    for (mine, state), (theirs, other) in zip(three_ranks(seen, KINDS[kind](size), options), indexed, strict=True):
        assert mine == theirs
        assert state["ledger"] == other["ledger"]


@pytest.mark.parametrize("kind", KINDS)
def test_alone_it_is_iterated_once(kind):
    found, _ = seen(KINDS[kind](10), {"batch_size": 4}, epochs=1)
    assert found == [([0, 1, 2, 3], True), ([4, 5, 6, 7], True), ([8, 9], True)]


def resumed(dataset, state, options):
    with samestep.world() as world:
        batches = batches_of(world, dataset, options)
        batches.load_state_dict(state)
        taken = []
        for x in batches:
            taken += x.tolist()
            if batches.step_ends:
                batches.commit()
        return taken, batches.state_dict()


def stopped(dataset, steps, options):
    with samestep.world() as world:
        batches, taken = batches_of(world, dataset, options), []
        for x in batches:
            taken += x.tolist()
            if batches.step_ends:
                batches.commit()
                if batches.step == steps:
                    break
        return taken, batches.state_dict()


@pytest.mark.parametrize(
    ("kind", "summary"),
    [
        ("seeks", "every sample of 1 epoch exactly once"),
        ("repeats", "every sample of 1 epoch exactly once, if the stream gives the same items each time"),
        (
            "unknown",
            "every sample that the stream gave in 1 epoch exactly once, if the stream gives the same items each time",
        ),
    ],
)
def test_a_resume_goes_on_with_another_number_of_ranks_and_workers(two_ranks, three_ranks, kind, summary):
    data = KINDS[kind](29)
    before = three_ranks(stopped, data, 2, {"workers": 1})
    after = two_ranks(resumed, data, before[0][1], {"micro_batch_size": 2, "workers": 2})
    taken = [item for part, _ in before + after for item in part]
    assert sorted(taken) == list(range(29))
    assert audit(after[0][1]).summary == summary


def test_the_audit_of_an_epoch_under_way_says_how_far_it_is():
    _, state = stopped(Repeats(29), 2, {})
    assert audit(state).summary == (
        "epoch 0: 16 so far, each exactly once, if the stream gives the same items each time"
    )


def test_a_dataset_is_told_the_epoch():
    found, _ = seen(Repeats(4, epoch_matters=True), {"batch_size": 4})
    assert found == [([0, 1, 2, 3], True), ([1000, 1001, 1002, 1003], True)]


class Draws(IterableDataset):
    """Shuffles as it is read, and augments what it gives."""

    def __iter__(self):
        rest = list(range(40))
        random.shuffle(rest)
        for number in rest:
            yield torch.tensor([float(number), random.random()])


def drawn(workers):
    with samestep.world() as world:
        state = random.getstate()
        batches = samestep.shards(Draws(), world, batch_size=8, workers=workers)
        found = [row for _ in range(2) for x in batches for row in x.tolist()]
        assert random.getstate() == state
        return found


def test_a_stream_that_draws_is_the_same_for_all_who_read_it(two_ranks):
    first, second = two_ranks(drawn, 2)
    alone = drawn(0)
    assert sorted(first + second) == sorted(alone)
    assert sorted({number for number, _ in alone}) == list(range(40))
    assert alone[:40] != alone[40:]


class AsksForItsWorker(IterableDataset):
    """Splits itself by worker, unasked."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(first, 20, step)


def test_a_dataset_that_would_split_itself_by_worker_is_read_whole():
    found, _ = seen(AsksForItsWorker(), {"workers": 2}, epochs=1)
    assert [item for part, _ in found for item in part] == list(range(20))


def virtual(dataset, micro):
    with samestep.world(virtual_ranks=4) as world:
        batches, steps = samestep.shards(dataset, world, batch_size=8, micro_batch_size=micro), [[]]
        for x in batches:
            steps[-1].append(x.tolist())
            if batches.step_ends:
                steps.append([])
        return steps[:-1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro", [None, 1])
def test_virtual_ranks_read_the_same_slices_on_one_rank_and_on_two(two_ranks, kind, micro):
    alone = virtual(KINDS[kind](21), micro)
    assert [mine + theirs for mine, theirs in zip(*two_ranks(virtual, KINDS[kind](21), micro), strict=True)] == alone


# --- a stream of each rank's own -------------------------------------------------------------


class Own(IterableDataset):
    """Rank r, worker w has items 1000 r + 100 w + 0, 1, 2, …"""

    def __init__(self, sizes, rank):
        self.sizes = sizes
        self.rank = rank

    def __iter__(self):
        info = get_worker_info()
        worker = 0 if info is None else info.id
        start = 1000 * self.rank + 100 * worker
        yield from range(start, start + self.sizes[self.rank])


def own(sizes, options, steps=None, state=None):
    with samestep.world() as world:
        batches = samestep.shards(Own(sizes, world.rank), world, **{"batch_size": 4, "splits_itself": True, **options})
        if state is not None:
            batches.load_state_dict(state)
        found = []
        for x in batches:
            value = batches.mean(torch.ones(len(x), dtype=torch.float64))
            found.append((x.tolist(), value.item(), batches.step_ends))
            if batches.step_ends:
                batches.commit()
                assert batches.loss == 1.0
                if batches.step == steps:
                    break
        return found, batches.state_dict()


def test_ranks_whose_streams_are_unequal_end_at_the_same_step(two_ranks):
    (first, state), (second, other) = two_ranks(own, [7, 3], {})
    assert first == [([0, 1], 0.5, True), ([2, 3], 2 / 3, True), ([4, 5], 1.0, True), ([6], 1.0, True)]
    assert second == [([1000, 1001], 0.5, True), ([1002], 1 / 3, True), ([], 0.0, True), ([], 0.0, True)]
    assert state == other == {"own": [2, 0, 4, 1], "epoch": 1, "cursor": 0, "steps": 0}


def test_with_drop_last_it_ends_with_the_first_step_that_is_short(two_ranks):
    (first, _), (second, _) = two_ranks(own, [7, 3], {"drop_last": True})
    assert [len(x) for x, _, _ in first] == [len(x) for x, _, _ in second] == [2]


@pytest.mark.parametrize("workers", [0, 2])
def test_micro_batches_and_workers_of_its_own_lose_nothing(two_ranks, workers):
    for rank, (found, _) in enumerate(two_ranks(own, [9, 6], {"workers": workers, "micro_batch_size": 1})):
        each = [9, 6][rank]
        expected = [1000 * rank + 100 * worker + at for worker in range(max(1, workers)) for at in range(each)]
        assert sorted(item for x, _, _ in found for item in x) == expected
        assert [ends for _, _, ends in found] == [False, True] * (len(found) // 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_its_resume_on_as_many_ranks_and_workers_goes_on(two_ranks, workers):
    options = {"workers": workers}
    before = two_ranks(own, [7, 3], options, 2)
    after = two_ranks(own, [7, 3], options, None, before[0][1])
    whole = two_ranks(own, [7, 3], options)
    assert [b[0] + a[0] for b, a in zip(before, after, strict=True)] == [w[0] for w in whole]


def test_a_rank_with_fewer_samples_than_micro_batches_takes_no_others(two_ranks):
    """Of steps of 3 in micro-batches of 1 rank 0 has two and rank 1 one."""
    (first, _), (second, _) = two_ranks(own, [4, 2], {"batch_size": 3, "micro_batch_size": 1})
    assert [x for x, _, _ in first] == [[0], [1], [2], [3]]
    assert [x for x, _, _ in second] == [[1000], [], [1001], []]


def test_its_resume_in_other_steps_begins_the_epoch_anew_and_says_so(capfd):
    _, state = own([9], {}, 1)
    found, _ = own([9], {"batch_size": 2}, None, state)
    assert [item for x, _, _ in found for item in x] == list(range(9))
    assert "epoch 0 begins anew" in (said := capfd.readouterr().err)
    assert "by 1 ranks with 0 workers each, in steps of 4" in said


def test_its_resume_on_other_ranks_begins_the_epoch_anew_and_says_so(two_ranks, capfd):
    _, state = two_ranks(own, [7, 3], {}, 2)[0]
    found, _ = own([7], {}, None, state)
    assert [item for x, _, _ in found for item in x] == list(range(7))
    assert (
        "epoch 0 begins anew: the data split themselves, and were saved in mid-epoch by 2 ranks"
        in capfd.readouterr().err
    )


def empty_stream():
    with samestep.world() as world:
        try:
            data = Own([3, 0], world.rank)
            return len(list(samestep.shards(data, world, batch_size=4, splits_itself=True)))
        except (DataError, PeerError, StepError) as error:
            return str(error)


def test_a_rank_that_has_nothing_at_all_says_so(two_ranks):
    assert any("the stream of rank 1 gives nothing at all" in str(said) for said in two_ranks(empty_stream))


def different(what):
    with samestep.world() as world:
        data = {"items": Own([4, 4], world.rank), "lengths": Repeats(9 - world.rank), "errors": Breaks(world.rank)}
        try:
            return len(list(samestep.shards(data[what], world, batch_size=4)))
        except (DataError, PeerError, StepError) as error:
            return str(error)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("items", "the first item of Own on rank 1 is not that on rank 0"),
        ("lengths", "the ranks read different streams: from item 8 on"),
        ("errors", "rank 0 failed: DataError: Breaks cannot give item 0"),
    ],
)
def test_ranks_that_read_different_streams_are_told_so(two_ranks, what, message):
    assert any(message in str(said) for said in two_ranks(different, what))


# --- training --------------------------------------------------------------------------------


class Examples(IterableDataset):
    def __iter__(self):
        draw = torch.Generator().manual_seed(1)
        for _ in range(29):
            yield (
                torch.randn(5, generator=draw, dtype=torch.float64),
                torch.randn(1, generator=draw, dtype=torch.float64),
            )


def train(micro):
    with samestep.world() as world:
        torch.manual_seed(0)
        model = samestep.replicate(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double(), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = samestep.shards(Examples(), world, batch_size=8, micro_batch_size=micro, workers=1)
        losses = []
        for _ in range(2):
            for x, y in batches:
                batches.mean((model(x) - y).square().squeeze(1)).backward()
                if batches.step_ends:
                    optimizer.step()
                    optimizer.zero_grad()
                    batches.commit()
                    losses.append(batches.loss)
        return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


def train_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for x, y in DataLoader(Examples(), batch_size=8):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(("count", "micro"), [(1, None), (2, None), (3, 2)])
def test_n_ranks_train_on_a_stream_as_one_process_with_torchs_loader(request, count, micro):
    names = {2: "two_ranks", 3: "three_ranks"}
    ranks = request.getfixturevalue(names[count]) if count > 1 else lambda fn, *args: [fn(*args)]
    losses, parameters = train_alone()
    for mine, found in ranks(train, micro):
        assert mine == pytest.approx(losses, abs=1e-12)
        assert (found - parameters).abs().max() < 1e-12


# --- what goes wrong -------------------------------------------------------------------------


class Breaks(IterableDataset):
    def __init__(self, good):
        self.good = good

    def __iter__(self):
        yield from range(self.good)
        raise ValueError("no more pictures")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_raises_is_named_with_its_item_and_line(workers):
    with samestep.world() as world, pytest.raises(DataError, match="cannot give item 5") as caught:
        list(samestep.shards(Breaks(5), world, batch_size=4, workers=workers))
    said = str(caught.value)
    assert "ValueError: no more pictures, at tests/data/test_iterable.py:" in said
    assert ("to worker 0 (process " in said) == (workers == 1)
    assert "\n" not in said


class Dies(IterableDataset):
    def __iter__(self):
        yield from range(5)
        os.kill(os.getpid(), signal.SIGKILL)
        yield 5


def test_a_worker_that_dies_is_named_with_its_item():
    with samestep.world() as world, pytest.raises(DataError, match="was killed by SIGKILL while it loaded sample 5"):
        list(samestep.shards(Dies(), world, batch_size=4, workers=1))


@pytest.mark.parametrize(
    ("kind", "said", "message", "workers"),
    [
        (Says, 12, "and gave 10", 0),
        (Says, 8, "and gave more", 2),
        (Seeks, 12, "and gave 10", 2),
        (Seeks, 8, "and gave more", 0),
    ],
)
def test_a_length_that_is_not_true_is_an_error(kind, said, message, workers):
    data = kind(10)
    data.said = said
    with samestep.world() as world, pytest.raises(DataError, match=f"said that it has {said} items {message}"):
        list(samestep.shards(data, world, batch_size=4, workers=workers))


class SameEachTime(torch.utils.data.IterableDataset):
    """Hands out one generator for ever, as a class that opens its file once does."""

    def __init__(self):
        self.items = iter([1, 2])

    def __iter__(self):
        return self.items


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (iter([1, 2]), {}, "can be iterated once"),
        (SameEachTime(), {}, "can be iterated once"),
        (Repeats(4), {"shuffle": True}, "its order is its own"),
        (Repeats(4), {"cost": [1, 2, 3, 4]}, "needs random access"),
        (Repeats(4), {"on_bad_sample": "skip"}, "is over when it raises"),
        (TensorDataset(torch.arange(4)), {"splits_itself": True}, "has random access"),
        (Says(0), {}, "Says is empty"),
        (7, {}, "int has no random access"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_one_line(dataset, options, message):
    with samestep.world() as world, pytest.raises(DataError, match=message) as caught:
        samestep.shards(dataset, world, **{"batch_size": 2, **options})
    assert "\n" not in str(caught.value)


def test_an_unknown_length_is_not_guessed():
    with samestep.world() as world:
        batches = samestep.shards(Repeats(4), world, batch_size=2)
        with pytest.raises(DataError, match="how many steps an epoch has is not known"):
            _ = batches.steps_per_epoch
        with pytest.raises(TypeError, match="how many micro-batches"):
            len(batches)


def test_every_kind_says_what_it_promises():
    with samestep.world() as world:
        made = {
            "indexed": (TensorDataset(torch.arange(4)), {}),
            "seeks": (Seeks(4), {}),
            "repeats": (Repeats(4), {}),
            "own": (Own([4], 0), {"splits_itself": True}),
        }
        for kind, (dataset, options) in made.items():
            assert samestep.shards(dataset, world, batch_size=2, **options).promise == PROMISES[kind]


def test_a_stream_goes_through_a_checkpoint(two_ranks, tmp_path):
    first = two_ranks(interrupted, str(tmp_path), 2)
    second = two_ranks(interrupted, str(tmp_path), None)
    taken = [item for part in first + second for item in part]
    assert sorted(taken) == sorted([*range(22), *range(22)])
    newest = inspection.inspect(max(inspection.list_checkpoints(tmp_path)), digests=True)
    (ledger,) = inspection.audit_data(newest.manifest).values()
    assert ledger.ok
    assert ledger.summary == (
        "every sample that the stream gave in 2 epochs exactly once, if the stream gives the same items each time"
    )


def interrupted(path, steps):
    with samestep.world() as world:
        batches, taken = samestep.shards(Repeats(22), world, batch_size=8), []
        state = samestep.checkpoint(path, world, every=1, model=nn.Linear(1, 1), data=batches)
        for _ in state.epochs(2):
            for x in batches:
                taken += x.tolist()
                state.commit()
                if state.step == steps:
                    state.wait()
                    return taken
        return taken


def test_peeking_consumes_nothing():
    with samestep.world() as world:
        batches = samestep.shards(Repeats(10), world, batch_size=4)
        assert next(iter(batches)).tolist() == [0, 1, 2, 3]
        for _ in itertools.islice(batches, 1):
            batches.commit()
        assert next(iter(batches)).tolist() == [4, 5, 6, 7]
