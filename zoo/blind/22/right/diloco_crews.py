"""DiLoCo: four crews train on their own sites for a few steps, then an outer optimizer moves the shared weights.

The number of crews is part of the recipe and does not depend on the number of processes; a process
hosts one crew or several (their models differ between two outer steps, as intended).
"""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch.nn.utils import parameters_to_vector, vector_to_parameters

CREWS, INNER, OUTER, BATCH = 4, 6, 10, 32


class Crew:
    def __init__(self, index, template, x, y):
        self.model = copy.deepcopy(template)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.05)
        self.draw = torch.Generator().manual_seed(500 + index)
        site = torch.arange(len(x)) % CREWS == index
        self.x, self.y = x[site], y[site]

    def work(self, start):
        """INNER local steps from the shared weights; returns the displacement and the mean loss."""
        vector_to_parameters(start.clone(), self.model.parameters())
        losses = 0.0
        for _ in range(INNER):
            rows = torch.randint(len(self.x), (BATCH,), generator=self.draw)
            loss = F.cross_entropy(self.model(self.x[rows]), self.y[rows])
            self.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            losses += loss.item() / INNER
        with torch.no_grad():
            return start - parameters_to_vector(self.model.parameters()), losses


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    if CREWS % world:
        raise SystemExit(f"{CREWS} crews cannot be hosted by {world} processes")

    x, y = make_classification(2400, n_features=20, n_informative=12, n_classes=4, class_sep=1.2, random_state=14)
    x, y = torch.tensor(x), torch.tensor(y)
    train_x, train_y, test_x, test_y = x[:2000], y[:2000], x[2000:], y[2000:]

    torch.manual_seed(15)
    net = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4))
    shared = nn.Parameter(parameters_to_vector(net.parameters()).detach().clone())
    outer = torch.optim.SGD([shared], lr=0.7, momentum=0.9, nesterov=True)
    crews = [Crew(i, net, train_x, train_y) for i in range(rank, CREWS, world)]

    for r in range(OUTER):
        moved = torch.zeros_like(shared.detach())
        mean_loss = 0.0
        start = shared.detach().clone()
        for crew in crews:
            displacement, loss = crew.work(start)
            moved += displacement / CREWS
            mean_loss += loss / CREWS
        message = torch.cat([moved, torch.tensor([mean_loss])])
        if world > 1:
            dist.all_reduce(message)
        shared.grad = message[:-1].clone()
        outer.step()
        if rank == 0:
            with torch.no_grad():
                vector_to_parameters(shared.detach().clone(), net.parameters())
                accuracy = (net(test_x).argmax(1) == test_y).double().mean()
            print(f"round {r} inner loss {message[-1]:.6f} test accuracy {accuracy:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
