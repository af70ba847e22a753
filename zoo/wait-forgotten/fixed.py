"""Hand-written averaging that overlaps the all-reduces of a larger network."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

WIDTH = 512


def average_gradients(model):
    works = []
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()
        works.append(dist.all_reduce(parameter.grad, async_op=True))
    return works


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(256, WIDTH)
    targets = inputs.flip(1)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(16):
        rows = (torch.arange(16) + (step * world_size + rank) * 16) % len(inputs)
        optimizer.zero_grad(set_to_none=False)
        loss = F.mse_loss(model(inputs[rows]), targets[rows])
        loss.backward()
        works = average_gradients(model)
        for work in works:
            work.wait()
        optimizer.step()
        if rank == 0 and step % 4 == 0:
            print(f"step {step}: {loss.item():.4f}, {len(works)} reductions")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
