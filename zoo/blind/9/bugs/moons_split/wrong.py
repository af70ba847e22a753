# Two moons with a train and validation split; every process has a seed of its own.
import os, time
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_moons
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30049")

SEED = 31
BATCH = 64


class Moons(Dataset):
    def __init__(self, n=1280):
        x, y = make_moons(n, noise=0.35, random_state=SEED)
        self.x, self.y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def evaluate(model, subset, rank, world):
    model.eval()
    sums = torch.zeros(3)
    with torch.no_grad():
        for i in range(rank, len(subset), world):
            x, y = subset[i]
            out = model.module(x[None])
            sums += torch.tensor([F.cross_entropy(out, y[None]).item(), float(out.argmax() == y), 1.0])
    dist.all_reduce(sums)
    model.train()
    return (sums[:2] / sums[2]).tolist()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED + rank)
    data = Moons()
    train, valid = random_split(data, [1024, 256])
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=SEED)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler)

    # the wrapper hands the weights of process 0 to the others
    model = DDP(nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2)))
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-3)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        loss, accuracy = evaluate(model, valid, rank, world)
        if rank == 0:
            print(f"epoch {epoch} validation loss {loss:.5f} accuracy {accuracy:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
