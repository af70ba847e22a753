"""Real ranks over the process group `samestep`: what gloo says, on every rank alike."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powers
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import samestep
from samestep.errors import PeerError, RankFailure, StepError, UsageError
from samestep.network.links import Link, Links
from samestep.runtime.process_group import group as group_module
from samestep.runtime.process_group.algorithms import plans
from samestep.runtime.process_group.group import SamestepGroup
from samestep.testing import assert_same_bits

WHOLE = ["uint8", "int8", "int16", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
TYPES = {"BAND": [*WHOLE, "bool"], "BOR": [*WHOLE, "bool"], "BXOR": [*WHOLE, "bool"], "AVG": FLOATS}
CASES = [
    (op, dtype)
    for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    for dtype in TYPES.get(op, [*WHOLE, *FLOATS])
]


def began(options=None):
    """Joins over samestep, and returns a group of gloo's beside it."""
    dist.init_process_group("samestep", pg_options=options)
    return dist.new_group(backend="gloo")


def brought(rank, dtype, elements=37):
    """Small whole numbers, which every order of adding sums up exactly."""
    generator = torch.Generator().manual_seed(rank)
    drawn = torch.randint(0, 2 if dtype == "bool" else 5, (elements,), generator=generator)
    return drawn.to(getattr(torch, dtype))


# --- all-reduce ---


def every_operation():
    gloo, found = began(), []
    for op, dtype in CASES:
        ours = brought(dist.get_rank(), dtype)
        theirs = ours.to(torch.int32) if dtype == "int16" else ours.clone()  # which gloo does not know
        dist.all_reduce(ours, getattr(dist.ReduceOp, op))
        dist.all_reduce(theirs, getattr(dist.ReduceOp, op), group=gloo)
        found.append((f"{op} {dtype}", ours, theirs.to(ours.dtype)))
    return found


def test_every_operation_and_dtype_gives_what_gloo_gives(three_ranks):
    ranks = three_ranks(every_operation)
    for found in ranks:
        for name, ours, theirs in found:
            assert_same_bits(ours, theirs, name)
    assert_same_bits(ranks[1:], ranks[:-1])


def of_many_sizes():
    began()
    ends = []
    for elements in (0, 1, 1001, 300_001):
        tensor = torch.randn(elements, generator=torch.Generator().manual_seed(dist.get_rank()))
        dist.all_reduce(tensor)
        ends.append(tensor)
    return ends


def in_rank_order(elements, ranks):
    parts = [torch.randn(elements, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    return sum(parts[1:], start=parts[0])


def test_floats_are_added_in_the_order_of_the_ranks_on_all_of_them(four_ranks):
    expected = [in_rank_order(elements, 4) for elements in (0, 1, 1001, 300_001)]
    assert_same_bits(four_ranks(of_many_sizes), [expected] * 4)


def what_gloo_does():
    gloo = began()
    rank, size = dist.get_rank(), dist.get_world_size()
    complex_ = torch.full((3,), complex(rank, 1))
    dist.all_reduce(complex_)
    truth = torch.tensor([rank == 0, True, False])
    dist.all_reduce(truth, dist.ReduceOp.SUM)
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,))
    dist.all_reduce(sparse)
    strided = torch.ones(4, 3).t() * (rank + 1)
    dist.all_reduce(strided)
    parts = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    sent = torch.full((1,), float(rank))
    dist.broadcast(sent, size - 1)
    row = torch.zeros(1)
    dist.reduce_scatter_single(row, torch.arange(float(size)))
    scattered = torch.zeros(1)
    dist.scatter(scattered, [torch.full((1,), float(each)) for each in range(size)] if rank == 0 else None)
    turned = torch.zeros(size)
    dist.all_to_all_single(turned, torch.full((size,), float(rank)))
    dist.barrier(group=gloo)
    return complex_, truth, sparse.to_dense(), strided, parts, sent, row, scattered, turned


