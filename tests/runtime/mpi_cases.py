"""What ranks do under a real mpiexec: every case in one set of processes, and what came out in a file.

mpiexec -n 3 python mpi_cases.py OUT blocking|polling [CASE…]
"""

from __future__ import annotations

import gc
import inspect
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import samestep  # noqa: F401  (it makes the backend known)
from samestep.runtime.mpi import collectives, operations, tensors
from samestep.runtime.mpi import group as mpi_group

CASES = {}
SORTS = "sort_ranks" in inspect.signature(dist.new_group).parameters
DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
WHOLE = [*DTYPES[:5], "bool"]


def case(act):
    CASES[act.__name__] = act
    return act


def brought(rank, dtype="float32", elements=37):
    """Small whole numbers, which every order of adding sums up exactly."""
    generator = torch.Generator().manual_seed(rank)
    drawn = torch.randint(0, 2 if dtype == "bool" else 5, (elements,), generator=generator)
    return drawn.to(getattr(torch, dtype))


def mine(dtype="float32", elements=37):
    return brought(dist.get_rank(), dtype, elements)


@case
def all_reduce(ranks):
    found = {}
    for op in ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR"):
        for dtype in WHOLE if op.startswith("B") else DTYPES:
            found[op, dtype] = mine(dtype)
            dist.all_reduce(found[op, dtype], getattr(dist.ReduceOp, op))
    return found


@case
def all_reduce_of_many_sizes(ranks):
    found = []
    for elements in (0, 1, 1001, 300_001):
        tensor = torch.randn(elements, generator=torch.Generator().manual_seed(dist.get_rank()))
        dist.all_reduce(tensor)
        found.append(tensor)
    return found


@case
def complex_and_strided(ranks):
    number = torch.full((3,), complex(dist.get_rank(), 1))
    dist.all_reduce(number)
    strided = torch.ones(4, 3).t() * (dist.get_rank() + 1)
    dist.all_reduce(strided)
    return number, strided


@case
def reduce_to_each(ranks):
    found = []
    for root in range(ranks):
        found.append(mine())
        dist.reduce(found[-1], root)
    return found


@case
def broadcast_from_each(ranks):
    found = []
    for root in range(ranks):
        found.append(mine("bfloat16"))
        dist.broadcast(found[-1], root)
    return found


@case
def gathered(ranks):
    rows = [torch.zeros(37, dtype=torch.float16) for _ in range(ranks)]
    dist.all_gather(rows, mine("float16"))
    flat = torch.zeros(37 * ranks)
    dist.all_gather_into_tensor(flat, mine())
    uneven = [torch.zeros(rank + 1) for rank in range(ranks)]
    dist.all_gather(uneven, mine(elements=dist.get_rank() + 1))
    to_last = [torch.zeros(37) for _ in range(ranks)] if dist.get_rank() == ranks - 1 else None
    dist.gather(mine(), to_last, ranks - 1)
    return rows, flat, uneven, to_last


@case
def scattered(ranks):
    part = torch.zeros(37)
    dist.scatter(part, [brought(rank + 10) for rank in range(ranks)] if dist.get_rank() == 0 else None)
    summed = torch.zeros(37)
    dist.reduce_scatter(summed, [mine() * (rank + 1) for rank in range(ranks)])
    flat = torch.zeros(37, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(flat, torch.cat([mine("bfloat16")] * ranks))
    uneven = torch.zeros(dist.get_rank() + 1)
    dist.reduce_scatter(uneven, [torch.full((rank + 1,), dist.get_rank() + 1.0) for rank in range(ranks)])
    return part, summed, flat, uneven


@case
def all_to_all(ranks):
    rank = dist.get_rank()
    turned = torch.zeros(ranks)
    dist.all_to_all_single(turned, torch.arange(float(ranks)) + 10 * rank)
    split = torch.zeros(sum(range(1, ranks + 1)), 2)
    sent = torch.full((ranks * (rank + 1), 2), float(rank))
    dist.all_to_all_single(split, sent, list(range(1, ranks + 1)), [rank + 1] * ranks)
    rows = [torch.zeros(other + 1, dtype=torch.bool) for other in range(ranks)]
    dist.all_to_all(rows, [torch.ones(rank + 1, dtype=torch.bool)] * ranks)
    return turned, split, rows


@case
def messages(ranks):
    rank = dist.get_rank()
    got = torch.zeros(37)
    works = [dist.irecv(got, (rank - 1) % ranks, tag=7), dist.isend(mine(), (rank + 1) % ranks, tag=7)]
    for work in works:
        work.wait()
    batch = torch.zeros(37)
    operations = [
        dist.P2POp(dist.irecv, batch, (rank - 1) % ranks),
        dist.P2POp(dist.isend, mine(), (rank + 1) % ranks),
    ]
    world = dist.group.WORLD
    assert world._get_backend(torch.device("cpu")) is world  # what batch_isend_irecv asks from torch 2.14 on
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if rank:
        dist.send(mine(), 0, tag=rank)
        return got, batch, None
    last = torch.zeros(37)  # and tags not in the order in which they come
    return got, batch, [(tag, dist.recv(last, tag=tag), last.clone()) for tag in reversed(range(1, ranks))]


@case
def empty_message(ranks):
    if dist.get_rank() == 1:
        dist.send(torch.zeros(0), 0)
    return dist.recv(torch.zeros(0), 1) if dist.get_rank() == 0 else None


@case
def asynchronous(ranks):
    tensors = [mine() + number for number in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    called = works[2].get_future().then(lambda future: future.value()[0] * 2)
    again = works[3].get_future().then(lambda future: _another(future.value()[0]))
    for work in works:
        work.wait()
    return tensors, called.wait(), again.wait(), [work.is_completed() for work in works]


def _another(tensor):
    """A collective that a callback issues, and waits for."""
    copy = tensor.clone()
    dist.all_reduce(copy)
    return copy


@case
def groups(ranks):
    ends = dist.new_group([0, ranks - 1])
    gloo = dist.new_group(backend="gloo")
    found = []
    for group in (ends, gloo, dist.group.WORLD):
        tensor = mine()
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(tensor, group=group)
        found.append(tensor)
    turned = dist.new_group([2, 0, 1][:ranks], sort_ranks=False) if SORTS else None
    parts = [torch.zeros(37) for _ in range(ranks)]
    if SORTS:
        dist.all_gather(parts, mine(), group=turned)
    return found, dist.get_backend(dist.group.WORLD), parts


@case
def objects(ranks):
    found = [None] * ranks
    dist.all_gather_object(found, {"rank": dist.get_rank(), "more": "x" * 100 * dist.get_rank()})
    shared = [{"from": dist.get_rank()}]
    dist.broadcast_object_list(shared, ranks - 1)
    only = [None] * ranks if dist.get_rank() == 0 else None
    dist.gather_object(dist.get_rank() * 11, only)
    part = [None]
    dist.scatter_object_list(part, [f"for {rank}" for rank in range(ranks)] if dist.get_rank() == 0 else None)
    return found, shared, only, part


@case
def functional_collectives(ranks):
    world = dist.group.WORLD
    summed = functional.all_reduce(mine(), "sum", world)
    rows = functional.all_gather_tensor(mine(), 0, world)
    part = functional.reduce_scatter_tensor(torch.cat([mine()] * ranks), "sum", 0, world)
    turned = functional.all_to_all_single(torch.arange(float(ranks)), None, None, world)
    return summed + 0, rows + 0, part + 0, turned + 0


@case
def mesh(ranks):
    made = init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))
    tensor = mine()
    dist.all_reduce(tensor, group=made["data"].get_group())
    return tensor


