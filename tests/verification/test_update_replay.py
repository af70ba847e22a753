"""What a step of the script alone starts from: what the ranks' optimizers had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from journals import step

from samestep.verification.journal import TraceWriter, value_path
from samestep.verification.judging.record import Rank, Record
from samestep.verification.recording.optimizers import Optimizers, state_of
from samestep.verification.reference.updates import UpdateReplay


def test_parameters_that_one_process_has_not_stepped_yet_get_state_and_gradients(tmp_path: Path) -> None:
    """A layer that is frozen for the first epoch, which is longer in one process; and a decay that follows a schedule.

    Behind the step, the script goes on with its own numbers.
    """
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.5)
    journal = TraceWriter(tmp_path, 0)
    optimizers = Optimizers(journal)
    optimizers.add(optimizer, "train.py:10")
    (name,) = optimizers.parameters(optimizer)
    value_path(tmp_path, 0, 5).parent.mkdir(exist_ok=True)
    torch.save({name: torch.tensor([1.0, 2.0])}, value_path(tmp_path, 0, 5))
    torch.save({"parameters": {}, "states": {}}, value_path(tmp_path, 0, 6))
    taken = step(0, "g", kept=5, rates=[0.2], by_hand=False, settings=[{"weight_decay": 0.0, "betas": [0.5, 0.9]}])
    updated = {"kind": "updated", "event": 0, "kept": 6, "evaluations": 0}
    replay = UpdateReplay(Record(tmp_path, [Rank(0, [taken, updated])]), optimizers)
    theirs = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    replay.put_back({name: theirs})
    replay.before(optimizer, optimizers.parameters(optimizer), taken)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.0, 2.0]
    assert optimizer.state[parameter] == theirs
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.2, 0.0, (0.5, 0.9))
    replay.after()
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.1, 0.5, (0.9, 0.999))


def test_a_sparse_gradient_is_the_ranks_with_all_their_rows(tmp_path: Path) -> None:
    """One process, given one rank's samples, has fewer rows than the ranks together."""
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(list(table.parameters()))
    optimizers = Optimizers(TraceWriter(tmp_path, 0))
    optimizers.add(optimizer, "train.py:10")
    (name,) = optimizers.parameters(optimizer)
    whole = torch.nn.Embedding(4, 2, sparse=True)
    whole(torch.tensor([0, 1, 3])).sum().backward()
    theirs = whole.weight.grad
    assert theirs is not None
    value_path(tmp_path, 0, 5).parent.mkdir(exist_ok=True)
    torch.save({name: theirs}, value_path(tmp_path, 0, 5))
    torch.save({"parameters": {}, "states": {}}, value_path(tmp_path, 0, 6))
    taken = step(0, "g", kept=5, settings=[{}])
    updated = {"kind": "updated", "event": 0, "kept": 6, "evaluations": 0}
    table(torch.tensor([1])).sum().backward()
    replay = UpdateReplay(Record(tmp_path, [Rank(0, [taken, updated])]), optimizers)
    replay.before(optimizer, optimizers.parameters(optimizer), taken)
    assert table.weight.grad is not None
    assert torch.equal(table.weight.grad.to_dense(), theirs.to_dense())


def test_ranks_are_replicas_while_one_of_two_optimizers_has_not_stepped_yet(tmp_path: Path) -> None:
    """State of a part of one optimizer's parameters tells that the ranks divide it."""
    optimizers = Optimizers(TraceWriter(tmp_path, 0))
    made = []
    for _ in range(2):
        model = torch.nn.Linear(2, 1)
        made.append(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        optimizers.add(made[-1], "train.py:10")
        model(torch.ones(2)).sum().backward()
    made[0].step()
    assert optimizers.are_replicas
    made[1].step()
    assert optimizers.are_replicas
    made[1].state.popitem()
    assert not optimizers.are_replicas


def test_states_of_two_optimizers_are_told_apart_by_number(tmp_path: Path) -> None:
    """A generator and a discriminator: each has a parameter of the same name."""
    optimizers = Optimizers(TraceWriter(tmp_path, 0))
    made = []
    for size in (2, 3):
        model = torch.nn.Linear(size, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(size)).sum().backward()
        optimizer.step()
        optimizers.add(optimizer, "train.py:10")
        made.append((model, optimizer))
    states = state_of(optimizers)
    assert {name: len(state["momentum_buffer"].flatten()) for name, state in states.items()} == {
        "weight": 2,
        "bias": 1,
        "optimizer 1: weight": 3,
        "optimizer 1: bias": 1,
    }


def test_a_rate_that_is_a_number_of_numpy_is_lent(tmp_path: Path) -> None:
    """It has a shape, as a tensor has."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.param_groups[0]["lr"] = np.linspace(0.1, 0.3, 3)[1]
    optimizers = Optimizers(TraceWriter(tmp_path, 0))
    optimizers.add(optimizer, "train.py:10")
    taken = step(0, "g", rates=[0.4], settings=[{"weight_decay": np.float64(0.5)}])
    UpdateReplay(Record(tmp_path, [Rank(0, [taken])]), optimizers).before(optimizer, {}, taken)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.4, 0.5)


def test_a_rate_that_is_a_tensor_is_lent_and_put_back_in_place(tmp_path: Path) -> None:
    """A compiled optimizer has taken the tensor for its own."""
    parameter, rate = torch.nn.Parameter(torch.ones(2)), torch.tensor(0.1)
    optimizer = torch.optim.AdamW([parameter], lr=rate, capturable=True)
    optimizers = Optimizers(TraceWriter(tmp_path, 0))
    optimizers.add(optimizer, "train.py:10")
    taken = step(0, "g", rates=[0.4], settings=[{}])
    replay = UpdateReplay(Record(tmp_path, [Rank(0, [taken])]), optimizers)
    for then, left in ((0.4, 0.1), (0.3, 0.3)):  # a schedule that sets it meanwhile has its way
        replay.before(optimizer, {}, taken)
        assert float(rate) == pytest.approx(0.4)
        rate.fill_(then)
        replay.after()
        assert float(rate) == pytest.approx(left)
    assert optimizer.param_groups[0]["lr"] is rate


def test_rates_are_lent_by_parameter_where_each_rank_s_optimizer_holds_others(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": [one], "lr": 1.0} for one in model.parameters()])
    optimizers = Optimizers(TraceWriter(tmp_path, 0))
    optimizers.add(optimizer, "train.py:10")
    ranks = [
        Rank(number, [{"kind": "names", "optimizer": 0, "names": [name], "groups": [0]}, step(0, "g", rates=[rate])])
        for number, (name, rate) in enumerate({"weight": 0.1, "bias": 0.2}.items())
    ]
    replay = UpdateReplay(Record(tmp_path, ranks), optimizers)
    replay.before(optimizer, optimizers.parameters(optimizer), ranks[0].events[1])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