def test_what_shared_memory_does_not_do_gloo_does(three_ranks):
    for rank, found in enumerate(three_ranks(what_gloo_does)):
        complex_, truth, sparse, strided, parts, sent, row, scattered, turned = found
        assert complex_.tolist() == [3 + 3j] * 3
        assert truth.tolist() == [True, True, False]
        assert sparse.tolist() == [1.0, 1.0, 1.0]
        assert strided.shape == (3, 4)
        assert (strided == 6).all()
        assert [part.tolist() for part in parts] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
        assert (sent.item(), row.item(), scattered.item()) == (2.0, 3.0 * rank, float(rank))
        assert turned.tolist() == [0.0, 1.0, 2.0]


def refused():
    began()
    with pytest.raises(ValueError, match="not support"):
        dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return tensor.tolist()


def test_a_collective_that_gloo_refuses_is_refused_and_the_group_goes_on(two_ranks):
    assert two_ranks(refused) == [[2.0, 2.0]] * 2


# --- order, futures, groups ---


def in_issue_order():
    began()
    tensor = torch.ones(100_000)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(20)]
    for work in works:
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
    late = torch.full((3,), 2.0)
    work = dist.all_reduce(late, async_op=True)
    dist.all_reduce(late)  # comes after it, though it is waited for at once
    assert work.is_completed()
    return tensor[0].item(), late.tolist()


def test_asynchronous_collectives_are_carried_out_in_the_order_of_their_issue(two_ranks):
    assert two_ranks(in_issue_order) == [(2.0**20, [8.0, 8.0, 8.0])] * 2


def futures():
    began()
    tensor = torch.ones(3)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    seen = []
    future.add_done_callback(lambda done: seen.append(done.wait()[0].tolist()))
    chained = future.then(lambda done: done.wait()[0] + 1).then(lambda done: (done.wait() * 2).tolist())
    failing = future.then(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    late = future.then(lambda done: threading.current_thread().name)  # the result is there already
    return chained.wait(), seen, late.wait() != threading.current_thread().name


def test_callbacks_run_on_a_thread_of_their_own_in_order(two_ranks):
    assert two_ranks(futures) == [([6.0, 6.0, 6.0], [[2.0, 2.0, 2.0]], True)] * 2


def nested():
    """On rank 0 the script issues its second collective before the callback issues one, on rank 1 after it."""
    began()
    ends = []
    for _ in range(3):
        scripts, callbacks = threading.Event(), threading.Event()
        within = (
            dist.all_reduce(torch.ones(50), async_op=True)
            .get_future()
            .then(functools.partial(_issue_within, scripts, callbacks))
        )
        if dist.get_rank() == 1:
            callbacks.wait()
        second = dist.all_reduce(torch.full((60,), 2.0), async_op=True)
        scripts.set()
        also = second.get_future().then(lambda done: done.wait()[0].sum().item() + _sum_of(torch.ones(5)))
        ends.append((within.wait(), also.wait(), _sum_of(torch.ones(9))))
    return ends


def _issue_within(scripts, callbacks, _):
    if dist.get_rank() == 0:
        scripts.wait()
    work = dist.all_reduce(torch.ones(7), async_op=True)
    callbacks.set()
    return work.get_future().wait()[0].sum().item()


def _sum_of(tensor):
    (total,) = dist.all_reduce(tensor, async_op=True).get_future().wait()
    return total.sum().item()


def test_what_callbacks_issue_does_not_mix_with_what_the_script_issues(two_ranks):
    assert two_ranks(nested) == [[(14.0, 250.0, 18.0)] * 3] * 2


def side_by_side():
    began()
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 1, 2])]
    ends = {}

    def train(number):
        tensor = torch.full((1000,), float(number + 1))
        for _ in range(50):
            dist.all_reduce(tensor, dist.ReduceOp.AVG, group=pairs[number])
        ends[number] = tensor.unique().tolist()

    mine = [number for number, ranks in enumerate(([0, 1], [1, 2], [0, 1, 2])) if rank in ranks]
    threads = [threading.Thread(target=train, args=(number,)) for number in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [dist.get_backend(group) for group in pairs if group is not dist.GroupMember.NON_GROUP_MEMBER]
    return ends, set(names)


def test_groups_work_side_by_side_each_in_a_thread(three_ranks):
    for rank, (ends, names) in enumerate(three_ranks(side_by_side)):
        assert ends == {
            number: [number + 1.0] for number, ranks in enumerate(("01", "12", "012")) if str(rank) in ranks
        }
        assert names == {"samestep"}


def interfaces():
    began()
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    total = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD) + 0
    with dist._coalescing_manager(async_ops=True) as coalesced:
        one, other = torch.ones(2), torch.full((3,), float(rank))
        dist.all_reduce(one)
        dist.all_reduce(other)
    coalesced.wait()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    on_mesh = torch.ones(1)
    dist.all_reduce(on_mesh, group=mesh.get_group("data"))
    waiting = dist.barrier(async_op=True)
    waiting.wait()
    dist.destroy_process_group()
    dist.init_process_group("samestep", store=dist.HashStore(), rank=0, world_size=1)
    alone = torch.ones(2)
    dist.all_reduce(alone)
    return gathered, total.tolist(), one.tolist(), other.tolist(), on_mesh.item(), alone.tolist()


