import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import samestep
from samestep.collectives import shared_memory
from samestep.collectives.shared_memory import divide_
from samestep.errors import UsageError
from samestep.replicas import reduction
from samestep.runtime.axis import HostMap

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTHS = (40, 64, 64, 10)
BUCKETS = 0.01  # MiB: several buckets, and others after the first step


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [part for i in range(3) for part in (nn.Linear(WIDTHS[i], WIDTHS[i + 1]), nn.Tanh())]
    return nn.Sequential(*layers).to(dtype)


def inputs(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, WIDTHS[0], generator=generator).to(dtype)


def gradients(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def own_gradients(ranks, step, dtype=torch.float32):
    """What each rank brings, computed in this process."""
    found = []
    for rank in range(ranks):
        model = network(dtype)
        model(inputs(rank, step, dtype)).square().sum().backward()
        found.append(gradients(model))
    return found


def in_order(parts):
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    divide_(total, len(parts))
    return total


def trained(reduce, hosts=None, steps=4, dtype=torch.float32, buckets=BUCKETS, set_to_none=True):
    """The averaged gradients of some steps, all of the same parameters."""
    torch.set_num_threads(1)
    with samestep.world() as world:
        if hosts is not None:
            world.data.host_map = HostMap(hosts, world.data.host_map.processes)
        model = samestep.replicate(network(dtype), world, reduce=reduce, buckets=buckets)
        found = []
        for step in range(steps):
            model(inputs(world.rank, step, dtype)).square().sum().backward()
            found.append(gradients(model))
            model.zero_grad(set_to_none=set_to_none)
        return found


@pytest.mark.parametrize("reduce", [None, "shared", "ordered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_on_one_host_gradients_are_the_mean_in_rank_order_bit_for_bit(three_ranks, reduce, dtype):
    expected = [in_order(own_gradients(3, step, dtype)) for step in range(4)]
    for found in three_ranks(trained, reduce, None, 4, dtype):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("buckets", [0.001, 0.01, 25])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_bits_do_not_depend_on_buckets_nor_on_who_owns_the_gradients(four_ranks, buckets, set_to_none):
    expected = [in_order(own_gradients(4, step)) for step in range(3)]
    for found in four_ranks(trained, None, None, 3, torch.float32, buckets, set_to_none):
        assert all(map(torch.equal, found, expected))


def test_added_in_order_over_messages_they_are_the_same_bits(three_ranks):
    expected = [in_order(own_gradients(3, step)) for step in range(4)]
    for found in three_ranks(trained, "ordered", ((0,), (1, 2))):
        assert all(map(torch.equal, found, expected))


def test_over_hosts_all_ranks_hold_the_same_bits_and_the_mean(four_ranks):
    expected = [in_order(own_gradients(4, step, torch.float64)) for step in range(4)]
    ranks = four_ranks(trained, None, ((0, 2), (1, 3)), 4, torch.float64)
    for step, mean in enumerate(expected):
        assert torch.allclose(ranks[0][step], mean, rtol=0, atol=1e-15 * float(mean.abs().max()) * 4)
    for found in ranks[1:]:
        assert all(map(torch.equal, found, ranks[0]))


def halves(reduce, hosts):
    with samestep.world() as world:
        if hosts is not None:
            world.data.host_map = HostMap(hosts, world.data.host_map.processes)
        model = samestep.replicate(nn.Linear(50, 1, bias=False).half(), world, reduce=reduce, nonfinite="off")
        model(torch.full((1, 50), 40000.0, dtype=torch.float16)).sum().backward()
        return gradients(model)


@pytest.mark.parametrize(
    "way", [(None, None), ("ordered", None), ("ordered", ((0,), (1, 2, 3))), (None, ((0, 1), (2, 3)))]
)
def test_gradients_in_float16_do_not_overflow_on_the_way_to_their_mean(four_ranks, way):
    for found in four_ranks(halves, *way):
        assert torch.equal(found, torch.full((50,), 40000.0, dtype=torch.float16))


def test_left_to_the_backend_they_are_what_ddp_makes_of_them(two_ranks):
    expected = [in_order(own_gradients(2, step)) for step in range(4)]
    for found in two_ranks(trained, "gloo"):
        assert all(map(torch.equal, found, expected))  # of two numbers there is one sum, and halving is exact


def chosen(hosts):
    with samestep.world() as world:
        if hosts is not None:
            world.data.host_map = HostMap(hosts, world.data.host_map.processes)
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        told = []
        model.register_comm_hook = lambda axis, hook: told.append(hook.__module__)
        reduction.install(model, world.data, None)
        return bool(told)


def test_by_default_shared_memory_is_used_where_it_serves(three_ranks):
    assert three_ranks(chosen, None) == [True] * 3
    assert three_ranks(chosen, ((0,), (1, 2))) == [False] * 3


def accumulated(reduce):
    with samestep.world() as world:
        data = torch.utils.data.TensorDataset(torch.arange(24.0).view(12, 2))
        model = samestep.replicate(nn.Linear(2, 1), world, reduce=reduce)
        batches = samestep.shards(data, world, batch_size=12, micro_batch_size=2)
        for (x,) in batches:
            batches.mean(model(x).squeeze(1)).backward()
            if batches.step_ends:
                return gradients(model)
    return None


def test_micro_batches_are_added_before_the_ranks_are(two_ranks):
    mean = torch.arange(24.0).view(12, 2).mean(0)
    for reduce in (None, "ordered", "gloo"):
        for found in two_ranks(accumulated, reduce):
            assert torch.allclose(found, torch.tensor([*mean.tolist(), 1.0]))


def two_models():
    with samestep.world() as world:
        models = [samestep.replicate(network(), world, buckets=BUCKETS) for _ in range(2)]
        for step in range(3):
            outputs = [model(inputs(world.rank, step)).square().sum() for model in models]
            (outputs[0] + 2 * outputs[1]).backward()
            found = [gradients(model) for model in models]
            for model in models:
                model.zero_grad()
        return found


def test_two_models_in_one_backward_do_not_mix(three_ranks):
    expected = in_order(own_gradients(3, 2))
    for first, second in three_ranks(two_models):
        assert torch.equal(first, expected)
        assert torch.allclose(second, 2 * expected)


def frozen_later():
    with samestep.world() as world:
        model = samestep.replicate(network(), world, buckets=BUCKETS)
        for step in range(4):
            model.module[0].requires_grad_(step % 2 == 0)
            model(inputs(world.rank, step)).square().sum().backward()
            found = gradients(model.module[2])
            model.zero_grad()
        return found


def test_a_layer_frozen_and_unfrozen_gets_new_memory(two_ranks):
    first, second = two_ranks(frozen_later)
    assert torch.equal(first, second)


def without_room():
    shared_memory._free_bytes, room = (lambda: 0), shared_memory._free_bytes
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = trained(None)
    finally:
        shared_memory._free_bytes = room
    return found, [str(one.message) for one in said]


def test_where_memory_is_short_it_says_so_once_and_uses_gloo(two_ranks):
    expected = [in_order(own_gradients(2, step)) for step in range(4)]
    results = two_ranks(without_room)
    for found, _ in results:
        assert all(map(torch.equal, found, expected))
    assert [len(said) for _, said in results] == [1, 0]
    assert "/dev/shm has no room for 1 MiB of gradients" in results[0][1][0]


SMALL = """
import samestep, torch, warnings
with samestep.world() as world:
    model = samestep.replicate(torch.nn.Linear(2000, 500), world)
    model(torch.ones(1, 2000)).sum().backward()
    print("gradient", float(model.module.weight.grad.sum()))
"""


@pytest.mark.prove
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small /dev/shm takes root")
def test_in_a_container_with_a_small_memory_file_system_training_goes_on(tmp_path):
    (tmp_path / "train.py").write_text(SMALL)
    inside = f"mount -t tmpfs -o size=6m tmpfs /dev/shm && exec {sys.executable} -m samestep run -n 2 train.py"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", inside], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gradient 1000000.0") == 2
    assert done.stderr.count("/dev/shm has no room for 8 MiB of gradients") == 1


def refused(reduce):
    with samestep.world() as world, pytest.raises(UsageError) as caught:
        samestep.replicate(nn.Linear(2, 1), world, reduce=reduce)
    return str(caught.value)


def test_a_way_that_does_not_exist_is_refused(two_ranks):
    assert set(two_ranks(refused, "quick")) == {
        "reduce='quick' is unknown: use 'shared', 'ordered' or 'gloo', or leave it out"
    }


def insisted():
    with samestep.world() as world:
        world.data.host_map = HostMap(((0,), (1,)), world.data.host_map.processes)
        with pytest.raises(UsageError) as caught:
            samestep.replicate(nn.Linear(2, 1), world, reduce="shared")
    return str(caught.value)


def test_shared_memory_that_is_insisted_on_and_not_to_be_had_says_why(two_ranks):
    for said in two_ranks(insisted):
        assert "reduce='shared' is not available: a rank stands alone on its host" in said


def ordered_without_memory():
    torch.set_num_threads(1)
    with samestep.world() as world:
        with mock.patch.object(reduction, "open_counters", return_value=None):
            model = samestep.replicate(nn.Linear(2, 1), world, reduce="ordered")
        model(torch.full((1, 2), float(world.rank))).sum().backward()
        return model.module.weight.grad.tolist()


def test_ranks_that_cannot_open_each_others_memory_add_in_order_by_messages(two_ranks):
    assert two_ranks(ordered_without_memory) == [[[0.5, 0.5]]] * 2


DYING = """
import os, signal, sys, torch
import samestep
with samestep.world(init_method=sys.argv[1], rank=int(sys.argv[2]), size=2) as world:
    model = samestep.replicate(torch.nn.Linear(1000, 1000), world)
    for step in range(100):
        if step == 5 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(1, 1000)).sum().backward()
"""


def test_a_rank_killed_while_others_wait_is_named_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "train.py").write_text(DYING)
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py", f"file://{tmp_path}/meet", str(rank)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (_, err), _ = [rank.communicate(timeout=60) for rank in ranks]
    assert ranks[1].returncode == -signal.SIGKILL
    assert re.search(rf"PeerError: rank 1 \(process {ranks[1].pid}\) has left, and rank 0 waited to add gradients", err)
    left = [file.name for file in Path("/dev/shm").iterdir() if any(str(rank.pid) in file.name for rank in ranks)]
    assert not left


TWO_HOSTS = """
import samestep, torch
with samestep.world() as world:
    model = samestep.replicate(torch.nn.Linear(300, 300), world, buckets=0.1)
    for step in range(3):
        model(torch.full((1, 300), float(world.rank + 1))).sum().backward()
        found = model.module.weight.grad.clone()
        model.zero_grad()
    print(world.data.host_map.hosts, world.data.inter_host is not None, bool((found == 2.5).all()), flush=True)
"""


@pytest.mark.prove
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of process numbers take root")
def test_ranks_that_do_not_see_each_others_processes_add_as_two_hosts(tmp_path):
    (tmp_path / "train.py").write_text(TWO_HOSTS)
    apart = ["unshare", "-pf", "--mount-proc", "--kill-child", sys.executable, "-m", "samestep"]
    apart += ["run", "-n", "2", "--nnodes", "2"]
    hosts = [
        subprocess.Popen(
            [*apart, "--node-rank", str(host), "--rendezvous", f"{tmp_path}/meet", "train.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    said = [host.communicate(timeout=100) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    assert said[0][0].count("((0, 1), (2, 3)) True True") == 4
