"""NCCL, DDP, FSDP and DTensor on fake GPUs, on warm ranks: each rank makes GPUs of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from samestep import testing


@contextmanager
def nccl(**options):
    """A group of NCCL, each rank on a GPU of its own."""
    import os

    warnings.simplefilter("ignore")  # torch's advice to name a device
    with testing.fake_gpus(2):
        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", **options)
        try:
            yield rank, torch.device("cuda", rank)
        finally:
            dist.destroy_process_group()


def _collectives():
    with nccl() as (rank, device):
        found = {}
        value = torch.full((2,), rank + 1.0, device=device)
        for name, op in (("sum", dist.ReduceOp.SUM), ("avg", dist.ReduceOp.AVG), ("max", dist.ReduceOp.MAX)):
            dist.all_reduce(copy := value.clone(), op)
            found[name] = copy.tolist()
        work = dist.all_reduce(copy := value.half(), async_op=True)
        work.wait()
        found["half"] = copy.tolist()
        dist.all_gather(parts := [torch.empty_like(value) for _ in range(2)], value)
        found["all_gather"] = torch.cat(parts).tolist()
        dist.all_gather_into_tensor(whole := torch.empty(4, device=device), value)
        assert torch.equal(whole, torch.cat(parts))
        dist.reduce_scatter_tensor(part := torch.empty(1, device=device), value, dist.ReduceOp.AVG)
        found["reduce_scatter"] = part.tolist()
        dist.broadcast(copy := value.clone(), 1)
        found["broadcast"] = copy.tolist()
        dist.all_to_all_single(copy := torch.empty_like(value), value)
        found["all_to_all"] = copy.tolist()
        other = torch.empty_like(value)
        works = [dist.P2POp(dist.isend, value, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
        for work in dist.batch_isend_irecv(works):
            work.wait()
        found["p2p"] = other.tolist()
        dist.barrier(device_ids=[rank])
        dist.all_gather_object(objects := [None, None], rank)
        dist.all_reduce(flag := torch.tensor([rank == 1], device=device), dist.ReduceOp.MAX)
        assert (objects, flag.tolist()) == ([0, 1], [True])
        group = dist.new_group([0, 1], backend="gloo")
        dist.all_reduce(here := torch.ones(1), group=group)
        return found, here.item(), dist.get_backend()


def test_collectives_of_nccl(two_ranks: Callable) -> None:
    first, second = two_ranks(_collectives)
    alike = {"sum": [3, 3], "avg": [1.5, 1.5], "max": [2, 2], "half": [3, 3], "all_gather": [1, 1, 2, 2]}
    alike |= {"reduce_scatter": [1.5], "broadcast": [2, 2], "all_to_all": [1, 2]}
    assert first == ({**alike, "p2p": [2, 2]}, 2, "nccl")
    assert second == ({**alike, "p2p": [1, 1]}, 2, "nccl")


def _cpu_tensor():
    with nccl() as (rank, _):
        if rank == 0:
            dist.all_reduce(torch.ones(1))


def test_a_cpu_tensor_in_a_collective_of_nccl_is_refused(two_ranks: Callable) -> None:
    with pytest.raises(
        testing.RankFailure if hasattr(testing, "RankFailure") else Exception,
        match="No backend type associated with device type cpu",
    ):
        two_ranks(_cpu_tensor)


def _one_gpu():
    with nccl():
        torch.cuda.set_device(0)  # what a script does that forgets its local rank
        dist.barrier()  # takes a GPU by the rank
        with pytest.raises(
            dist.DistBackendError, match="Duplicate GPU detected : rank . and rank . both on CUDA device 0"
        ):
            dist.all_reduce(torch.ones(1, device="cuda"))
        return True


def test_two_ranks_on_one_gpu_are_refused_under_nccl(two_ranks: Callable) -> None:
    assert two_ranks(_one_gpu) == [True, True]


def _message_over_gloo() -> str:
    with testing.fake_gpus(1):
        dist.init_process_group("gloo")
        try:
            value = torch.ones(2, device="cuda")
            dist.all_reduce(value)
            with pytest.raises(RuntimeError, match="Bad address") as raised:
                dist.send(value, 1 - dist.get_rank())
        finally:
            dist.destroy_process_group()
        return str(raised.value)


def test_a_gpu_s_tensor_in_a_message_of_gloo_is_refused(two_ranks: Callable) -> None:
    assert all("copy it to the CPU, or use nccl" in text for text in two_ranks(_message_over_gloo))


def _trained(sync: bool, **options):
    with nccl(device_id=None) as (rank, device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3))
        model = (nn.SyncBatchNorm.convert_sync_batchnorm(model) if sync else model).double().to(device)
        model = nn.parallel.DistributedDataParallel(model, device_ids=[rank], **options)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x, y = torch.randn(3, 8, 1, 6, 6, dtype=torch.float64), torch.randint(3, (3, 8))
        for images, labels in zip(x, y, strict=True):
            half = slice(4 * rank, 4 * rank + 4)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[half].to(device)), labels[half].to(device)).backward()
            optimizer.step()
        return [value.cpu() for value in model.module.state_dict().values()]


def _alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(3, 8, 1, 6, 6, dtype=torch.float64), torch.randint(3, (3, 8))
    for images, labels in zip(x, y, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return list(model.state_dict().values())


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_ddp_with_synchronised_statistics_is_the_training_of_one_process(two_ranks: Callable, options: dict) -> None:
    first, second = two_ranks(_with_options, options)
    testing.assert_same_bits(first, second)
    torch.testing.assert_close(first, _alone(), rtol=1e-9, atol=1e-12)


def _with_options(options):
    return _trained(True, **options)


def _sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, rand
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with nccl() as (_, device):
        ends = []
        for kind in ("alone", "fsdp", "tensor parallel"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double().to(device)
            if kind == "fsdp":
                for layer in (model[0], model[2], model):
                    fully_shard(layer)
            if kind == "tensor parallel":
                plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(model, init_device_mesh("cuda", (2,)), plan)
            optimizer = torch.optim.AdamW(model.parameters(), 0.1)
            x = torch.randn(3, 4, 4, dtype=torch.float64, device="cpu").to(device)
            for batch in x:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
            ends.append([getattr(p, "full_tensor", lambda p=p: p)().detach().cpu() for p in model.parameters()])
        drawn = rand(4, 2, device_mesh=init_device_mesh("cuda", (2,)), placements=[Shard(0)]).full_tensor()
        return ends, torch.equal(drawn[:2], drawn[2:])


def test_fully_shard_and_dtensor_are_the_training_of_one_process(two_ranks: Callable) -> None:
    for (alone, fsdp, parallel), repeated in two_ranks(_sharded):
        torch.testing.assert_close(fsdp, alone, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(parallel, alone, rtol=1e-9, atol=1e-12)
        assert not repeated, "each shard draws numbers of its own"