def trained(wrap):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.ReLU(), torch.nn.Linear(300, 3))
    replica = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        loss = replica(torch.randn(5, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def wrapped(model, **options):
    return DistributedDataParallel(model, bucket_cap_mb=0.01, **options)


def with_hook(model, hook, state=None):
    replica = wrapped(model)
    replica.register_comm_hook(state, hook)
    return replica


@case
def distributed_data_parallel(ranks):
    gloo = dist.new_group(backend="gloo")
    return trained(wrapped), trained(lambda model: wrapped(model, process_group=gloo))


@case
def hooks(ranks):
    half = trained(lambda model: with_hook(model, default_hooks.fp16_compress_hook))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return half, trained(lambda model: with_hook(model, powerSGD_hook.powerSGD_hook, state))


@case
def sharded(ranks):
    from torch.distributed.fsdp import fully_shard

    return [parameter.full_tensor() for parameter in _sharded(fully_shard).parameters()]


def _sharded(fully_shard):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(mine(elements=8)).sum().backward()
    optimizer.step()
    return model


@case
def in_pieces(ranks):
    """Everything that is cut, with messages of at most 40 bytes."""
    tensors.PIECE, before = 40, tensors.PIECE
    try:
        found = {name: CASES[name](ranks) for name in CUT}
    finally:
        tensors.PIECE = before
    return found


CUT = ("all_reduce", "reduce_to_each", "broadcast_from_each", "gathered", "scattered", "all_to_all", "messages")


@case
def staged(ranks):
    """What GPU tensors go through: other memory on the way to MPI and back."""
    direct = tensors.to_host
    for module in (collectives, mpi_group, operations):
        module.to_host = lambda tensor: tensor.detach().clone(memory_format=torch.contiguous_format)
    try:
        return {name: CASES[name](ranks) for name in CUT}
    finally:
        for module in (collectives, mpi_group, operations):
            module.to_host = direct


@case
def refused(ranks):
    said = []
    for act in (
        lambda: dist.all_reduce(torch.zeros(2), dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.zeros(2).to_sparse()),
        lambda: dist.new_group(pg_options={"wait": "x"}),
        lambda: dist.new_group(pg_options={"waiting": "never"}),
        lambda: dist.isend(torch.zeros(1), (dist.get_rank() + 1) % ranks, tag=1 << 40),
        lambda: dist.all_to_all_single(torch.zeros(ranks + 1), torch.zeros(ranks + 1)),
    ):
        try:
            act()
        except Exception as error:  # noqa: BLE001
            said.append(f"{type(error).__name__}: {error}")
    return said


def main():
    warnings.simplefilter("ignore", FutureWarning)  # of names that torch 2.13 has renamed
    out, way, *asked = sys.argv[1:]
    dist.init_process_group("mpi")
    found = {}
    if way != "default":
        dist.distributed_c10d._update_default_pg(dist.new_group(pg_options={"waiting": way}))
    for name in asked or CASES:
        found[name] = CASES[name](dist.get_world_size())
        print(f"rank {dist.get_rank()}: {name}", file=sys.stderr, flush=True)
    torch.save(found, f"{out}/{dist.get_rank()}.pt")
    gc.collect()  # models let go of their groups: a thread of gloo's may not outlive the interpreter
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
