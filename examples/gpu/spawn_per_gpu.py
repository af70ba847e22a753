"""A process for each GPU of a machine, started by mp.spawn; with --nodes and --node-rank, of several machines.

samestep run -n 1 --fake-gpus 2 examples/gpu/spawn_per_gpu.py

On two machines: `python examples/gpu/spawn_per_gpu.py --nodes 2 --node-rank 0 --dist-url tcp://node1:29500`, with 1 on
the other.
"""

import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from data import digits


def parse():
    """Returns the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--dist-url", default=None)
    return parser.parse_args()


def work(gpu, ngpus_per_node, args):
    """Trains an epoch as one rank."""
    rank, size = args.node_rank * ngpus_per_node + gpu, args.nodes * ngpus_per_node
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", init_method=args.dist_url, rank=rank, world_size=size)
    torch.manual_seed(0)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    ).cuda(gpu)
    model = DistributedDataParallel(model, device_ids=[gpu])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = digits()
    sampler = DistributedSampler(dataset)
    sampler.set_epoch(0)
    loader = DataLoader(dataset, batch_size=64 // size, sampler=sampler, pin_memory=True)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.cuda(gpu)), labels.cuda(gpu))
        loss.backward()
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    print(f"rank {rank} of {size} on {torch.cuda.get_device_name(gpu)} {gpu}: mean loss {mean.item():.3f}", flush=True)
    del model
    dist.destroy_process_group()


def main():
    """Starts a process for each GPU."""
    args = parse()
    if args.dist_url is None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # holds a port that is free
        args.dist_url = f"tcp://127.0.0.1:{store.port}"
        del store
    ngpus_per_node = torch.cuda.device_count()
    mp.spawn(work, nprocs=ngpus_per_node, args=(ngpus_per_node, args))


if __name__ == "__main__":
    main()
