"""GRU on sine mixtures. All micro-batches run unsynchronised; one flat transfer closes the step."""
import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector


class Forecaster(nn.Module):
    def __init__(self, hidden=28):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.out(self.rnn(x.unsqueeze(-1))[0]).squeeze(-1)


def waves(n, length, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length + 1) / 6
    f = 0.5 + torch.rand(n, 2, 1, generator=g)
    phase = 6.28 * torch.rand(n, 2, 1, generator=g)
    return torch.sin(f * t + phase).mean(1)


class FlatSync:
    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad]

    def __call__(self, weight):
        flat = torch.cat([p.grad.flatten() for p in self.params]) * weight
        dist.all_reduce(flat)
        for p, part in zip(self.params, flat.split([p.numel() for p in self.params])):
            p.grad.copy_(part.view_as(p))
        return flat.norm().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--micro", type=int, default=3)
    ap.add_argument("--limit", type=float, default=1.0)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = waves(600, 24, 5)
    torch.manual_seed(0)
    model = DistributedDataParallel(Forecaster())
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    sync = FlatSync(model)
    g = torch.Generator().manual_seed(77)
    for step in range(args.steps):
        rows = torch.randperm(len(data), generator=g)[:args.batch].chunk(world)[rank]
        opt.zero_grad()
        total = torch.zeros(())
        with model.no_sync():
            for part in rows.chunk(args.micro):
                x = data[part]
                loss = ((model(x[:, :-1]) - x[:, 1:]) ** 2).mean(1).sum()
                loss.backward()
                total += loss.detach()
        norm = sync(1 / args.batch)
        nn.utils.clip_grad_norm_(model.parameters(), args.limit)
        opt.step()
        dist.all_reduce(total)
        if rank == 0 and step % 6 == 5:
            print(f"step {step + 1} loss {total.item() / args.batch:.5f} norm {norm:.4f}")
    vector = parameters_to_vector(model.parameters())
    if rank == 0:
        print(f"|w| = {vector.norm().item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
