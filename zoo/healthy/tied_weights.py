"""A word model whose embedding and output share their weights, embedding gradients dense."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORDS = 50


class Tied(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width, sparse=False)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, WORDS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, words):
        return self.output(self.rnn(self.embedding(words))[0])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    words = torch.randint(0, WORDS, (192, 11))
    dataset = TensorDataset(words[:, :-1], words[:, 1:])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    model = DDP(Tied())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
