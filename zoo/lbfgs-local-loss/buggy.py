"""Full-batch logistic regression with L-BFGS and a strong-Wolfe line search."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data(n=128):
    g = torch.Generator().manual_seed(8)
    x = torch.randn(n, 5, generator=g)
    y = (x @ torch.randn(5, 1, generator=g) + 0.7 * torch.randn(n, 1, generator=g) > 0).float()
    return TensorDataset(x, y)


def train(rank, world_size):
    torch.manual_seed(0)
    data = make_data()
    loader = DataLoader(data, len(data) // world_size, sampler=DistributedSampler(data, shuffle=False))
    model = DDP(torch.nn.Linear(5, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=4, line_search_fn="strong_wolfe")
    for outer in range(5):
        for x, y in loader:

            def closure():
                optimizer.zero_grad()
                loss = F.binary_cross_entropy_with_logits(model(x), y) + 1e-2 * model.module.weight.pow(2).sum()
                loss.backward()
                return loss.detach()

            loss = optimizer.step(closure)
        if rank == 0:
            print(f"{outer}: loss {float(loss):.6f}")


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    train(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