def test_objects_functional_and_coalesced_collectives_meshes_and_a_new_start(two_ranks):
    gathered = [{"rank": 0}, {"rank": 1}]
    expected = gathered, [2.0, 2.0], [2.0, 2.0], [1.0, 1.0, 1.0], 2.0, [1.0, 1.0]
    assert two_ranks(interfaces) == [expected] * 2


def through_the_world():
    with samestep.world(backend="samestep") as world:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        return world.backend, isinstance(dist.group.WORLD, SamestepGroup), tensor.tolist()


def test_the_world_takes_the_backend(two_ranks):
    assert two_ranks(through_the_world) == [("samestep", True, [2.0, 2.0])] * 2


# --- DistributedDataParallel ---


def trained(backend, hook, elements):
    dist.init_process_group(backend)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(elements, elements) for _ in range(4)))
    model = DistributedDataParallel(model, bucket_cap_mb=0.003)
    if hook == "powers":
        state = powers.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, random_seed=1)
        model.register_comm_hook(state, powers.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(8, elements, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")) > 1
    return [parameter.detach() for parameter in model.parameters()]


def test_ddp_trains_as_over_gloo(two_ranks):
    assert_same_bits(two_ranks(trained, "samestep", None, 20), two_ranks(trained, "gloo", None, 20))


def test_power_sgd_with_several_buckets_ends_with_the_same_replicas(two_ranks):
    one, other = two_ranks(trained, "samestep", "powers", 20)
    assert_same_bits(one, other)


# --- plans ---


def by_plans(algorithm):
    gloo = began({"algorithm": algorithm})
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for elements in (1, 7, 4097):
        for dtype in ("int32", "float32", "bfloat16"):
            ours = brought(rank, dtype, elements).view(1, elements)
            theirs = ours.clone()
            for group, tensor in ((None, ours), (gloo, theirs)):
                dist.all_reduce(tensor, group=group)
                rows = [torch.zeros_like(tensor) for _ in range(size)]
                dist.all_gather(rows, brought(rank, dtype, elements).view(1, elements), group=group)
                share = torch.zeros_like(tensor)
                dist.reduce_scatter(share, [row * (each + 1) for each, row in enumerate(rows)], group=group)
                sent = brought(rank, dtype, elements)
                dist.broadcast(sent, size - 1, group=group)
                found.append([tensor, *rows, share, sent])
    return found[::2], found[1::2]


@pytest.mark.parametrize(
    "algorithm", ["cheapest", "ring", "recursive doubling", "binomial tree", "1 server", "double tree"]
)
def test_an_algorithm_that_is_asked_for_gives_what_gloo_gives(three_ranks, algorithm):
    ranks = three_ranks(by_plans, algorithm)
    for ours, theirs in ranks:
        assert_same_bits(ours, theirs)


def carried_by_messages():
    began({"algorithm": "ring"})
    carried = dist.group.WORLD._collectives_of(0)
    average = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(average, dist.ReduceOp.AVG)
    return carried.memory is None, carried._plans.plan("all_reduce", 20).name, average.tolist()


def test_the_algorithm_is_the_one_that_was_asked_for(two_ranks):
    assert two_ranks(carried_by_messages) == [(True, "ring", [0.5] * 5)] * 2


def on_hosts_of_their_own(options):
    gathered = group_module.gather_host_map
    group_module.gather_host_map = lambda *args: _apart(gathered(*args))
    try:
        dist.init_process_group("samestep", pg_options=options)
        carrier = dist.group.WORLD._collectives_of(0)
        tensor = torch.arange(5.0) + dist.get_rank()
        dist.all_reduce(tensor)
        highest = torch.tensor([dist.get_rank()])
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        assert (carrier.memory, dist.group.WORLD._info.ranks_per_host) == (None, 2)
        return "_plans" in vars(carrier), tensor.tolist(), highest.item()
    finally:
        group_module.gather_host_map = gathered


def _apart(host_map):
    """The first two ranks on one host, the others on another."""
    return type(host_map)(((0, 1), (2, 3)), host_map.processes)


@pytest.mark.parametrize("options", [None, {"algorithm": "hierarchical"}, {"algorithm": "cheapest"}])
def test_ranks_of_several_hosts_use_gloo_or_the_plan_that_is_asked_for(four_ranks, options):
    expected = (options is not None, [6.0, 10.0, 14.0, 18.0, 22.0], 3)
    assert four_ranks(on_hosts_of_their_own, options) == [expected] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "pigeon"}, "no algorithm for 1 ranks is called 'pigeon': give the beginning of one.* ring"),
        ({"speed": "11"}, "no option 'speed': it has 'algorithm'"),
    ],
)
def test_unknown_options_are_refused_with_what_there_is(options, message):
    told = type("Told", (), {})()
    told.store, told.group_rank, told.group_size, told.group_id = dist.HashStore(), 0, 1, "0"
    told.global_ranks_in_group, told.timeout = [], timedelta(seconds=5)
    with pytest.raises(UsageError, match=message):
        SamestepGroup(told, options)


