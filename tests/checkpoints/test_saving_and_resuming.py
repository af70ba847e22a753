"""A run that was interrupted anywhere ends with the bits of one that was not; every verdict reaches every rank."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep
from samestep.checkpoints import interval
from samestep.checkpoints import store as stores
from samestep.checkpoints.writer import AsyncWriter
from samestep.errors import CheckpointError, DataError, SamestepError, UsageError
from samestep.testing import assert_same_bits

SAMPLES, BATCH, EPOCHS = 22, 6, 3
STEPS_PER_EPOCH = 4  # the last one short: 22 = 6 + 6 + 6 + 4
STEPS = EPOCHS * STEPS_PER_EPOCH


class CrashError(Exception):
    """Ends a run at a chosen point."""


def a_dataset():
    stream = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 5, generator=stream, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 3, (SAMPLES,), generator=stream), torch.arange(SAMPLES))


def a_model(dropout):
    return nn.Sequential(
        nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 3)
    ).double()


def an_optimizer(kind, parameters):
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)


def train(path, *, stop=None, kind="adam", dropout=0.5, every=1, micro=None, epochs=EPOCHS):
    """Trains with a checkpoint at `path`, crashing at `stop`: ("step", k), ("evaluation", e) or ("end", e).

    Returns everything a run leaves: parameters, buffers, optimizer state, the samples of each step, the epochs seen.
    """
    record = SimpleNamespace(samples=[], seen=[], evaluated=[])
    with samestep.world(device="cpu") as world:
        model = samestep.replicate(a_model(dropout), world)
        optimizer = an_optimizer(kind, model.parameters())
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7], gamma=0.5)
        batches = samestep.shards(a_dataset(), world, batch_size=BATCH, micro_batch_size=micro)
        state = samestep.checkpoint(
            path, world, every=every, model=model, optimizer=optimizer, schedule=schedule, data=batches
        )
        record.resumed = (bool(state.resumed), state.step, state.epoch)
        try:
            for epoch in state.epochs(epochs):
                record.seen.append(epoch)
                for x, y, number in batches:
                    batches.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
                    record.samples += number.tolist()
                    if batches.step_ends:
                        optimizer.step()
                        schedule.step()
                        optimizer.zero_grad()
                        state.commit()
                        if stop == ("step", state.step):
                            raise CrashError
                if stop == ("evaluation", epoch):
                    raise CrashError
                record.evaluated.append(epoch)
                if stop == ("end", epoch):
                    stop = ("step", state.step + 1)
        except CrashError:
            record.crashed = True
        finally:
            state.close()
        record.ended = (state.step, state.epoch)
        record.model = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        record.optimizer = optimizer.state_dict()
        record.drawn = torch.rand(3)
    return vars(record)


def both_parts(path, stop, **options):
    first, second = train(path, stop=stop, **options), train(path, **options)
    assert first["crashed"]
    return first, second


def assert_same_end(one, other):
    for what in ("model", "optimizer", "drawn", "ended"):
        assert_same_bits(one[what], other[what], what)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sums are split among threads, so equal bits need equally many."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return {kind: train(tmp_path_factory.mktemp(kind), kind=kind) for kind in ("sgd", "adam")}


# --- bit for bit, at every boundary -------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "k"),
    [
        *(("adam", k) for k in (1, 4, 5, 12)),
        ("sgd", 7),
        *(pytest.param(*case, marks=pytest.mark.prove) for case in (("adam", 3), ("adam", 8), ("sgd", 2), ("sgd", 4))),
    ],
)
def test_stopped_after_any_step_and_resumed_every_bit_is_that_of_an_uninterrupted_run(tmp_path, straight, kind, k):
    first, second = both_parts(tmp_path, ("step", k), kind=kind)
    assert_same_end(second, straight[kind])
    assert first["samples"] + second["samples"] == straight[kind]["samples"]
    assert second["resumed"] == (True, k, (k - 1) // STEPS_PER_EPOCH)


@pytest.mark.parametrize("epoch", [1, *(pytest.param(epoch, marks=pytest.mark.prove) for epoch in (0, 2))])
def test_stopped_in_the_evaluation_it_is_repeated_and_no_step_is(tmp_path, straight, epoch):
    first, second = both_parts(tmp_path, ("evaluation", epoch))
    assert_same_end(second, straight["adam"])
    assert first["samples"] + second["samples"] == straight["adam"]["samples"]
    assert first["evaluated"] == list(range(epoch))
    assert second["seen"] == second["evaluated"] == list(range(epoch, EPOCHS))


def test_stopped_behind_the_end_of_an_epoch_the_next_one_begins(tmp_path, straight):
    first, second = both_parts(tmp_path, ("end", 0), every=None)
    assert second["resumed"] == (True, STEPS_PER_EPOCH, 1)
    assert second["seen"] == [1, 2]
    assert_same_end(second, straight["adam"])
    assert first["samples"][:SAMPLES] + second["samples"] == straight["adam"]["samples"]


def test_a_finished_run_has_no_more_epochs_and_a_longer_one_goes_on(tmp_path, straight):
    finished = train(tmp_path, epochs=2)
    again = train(tmp_path, epochs=2)
    assert again["seen"] == []
    assert again["resumed"] == (True, 2 * STEPS_PER_EPOCH, 2)
    assert_same_end(again, finished)
    longer = train(tmp_path, epochs=3)
    assert longer["seen"] == [2]
    assert_same_end(longer, straight["adam"])


def test_stopped_twice_and_with_micro_batches_the_end_is_the_same(tmp_path):
    whole = train(tmp_path / "whole", micro=2)
    parts = [train(tmp_path / "parts", micro=2, stop=stop) for stop in (("step", 2), ("step", 9), None)]
    assert_same_end(parts[-1], whole)
    assert [number for part in parts for number in part["samples"]] == whole["samples"]


def test_saved_less_often_than_every_step_a_run_goes_on_from_the_last_save(tmp_path, straight):
    first, second = both_parts(tmp_path, ("step", 5), every=3)
    assert second["resumed"] == (True, 4, 1)  # the end of epoch 0 is saved too
    assert first["samples"][:SAMPLES] + second["samples"] == straight["adam"]["samples"]
    assert_same_end(second, straight["adam"])


def test_two_ranks_go_on_bit_for_bit(tmp_path, two_ranks):
    whole = two_ranks(train_at, str(tmp_path / "whole"), None)
    first = two_ranks(train_at, str(tmp_path / "parts"), ("step", 5))
    second = two_ranks(train_at, str(tmp_path / "parts"), None)
    for rank in range(2):
        assert second[rank]["resumed"] == (True, 5, 1)
        assert_same_end(second[rank], whole[rank])
        assert first[rank]["samples"] + second[rank]["samples"] == whole[rank]["samples"]
    assert_same_bits(second[0]["model"], second[1]["model"])
    assert not torch.equal(second[0]["drawn"], second[1]["drawn"])  # each rank has streams of its own


def train_at(path, stop, dropout=0.5, kind="adam"):
    return train(path, stop=stop, dropout=dropout, kind=kind)


# --- another number of ranks --------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_on_another_number_of_ranks_the_order_goes_on_and_the_parameters_agree(tmp_path, two_ranks, before, after):
    def run(ranks, path, stop):
        # SGD, since Adam makes much of the rounding in a gradient that is zero (a bias before BatchNorm).
        return two_ranks(train_at, path, stop, 0.0, "sgd") if ranks == 2 else [train_at(path, stop, 0.0, "sgd")]

    path = str(tmp_path / "parts")
    first, second = run(before, path, ("step", 6)), run(after, path, None)
    whole = run(before, str(tmp_path / "whole"), None)
    assert {part["resumed"] for part in second} == {(True, 6, 1)}
    used = sorted(number for part in first + second for number in part["samples"])
    assert used == sorted(number for part in whole for number in part["samples"])
    assert used == sorted(list(range(SAMPLES)) * EPOCHS)
    for name, tensor in second[0]["model"].items():
        torch.testing.assert_close(tensor, whole[0]["model"][name], rtol=0, atol=1e-12)


def weights_after_loading(path):
    with samestep.world(device="cpu") as world:
        model = samestep.replicate(a_model(0.5), world)
        state = samestep.checkpoint(path, world, model=model)
        state.close()
        return bool(state.resumed), dict(model.state_dict())


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_weights_load_bit_for_bit_on_another_number_of_ranks(tmp_path, two_ranks, before, after):
    saved = two_ranks(save_once, str(tmp_path)) if before == 2 else [save_once(str(tmp_path))]
    loaded = two_ranks(weights_after_loading, str(tmp_path)) if after == 2 else [weights_after_loading(str(tmp_path))]
    for resumed, weights in loaded:
        assert resumed
        assert_same_bits(weights, saved[0])


def save_once(path):
    with samestep.world(device="cpu", seed=3) as world:
        model = samestep.replicate(a_model(0.5), world)
        state = samestep.checkpoint(path, world, model=model)
        state.save()
        state.close()
        return dict(model.state_dict())


# --- what is saved when -------------------------------------------------------------------------


def a_state(path, world, model=None, **options):
    return samestep.checkpoint(path, world, model=model or nn.Linear(2, 1), **options)


def names(path):
    return sorted(entry.name for entry in Path(path).iterdir() if not entry.name.startswith("."))


def test_steps_are_saved_as_often_as_asked_and_as_many_stay_as_asked(tmp_path):
    with samestep.world(device="cpu") as world:
        state = a_state(tmp_path, world, every=2, keep=3)
        for _ in range(9):
            state.commit()
        state.close()
    assert names(tmp_path) == ["step-00000004", "step-00000006", "step-00000008"]


def test_steps_that_keep_each_divides_stay(tmp_path):
    with samestep.world(device="cpu") as world:
        state = a_state(tmp_path, world, every=1, keep=2, keep_each=3)
        for _ in range(8):
            state.commit()
        state.close()
    assert names(tmp_path) == [f"step-0000000{step}" for step in (3, 6, 7, 8)]


def test_without_an_interval_only_the_ends_of_epochs_are_saved(tmp_path):
    with samestep.world(device="cpu") as world:
        state = a_state(tmp_path, world, keep=9)
        for _ in state.epochs(2):
            for _ in range(3):
                state.commit()
        state.close()
    assert names(tmp_path) == ["step-00000003", "step-00000006"]


def test_every_fifth_epoch_and_the_last_are_saved(tmp_path):
    with samestep.world(device="cpu") as world:
        state = a_state(tmp_path, world, every="5 epochs", keep=9)
        for _ in state.epochs(12):
            state.commit()
        state.close()
    assert names(tmp_path) == ["step-00000005", "step-00000010", "step-00000012"]


def test_a_run_that_never_commits_resumes_at_the_end_of_its_epoch(tmp_path):
    seen = []
    for n in (2, 4):
        with samestep.world(device="cpu") as world:
            batches = samestep.shards(a_dataset(), world, batch_size=BATCH)
            state = a_state(tmp_path, world, data=batches)
            seen += [(epoch, batches.epoch, len(list(batches))) for epoch in state.epochs(n)]
            state.close()
    assert seen == [(epoch, epoch, STEPS_PER_EPOCH) for epoch in range(4)]


def test_a_body_left_by_break_does_not_count_as_finished(tmp_path):
    with samestep.world(device="cpu") as world:
        state = a_state(tmp_path, world)
        for _ in state.epochs(3):
            break
        assert state.epoch == 0
        state.close()
    assert names(tmp_path) == []


def test_saved_by_hand_in_the_evaluation_the_data_of_the_epoch_are_still_used_up(tmp_path):
    trained = []
    for stop in (True, False):
        with samestep.world(device="cpu") as world:
            batches = samestep.shards(a_dataset(), world, batch_size=BATCH)
            state = a_state(tmp_path, world, data=batches)
            for epoch in state.epochs(2):
                for _ in batches:
                    state.commit()
                    trained.append(epoch)
                if stop:
                    state.save()
                    break
            state.close()
    assert trained == [0] * STEPS_PER_EPOCH + [1] * STEPS_PER_EPOCH


def saved_by_time(path, with_data):
    """Rank 0's clock runs 1 s a step, the others' stand still; every 3 s is asked for."""
    now = [0.0]
    interval.time = SimpleNamespace(monotonic=lambda: now[0])
    try:
        with samestep.world(device="cpu") as world:
            named = {"data": samestep.shards(a_dataset(), world, batch_size=2)} if with_data else {}
            state = a_state(path, world, every="3 s", keep=99, **named)
            for _ in named.get("data", range(11)):
                now[0] += 1.0 if world.is_first else 0.0
                state.commit()
            state.close()
            return state.step
    finally:
        import time

        interval.time = time


@pytest.mark.parametrize(("with_data", "steps"), [(True, [4, 8]), (False, [3, 6, 9])])
def test_the_clock_of_rank_0_alone_decides_and_all_ranks_save_together(tmp_path, two_ranks, with_data, steps):
    assert two_ranks(saved_by_time, str(tmp_path), with_data) == [11, 11]
    assert names(tmp_path) == [f"step-{step:08d}" for step in steps]  # with data the request travels with the next step


def test_local_batchnorm_statistics_are_made_equal_before_they_are_saved(tmp_path, two_ranks):
    (first, second) = two_ranks(buffers_when_saved, str(tmp_path))
    assert_same_bits(first, second)


def buffers_when_saved(path):
    with samestep.world(device="cpu") as world:
        model = samestep.replicate(a_model(0.0), world, batchnorm="local")
        model(torch.full((4, 5), float(world.rank + 1), dtype=torch.float64).cumsum(0))
        state = samestep.checkpoint(path, world, model=model)
        state.save()
        state.close()
        return dict(model.named_buffers())


# --- verdicts reach every rank ------------------------------------------------------------------


def caught(action):
    try:
        action()
    except SamestepError as error:
        return type(error).__name__, str(error)
    return None


def refused_lock(path):
    with samestep.world(device="cpu") as world:
        first = a_state(path, world)
        problem = caught(lambda: a_state(path, world))
        first.close()
        a_state(path, world).close()
        return problem


def test_a_directory_in_use_is_refused_on_every_rank(tmp_path, two_ranks):
    (first, told), (second, passed_on) = two_ranks(refused_lock, str(tmp_path))
    assert (first, second) == ("CheckpointError", "CheckpointError")
    assert "in use by an earlier checkpoint of this very process" in told
    assert "rank 0 failed" in passed_on
    assert "in use" in passed_on


def failing_save(path, when):
    original = stores.write

    def refuse(*_):
        raise CheckpointError("disk full at P: needs 8.0 MB, free 1.0 MB")

    with samestep.world(device="cpu") as world:
        state = a_state(path, world, every=1)
        state.commit()
        state.wait()
        stores.write = refuse
        try:
            state.commit()
            problem = caught(state.wait if when == "waited for" else lambda: None)
        finally:
            if world.is_first and when == "on":
                state._store._writer._thread.join()
            stores.write = original
        state.commit()
        state.close()
        return problem, state.step


@pytest.mark.parametrize("when", ["waited for", "on"])
def test_training_goes_on_after_a_save_that_failed_and_who_waits_for_it_is_told_on_every_rank(
    tmp_path, two_ranks, when
):
    for problem, step in two_ranks(failing_save, str(tmp_path), when):
        assert step == 3
        if when == "waited for":
            kind, message = problem
            assert kind == "CheckpointError"
            assert "disk full at P: needs 8.0 MB, free 1.0 MB" in message
        else:
            assert problem is None
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_failed_save_is_said_at_the_next_commit_and_at_the_end(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise CheckpointError("disk full at P: needs 8.0 MB, free 1.0 MB")

    monkeypatch.setattr(stores, "write", refuse)
    with pytest.raises(CheckpointError, match="disk full at P"), samestep.world(device="cpu") as world:  # noqa: PT012
        state = a_state(str(tmp_path), world, every=2)
        for _ in range(3):
            state.commit()
            if state.step == 2:
                state._store._writer._thread.join()
        said = capsys.readouterr().err
        assert said == "samestep: saving step 2 failed: disk full at P: needs 8.0 MB, free 1.0 MB; training continues\n"
        state.commit()  # and the world closes, which waits for it
    assert not dist.is_initialized()


class OnGpu(SimpleNamespace):
    """Stands for a tensor on a GPU that this machine does not have."""

    is_cuda, shape, dtype = True, torch.Size([]), torch.float32

    def detach(self):
        return torch.zeros(())


def test_the_copies_of_a_model_over_several_gpus_are_waited_for_on_each_of_them(monkeypatch):
    waited = []
    stream = lambda device=None: SimpleNamespace(synchronize=lambda: waited.append(device))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(AsyncWriter, "_buffer", lambda *_: torch.empty(()))
    AsyncWriter().stage({f"part{number}": OnGpu(device=torch.device("cuda", number)) for number in (0, 1, 1)})
    assert sorted(map(str, waited)) == ["cuda:0", "cuda:1"]


def commit_in_a_function(path, world):
    state = a_state(path, world, every=1)
    state.commit()


def test_a_failed_save_of_a_function_that_has_returned_is_an_error_when_the_world_closes(tmp_path, monkeypatch):
    def refuse(*_):
        raise CheckpointError("disk full at P: needs 8.0 MB, free 1.0 MB")

    monkeypatch.setattr(stores, "write", refuse)
    with pytest.raises(CheckpointError, match="disk full at P"), samestep.world(device="cpu") as world:
        commit_in_a_function(str(tmp_path), world)
    with pytest.raises(KeyError), samestep.world(device="cpu") as world:  # noqa: PT012
        commit_in_a_function(str(tmp_path), world)
        raise KeyError


def test_a_function_that_has_returned_leaves_neither_its_directory_locked_nor_the_signals_taken(tmp_path):
    with samestep.world(device="cpu") as world:
        for _ in range(3):
            commit_in_a_function(str(tmp_path), world)  # its write would be under way still
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert names(tmp_path)[-1] == "step-00000003"


def test_a_save_that_is_due_waits_for_the_one_under_way(tmp_path, monkeypatch):
    original, under_way, most = stores.write, [], []

    def slow(*arguments):
        under_way.append(1)
        most.append(len(under_way))
        time.sleep(0.05)
        folder = original(*arguments)
        under_way.pop()
        return folder

    monkeypatch.setattr(stores, "write", slow)
    with samestep.world(device="cpu") as world:
        state = a_state(str(tmp_path), world, every=1)
        for _ in range(4):
            state.commit()
    assert most == [1, 1, 1, 1]
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_what_is_saved_is_the_step_that_was_due_though_training_goes_on(tmp_path, monkeypatch):
    original, go = stores.write, threading.Event()

    def held_back(*arguments):
        assert go.wait(20)
        return original(*arguments)

    monkeypatch.setattr(stores, "write", held_back)
    with samestep.world(device="cpu") as world:
        model = torch.nn.Linear(2, 1)
        state = samestep.checkpoint(tmp_path, world, every=1, model=model)
        before = model.weight.detach().clone()
        state.commit()
        with torch.no_grad():
            model.weight.fill_(7.0)
        go.set()
        state.wait()
        state.close()
        other = torch.nn.Linear(2, 1)
        samestep.checkpoint(tmp_path, world, model=other)
        assert_same_bits(other.weight.detach(), before)


class Odd:
    """Has a state that cannot be saved on one rank alone."""

    def __init__(self, broken):
        self.broken = broken

    def state_dict(self):
        return {"value": object() if self.broken else 1}

    def load_state_dict(self, state):
        pass


def unsavable_on_rank_1(path):
    with samestep.world(device="cpu") as world:
        state = a_state(path, world, odd=Odd(world.rank == 1))
        problem = caught(state.save)
        state.close()
        return problem


def test_a_state_that_one_rank_cannot_save_stops_all(tmp_path, two_ranks):
    (_, first), (_, second) = two_ranks(unsavable_on_rank_1, str(tmp_path))
    assert first.startswith("rank 1 failed: CheckpointError: cannot save odd/value: a builtins.object")
    assert second.startswith("cannot save odd/value")
    assert names(tmp_path) == []


def wrong_model(path):
    with samestep.world(device="cpu") as world:
        a_state(path, world).save()
        model, optimizer = nn.Linear(3, 1), Odd(broken=False)
        before = model.weight.detach().clone()
        problem = caught(lambda: a_state(path, world, model, optimizer=optimizer))
        return problem, torch.equal(before, model.weight)


def test_a_model_that_does_not_fit_is_refused_on_every_rank_and_nothing_is_loaded(tmp_path, two_ranks):
    for (kind, message), untouched in two_ranks(wrong_model, str(tmp_path)):
        assert kind == "CheckpointError"
        assert "model.weight: float32 [1, 2] in the checkpoint, float32 [1, 3] in the model" in message
        assert "optimizer: named here, not in the checkpoint" in message
        assert untouched


def test_a_type_is_never_cast_silently(tmp_path):
    with samestep.world(device="cpu") as world:
        state = a_state(tmp_path, world)
        state.save()
        state.close()
        with pytest.raises(CheckpointError, match=r"float32 \[1\] in the checkpoint, float64 \[1\] in the model"):
            a_state(tmp_path, world, nn.Linear(2, 1).double())


def test_other_data_are_refused_before_anything_is_loaded(tmp_path):
    with samestep.world(device="cpu") as world:
        state = a_state(tmp_path, world, data=samestep.shards(a_dataset(), world, batch_size=BATCH, seed=1))
        state.save()
        state.close()
        model = nn.Linear(2, 1)
        before = model.weight.detach().clone()
        with pytest.raises(DataError, match="the saved run had seed 1"):
            a_state(tmp_path, world, model, data=samestep.shards(a_dataset(), world, batch_size=BATCH, seed=2))
        assert_same_bits(model.weight, before)


def damaged_newest(path):
    with samestep.world(device="cpu") as world:
        state = a_state(path, world, every=1)
        state.commit()
        state.commit()
        state.close()
        if world.is_first:
            payload = Path(path) / "step-00000002" / "tensors.safetensors"
            payload.write_bytes(payload.read_bytes()[:-1])
        world.barrier()
        again = a_state(path, world)
        again.close()
        return again.step


def test_all_ranks_fall_back_to_the_same_older_checkpoint(tmp_path, two_ranks):
    assert two_ranks(damaged_newest, str(tmp_path)) == [1, 1]
    assert names(tmp_path) == ["step-00000001", "step-00000002.bad"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": "sometimes"}, "says no interval"),
        ({"keep": 0}, "keep=0 must be a whole number, at least 1"),
        ({"rate": 0.1}, "rate=float cannot be saved"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(tmp_path, options, message):
    with samestep.world(device="cpu") as world, pytest.raises(UsageError, match=message):
        a_state(tmp_path / "new", world, **options)
    assert not (tmp_path / "new").exists()


def test_without_a_path_nothing_is_saved_and_all_else_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with samestep.world() as world:
        batches = samestep.shards(torch.utils.data.TensorDataset(torch.arange(4)), world, batch_size=2)
        state = samestep.checkpoint(None, world, every=1, data=batches)
        for _ in state.epochs(2):
            for _ in batches:
                state.commit()
        assert (state.step, state.epoch, state.resumed, state.save()) == (4, 2, None, None)
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_goes_on_from_is_counted_in_words_that_fit(tmp_path, capfd):
    for epochs in (1, 3, 4):
        with samestep.world(device="cpu") as world:
            state = samestep.checkpoint(tmp_path / "run", world, every=None, model=nn.Linear(2, 1))
            for _ in state.epochs(epochs):
                state.commit()
    said = [line.rpartition(": ")[2] for line in capfd.readouterr().err.splitlines() if "resuming from" in line]
    assert said == ["1 step, 1 epoch finished", "3 steps, 3 epochs finished"]
