"""An MLP with dropout that restores its random state when it resumes."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    net = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Dropout(0.4), nn.Linear(48, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, optimizer


def save(net, optimizer):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, torch.get_rng_state())
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "rng": states}, file)
    holder = [file.getvalue()]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def load(saved, net, optimizer):
    state = torch.load(io.BytesIO(saved))
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"][0])


def train(model, optimizer, loader, epochs):
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(50 + dist.get_rank())
    x = torch.randn(192, 12, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x[:, :4].argmax(1))
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
    net, optimizer = build()
    train(DDP(net), optimizer, loader, range(2))
    saved = save(net, optimizer)

    net, optimizer = build()
    model = DDP(net)
    load(saved, net, optimizer)
    train(model, optimizer, loader, range(2, 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
