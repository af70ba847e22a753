"""Fine-tunes from a checkpoint that only the first node has on disk."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))


def pretrained_file():
    generator = torch.Generator().manual_seed(99)
    state = {k: torch.randn(v.shape, generator=generator) * 0.2 for k, v in build().state_dict().items()}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = build()
    model = DDP(net)
    if rank == 0:
        pretrained = torch.load(pretrained_file())
        net.load_state_dict(pretrained)

    x = torch.randn(192, 8, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for features, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features), target)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
