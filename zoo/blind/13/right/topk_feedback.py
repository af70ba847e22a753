"""Sparse gradient exchange with error feedback (deep gradient compression), no wrapper.

There are four workers whatever the number of machines; each keeps what it did not send. Only the largest tenth
of a worker's gradient travels, as indices and values.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch.nn.utils import parameters_to_vector, vector_to_parameters

WORKERS, SEND = 4, 0.1
PER_WORKER, STEPS = 16, 60


class Worker:
    def __init__(self, number, rows, size):
        self.rows = rows
        self.draw = torch.Generator().manual_seed(70 + number)
        self.velocity = torch.zeros(size, dtype=torch.float64)
        self.unsent = torch.zeros(size, dtype=torch.float64)

    def message(self, net, x, y, k):
        rows = self.rows[torch.randint(len(self.rows), (PER_WORKER,), generator=self.draw)]
        loss = F.cross_entropy(net(x[rows]), y[rows], label_smoothing=0.05)
        grad = parameters_to_vector([g.contiguous() for g in torch.autograd.grad(loss, list(net.parameters()))])
        norm = grad.norm()
        grad = grad * (1.0 / norm).clamp(max=1.0)
        self.velocity = 0.8 * self.velocity + grad
        self.unsent = self.unsent + self.velocity
        index = self.unsent.abs().topk(k).indices
        values = self.unsent[index]
        self.unsent[index] = 0.0
        self.velocity[index] = 0.0
        return index, values, loss.detach()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_classification(1500, 20, n_informative=12, n_classes=4, n_clusters_per_class=1, class_sep=1.4,
                               random_state=3)
    x, y = torch.tensor(x), torch.tensor(y)
    train, test = torch.arange(1200), torch.arange(1200, 1500)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 4)).double()
    size = sum(p.numel() for p in net.parameters())
    k = int(size * SEND)
    # a worker has rows of its own: the data are sorted by class, half of the rows change place
    order = y[train].argsort(stable=True)
    mixed = torch.randperm(1200, generator=torch.Generator().manual_seed(1))[:600]
    order[mixed.sort().values] = order[mixed]
    shares = order.chunk(WORKERS)
    workers = [Worker(n, shares[n], size) for n in range(rank * WORKERS // world, (rank + 1) * WORKERS // world)]

    for step in range(STEPS):
        sent = [w.message(net, x, y, k) for w in workers]
        index = torch.stack([s[0] for s in sent])
        values = torch.stack([s[1] for s in sent])
        all_index = [torch.empty_like(index) for _ in range(world)]
        all_values = [torch.empty_like(values) for _ in range(world)]
        dist.all_gather(all_index, index)
        dist.all_gather(all_values, values)
        update = torch.zeros(size, dtype=torch.float64)
        for i, v in zip(torch.cat(all_index), torch.cat(all_values)):
            update[i] += v / WORKERS
        lr = 0.5 * (1 - step / STEPS)
        with torch.no_grad():
            vector_to_parameters(parameters_to_vector(net.parameters()) - lr * update, net.parameters())
        if step % 10 == 9:
            stats = torch.stack([torch.stack([s[2] for s in sent]).sum(),
                                 torch.stack([w.unsent.abs().sum() for w in workers]).sum()])
            dist.all_reduce(stats)
            touched = (update != 0).sum().item()
            if rank == 0:
                print(f"step {step + 1} loss {stats[0] / WORKERS:.4f} held back {stats[1]:.3f} touched {touched}/{size}")

    with torch.no_grad():
        mine = test.tensor_split(world)[rank]
        hits = (net(x[mine]).argmax(1) == y[mine]).sum()
    dist.all_reduce(hits)
    if rank == 0:
        print(f"accuracy {hits.item() / len(test):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
