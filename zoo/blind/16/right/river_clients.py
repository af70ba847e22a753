"""Federated simulation: eight clients with unlike digits, spread over however many processes.

A round draws five clients. Each trains on its own from the round's weights; the server step is
Adam on the size-weighted mean of the clients' moves (FedAdam).
"""
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

CLIENTS, PER_ROUND, ROUNDS, LOCAL_EPOCHS, BATCH = 8, 5, 8, 2, 20


def make_clients(seed=0):
    digits = load_digits()
    x = torch.tensor(digits.data / 16.0)
    y = torch.tensor(digits.target)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=g)
    test, train = order[:397], order[397:]
    share = torch.rand(10, CLIENTS, generator=g, dtype=torch.float64) ** 3
    share = (share / share.sum(1, keepdim=True)).cumsum(1)
    owner = (torch.rand(len(train), 1, generator=g, dtype=torch.float64) > share[y[train]]).sum(1)
    owner.clamp_(max=CLIENTS - 1)
    clients = [(x[train[owner == c]], y[train[owner == c]]) for c in range(CLIENTS)]
    return clients, (x[test], y[test])


def build():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()


def train_client(model, data, seed):
    x, y = data
    g = torch.Generator().manual_seed(seed)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(LOCAL_EPOCHS):
        for idx in torch.randperm(len(x), generator=g).split(BATCH):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x[idx]), y[idx]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            opt.step()


def main():
    grouped = "RANK" in os.environ
    if grouped:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if grouped else 0
    world = dist.get_world_size() if grouped else 1

    clients, (test_x, test_y) = make_clients()
    torch.manual_seed(21)
    model, worker = build(), build()
    server = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.9, 0.99), eps=1e-3)
    draw = torch.Generator().manual_seed(77)

    for round_ in range(ROUNDS):
        chosen = torch.randperm(CLIENTS, generator=draw)[:PER_ROUND].tolist()
        begin = parameters_to_vector(model.parameters()).detach()
        moved = torch.zeros(len(begin) + 1, dtype=torch.float64)
        for c in chosen:
            if c % world != rank:
                continue
            vector_to_parameters(begin.clone(), worker.parameters())
            train_client(worker, clients[c], seed=1000 * round_ + c)
            n = len(clients[c][0])
            moved[:-1] += n * (parameters_to_vector(worker.parameters()).detach() - begin)
            moved[-1] += n
        if grouped:
            dist.all_reduce(moved)
        mean_move = moved[:-1] / moved[-1]

        at = 0
        for p in model.parameters():
            p.grad = -mean_move[at:at + p.numel()].view_as(p)
            at += p.numel()
        server.step()

        if rank == 0:
            with torch.no_grad():
                logits = model(test_x)
            loss = nn.functional.cross_entropy(logits, test_y)
            hits = (logits.argmax(1) == test_y).double().mean()
            print(f"round {round_}: clients {chosen} test loss {loss:.8f} accuracy {hits:.4f}")

    if grouped:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
