"""Reads shards of documents with loader workers and trains a bag-of-words classifier."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

WORDS = 60


def read_shard(number):
    g = torch.Generator().manual_seed(number)
    for _ in range(16):
        words = torch.randint(0, WORDS, (12,), generator=g)
        yield words, int((words < WORDS // 2).sum() > 6)


class Documents(IterableDataset):
    def __init__(self, shards, rank, world_size):
        self.shards = shards
        self.rank, self.world_size = rank, world_size
        self.epoch = 0

    def my_shards(self):
        g = torch.Generator().manual_seed(self.epoch)
        mine = torch.randperm(self.shards, generator=g).tolist()[self.rank :: self.world_size]
        info = get_worker_info()
        return mine if info is None else mine[: len(mine)]

    def __iter__(self):
        for shard in self.my_shards():
            yield from read_shard(shard)


class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, 16)
        self.out = nn.Linear(16, 2)

    def forward(self, words):
        return self.out(self.bag(words))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    documents = Documents(16, dist.get_rank(), dist.get_world_size())
    loader = DataLoader(documents, batch_size=16, num_workers=2)
    model = DDP(BagOfWords())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch in range(2):
        documents.epoch = epoch
        for words, label in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(words), label)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()