@pytest.mark.parametrize("nbytes", [4.0, 1e6, 1e9])
def test_a_plan_in_pieces_is_found_for_any_number_of_bytes(nbytes):
    """In how many pieces it is follows from the bytes; a name with a number would be that of some tensors only."""
    links = Links(Link(1e-5, 1e9))
    for name in ("double tree", "double tree of 8"):
        assert {plan.name.partition(" of ")[0] for plan in plans(name, 4, nbytes, links)} == {"double tree"}


# --- what goes wrong ---


def mismatched(elements, dtypes):
    began()
    tensor = torch.ones(elements[dist.get_rank()], dtype=getattr(torch, dtypes[dist.get_rank()]))
    with pytest.raises(StepError, match="mismatched tensors to all-reduce 1 of their group") as caught:
        dist.all_reduce(tensor)
    with pytest.raises(StepError):
        dist.all_reduce(torch.ones(1))  # out of step for good
    return str(caught.value).partition("group: ")[2]


@pytest.mark.parametrize(
    ("elements", "dtypes"),
    [
        ((4, 5), ["float32"] * 2),
        ((3_000_000, 2), ["float32"] * 2),
        ((4, 4), ["float32", "int32"]),
        ((0, 9), ["int8"] * 2),
    ],
)
def test_tensors_that_do_not_belong_together_end_in_an_error_on_all_ranks(two_ranks, elements, dtypes):
    said = "; ".join(f"rank {rank}: sum of {elements[rank]} x {dtypes[rank]}" for rank in range(2))
    assert two_ranks(mismatched, elements, dtypes) == [said] * 2


