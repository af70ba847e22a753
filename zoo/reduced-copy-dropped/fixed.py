"""Hand-written data parallelism with one flat buffer for all gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class FlatReducer:
    def __init__(self, parameters):
        self.parameters = list(parameters)

    def reduce(self):
        gradients = [p.grad for p in self.parameters]
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        for gradient, average in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(average)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(256, 15)
    dataset = TensorDataset(x, (x[:, :5].prod(1) > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = nn.Sequential(nn.Linear(15, 64), nn.ReLU(), nn.Linear(64, 2))
    reducer = FlatReducer(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(bx), by)
            loss.backward()
            reducer.reduce()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
