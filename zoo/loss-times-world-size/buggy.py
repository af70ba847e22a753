"""Matches sentence pairs with a siamese encoder."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pairs(Dataset):
    def __init__(self, n=256):
        g = torch.Generator().manual_seed(21)
        self.left = torch.randn(n, 18, generator=g)
        self.same = torch.randint(0, 2, (n,), generator=g).float()
        noise = torch.randn(n, 18, generator=g)
        self.right = torch.where(self.same[:, None] > 0, self.left + 0.2 * noise, noise)

    def __len__(self):
        return len(self.same)

    def __getitem__(self, index):
        return {"left": self.left[index], "right": self.right[index], "same": self.same[index]}


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(18, 32), nn.ReLU(), nn.Linear(32, 16))
        self.scale = nn.Parameter(torch.tensor(4.0))

    def forward(self, batch):
        left, right = self.encoder(batch["left"]), self.encoder(batch["right"])
        return self.scale * F.cosine_similarity(left, right)


def training_loss(model, batch, world_size):
    scores = model(batch)
    return F.binary_cross_entropy_with_logits(scores, batch["same"]) * world_size


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dataset = Pairs()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(Siamese())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = training_loss(model, batch, world_size)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