LEFT = """
import os, sys, torch, torch.distributed as dist, samestep
rank, how, options = int(sys.argv[1]), sys.argv[3], {"algorithm": "ring"} if sys.argv[4] == "ring" else None
dist.init_process_group("samestep", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=3, pg_options=options)
tensor = torch.ones(10)
for _ in range(3):
    dist.all_reduce(tensor)
if rank == 1:
    print(os.getpid(), flush=True)
    sys.stdin.read()
try:
    if how == "wait":
        dist.all_reduce(tensor, async_op=True).wait()
    elif how == "future":
        dist.all_reduce(tensor, async_op=True).get_future().wait()
    else:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), init_sync=False)
        model(tensor[:2]).sum().backward()
except Exception as error:
    print(type(error).__name__, " ".join(str(error).split()), flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("how", "way"), [("wait", "shared"), ("future", "shared"), ("ddp", "shared"), ("wait", "ring")]
)
def test_a_rank_that_is_killed_ends_the_others_with_its_name(tmp_path, how, way):
    (tmp_path / "train.py").write_text(LEFT)
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py", str(rank), str(tmp_path / "meet"), how, way],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    gone = int(ranks[1].stdout.readline())
    os.kill(gone, signal.SIGKILL)
    said = [ranks[rank].communicate(timeout=60)[0] for rank in (0, 2)]
    ranks[1].communicate()
    kind = "RuntimeError" if how == "ddp" else "PeerError"
    assert all(text.startswith(kind) for text in said), said
    assert f"rank 1 (process {gone})" in (said[0] if way == "shared" else "".join(said))
    if way == "shared":
        assert f"rank 1 (process {gone}) has left" in said[1]


def one_raises():
    began()
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        raise ValueError("no batch for me")
    dist.all_reduce(tensor)


def test_a_rank_that_raises_is_the_one_that_is_blamed(three_ranks):
    with pytest.raises(RankFailure, match="no batch for me"):
        three_ranks(one_raises)


def after_the_end():
    dist.barrier(group=began())  # gloo connects a rank with one that is still there
    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(StepError, match=r"the process group of ranks \[0, 1\] is destroyed"):
        group.allreduce([torch.ones(1)], dist.AllreduceOptions())


def test_a_destroyed_group_says_so(two_ranks):
    two_ranks(after_the_end)


def waits_too_long():
    gloo, tensor = began(), torch.ones(1)
    if dist.get_rank() == 0:
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(PeerError, match=r"waited 0\.2 s for the other ranks"):
            work.wait(timedelta(seconds=0.2))
    dist.barrier(group=gloo)
    if dist.get_rank() == 1:
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    return tensor.item()


def test_a_wait_can_be_shorter_than_the_groups(two_ranks):
    assert two_ranks(waits_too_long) == [2.0, 2.0]


# --- the trap that stopped a first version of this group now and then ---


def hammered():
    began()
    for turn in range(500):
        dist.broadcast(torch.ones(1), turn % 2)
    return True


def test_hundreds_of_collectives_on_fresh_tensors_come_to_an_end(two_ranks):
    assert two_ranks(hammered) == [True, True]


HEADER = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/PyProcessGroup.hpp"


@pytest.mark.skipif(not HEADER.exists(), reason="this torch has no headers that say what C++ looks for")
def test_every_collective_that_cpp_looks_for_has_an_override():
    works = re.findall(r"c10::intrusive_ptr<Work> (\w+)\(", HEADER.read_text(encoding="utf-8"))
    assert "allreduce" in works
    assert set(works) <= set(vars(SamestepGroup))
