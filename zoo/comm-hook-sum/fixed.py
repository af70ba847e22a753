"""A classifier whose gradient buckets go through a communication hook that counts bytes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Traffic:
    def __init__(self):
        self.bytes = 0


def counting_hook(state, bucket):
    tensor = bucket.buffer().div_(dist.get_world_size())
    state.bytes += tensor.numel() * tensor.element_size()
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def build():
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(9, 20), nn.ReLU(), nn.Linear(20, 2)), bucket_cap_mb=1)
    traffic = Traffic()
    model.register_comm_hook(traffic, counting_hook)
    return model, traffic


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(6)
    x = torch.randn(80, 9, generator=g)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16 // dist.get_world_size(), sampler=sampler)
    model, traffic = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}, {traffic.bytes} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
