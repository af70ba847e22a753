"""An exponential moving average of the weights, kept and evaluated on all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    return TensorDataset(torch.randn(n, 5, generator=g) + y[:, None], y)


@torch.no_grad()
def accuracy(net, dataset):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = (tensor[rank::world_size] for tensor in dataset.tensors)
    right = (net(x).argmax(1) == y).sum()
    dist.all_reduce(right)
    return right.item() / len(dataset)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3))
    model = DDP(net)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_set, test_set = blobs(256, 1), blobs(101, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            average.update_parameters(net)
        result = accuracy(average, test_set)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {result:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
