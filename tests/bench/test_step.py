"""The step benchmark does the same work on both sides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from small import small

import samestep
from samestep.bench import step
from samestep.bench.workloads import CNN, MLP, TRANSFORMER, WIDE


def distance_trained(make, steps):
    with samestep.world() as world:
        network = MLP.network()
        before = [parameter.detach().clone() for parameter in network.parameters()]
        training = make(MLP, network, world)
        for _ in range(steps):
            next(training)
        gone = [(a.detach() - b).square().sum() for a, b in zip(network.parameters(), before, strict=True)]
        return float(sum(gone)) ** 0.5


def test_both_sides_train_as_far_in_as_many_steps(two_ranks):
    (ours, also_ours), (theirs, also_theirs) = (
        two_ranks(small, distance_trained, (make, 8)) for make in (step.our_steps, step.their_steps)
    )
    assert (ours, theirs) == (also_ours, also_theirs)
    assert ours > 0
    # They see different samples of the same distribution; a loss scaled wrongly by the ranks would be off by 2.
    assert abs(ours / theirs - 1) < 0.1


@pytest.mark.parametrize("as_it_comes", [True, False])
def test_every_rank_returns_a_time_of_each_loop_for_each_pair_and_the_setting(two_ranks, as_it_comes):
    for times, setting in two_ranks(small, step.compare, (MLP, as_it_comes, "cpu", 3, True)):
        assert [len(side) for side in times] == [3] * (3 if as_it_comes else 2)
        assert min(map(min, times)) > 0
        assert (setting["ranks"], setting["backend"], setting["batch_size"]) == (2, "gloo", 2 * MLP.batch)
        assert setting["torch"] == torch.__version__


@pytest.mark.parametrize("peer", sorted(step.PEERS))
def test_other_libraries_train_as_far_where_they_are_installed(two_ranks, peer):
    if peer not in step.installed_peers():
        pytest.skip(f"{peer} is not installed")
    for times, _ in two_ranks(small, step.compare, (MLP, True, "cpu", 2, True, peer)):
        assert [len(side) for side in times] == [2, 2]


def test_what_communication_takes_is_the_step_less_the_same_without_it():
    found = step.lost((0.030, 0.032, 0.034), (0.050, 0.051, 0.052), (0.028, 0.027, 0.026))
    assert found == pytest.approx(
        {
            "lost_ms": 5.0,
            "lost_by_theirs_ms": 24.0,
            "lost_share": 5 / 24,
            "target_at_most": 1 / 3,
            "times_faster_at_best": 51 / 27,
        }
    )


@pytest.mark.parametrize("task", [MLP, CNN, TRANSFORMER], ids=lambda task: task.name)
def test_the_networks_have_about_five_million_parameters_and_take_their_samples(task):
    network = task.network()
    assert abs(sum(parameter.numel() for parameter in network.parameters()) - 5e6) < 3e5
    x, y = task.dataset()[:2]
    assert network(x).shape == (2, task.classes)
    assert int(y.max()) < task.classes


@pytest.mark.parametrize("task", [CNN, MLP, TRANSFORMER, WIDE], ids=lambda task: task.name)
def test_every_rank_of_many_has_a_whole_batch(task):
    for rank in (0, 63, 64, 200):
        x, y = task.batch_of(SimpleNamespace(rank=rank, device=torch.device("cpu")))
        assert len(x) == len(y) == task.batch
