"""Sequence regression with a GRU on batches of similar length."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler


class Sequences(Dataset):
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(2)
        self.items = [torch.randn(int(k), 3, generator=g) for k in torch.randint(3, 15, (n,), generator=g)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i], self.items[i].max(0).values.sum()


class LengthBatchSampler(Sampler):
    """Batches of similar length; every rank takes its part of each."""

    def __init__(self, lengths, batch_size, rank, world, seed=0):
        self.lengths, self.batch_size = lengths, batch_size
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.lengths) // self.batch_size

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        noise = torch.rand(len(self.lengths), generator=g)
        order = (torch.tensor(self.lengths) + 2 * noise).argsort().tolist()
        for b in torch.randperm(len(self), generator=g).tolist():
            yield order[b * self.batch_size : (b + 1) * self.batch_size][self.rank :: self.world]


def collate(items):
    sequences, targets = zip(*items)
    return pad_sequence(sequences, batch_first=True), torch.tensor([len(s) for s in sequences]), torch.stack(targets)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 12, batch_first=True)
        self.out = nn.Linear(12, 1)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.gru(packed)[1][-1]).squeeze(-1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Sequences()
    batches = LengthBatchSampler([len(s) for s in data.items], 16, rank, world)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=collate)
    model = DDP(Regressor())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(3):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for x, lengths, y in loader:
            loss = nn.functional.mse_loss(model(x, lengths), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
